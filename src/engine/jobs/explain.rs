//! Why a job is not running: reads the facts that `domain::explain` decides by.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use fencepost_domain::{
    error::Error,
    explain::{
        self, Crowd, Explanation, Facts, GroupLimit, GroupLine, JobAhead, Loss, PushTrouble,
        RateUse, Reason, SharedUse, Slots, TypePause,
    },
    ids::{JobId, JobKey, ProjectId},
    job::{DeadLetterReason, StoredState, WaitingFor, max_losses},
    limits,
    rate::{Handout, RateLimit, RateLimits},
    shared_limit::{MAX_LIMITS_OF_QUEUE, SharedBy},
};
use fencepost_store::{
    self as store,
    groups::{self, turns},
    jobs::{JobRow, Payloads},
    queues::QueueState,
    queues::queue_limits::{self, GroupLimitRow},
    shared_limits::keys,
    sweep::gauges::ReadyQueue,
    workers::{fitting, holders},
};
use sqlx::PgConnection;

use crate::Engine;

fn type_pause(queue: &QueueState) -> Option<TypePause> {
    let is_brake = queue.type_paused_by.as_deref() == Some("brake");
    let dead_letters = queue.streak.filter(|_| is_brake);
    Some(TypePause { paused_at: queue.type_paused_at?, dead_letters })
}

fn rate_use(queue: &QueueState, now: DateTime<Utc>) -> Option<RateUse> {
    let (count, per_seconds) = (queue.rate_limit_count?, queue.rate_limit_per_seconds?);
    let limit = RateLimit { count, per_seconds };
    let (at, jobs) = (queue.handed_out_at.iter().flatten(), queue.handed_out_jobs.iter().flatten());
    let handouts = at.zip(jobs).map(|(at, jobs)| Handout { at: *at, jobs: *jobs });
    let handouts: Vec<_> = handouts.collect();
    let opens_at = now + limit.wait(&handouts, now);
    Some(RateUse { limit, left: limit.allows(&handouts, now), opens_at })
}

/// The state of a job, and the reasons why it is not running.
#[derive(Debug)]
pub struct Explained {
    pub state: StoredState,
    pub waiting_for: Option<WaitingFor>,
    /// Since when it is ready, if it is pending.
    pub ready_at: Option<DateTime<Utc>>,
    pub why: Explanation,
}

/// Why a job is not running.
///
/// # Errors
/// [`Error::JobNotFound`].
pub async fn explain(engine: &Engine, key: JobKey) -> Result<Explained, Error> {
    let mut conn = engine.pools.read_for(key.project_id).await?;
    let row = store::jobs::find(&mut conn, key.project_id, key.id).await?;
    let row = row.ok_or(Error::JobNotFound)?;
    let (state, ready_at) = (row.state, row.ready_at);
    let waiting_for = state.waiting_for(row.unfinished_parents, row.closed());
    let why = explain_row(&mut conn, key.project_id, row).await?;
    Ok(Explained { state, waiting_for, ready_at, why })
}

/// Why these jobs wait: those that still do.
///
/// # Errors
/// [`Error::Unavailable`] when the database does not answer.
pub async fn reasons(
    engine: &Engine,
    project_id: ProjectId,
    ids: &[JobId],
) -> Result<HashMap<JobId, (Reason, String)>, Error> {
    if ids.is_empty() {
        return Ok(HashMap::new());
    }
    let mut conn = engine.pools.read_for(project_id).await?;
    Ok(reasons_in(&mut conn, project_id, ids).await?)
}

async fn reasons_in(
    conn: &mut PgConnection,
    project_id: ProjectId,
    ids: &[JobId],
) -> sqlx::Result<HashMap<JobId, (Reason, String)>> {
    let mut found = HashMap::new();
    for row in store::jobs::find_all(conn, project_id, ids, Payloads::LeftOut).await? {
        let id = row.id;
        let explained = explain_row(conn, project_id, row).await?;
        found.extend(explained.reason.map(|it| (id, (it, explained.summary))));
    }
    Ok(found)
}

