//! Queues: their depth and health, and one queue with its settings.

use askama::Template;
use axum::{
    extract::Path,
    http::{
        HeaderValue,
        header::{CACHE_CONTROL, CONTENT_TYPE},
    },
    response::{IntoResponse, Response},
};
use fencepost_domain::{
    error::Error,
    group::{GroupOrder, OnDead},
    limits::{self, MAX_CONCURRENCY},
    turns::{MAX_WEIGHT, MIN_WEIGHT},
};
use fencepost_http::routes::{
    metrics::Throughput,
    queues::{
        Counts, Queue,
        groups::{Group, GroupState, JobGroupPage},
    },
    workers::registry::{WorkerPage, WorkerView},
};

use super::{
    chart::{self, Chart, Range},
    form::encode,
    format, health,
    location::segment,
    overview,
    page::{Frame, Here, render},
};

/// The order of groups in which those that wait longest come first, as the API and the page's
/// query name it.
const BY_WAIT: &str = "longest_wait";
/// Groups of a queue that its page shows.
const SHOWN_GROUPS: u32 = 20;
/// Workers of a queue that its page shows.
const SHOWN_WORKERS: u32 = 50;
/// A browser requests a sparkline again after this.
const SPARK_AGE: HeaderValue = HeaderValue::from_static("private, max-age=30");

/// Queues that the page shows.
const MAX_SHOWN_QUEUES: usize = 200;

#[derive(Template)]
#[template(path = "queues.html")]
struct Queues {
    frame: Frame,
    queues: Vec<Queue>,
    search: String,
    left_out: usize,
    has_more: bool,
}

/// Queues whose name has a text, those with problems first.
pub async fn list(here: Here) -> Result<Response, Error> {
    let (mut queues, has_more) = overview::all_queues(&here).await?;
    let search = here.asked.text("search").trim().to_owned();
    let wanted = search.to_lowercase();
    queues.retain(|it| it.queue.to_lowercase().contains(&wanted));
    health::sort(&mut queues);
    let left_out = queues.len().saturating_sub(MAX_SHOWN_QUEUES);
    queues.truncate(MAX_SHOWN_QUEUES);
    render(&Queues { frame: here.frame, queues, search, left_out, has_more })
}

#[derive(Template)]
#[template(path = "queue.html")]
struct QueueDetail {
    frame: Frame,
    queue: Queue,
    workers: Vec<WorkerView>,
    has_more_workers: bool,
    groups: Vec<Group>,
    /// Those that wait longest come first; else they are in the order of their names.
    is_by_wait: bool,
    next_groups: Option<String>,
    throughput: Chart,
    waits: Chart,
    range: Range,
}

pub async fn detail(
    here: Here,
    Path((_, name)): Path<(String, String)>,
) -> Result<Response, Error> {
    let (at, named) = (format!("/queues/{}", segment(&name)), encode(&[("queue", &name)]));
    let range = Range::of(&here.frame, &at, &here.asked);
    let (numbers, polled) = (
        format!("/metrics/throughput?period={}&{named}", range.period),
        format!("/workers?limit={SHOWN_WORKERS}&{named}"),
    );
    let is_by_wait = here.asked.text("order") == BY_WAIT;
    let (cursor, order) = match is_by_wait {
        true => ("", BY_WAIT),
        false => (here.asked.text("groups"), "name"),
    };
    let mut page = encode(&[("order", order)]);
    if !cursor.is_empty() {
        page = format!("{page}&{}", encode(&[("cursor", cursor)]));
    }
    let grouped = format!("{at}/groups?limit={SHOWN_GROUPS}&{page}");
    let (queue, throughput, workers, groups) = tokio::try_join!(
        here.get::<Queue>(&at),
        here.get::<Throughput>(&numbers),
        here.get::<WorkerPage>(&polled),
        here.get::<JobGroupPage>(&grouped),
    )?;
    let next_groups = groups.next_cursor.map(|cursor| {
        let query = encode(&[("groups", &cursor)]);
        here.frame.to(&format!("{at}?{query}#groups-head"))
    });
    render(&QueueDetail {
        throughput: chart::throughput(&throughput, &range),
        waits: chart::waits(&throughput, &range),
        range,
        has_more_workers: workers.has_more,
        workers: workers.workers,
        groups: groups.groups,
        is_by_wait,
        next_groups,
        queue,
        frame: here.frame,
    })
}

