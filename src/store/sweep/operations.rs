//! Operations whose next step is due.

use fencepost_domain::{
    ids::{OperationId, ProjectId},
    operation::Skipped,
};
use sqlx::{PgConnection, types::Json};

use crate::operations::DueOperation;

/// Locks the operation whose next step has been due longest, until the end of the transaction.
/// Operations locked by another node are skipped.
pub async fn lock_due(conn: &mut PgConnection) -> sqlx::Result<Option<DueOperation>> {
    sqlx::query_as!(
        DueOperation,
        r#"
        select project_id "project_id: ProjectId", id "id: OperationId", kind, filter, done,
               skipped_by "skipped_by: Json<Skipped>", max_jobs, rate_per_second, after_at,
               after_id, created_at
        from operations
        where next_step_at <= now()
        order by next_step_at
        limit 1
        for update skip locked
        "#,
    )
    .fetch_optional(conn)
    .await
}

/// Milliseconds until the next step of any operation is due; none if no operation is running.
pub async fn next_step_ms(conn: &mut PgConnection) -> sqlx::Result<Option<f64>> {
    sqlx::query_scalar!(
        r#"
        select (extract(epoch from next_step_at - now()) * 1000)::float8 "wait_ms!"
        from operations
        where next_step_at is not null
        order by next_step_at
        limit 1
        "#,
    )
    .fetch_optional(conn)
    .await
}

/// Deletes operations that ended more than this many days ago. Returns how many.
pub async fn prune(conn: &mut PgConnection, keep_days: i32) -> sqlx::Result<u64> {
    let pruned = sqlx::query!(
        "
        delete from operations
        using (
            select project_id, id
            from operations
            where ended_at < now() - make_interval(days => $1)
            order by ended_at
            limit 500
            for update skip locked
        ) old
        where operations.project_id = old.project_id and operations.id = old.id
        ",
        keep_days,
    )
    .execute(conn)
    .await?;
    Ok(pruned.rows_affected())
}
