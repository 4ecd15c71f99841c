//! How many bytes a project has stored. Triggers write the changes; a loop merges them.

use sqlx::PgConnection;

use fencepost_domain::ids::ProjectId;

/// Changes that one pass merges at most. The statement carries the same number as a literal.
pub const MAX_MERGED_DELTAS: i64 = 20_000;

/// The bytes that a project has stored, without those of its outbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredBytes {
    /// At least 1 KiB for each job.
    pub bytes: i64,
    /// The project whose jobs are its deliveries; none: it has no webhooks.
    pub outbox: Option<ProjectId>,
}

/// The bytes that a project has stored.
pub async fn of_project(
    conn: &mut PgConnection,
    project_id: ProjectId,
) -> sqlx::Result<StoredBytes> {
    sqlx::query_as!(
        StoredBytes,
        r#"
        select (
            coalesce((
                select sum(scheduled + active + dead_letter + succeeded + cancelled) * 1024
                from queue_counts
                where project_id = $1
            ), 0)
            + coalesce((select bytes from stored_bytes where project_id = $1), 0)
            + coalesce((select sum(bytes) from stored_byte_deltas where project_id = $1), 0)
        )::bigint "bytes!",
        (select outbox_id from outboxes where project_id = $1) "outbox: ProjectId"
        "#,
        project_id.0,
    )
    .fetch_one(conn)
    .await
}

/// The result of a merge.
#[derive(Debug)]
pub struct Merged {
    pub deltas: i64,
    /// Projects among those of the changes that have stored [`NOTED_BYTES`] or more.
    pub noted: Vec<ProjectId>,
}

/// A project that has stored less is counted when it enqueues, and not because of a merge.
pub const NOTED_BYTES: i64 = 1024 * 1024;

/// Merges changes. Those that another node is merging are skipped. Projects are written in order,
/// so that two nodes do not wait for each other.
pub async fn merge(conn: &mut PgConnection) -> sqlx::Result<Merged> {
    sqlx::query_as!(
        Merged,
        r#"
        with taken as (
            delete from stored_byte_deltas
            where ctid = any(array(
                select ctid from stored_byte_deltas limit 20000 for update skip locked
            ))
            returning project_id, bytes
        ), merged as (
            insert into stored_bytes (project_id, bytes)
            select project_id, sum(bytes)::bigint from taken group by project_id
            order by project_id
            on conflict (project_id) do update
            set bytes = stored_bytes.bytes + excluded.bytes
            returning project_id, bytes
        )
        select (select count(*) from taken) "deltas!",
               array(select project_id from merged where bytes >= $1) "noted!: Vec<ProjectId>"
        "#,
        NOTED_BYTES,
    )
    .fetch_one(conn)
    .await
}
