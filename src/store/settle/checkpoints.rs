//! Checkpoints of jobs: how far their attempts have come.

use fencepost_domain::{
    ids::{JobId, JobKey, ProjectId},
    lease::Fence,
};
use sqlx::PgConnection;
use uuid::Uuid;

/// A checkpoint as a worker sends it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewCheckpoint {
    /// The worker's number of it.
    pub sequence: i64,
    /// The JSON as it was sent.
    pub data: String,
}

/// A stored checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    pub project_id: ProjectId,
    pub job_id: JobId,
    pub sequence: i64,
    /// The JSON as it was sent.
    pub data: String,
}

/// Whether a checkpoint whose fence holds took the place of the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kept {
    pub job_id: JobId,
    pub is_stored: bool,
}

/// Stores checkpoints of one project whose fences hold, unless a newer one is there. Their attempts
/// do not end before the transaction does: a lease that is given later sees them.
pub async fn store(
    conn: &mut PgConnection,
    project_id: ProjectId,
    sent: &[(JobId, &Fence, &NewCheckpoint)],
) -> sqlx::Result<Vec<Kept>> {
    sqlx::query_as!(
        Kept,
        r#"
        with held as materialized (
            select job.id, job.attempt, sent.sequence, sent.data
            from unnest($2::uuid[], $3::text[], $4::int[], $5::uuid[], $6::bigint[], $7::text[])
                as sent(job_id, worker_id, attempt, lease_id, sequence, data)
            join jobs job on job.project_id = $1 and job.id = sent.job_id
            where job.worker_id = coalesce(sent.worker_id, job.worker_id)
                and (sent.attempt is null or job.attempt = sent.attempt)
                and (sent.lease_id is null or job.lease_id = sent.lease_id)
            order by job.id
            limit 500
            for key share of job
        ), newest as materialized (
            select distinct on (id) id, attempt, sequence, data
            from held
            order by id, sequence desc
        ), kept as (
            insert into job_checkpoints (
                project_id, job_id, sequence, data, attempt, stored_at, counted_bytes
            )
            select $1, id, sequence, data, attempt, statement_timestamp(), 256 + octet_length(data)
            from newest
            on conflict (project_id, job_id) do update
            set sequence = excluded.sequence, data = excluded.data, attempt = excluded.attempt,
                stored_at = excluded.stored_at, counted_bytes = excluded.counted_bytes
            where job_checkpoints.sequence < excluded.sequence
            returning job_id
        )
        select newest.id "job_id!: JobId", kept.job_id is not null "is_stored!"
        from newest
        left join kept on kept.job_id = newest.id
        "#,
        project_id.0,
        &sent.iter().map(|it| it.0.0).collect::<Vec<Uuid>>(),
        &sent.iter().map(|it| it.1.worker_id.as_deref()).collect::<Vec<_>>() as &[Option<&str>],
        &sent.iter().map(|it| it.1.attempt).collect::<Vec<_>>() as &[Option<i32>],
        &sent.iter().map(|it| it.1.lease_id.map(|it| it.0)).collect::<Vec<_>>()
            as &[Option<Uuid>],
        &sent.iter().map(|it| it.2.sequence).collect::<Vec<_>>(),
        &sent.iter().map(|it| it.2.data.as_str()).collect::<Vec<_>>() as &[&str],
    )
    .fetch_all(conn)
    .await
}

/// The checkpoints of those of these jobs that have one.
pub async fn find(conn: &mut PgConnection, jobs: &[JobKey]) -> sqlx::Result<Vec<Checkpoint>> {
    sqlx::query_as!(
        Checkpoint,
        r#"
        select at.project_id "project_id!: ProjectId", at.job_id "job_id!: JobId",
               at.sequence "sequence!", at.data "data!"
        from unnest($1::int[], $2::uuid[]) as asked(project_id, job_id)
        -- Lateral, so that each is read by its key.
        cross join lateral (
            select *
            from job_checkpoints
            where project_id = asked.project_id and job_id = asked.job_id
            offset 0
        ) at
        "#,
        &jobs.iter().map(|it| it.project_id.0).collect::<Vec<_>>(),
        &jobs.iter().map(|it| it.id.0).collect::<Vec<Uuid>>(),
    )
    .fetch_all(conn)
    .await
}

/// Forgets how far a job has come.
pub async fn remove(conn: &mut PgConnection, key: JobKey) -> sqlx::Result<()> {
    sqlx::query!(
        "delete from job_checkpoints where project_id = $1 and job_id = $2",
        key.project_id.0,
        key.id.0,
    )
    .execute(conn)
    .await?;
    Ok(())
}
