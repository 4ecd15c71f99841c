//! Renewing leases.

use fencepost_domain::{
    ids::{ANONYMOUS, JobId, JobKey, LeaseId, ProjectId},
    lease::{Fence, TIMEOUT_GRACE_SECONDS},
};
use sqlx::PgConnection;
use uuid::Uuid;

use super::settle_success::FenceColumns;

/// A heartbeat of one job.
#[derive(Debug, Clone, PartialEq)]
pub struct Beat {
    pub key: JobKey,
    pub fence: Fence,
    /// Progress from 0 to 1; none keeps the last value.
    pub progress: Option<f32>,
}

/// A renewed lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Renewed {
    pub key: JobKey,
    pub cancel_requested: bool,
    /// The lease's length, in seconds.
    pub lease_seconds: i32,
}

/// Renews the leases whose fences hold and which have not expired, by their own length, but never
/// past the job's timeout and its grace. Jobs that another transaction holds are skipped.
///
/// No job may appear twice in `beats`.
pub async fn renew(conn: &mut PgConnection, beats: &[Beat]) -> sqlx::Result<Vec<Renewed>> {
    let fences = FenceColumns::of(beats.iter().map(|it| (it.key, &it.fence)));
    let rows = sqlx::query!(
        r#"
        with held as materialized (
            select job.project_id, job.id, beat.progress
            from unnest($1::int[], $2::uuid[], $3::text[], $4::int[], $5::uuid[], $6::real[])
                as beat(project_id, job_id, worker_id, attempt, lease_id, progress)
            join jobs job on job.project_id = beat.project_id and job.id = beat.job_id
            where job.worker_id = coalesce(beat.worker_id, job.worker_id)
                and (beat.attempt is null or job.attempt = beat.attempt)
                and (beat.lease_id is null or job.lease_id = beat.lease_id)
                and job.lease_expires_at > now()
            order by job.project_id, job.id
            limit 500
            for no key update of job skip locked
        )
        update jobs
        set lease_expires_at = greatest(jobs.lease_expires_at, least(
                now() + make_interval(secs => jobs.lease_seconds),
                jobs.claimed_at + make_interval(secs => jobs.timeout_seconds + $7::int)
            )),
            progress = coalesce(held.progress, jobs.progress)
        from held
        where jobs.project_id = held.project_id and jobs.id = held.id
        returning jobs.project_id "project_id: ProjectId", jobs.id "id: JobId",
                  jobs.cancel_requested, jobs.lease_seconds "lease_seconds!"
        "#,
        &fences.project_id,
        &fences.job_id,
        &fences.worker_id as &[Option<&str>],
        &fences.attempt as &[Option<i32>],
        &fences.lease_id as &[Option<Uuid>],
        &beats.iter().map(|it| it.progress).collect::<Vec<_>>() as &[Option<f32>],
        TIMEOUT_GRACE_SECONDS,
    )
    .fetch_all(conn)
    .await?;
    let renewed = rows.into_iter().map(|it| Renewed {
        key: JobKey { project_id: it.project_id, id: it.id },
        cancel_requested: it.cancel_requested,
        lease_seconds: it.lease_seconds,
    });
    Ok(renewed.collect())
}

/// A lease that is to end earlier.
#[derive(Debug, Clone, Copy)]
pub struct ShorterLease {
    pub key: JobKey,
    pub lease_id: LeaseId,
    /// Its length in seconds, from its claim.
    pub seconds: i32,
}

/// Shortens leases that were just given. None of them gets longer.
pub async fn shorten(conn: &mut PgConnection, leases: &[ShorterLease]) -> sqlx::Result<()> {
    sqlx::query!(
        "
        with held as materialized (
            select job.project_id, job.id, shorter.seconds
            from unnest($1::int[], $2::uuid[], $3::uuid[], $4::int[])
                as shorter(project_id, job_id, lease_id, seconds)
            join jobs job on job.project_id = shorter.project_id and job.id = shorter.job_id
            where job.lease_id = shorter.lease_id
            order by job.project_id, job.id
            for no key update of job
        )
        update jobs
        set lease_seconds = least(jobs.lease_seconds, held.seconds),
            lease_expires_at = least(
                jobs.lease_expires_at, jobs.claimed_at + make_interval(secs => held.seconds)
            )
        from held
        where jobs.project_id = held.project_id and jobs.id = held.id
        ",
        &leases.iter().map(|it| it.key.project_id.0).collect::<Vec<_>>(),
        &leases.iter().map(|it| it.key.id.0).collect::<Vec<_>>(),
        &leases.iter().map(|it| it.lease_id.0).collect::<Vec<_>>(),
        &leases.iter().map(|it| it.seconds).collect::<Vec<_>>(),
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Assigns leases without a named worker to a named one. Returns those that were assigned.
pub async fn adopt(
    conn: &mut PgConnection,
    project_id: ProjectId,
    worker_id: &str,
    jobs: &[JobId],
) -> sqlx::Result<Vec<JobId>> {
    sqlx::query_scalar!(
        r#"
        with held as materialized (
            select id
            from jobs
            where project_id = $1 and id = any($2) and starts_with(worker_id, $3)
                and lease_expires_at > now()
            order by id
            limit 500
            for no key update
        )
        update jobs
        set worker_id = $4
        from held
        where jobs.project_id = $1 and jobs.id = held.id
        returning jobs.id "id: JobId"
        "#,
        project_id.0,
        &jobs.iter().map(|it| it.0).collect::<Vec<_>>(),
        ANONYMOUS,
        worker_id,
    )
    .fetch_all(conn)
    .await
}
