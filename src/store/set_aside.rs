//! Reading what the background loops have set aside ([`crate::sweep::set_aside`]), for one project.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use fencepost_domain::ids::{JobId, ProjectId};

/// Work on a row that fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failing {
    pub first_failed_at: DateTime<Utc>,
    pub next_try_at: DateTime<Utc>,
}

/// Whether work on a job fails.
pub async fn find(
    conn: &mut PgConnection,
    project_id: ProjectId,
    job_id: JobId,
) -> sqlx::Result<Option<Failing>> {
    sqlx::query_as!(
        Failing,
        "
        select first_failed_at, next_try_at
        from set_aside
        where project_id = $1 and work in ('promote', 'reap', 'cascade', 'expire', 'retention')
            and item = $2
        order by first_failed_at
        limit 1
        ",
        project_id.0,
        job_id.0.to_string(),
    )
    .fetch_optional(conn)
    .await
}
