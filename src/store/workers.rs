//! The workers that registered.

use sqlx::PgConnection;

use crate::ids::ProjectId;

/// What a worker tells of itself.
#[derive(Debug, Clone)]
pub struct Registration {
    /// Its name, chosen by itself.
    pub worker_id: String,
    /// Queues it will poll.
    pub queues: Vec<String>,
    /// Types it can do.
    pub job_types: Vec<String>,
    /// Its machine.
    pub hostname: Option<String>,
    /// Its client's version.
    pub sdk_version: Option<String>,
    /// Jobs it runs at a time.
    pub concurrency: i32,
    /// Its process.
    pub pid: Option<i32>,
}

/// Keeps what a worker tells of itself; the last word counts.
///
/// # Errors
/// Only those of the store.
pub async fn upsert(
    conn: &mut PgConnection,
    project_id: ProjectId,
    worker: &Registration,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        insert into workers (
            project_id, worker_id, queues, job_types, hostname, sdk_version, concurrency, pid
        )
        values ($1, $2, $3, $4, $5, $6, $7, $8)
        on conflict (project_id, worker_id) do update
        set queues = excluded.queues,
            job_types = excluded.job_types,
            hostname = excluded.hostname,
            sdk_version = excluded.sdk_version,
            concurrency = excluded.concurrency,
            pid = excluded.pid,
            registered_at = now(),
            last_seen_at = now()
        ",
        project_id.0,
        worker.worker_id,
        &worker.queues,
        &worker.job_types,
        worker.hostname,
        worker.sdk_version,
        worker.concurrency,
        worker.pid,
    )
    .execute(conn)
    .await?;
    Ok(())
}