impl QueueDetail {
    /// Seconds for which the first due job of a group has waited; none: none waits.
    fn waited(&self, group: &Group) -> Option<i64> {
        Some((self.frame.now - group.waiting_since?).num_seconds().max(0))
    }

    /// Seconds for which the group on the page has waited that waits longest.
    fn longest_wait(&self) -> i64 {
        self.groups.iter().filter_map(|it| self.waited(it)).max().unwrap_or_default()
    }
}

/// The last hour of a queue as a sparkline.
pub async fn spark(here: Here, Path((_, name)): Path<(String, String)>) -> Result<Response, Error> {
    let named = encode(&[("queue", &name)]);
    let numbers: Throughput = here.get(&format!("/metrics/throughput?period=1h&{named}")).await?;
    let kind = HeaderValue::from_static("image/svg+xml");
    Ok(([(CONTENT_TYPE, kind), (CACHE_CONTROL, SPARK_AGE)], chart::sparkline(&numbers))
        .into_response())
}

/// Adds to [`Queue`] what pages show of it.
trait QueueExt {
    /// Used share of the concurrency limit, in percent; none: unlimited.
    fn utilisation(&self) -> Option<i64>;

    fn rate_count(&self) -> Option<i32>;

    fn rate_seconds(&self) -> Option<i32>;

    /// `strict` if jobs of a group run one at a time, as they were stored; else `none`.
    fn group_order(&self) -> &'static str;

    /// `skip` if a dead letter lets the next job of its group run; else `block`.
    fn on_dead(&self) -> &'static str;

    fn group_max_running(&self) -> Option<i32>;

    fn is_fair(&self) -> bool;

    /// True if the queue has no jobs, finished ones included.
    fn has_no_jobs(&self) -> bool;
}

/// Adds to [`Group`] what pages show of it.
trait GroupExt {
    fn has_rules(&self) -> bool;

    fn weight(&self) -> i16;

    /// Empty: it has no rules of its own.
    fn own_weight(&self) -> String;

    /// Empty: as its queue says.
    fn own_max_running(&self) -> String;
}

impl GroupExt for Group {
    fn has_rules(&self) -> bool {
        self.rules.is_some()
    }

    fn weight(&self) -> i16 {
        self.rules.as_ref().map_or(MIN_WEIGHT, |it| it.weight)
    }

    fn own_weight(&self) -> String {
        format::or_empty(&self.rules.as_ref().map(|it| it.weight))
    }

    fn own_max_running(&self) -> String {
        format::or_empty(&self.rules.as_ref().and_then(|it| it.max_running))
    }
}

impl QueueExt for Queue {
    fn utilisation(&self) -> Option<i64> {
        let max = self.max_concurrency.filter(|it| *it <= MAX_CONCURRENCY)?;
        Some(format::percent(self.counts.processing, max.into()))
    }

    fn rate_count(&self) -> Option<i32> {
        self.rate_limit.as_ref().map(|it| it.count)
    }

    fn rate_seconds(&self) -> Option<i32> {
        self.rate_limit.as_ref().map(|it| it.per_seconds)
    }

    fn group_order(&self) -> &'static str {
        match self.groups.as_ref().map(|it| it.order) {
            Some(GroupOrder::Strict) => "strict",
            Some(GroupOrder::None) | None => "none",
        }
    }

    fn on_dead(&self) -> &'static str {
        match self.groups.as_ref().map(|it| it.on_dead) {
            Some(OnDead::Skip) => "skip",
            Some(OnDead::Block) | None => "block",
        }
    }

    fn group_max_running(&self) -> Option<i32> {
        self.groups.as_ref().and_then(|it| it.max_running)
    }

    fn is_fair(&self) -> bool {
        self.groups.as_ref().is_some_and(|it| it.fair)
    }

    fn has_no_jobs(&self) -> bool {
        let Counts { scheduled, pending, processing, dead_letter, succeeded, cancelled, .. } =
            self.counts;
        scheduled + pending + processing + dead_letter + succeeded + cancelled == 0
    }
}
