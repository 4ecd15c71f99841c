//! `GET /v1/metrics/prometheus`: a project's metrics, for its own Prometheus. At most
//! [`MAX_LABEL_VALUES`] queues and types are named, the rest is `other`: gauges name the busiest,
//! counters the oldest.

use std::collections::{BTreeMap, HashSet};

use axum::{
    extract::State,
    http::header::{CONTENT_TYPE, HeaderName},
};
use fencepost_domain::{
    error::Error,
    explain::Reason,
    histogram::Histogram,
    ids::{JobId, ProjectId},
    limits::MAX_LABEL_VALUES,
    stats::{Counted, Counts},
};
use fencepost_engine::{jobs::explain, stats::recorder::OTHER};
use fencepost_store::{
    self as store,
    groups::HeldGroups,
    queues::counts::{Depth, QueueRow},
};
use fencepost_web::{
    app::App,
    auth::{Caller, Read},
};

use super::exposition::Exposition;

/// Queues that are searched for the busiest.
const MAX_DEPTHS: i64 = 10_000;
/// Pairs of queue and type that are summed up, the oldest first.
const MAX_PAIRS: i64 = 5_000;
/// Queues whose oldest ready job is looked at: those that wait longest.
const MAX_EXPLAINED_QUEUES: usize = 20;
/// The reason of the others.
const UNKNOWN: &str = "unknown";
/// Shorter waits are not shown, in seconds.
const MIN_EXPLAINED_SECONDS: f64 = 30.0;