/// Jobs among these that no live worker can take, as far as a list looks, and why.
///
/// # Errors
/// The errors of the statement.
pub async fn unserved(
    conn: &mut PgConnection,
    project_id: ProjectId,
    rows: &[JobRow],
) -> sqlx::Result<HashMap<JobId, Reason>> {
    let needs_worker = |it: &&JobRow| {
        it.state.waiting_for(it.unfinished_parents, it.closed()) == Some(WaitingFor::Worker)
    };
    let ready: Vec<_> = rows.iter().filter(needs_worker).collect();
    if ready.is_empty() {
        return Ok(HashMap::new());
    }
    let ids: Vec<_> = ready.iter().map(|it| it.id).collect();
    let kinds = fitting::serving(conn, project_id, &ids).await?;
    let reason = |row: &JobRow| {
        let labels = row.labels.as_deref().unwrap_or_default();
        let kind = kinds.iter().find(|kind| {
            kind.queue == row.queue && kind.job_type == row.job_type && kind.labels == labels
        })?;
        match (kind.is_polled, kind.is_labelled) {
            (false, _) => Some(Reason::NoWorkers),
            (true, false) => Some(Reason::Labels),
            (true, true) => None,
        }
    };
    Ok(ready.into_iter().filter_map(|it| Some((it.id, reason(it)?))).collect())
}

fn push_trouble(it: store::queues::pushes::PushTrouble) -> Option<PushTrouble> {
    if it.is_unserved {
        return Some(PushTrouble::NotServed);
    }
    it.failing_since.map(|since| PushTrouble::Failing { since, error: it.error })
}

/// Why all jobs of a queue wait, whatever else keeps the oldest one.
#[must_use]
pub const fn plain_reason(is_paused: bool, is_polled: bool) -> Option<Reason> {
    match (is_paused, is_polled) {
        (true, _) => Some(Reason::QueuePaused),
        (false, false) => Some(Reason::NoWorkers),
        (false, true) => None,
    }
}

/// Why the oldest jobs of queues of all projects wait, with a connection of the caller, in the
/// order of `queues`. Of those that are neither paused nor without workers, only the first `max`
/// that wait longer than `min_age_seconds` are looked at, and of one project `max_of_project`.
///
/// # Errors
/// The errors of the statements.
pub async fn oldest(
    conn: &mut PgConnection,
    queues: &[ReadyQueue],
    min_age_seconds: f64,
    (max, max_of_project): (usize, usize),
) -> sqlx::Result<Vec<Option<(Reason, String)>>> {
    let (mut found, mut left) = (Vec::with_capacity(queues.len()), max);
    let mut of_project: HashMap<ProjectId, usize> = HashMap::new();
    for queue in queues {
        found.push(match plain_reason(queue.is_paused, queue.is_polled) {
            Some(reason @ Reason::QueuePaused) => Some((reason, "paused".to_owned())),
            Some(reason) => Some((reason, "no worker takes its jobs".to_owned())),
            None if left > 0
                && queue.age_seconds > min_age_seconds
                && of_project.get(&queue.project_id).is_none_or(|it| *it < max_of_project) =>
            {
                left -= 1;
                *of_project.entry(queue.project_id).or_default() += 1;
                reasons_in(conn, queue.project_id, &[queue.job_id]).await?.remove(&queue.job_id)
            }
            None => None,
        });
    }
    Ok(found)
}

/// The first types that live workers of a queue take.
async fn other_types(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
) -> sqlx::Result<Vec<String>> {
    // One more than is shown, so that it is known.
    let limit = explain::MAX_OTHER_TYPES as i64 + 1;
    store::jobs::job_types::taken(conn, project_id, queue, limit).await
}

/// The silence of the worker that holds a job, and when the worker is lost.
async fn holder(
    conn: &mut PgConnection,
    project_id: ProjectId,
    row: &JobRow,
) -> sqlx::Result<(Option<i64>, Option<DateTime<Utc>>)> {
    if row.state != StoredState::Processing {
        return Ok((None, None));
    }
    let silence = holders::silence_of(conn, project_id, row.id).await?;
    Ok((silence, holders::lost_at(conn, project_id, row.id).await?))
}

