//! Repeated polls, and which queues have work.

use std::sync::Arc;

use fencepost_domain::ids::{JobId, LeaseId, ProjectId, WorkflowId};
use sqlx::PgConnection;
use uuid::Uuid;

use super::leased::{LeasedJob, query_leased};

/// The id that a worker gave a poll.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PollKey {
    pub project_id: ProjectId,
    pub worker_id: Arc<str>,
    pub poll_id: Uuid,
}

/// The jobs that earlier polls with these ids were given and whose leases still run. `slot` is the
/// index of the poll.
pub async fn leased_by_polls(
    conn: &mut PgConnection,
    polls: &[PollKey],
) -> sqlx::Result<Vec<LeasedJob>> {
    query_leased!(
        r#"
        select poll.number - 1 as slot,
        "# + LEASED
            + r#"
        from unnest($1::int[], $2::uuid[], $3::text[]) with ordinality
            as poll(project_id, poll_id, worker_id, number)
        join jobs on jobs.project_id = poll.project_id and jobs.poll_id = poll.poll_id
        join job_bodies body on body.project_id = jobs.project_id and body.job_id = jobs.id
        where jobs.worker_id = poll.worker_id and jobs.lease_expires_at > now()
        order by poll.number, jobs.rank, jobs.run_at, jobs.id
        "#,
        &polls.iter().map(|it| it.project_id.0).collect::<Vec<_>>(),
        &polls.iter().map(|it| it.poll_id).collect::<Vec<_>>(),
        &polls.iter().map(|it| &*it.worker_id).collect::<Vec<_>>() as &[&str],
    )
    .fetch_all(conn)
    .await
}

/// Which of these queues have at least one claimable job, with or without a constraint key. Returns
/// their indexes.
pub async fn queues_with_work(
    conn: &mut PgConnection,
    queues: &[(ProjectId, Arc<str>)],
) -> sqlx::Result<Vec<i64>> {
    sqlx::query_scalar!(
        r#"
        select look.number - 1 "number!"
        from unnest($1::int[], $2::text[]) with ordinality as look(project_id, queue, number)
        cross join lateral (
            (
                select 1
                from jobs
                where project_id = look.project_id and queue = look.queue
                    and state = 'pending' and constraint_key is null
                order by rank, run_at, id
                limit 1
            )
            union all
            (
                select 1
                from jobs
                where project_id = look.project_id and queue = look.queue
                    and state = 'pending' and constraint_key is not null
                order by constraint_key, rank, run_at, id
                limit 1
            )
            limit 1
        ) found
        "#,
        &queues.iter().map(|it| it.0.0).collect::<Vec<_>>(),
        &queues.iter().map(|it| &*it.1).collect::<Vec<_>>() as &[&str],
    )
    .fetch_all(conn)
    .await
}
