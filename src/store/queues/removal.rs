//! Deleting a queue that has no jobs.

use fencepost_domain::ids::ProjectId;
use sqlx::PgConnection;

/// Reasons why a queue cannot be deleted.
#[derive(Debug, Clone, Copy)]
pub struct QueueUse {
    /// Jobs are counted, or changes of its counts are not merged yet.
    pub has_jobs: bool,
    pub is_pushed: bool,
}

/// Locks the counts of a queue and its claims until the end of the transaction, and says what holds
/// it.
pub async fn lock_counts(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
) -> sqlx::Result<QueueUse> {
    sqlx::query_as!(
        QueueUse,
        r#"
        with counted as materialized (
            select scheduled = 0 and active = 0 and backoff = 0 and dead_letter = 0
                and succeeded = 0 and cancelled = 0 as is_empty
            from queue_counts
            where project_id = $1 and queue = $2
            for update
        )
        select exists (select from counted where not is_empty)
                or exists (
                    select from unmerged_deltas where project_id = $1 and queue = $2
                ) "has_jobs!",
            exists (
                select from queue_pushes where project_id = $1 and queue = $2
            ) "is_pushed!"
        -- As claims under limits do: none writes what is deleted later in this transaction.
        from (select pg_advisory_xact_lock(hashtextextended('queue ' || $2, $1::int))) as locked
        "#,
        project_id.0,
        queue,
    )
    .fetch_one(conn)
    .await
}

/// Deletes the settings of a queue and its counts, which [`lock_counts`] has found to be zero.
/// Returns whether there were any. Its statistics stay until their retention.
pub async fn delete(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
) -> sqlx::Result<bool> {
    sqlx::query_scalar!(
        r#"
        with counts as (
            delete from queue_counts where project_id = $1 and queue = $2 returning 1
        ), settings as (
            delete from queues where project_id = $1 and name = $2 returning 1
        ), types as (
            delete from queue_types where project_id = $1 and queue = $2
        ), handouts as (
            delete from queue_handouts where project_id = $1 and queue = $2
        ), rates as (
            delete from queue_rates where project_id = $1 and queue = $2
        ), pauses as (
            delete from job_groups where project_id = $1 and queue = $2
        ), starts as (
            delete from group_handouts where project_id = $1 and queue = $2
        ), turns as (
            delete from group_turns where project_id = $1 and queue = $2
        ), overrides as (
            delete from group_overrides where project_id = $1 and queue = $2
        ), unnamed as (
            update shared_limits
            set queues = array_remove(queues, $2)
            where project_id = $1 and $2 = any(queues)
        )
        select exists (select from counts union all select from settings) "had_any!"
        "#,
        project_id.0,
        queue,
    )
    .fetch_one(conn)
    .await
}