/// What keeps the group of a job that waits for it; of one that is ready, what limits its group.
async fn group_line(
    conn: &mut PgConnection,
    project_id: ProjectId,
    row: &JobRow,
) -> sqlx::Result<Option<GroupLine>> {
    let is_ready = row.state == StoredState::Pending;
    let Some(name) = row.group.clone().filter(|_| row.waits_for_group || is_ready) else {
        return Ok(None);
    };
    let limit = queue_limits::limit_of_group(conn, project_id, &row.queue, &name).await?;
    let is_full = |it: &GroupLimitRow| {
        it.full_until.is_some_and(|until| until > it.now)
            || it.max.is_some_and(|max| it.running >= max.into())
    };
    if !row.waits_for_group && !limit.as_ref().is_some_and(is_full) {
        return Ok(None);
    }
    let found = groups::find(conn, project_id, &row.queue, std::slice::from_ref(&name)).await?;
    let Some(found) = found.into_iter().next() else { return Ok(None) };
    let head = (found.head_id.filter(|id| *id != row.id), found.head_state, found.head_run_at);
    let ahead = match head {
        (Some(id), Some(state), Some(run_at)) => {
            let waits_for_parents = found.head_parents.is_some_and(|it| it > 0);
            let is_paused = found.head_paused_at.is_some();
            Some(JobAhead { id, state, run_at, is_paused, waits_for_parents })
        }
        _ => None,
    };
    Ok(Some(GroupLine {
        name,
        is_paused: found.paused_at.is_some(),
        paused_until: found.paused_until,
        ahead,
        limit: limit.map(|it| GroupLimit {
            running: it.running,
            max: it.max,
            full_until: it.full_until,
        }),
    }))
}

/// The group that a dead letter blocks.
async fn blocked_group(
    conn: &mut PgConnection,
    project_id: ProjectId,
    row: &JobRow,
) -> sqlx::Result<Option<String>> {
    let is_dead = row.state == StoredState::DeadLetter;
    let Some(name) = row.group.clone().filter(|_| is_dead) else { return Ok(None) };
    let found = groups::find(conn, project_id, &row.queue, std::slice::from_ref(&name)).await?;
    Ok(found.first().and_then(|it| it.head_id).filter(|it| *it == row.id).map(|_| name))
}

/// How many jobs are before it; where groups take turns, in its group, and how many groups are.
async fn before(
    conn: &mut PgConnection,
    project_id: ProjectId,
    row: &JobRow,
    has_turns: bool,
) -> sqlx::Result<(i64, Option<i64>)> {
    let (place, max) = ((row.rank, row.run_at), explain::MAX_COUNTED_AHEAD);
    if has_turns {
        let group = (project_id, row.queue.as_str(), row.group.as_deref());
        let found = turns::ahead(conn, group, place, max).await?;
        return Ok((found.jobs, Some(found.groups)));
    }
    let (rank, run_at) = place;
    let jobs = store::queues::count_ahead(conn, project_id, &row.queue, rank, run_at, max).await?;
    Ok((jobs, None))
}

/// Limits that the queue of a ready job keeps together with others.
async fn shared_limits(
    conn: &mut PgConnection,
    project_id: ProjectId,
    row: &JobRow,
    names: Option<&[String]>,
) -> sqlx::Result<Vec<SharedUse>> {
    let Some(names) = names.filter(|_| row.state == StoredState::Pending) else {
        return Ok(Vec::new());
    };
    let page = ("", MAX_LIMITS_OF_QUEUE as i64);
    let mut found = Vec::new();
    for limit in store::shared_limits::find(conn, project_id, Some(names), page).await? {
        if limit.by == SharedBy::All {
            found.push(SharedUse {
                full_until: RateLimits::of(limit.rates).next_at(&limit.starts, limit.now),
                name: limit.name,
                group: None,
                running: limit.running,
                max: limit.max_running,
                paused_until: limit.paused_until,
            });
        } else if let Some(group) = &row.group {
            let of = (project_id, limit.name.as_str());
            let known = keys::list(conn, of, &limit.queues, Some(group), ("", 1)).await?;
            let known = known.into_iter().next();
            let own_max = known.as_ref().and_then(|it| it.max_running);
            let own_rates = known.as_ref().and_then(|it| it.rates.clone());
            let rates = RateLimits::of(own_rates.unwrap_or(limit.rates));
            found.push(SharedUse {
                name: limit.name,
                group: Some(group.clone()),
                running: known.as_ref().map_or(0, |it| it.running),
                max: own_max.or(limit.max_running),
                full_until: known.as_ref().and_then(|it| rates.next_at(&it.starts, it.now)),
                paused_until: known.and_then(|it| it.paused_until),
            });
        }
    }
    Ok(found)
}