/// Scrape a project's metrics.
///
/// Prometheus text format: depth, age of the oldest ready job, workers, blocked and paused groups
/// by queue; throughput by queue and type; histograms of waiting by queue and of running by type.
/// 100 queues and 100 types are named (gauges name the busiest, counters the oldest), the rest is
/// `other`. Use a key with the scope `read` as bearer token, and an interval of 15 seconds or more.
#[utoipa::path(
    get, path = "/metrics/prometheus", tag = "metrics", operation_id = "metrics_prometheus",
    security(("api_key" = ["read"]), ("session" = ["viewer"])),
    responses(
        (status = 200, description = "The metrics.", body = String, content_type = "text/plain"),
    ),
)]
pub async fn scrape(
    caller: Caller<Read>,
    State(app): State<App>,
) -> Result<([(HeaderName, &'static str); 1], String), Error> {
    let (named, rest) = queues(&app, caller.project_id).await?;
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    let names: Vec<_> = named.iter().map(|it| it.queue.as_str()).collect();
    let held = store::groups::held(&mut conn, caller.project_id, &names).await?;
    let totals = store::queues::stats::totals(&mut conn, caller.project_id, MAX_PAIRS).await?;
    drop(conn);
    let oldest = oldest_by_reason(&app, caller.project_id, &named).await?;
    let mut text = Exposition::of(caller.who.slug());
    show_queues(&mut text, &named, rest);
    show_groups(&mut text, &held);
    show_oldest(&mut text, &oldest);
    show_totals(&mut text, &totals);
    Ok(([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text.finish()))
}

/// The busiest queues of a project by name, and the depth of all others together.
pub(super) async fn queues(
    app: &App,
    project_id: ProjectId,
) -> Result<(Vec<QueueRow>, Option<Depth>), Error> {
    let mut conn = app.engine.pools.read_for(project_id).await?;
    let mut depths = store::queues::counts::depths(&mut conn, project_id, MAX_DEPTHS).await?;
    let mut others = depths.split_off(depths.len().min(MAX_LABEL_VALUES));
    if !others.is_empty() {
        // A queue of that name is one of them.
        others.extend(depths.extract_if(.., |it| it.queue == OTHER));
    }
    let rest = others.into_iter().reduce(|sum, it| Depth {
        queue: OTHER.to_owned(),
        scheduled: sum.scheduled + it.scheduled,
        active: sum.active + it.active,
        backoff: sum.backoff + it.backoff,
        dead_letter: sum.dead_letter + it.dead_letter,
    });
    let mut names: Vec<_> = depths.into_iter().map(|it| it.queue).collect();
    names.sort();
    Ok((store::queues::counts::queues(&mut conn, project_id, &names).await?, rest))
}

fn show_queues(text: &mut Exposition, named: &[QueueRow], rest: Option<Depth>) {
    const JOBS: &str = "fencepost_project_queue_jobs";
    text.begin(
        JOBS,
        "gauge",
        "Jobs of a queue, by state; ready: waiting for a worker or a limit. For `other` this includes running jobs.",
    );
    for it in named {
        let ready = (it.active - it.backoff - it.processing).max(0);
        let states = [
            ("scheduled", it.scheduled),
            ("ready", ready),
            ("backoff", it.backoff),
            ("processing", it.processing),
            ("dead_letter", it.dead_letter),
        ];
        for (state, jobs) in states {
            text.sample(JOBS, &[("queue", &it.queue), ("state", state)], jobs);
        }
    }
    if let Some(it) = rest {
        // Running jobs among them are not counted separately.
        let states = [
            ("scheduled", it.scheduled),
            ("ready", (it.active - it.backoff).max(0)),
            ("backoff", it.backoff),
            ("dead_letter", it.dead_letter),
        ];
        for (state, jobs) in states {
            text.sample(JOBS, &[("queue", OTHER), ("state", state)], jobs);
        }
    }
    let mut gauge = |name: &str, help: &str, of: &dyn Fn(&QueueRow) -> f64| {
        text.begin(name, "gauge", help);
        for it in named {
            text.sample(name, &[("queue", &it.queue)], of(it));
        }
    };
    gauge(
        "fencepost_project_queue_oldest_ready_age_seconds",
        "Age of the oldest ready job of a queue; 0: none waits.",
        &|it| it.oldest_ready_at.map_or(0.0, |at| (it.now - at).as_seconds_f64().max(0.0)),
    );
    gauge("fencepost_project_queue_workers", "Live workers that poll a queue.", &|queue| {
        queue.workers as f64
    });
    gauge(
        "fencepost_project_queue_silent_jobs",
        "Running jobs of a queue whose workers make no calls.",
        &|queue| queue.silent_jobs as f64,
    );
    gauge("fencepost_project_queue_paused", "1 while a queue is paused.", &|queue| {
        f64::from(u8::from(queue.paused_at.is_some()))
    });
}

/// Of queues with rules of groups or a pause alone: others have none.
fn show_groups(text: &mut Exposition, held: &[HeldGroups]) {
    let mut gauge = |name: &str, help: &str, of: &dyn Fn(&HeldGroups) -> f64| {
        text.begin(name, "gauge", help);
        for it in held {
            text.sample(name, &[("queue", &it.queue)], of(it));
        }
    };
    gauge(
        "fencepost_project_queue_blocked_groups",
        "Groups of a queue in which jobs wait behind a dead letter, of the first 100 with dead letters by name.",
        &|it| it.blocked as f64,
    );
    gauge(
        "fencepost_project_queue_paused_groups",
        "Groups of a queue that are paused, by a person or a worker.",
        &|it| it.paused as f64,
    );
    gauge(
        "fencepost_project_queue_limited_groups",
        "Groups of a queue that a limit keeps from starting a job, of the first 100 with waiting jobs by name.",
        &|it| it.limited as f64,
    );
    gauge(
        "fencepost_project_queue_group_longest_wait_seconds",
        "Time for which the first job of a group has waited for its group or its turn: the longest of the first 100 groups with waiting jobs by name, without paused and blocked ones.",
        &|it| it.longest_wait,
    );
}

/// A queue, why its oldest ready job waits, and for how many seconds.
type Oldest<'a> = (&'a str, &'static str, f64);

/// Why the oldest ready jobs wait. Paused queues and those without workers need no look at the job;
/// of the others, those that wait longest are explained.
async fn oldest_by_reason<'a>(
    app: &App,
    project_id: ProjectId,
    named: &'a [QueueRow],
) -> Result<Vec<Oldest<'a>>, Error> {
    let seconds = |it: &QueueRow| Some((it.now - it.oldest_ready_at?).as_seconds_f64());
    let waits = named.iter().filter_map(|it| Some((it, it.oldest_ready_job_id?, seconds(it)?)));
    let mut waits: Vec<_> = waits.filter(|it| it.2 >= MIN_EXPLAINED_SECONDS).collect();
    waits.sort_by(|one, other| other.2.total_cmp(&one.2));
    let plain = |it: &QueueRow| explain::plain_reason(it.paused_at.is_some(), it.workers > 0);
    let unclear = waits.iter().filter(|it| plain(it.0).is_none()).map(|it| it.1);
    let ids: Vec<_> = unclear.take(MAX_EXPLAINED_QUEUES).collect();
    let reasons = explain::reasons(&app.engine, project_id, &ids).await?;
    let sample = |(queue, id, seconds): (&'a QueueRow, JobId, f64)| {
        let reason = plain(queue).or_else(|| Some(reasons.get(&id)?.0));
        (queue.queue.as_str(), reason.map_or(UNKNOWN, Reason::name), seconds)
    };
    Ok(waits.into_iter().map(sample).collect())
}

fn show_oldest(text: &mut Exposition, oldest: &[Oldest<'_>]) {
    const OLDEST: &str = "fencepost_project_oldest_ready_seconds";
    text.begin(
        OLDEST,
        "gauge",
        "Age of the oldest ready job of a queue by the reason why it waits, from 30 seconds on; `unknown` beyond the 20 queues that wait longest.",
    );
    for (queue, reason, seconds) in oldest {
        text.sample(OLDEST, &[("queue", queue), ("reason", reason)], seconds);
    }
}

/// The oldest names; every other name becomes [`OTHER`]. So a series keeps its meaning, whatever is
/// busy today.
struct Names<'a>(HashSet<&'a str>);

impl<'a> Names<'a> {
    /// `totals` are sorted, oldest first.
    fn first(totals: &'a [Counted], of: fn(&Counted) -> &str) -> Self {
        let mut names = HashSet::new();
        for it in totals.iter().map(of) {
            if names.len() == MAX_LABEL_VALUES {
                break;
            }
            names.insert(it);
        }
        Self(names)
    }

    fn of(&self, name: &'a str) -> &'a str {
        if self.0.contains(name) { name } else { OTHER }
    }
}

/// A name, its help, and what it counts.
type Counter = (&'static str, &'static str, fn(&Counts) -> i64);

fn show_totals(text: &mut Exposition, totals: &[Counted]) {
    let queues = Names::first(totals, |it| &it.queue);
    let types = Names::first(totals, |it| &it.job_type);
    let mut pairs: BTreeMap<(&str, &str), Counts> = BTreeMap::new();
    let mut waits: BTreeMap<&str, Histogram> = BTreeMap::new();
    let mut runs: BTreeMap<&str, Histogram> = BTreeMap::new();
    for it in totals {
        let (queue, job_type) = (queues.of(&it.queue), types.of(&it.job_type));
        pairs.entry((queue, job_type)).or_default().merge(&it.counts);
        waits.entry(queue).or_default().merge(&it.counts.wait);
        runs.entry(job_type).or_default().merge(&it.counts.run);
    }
    let counters: [Counter; 4] = [
        ("fencepost_project_jobs_enqueued_total", "Jobs stored.", |it| it.enqueued),
        ("fencepost_project_jobs_claimed_total", "Jobs leased to workers.", |it| it.claimed),
        ("fencepost_project_jobs_dead_lettered_total", "Jobs dead-lettered.", |counts| {
            counts.dead_lettered
        }),
        ("fencepost_project_jobs_cancelled_total", "Jobs cancelled.", |it| it.cancelled),
    ];
    for (name, help, of) in counters {
        text.begin(name, "counter", help);
        for ((queue, job_type), counts) in &pairs {
            text.sample(name, &[("queue", queue), ("job_type", job_type)], of(counts));
        }
    }
    const ATTEMPTS: &str = "fencepost_project_attempts_total";
    text.begin(ATTEMPTS, "counter", "Attempts ended, by outcome.");
    for ((queue, job_type), counts) in &pairs {
        let outcomes = [
            ("succeeded", counts.succeeded),
            ("failed", counts.failed),
            ("timeout", counts.timed_out),
            ("lease_expired", counts.lease_expired),
            ("released", counts.released),
        ];
        for (outcome, attempts) in outcomes {
            let labels = [("queue", *queue), ("job_type", *job_type), ("outcome", outcome)];
            text.sample(ATTEMPTS, &labels, attempts);
        }
    }
    const WAIT: &str = "fencepost_project_job_wait_seconds";
    text.begin(WAIT, "histogram", "Time from when a job could first run to its first lease.");
    waits.iter().for_each(|(queue, times)| text.histogram(WAIT, ("queue", queue), times));
    const RUN: &str = "fencepost_project_job_run_seconds";
    text.begin(RUN, "histogram", "Time from a lease to the ack of its attempt.");
    runs.iter().for_each(|(job_type, times)| text.histogram(RUN, ("job_type", job_type), times));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(queue: &str, job_type: &str, enqueued: i64) -> Counted {
        let counts = Counts { enqueued, ..Counts::default() };
        let (queue, job_type) = (queue.to_owned(), job_type.to_owned());
        Counted { project_id: ProjectId(1), queue, job_type, counts }
    }

    #[test]
    fn those_that_came_first_are_named_and_the_rest_is_other() {
        let mut totals: Vec<_> =
            (0..150).map(|it| counted("default", &format!("type{it:03}"), 150 - it)).collect();
        totals.push(counted("mail", "type000", 1));
        let mut text = Exposition::of("acme");
        show_totals(&mut text, &totals);
        let text = text.finish();
        let enqueued =
            "fencepost_project_jobs_enqueued_total{project=\"acme\",queue=\"default\",job_type=";
        assert_eq!(text.matches(enqueued).count(), MAX_LABEL_VALUES + 1);
        let others: i64 = (100..150).map(|it| 150 - it).sum();
        assert!(text.contains(&format!("{enqueued}\"other\"}} {others}\n")), "{text}");
        assert!(text.contains(&format!("{enqueued}\"type099\"}} 51\n")));
        assert!(!text.contains("type100"));
    }
}
