//! Adding up what queues count.

use sqlx::PgConnection;

/// Rows one pass adds up at the most. The statement carries the same number as a literal.
pub const MAX_FOLDED_ROWS: i64 = 20_000;

/// Adds changes up, and answers with how many; none when there were none. What another node is adding up
/// already is left to it.
///
/// # Errors
/// Only those of the store.
pub async fn fold(conn: &mut PgConnection) -> sqlx::Result<Option<i64>> {
    sqlx::query_scalar!(
        r#"
        with taken as (
            delete from queue_deltas
            using (
                select ctid as place
                from queue_deltas
                limit 20000
                for update skip locked
            ) left_over
            where queue_deltas.ctid = left_over.place
            returning queue_deltas.*
        ), counted as (
            insert into queue_counts (
                project_id, queue, scheduled, active, backoff, dead_letter, succeeded, cancelled
            )
            select project_id, queue, sum(scheduled), sum(active), sum(backoff), sum(dead_letter),
                   sum(succeeded), sum(cancelled)
            from taken
            group by project_id, queue
            order by project_id, queue
            on conflict (project_id, queue) do update
            set scheduled = queue_counts.scheduled + excluded.scheduled,
                active = queue_counts.active + excluded.active,
                backoff = queue_counts.backoff + excluded.backoff,
                dead_letter = queue_counts.dead_letter + excluded.dead_letter,
                succeeded = queue_counts.succeeded + excluded.succeeded,
                cancelled = queue_counts.cancelled + excluded.cancelled,
                updated_at = now()
        ), rated as (
            insert into queue_rates (project_id, queue, minute, enqueued, succeeded, failed)
            select project_id, queue, date_trunc('minute', at), sum(enqueued),
                   sum(greatest(succeeded, 0)), sum(failed)
            from taken
            where enqueued > 0 or succeeded > 0 or failed > 0
            group by project_id, queue, date_trunc('minute', at)
            order by project_id, queue, date_trunc('minute', at)
            on conflict (project_id, queue, minute) do update
            set enqueued = queue_rates.enqueued + excluded.enqueued,
                succeeded = queue_rates.succeeded + excluded.succeeded,
                failed = queue_rates.failed + excluded.failed
        )
        select count(*) "folded!" from taken having count(*) > 0
        "#,
    )
    .fetch_optional(conn)
    .await
}