fn loss(row: &JobRow) -> Loss {
    Loss {
        total: row.losses,
        in_row: row.losses_in_row,
        max_in_row: max_losses(row.max_losses, row.max_attempts),
        death: DeadLetterReason::stored(row.death.as_deref()),
    }
}

async fn crowds(
    conn: &mut PgConnection,
    project_id: ProjectId,
    row: &JobRow,
) -> sqlx::Result<store::queues::Crowds> {
    let (key, max) = (row.concurrency_key.as_deref(), limits::MAX_CONCURRENCY.into());
    store::queues::count_running(conn, project_id, key, &row.queue, max).await
}

async fn explain_row(
    conn: &mut PgConnection,
    project_id: ProjectId,
    row: JobRow,
) -> sqlx::Result<Explanation> {
    let concurrency_key = row.concurrency_key.as_deref();
    let crowds = crowds(conn, project_id, &row).await?;
    let queue = store::queues::find_state(conn, project_id, &row.queue, &row.job_type).await?;
    let labels = row.labels.clone().unwrap_or_default();
    let fitting = fitting::count(conn, project_id, &row.queue, &row.job_type, &labels).await?;
    let other_types = match fitting.all {
        0 => other_types(conn, project_id, &row.queue).await?,
        _ => Vec::new(),
    };
    let slots = Slots { in_use: fitting.slots_in_use, all: fitting.slots };
    let has_turns = queue.as_ref().is_some_and(|it| it.has_turns);
    let (ahead, groups_ahead) = before(conn, project_id, &row, has_turns).await?;
    let push = store::queues::pushes::trouble(conn, project_id, &row.queue).await?;
    let failing = store::set_aside::find(conn, project_id, row.id).await?;
    let (silent_seconds, worker_lost_at) = holder(conn, project_id, &row).await?;
    let group = group_line(conn, project_id, &row).await?;
    let blocks_group = blocked_group(conn, project_id, &row).await?;
    let names = queue.as_ref().and_then(|it| it.shared_limits.as_deref());
    let shared = shared_limits(conn, project_id, &row, names).await?;
    let crowd = |name: &str, running, limit| Crowd { name: name.to_owned(), running, limit };
    let facts = Facts {
        now: crowds.now,
        state: row.state,
        run_at: row.run_at,
        failures: row.failures,
        max_attempts: row.max_attempts,
        loss: loss(&row),
        unfinished_parents: row.unfinished_parents,
        paused_at: row.paused_at,
        group,
        blocks_group,
        labels,
        concurrency: concurrency_key
            .zip(row.concurrency_limit)
            .map(|(name, limit)| crowd(name, crowds.under_key, limit)),
        queue_concurrency: queue
            .as_ref()
            .and_then(|it| it.max_concurrency)
            .map(|limit| crowd(&row.queue, crowds.in_queue, limit)),
        queue_paused_at: queue.as_ref().and_then(|it| it.paused_at),
        type_pause: queue.as_ref().and_then(type_pause),
        rate: queue.as_ref().and_then(|it| rate_use(it, crowds.now)),
        rate_limited_until: queue.as_ref().and_then(|it| it.rate_limited_until),
        shared,
        push: push.and_then(push_trouble),
        worker_id: row.worker_id,
        lease_expires_at: row.lease_expires_at,
        silent_seconds,
        worker_lost_at,
        cancel_requested: row.cancel_requested,
        expires_at: row.expires_at,
        next_try_at: failing.map(|it| it.next_try_at),
        workers: fitting.all,
        quiet_workers: fitting.quiet,
        other_types,
        workers_with_labels: fitting.labelled,
        slots: fitting.are_registered.then_some(slots),
        slots_in_use: fitting.slots_in_use,
        ahead,
        groups_ahead,
        queue: row.queue,
        job_type: row.job_type,
    };
    Ok(explain::explain(&facts))
}
