//! The jobs of one queue in some states, found by indexes: other jobs may hide them from a walk.

use fencepost_domain::{
    ids::{JobId, ProjectId},
    limits,
};
use sqlx::PgConnection;

use super::filter::Filter;

/// Jobs that a list finds by queue and state: as many as one page examines after its first look.
/// The statement carries one more as a literal, to know whether there are more.
const MAX_FOUND: i64 = 8_000;
const _: () = assert!(MAX_FOUND == (limits::MAX_PAGE_LOOKS - 1) * limits::MAX_PAGE_EXAMINED_ROWS);

impl Filter {
    /// True if it names what the indexes have, and nothing that selects fewer jobs.
    const fn names_queue_and_states(&self) -> bool {
        let selects_fewer =
            self.ids.is_some() || self.batch_id.is_some() || matches!(self.is_paused, Some(true));
        self.queue.is_some() && !self.states.is_empty() && !selects_fewer
    }
}

/// The same filter for the jobs that its queue has in its states; none: there are more than
/// [`MAX_FOUND`], or it does not name both.
pub(super) async fn narrow(
    conn: &mut PgConnection,
    project_id: ProjectId,
    filter: &Filter,
) -> sqlx::Result<Option<Filter>> {
    if !filter.names_queue_and_states() {
        return Ok(None);
    }
    let queue = filter.queue.as_deref().unwrap_or_default();
    let found = find(conn, project_id, queue, &filter.stored_states()).await?;
    let has_all = found.len() as i64 <= MAX_FOUND;
    Ok(has_all.then(|| Filter { ids: Some(found), ..filter.clone() }))
}

/// Each index has a part of the statement. Succeeded jobs have none by state: all finished jobs of
/// the queue are found, and the walk leaves out those in other states.
async fn find(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    states: &[&str],
) -> sqlx::Result<Vec<JobId>> {
    sqlx::query_scalar!(
        r#"
        select id "id!: JobId" from (
            (select id from jobs
             where 'pending' = any($3::text[])
                 and project_id = $1 and queue = $2 and state = 'pending'
                 and constraint_key is null
             limit 8001)
            union all
            (select id from jobs
             where 'pending' = any($3)
                 and project_id = $1 and queue = $2 and state = 'pending'
                 and constraint_key is not null
             limit 8001)
            union all
            (select id from jobs
             where 'processing' = any($3)
                 and project_id = $1 and queue = $2 and state = 'processing'
             limit 8001)
            union all
            (select id from jobs
             where $3 && array['scheduled', 'backoff', 'dead_letter']
                 and project_id = $1 and queue = $2
                 and state in ('scheduled', 'backoff', 'dead_letter') and state = any($3)
             limit 8001)
            union all
            (select id from finished_jobs
             where 'cancelled' = any($3) and not 'succeeded' = any($3)
                 and project_id = $1 and queue = $2 and state = 'cancelled'
             limit 8001)
            union all
            (select id from finished_jobs
             where 'succeeded' = any($3) and project_id = $1 and queue = $2
             limit 8001)
        ) found
        limit 8001
        "#,
        project_id.0,
        queue,
        states as &[&str],
    )
    .fetch_all(conn)
    .await
}
