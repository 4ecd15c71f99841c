//! The overview of a project: queues, problems, and the last hour.

use askama::Template;
use axum::response::Response;
use fencepost_domain::{
    error::Error,
    limits::{MAX_PAGE_QUEUES, MAX_PAGE_WORKERS},
};
use fencepost_http::routes::{
    alarms::AlarmList,
    metrics::{MetricsSummary, Throughput},
    queues::{Queue, QueuePage},
    workers::registry::WorkerPage,
};

use super::{
    chart::{self, Chart, Range},
    format,
    health::{self, ready},
    page::{Frame, Here, render},
};

#[derive(Template)]
#[template(path = "overview.html")]
struct Overview {
    frame: Frame,
    queues: Vec<Queue>,
    has_more_queues: bool,
    /// Queues that were examined and are not in the table.
    left_out: usize,
    summary: MetricsSummary,
    ready: i64,
    /// How long it waits, and its id.
    oldest: Option<(i64, String)>,
    workers: usize,
    has_more_workers: bool,
    /// Names of alarms that reach no one.
    unheard: Vec<String>,
    throughput: Chart,
    waits: Chart,
    range: Range,
}

/// Queues in the table: those with problems are at its top.
const MAX_SHOWN_QUEUES: usize = 100;
/// Pages of queues that are read: a stuck queue must not be hidden by its name.
pub const MAX_QUEUE_PAGES: usize = 10;

/// All queues, as far as they are read, and whether there are more.
pub async fn all_queues(here: &Here) -> Result<(Vec<Queue>, bool), Error> {
    let rows = |it: QueuePage| (it.queues, it.next_cursor);
    here.pages(&format!("/queues?limit={MAX_PAGE_QUEUES}"), MAX_QUEUE_PAGES, rows).await
}

pub async fn page(here: Here) -> Result<Response, Error> {
    let range = Range::of(&here.frame, "", &here.asked);
    let numbers = format!("/metrics/throughput?period={}", range.period);
    let counted = format!("/workers?limit={MAX_PAGE_WORKERS}");
    let ((mut queues, has_more), summary, throughput, workers, alarms) = tokio::try_join!(
        all_queues(&here),
        here.get::<MetricsSummary>("/metrics/summary?period=1h"),
        here.get::<Throughput>(&numbers),
        here.get::<WorkerPage>(&counted),
        here.get::<AlarmList>("/alarms"),
    )?;
    health::sort(&mut queues);
    let unpaused = queues.iter().filter(|it| it.paused_at.is_none());
    let oldest = unpaused
        .filter_map(|it| Some((it.oldest_ready_age_seconds?, it.oldest_ready_job_id.clone()?)))
        .max_by_key(|it| it.0);
    let ready = queues.iter().map(ready).sum();
    let left_out = queues.len().saturating_sub(MAX_SHOWN_QUEUES);
    queues.truncate(MAX_SHOWN_QUEUES);
    render(&Overview {
        ready,
        oldest,
        left_out,
        workers: workers.workers.iter().filter(|it| it.alive).count(),
        has_more_workers: workers.has_more,
        throughput: chart::throughput(&throughput, &range),
        waits: chart::waits(&throughput, &range),
        range,
        has_more_queues: has_more,
        queues,
        summary,
        unheard: alarms.unheard,
        frame: here.frame,
    })
}
