//! The canary: a job of the server's own, through enqueue, claim and ack, on each node. Its
//! misses are a metric, by which an alert fires when the server fails, and never because of a
//! tenant's queues.

use std::{
    future::pending,
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use fencepost_domain::{
    error::Error,
    ids::{JobId, ProjectId},
    lease::Fence,
    plan::{Limits, Tenant},
};
use fencepost_signals::telemetry;
use fencepost_store as store;
use metrics::{counter, gauge, histogram};
use tokio::{sync::OnceCell, time::timeout};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{
    Engine,
    dispatch::{self, Poll},
    enqueue::{
        self, NewJob, Origin, Start,
        dependencies::{JobWithDependencies, OnConflict},
    },
    settle::{self, Ack, ReportedOutcome},
};

/// A canary that takes longer is a miss.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Its job type.
const JOB_TYPE: &str = "fencepost.canary";
/// Jobs of one poll: those of earlier passes that were missed come with the new one.
const POLLED_JOBS: u32 = 10;
/// Timeout of its attempts, in seconds: a job that was claimed and lost is retried after it.
const ATTEMPT_TIMEOUT_SECONDS: i32 = 10;
/// A lost canary is not worth many tries.
const MAX_ATTEMPTS: i32 = 2;

/// The canary of this node.
pub struct Canary {
    /// Its own, so that no other node claims its jobs.
    queue: String,
    project_id: OnceCell<ProjectId>,
    misses: AtomicU32,
}

impl Canary {
    /// A new one, with a queue of its own.
    #[must_use]
    pub fn of_this_node() -> Self {
        let queue = format!("canary-{}", Uuid::new_v4().simple());
        Self { queue, project_id: OnceCell::new(), misses: AtomicU32::new(0) }
    }

    /// Sends a job through, and records the outcome.
    pub async fn run(&self, engine: &Engine) {
        let started = Instant::now();
        let outcome = timeout(TIMEOUT, self.round(engine)).await;
        // At shutdown polls are answered empty.
        if engine.stopping.is_cancelled() {
            return;
        }
        let missed = match outcome {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some(format!("it took longer than {} s", TIMEOUT.as_secs())),
        };
        let misses = match &missed {
            None => {
                self.misses.store(0, Ordering::Relaxed);
                histogram!(telemetry::CANARY_SECONDS).record(started.elapsed().as_secs_f64());
                0
            }
            Some(error) => {
                tracing::warn!(error, "canary job was late or lost");
                self.misses.fetch_add(1, Ordering::Relaxed) + 1
            }
        };
        let outcome = if missed.is_some() { "missed" } else { "ok" };
        counter!(telemetry::CANARY_RUNS, "outcome" => outcome).increment(1);
        gauge!(telemetry::CANARY_MISSES).set(f64::from(misses));
    }

    async fn round(&self, engine: &Engine) -> Result<(), Error> {
        let project_id = *self.project_id.get_or_try_init(|| project(engine)).await?;
        let id = JobId::generate();
        let tenant = Tenant { project_id, limits: Limits::default() };
        let entry = JobWithDependencies::new(self.job(project_id, id), OnConflict::Reject);
        enqueue::store(engine, tenant, Origin::server(), vec![entry]).await?;
        loop {
            let poll = Poll {
                queues: vec![self.queue.clone()],
                capacity: POLLED_JOBS,
                wait: TIMEOUT,
                is_of_server: true,
                ..Poll::new(project_id)
            };
            let polled = dispatch::poll(engine, poll, &CancellationToken::new(), pending()).await?;
            let jobs: Vec<_> = polled.jobs().iter().map(|it| it.job.clone()).collect();
            if jobs.is_empty() {
                return Err(Error::Overloaded);
            }
            for job in &jobs {
                let fence = Fence {
                    worker_id: None,
                    attempt: Some(job.attempt),
                    lease_id: Some(job.lease_id),
                };
                let end = ReportedOutcome::Succeeded { result: None };
                let ack = Ack { job_id: job.id, fence, end, duration_ms: None };
                match settle::ack(engine, project_id, ack).await {
                    // One that was missed earlier may have lost its lease since.
                    Err(error) if job.id == id => return Err(error),
                    _ => (),
                }
            }
            polled.delivered();
            if jobs.iter().any(|it| it.id == id) {
                return Ok(());
            }
        }
    }

    fn job(&self, project_id: ProjectId, id: JobId) -> NewJob {
        NewJob {
            project_id,
            id,
            queue: self.queue.clone(),
            job_type: JOB_TYPE.to_owned(),
            rank: 0,
            start: Start::After(0),
            max_attempts: Some(MAX_ATTEMPTS),
            timeout_seconds: ATTEMPT_TIMEOUT_SECONDS,
            payload: "null".to_owned(),
            retry: None,
            tags: None,
            extras: None,
        }
    }
}

async fn project(engine: &Engine) -> Result<ProjectId, Error> {
    let mut conn = engine.pools.people.acquire().await?;
    Ok(store::people::projects::canary(&mut conn).await?)
}
