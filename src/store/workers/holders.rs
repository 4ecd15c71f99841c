//! Workers that hold leases and make no calls: their jobs wait for the leases to end.

use chrono::{DateTime, Utc};
use fencepost_domain::{
    ids::{JobId, JobKey, LeaseId, ProjectId},
    limits::{MISSED_BEATS, WORKER_SILENCE_SECONDS},
};
use sqlx::PgConnection;

use super::ALIVE_SECONDS;

/// Workers of one queue that a take back looks at.
pub const MAX_HOLDERS: i32 = 1_000;
/// Workers of one queue, the first by name, that lists of queues and alarms look at.
pub const MAX_LISTED_HOLDERS: i32 = 200;

/// A lease of a worker that makes no calls.
#[derive(Debug, Clone)]
pub struct SilentLease {
    pub key: JobKey,
    pub lease_id: LeaseId,
}

/// Leases of a queue whose workers make no calls, at most `limit`. A lease that began or was
/// renewed within [`ALIVE_SECONDS`] is none of them, and neither is one without the name of a
/// worker, or of a push: nothing else is known of their holders.
pub async fn silent_leases(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    limit: i64,
) -> sqlx::Result<Vec<SilentLease>> {
    let rows = sqlx::query!(
        r#"
        select held.id "id!: JobId", held.lease_id "lease_id!: LeaseId"
        from silent_holders($1, $2, $4, $5) silent
        cross join lateral (
            select id, lease_id
            from jobs
            where project_id = $1 and queue = $2 and state = 'processing'
                and worker_id = silent.worker_id
                and greatest(
                    claimed_at, lease_expires_at - make_interval(secs => lease_seconds)
                ) <= now() - make_interval(secs => $4::int)
            limit $3
        ) held
        limit $3
        "#,
        project_id.0,
        queue,
        limit,
        ALIVE_SECONDS,
        MAX_HOLDERS,
    )
    .fetch_all(conn)
    .await?;
    let lease = |id, lease_id| SilentLease { key: JobKey { project_id, id }, lease_id };
    Ok(rows.into_iter().map(|it| lease(it.id, it.lease_id)).collect())
}

/// The seconds for which the worker that holds a job has made no call, if it is silent as in
/// [`silent_leases`].
pub async fn silence_of(
    conn: &mut PgConnection,
    project_id: ProjectId,
    job: JobId,
) -> sqlx::Result<Option<i64>> {
    sqlx::query_scalar!(
        r#"
        select extract(epoch from now() - greatest(
            coalesce(workers.last_seen_at, job.claimed_at), job.claimed_at,
            job.lease_expires_at - make_interval(secs => job.lease_seconds)
        ))::bigint "seconds!"
        from jobs job
        left join workers on workers.project_id = $1 and workers.worker_id = job.worker_id
        where job.project_id = $1 and job.id = $2 and job.lease_id is not null
            and job.worker_id not like 'fencepost-push-%' and job.worker_id not like 'anonymous:%'
            and (
                workers.state <> 'terminated' and workers.lost_at is null
                and workers.last_seen_at
                    > now() - make_interval(secs => greatest($3::int, 3 * workers.beat_seconds))
            ) is not true
            and greatest(
                job.claimed_at, job.lease_expires_at - make_interval(secs => job.lease_seconds)
            ) <= now() - make_interval(secs => $3::int)
        "#,
        project_id.0,
        job.0,
        ALIVE_SECONDS,
    )
    .fetch_optional(conn)
    .await
}

/// The time at which the worker that holds a job is lost, if it makes no call until then. None: it
/// has not registered how often it calls, and does not beat for all of its jobs. See
/// [`crate::sweep::workers`].
pub async fn lost_at(
    conn: &mut PgConnection,
    project_id: ProjectId,
    job: JobId,
) -> sqlx::Result<Option<DateTime<Utc>>> {
    sqlx::query_scalar!(
        r#"
        select greatest(last_beat_at, last_seen_at)
            + make_interval(secs => coalesce(beat_seconds * $4::int, $3)) "lost_at!"
        from jobs job
        join workers on workers.project_id = $1 and workers.worker_id = job.worker_id
        where job.project_id = $1 and job.id = $2 and job.lease_id is not null
            and last_beat_at is not null and lost_at is null and workers.state <> 'terminated'
            and workers.worker_id not like 'fencepost-push-%'
        "#,
        project_id.0,
        job.0,
        WORKER_SILENCE_SECONDS,
        MISSED_BEATS,
    )
    .fetch_optional(conn)
    .await
}
