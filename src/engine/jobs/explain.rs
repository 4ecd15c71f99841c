//! Why a job is not running: reads the facts that `domain::explain` decides by.

use chrono::{DateTime, Utc};

use crate::{
    domain::{
        explain::{self, Crowd, Explanation, Facts, RateUse, Slots, TypePause},
        job::{StoredState, WaitingFor},
        limits,
        rate::{Handout, RateLimit},
    },
    engine::{Engine, jobs},
    error::Error,
    ids::JobKey,
    store::{self, queues::QueueState},
};

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

/// Why a job is not running.
///
/// # Errors
/// [`Error::JobNotFound`].
pub async fn explain(
    engine: &Engine,
    key: JobKey,
) -> Result<(StoredState, Option<WaitingFor>, Explanation), Error> {
    let row = jobs::find(engine, key).await?;
    let project_id = key.project_id;
    let mut conn = engine.pools.read_for(key.project_id).await?;
    let conn = &mut *conn;
    let concurrency_key = row.concurrency_key.as_deref();
    let max = i64::from(limits::MAX_CONCURRENCY);
    let crowds =
        store::queues::count_running(conn, project_id, concurrency_key, &row.queue, max).await?;
    let queue = store::queues::find_state(conn, project_id, &row.queue, &row.job_type).await?;
    let labels = row.labels.clone().unwrap_or_default();
    let fitting =
        store::workers::count_fitting(conn, project_id, &row.queue, &row.job_type, &labels).await?;
    let slots = Slots { in_use: fitting.slots_in_use, all: fitting.slots };
    let (rank, run_at) = (row.rank, row.run_at);
    let ahead = store::queues::count_ahead(
        conn,
        project_id,
        &row.queue,
        rank,
        run_at,
        explain::MAX_COUNTED_AHEAD,
    )
    .await?;
    let failing = store::set_aside::find(conn, project_id, key.id).await?;
    let waiting_for = row.state.waiting_for(row.unfinished_parents, row.closed());
    let crowd = |name: &str, running, limit| Crowd { name: name.to_owned(), running, limit };
    let facts = Facts {
        now: crowds.now,
        state: row.state,
        run_at,
        failures: row.failures,
        max_attempts: row.max_attempts,
        unfinished_parents: row.unfinished_parents,
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
        worker_id: row.worker_id,
        lease_expires_at: row.lease_expires_at,
        cancel_requested: row.cancel_requested,
        expires_at: row.expires_at,
        next_try_at: failing.map(|it| it.next_try_at),
        workers: fitting.all,
        workers_with_labels: fitting.labelled,
        slots: fitting.are_registered.then_some(slots),
        ahead,
        queue: row.queue,
        job_type: row.job_type,
    };
    Ok((row.state, waiting_for, explain::explain(&facts)))
}
