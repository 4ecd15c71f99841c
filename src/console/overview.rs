//! The first page of a project: what there is, what is wrong, and how the last hour went.

use askama::Template;
use axum::response::Response;

use super::{
    chart::{self, Chart},
    page::{Frame, Here, render},
    show,
    trouble::{self, ready},
};
use crate::{
    error::Error,
    http::{
        metrics::{MetricsSummary, Throughput},
        queues::{Queue, QueuePage},
        workers::registry::WorkerPage,
    },
};

#[derive(Template)]
#[template(path = "overview.html")]
struct Overview {
    frame: Frame,
    queues: Vec<Queue>,
    has_more_queues: bool,
    summary: MetricsSummary,
    ready: i64,
    oldest_seconds: Option<i64>,
    workers: usize,
    has_more_workers: bool,
    throughput: Chart,
    waits: Chart,
}

/// The page.
pub async fn page(here: Here) -> Result<Response, Error> {
    let (page, summary, throughput, workers) = tokio::try_join!(
        here.get::<QueuePage>("/queues?limit=100"),
        here.get::<MetricsSummary>("/metrics/summary?period=1h"),
        here.get::<Throughput>("/metrics/throughput?period=1h"),
        here.get::<WorkerPage>("/workers?limit=200"),
    )?;
    let QueuePage { mut queues, has_more, .. } = page;
    trouble::sort(&mut queues);
    let unpaused = queues.iter().filter(|it| it.paused_at.is_none());
    render(&Overview {
        ready: queues.iter().map(ready).sum(),
        oldest_seconds: unpaused.filter_map(|it| it.oldest_ready_age_seconds).max(),
        workers: workers.workers.iter().filter(|it| it.alive).count(),
        has_more_workers: workers.has_more,
        throughput: chart::throughput(&throughput),
        waits: chart::waits(&throughput),
        has_more_queues: has_more,
        queues,
        summary,
        frame: here.frame,
    })
}
