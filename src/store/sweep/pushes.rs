//! Queues whose jobs are sent to a URL, across projects.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use fencepost_domain::ids::{NodeId, ProjectId};

use crate::connection::nodes::NODE_SILENCE_SECONDS;

/// A queue whose jobs a node sends.
#[derive(Clone, PartialEq)]
pub struct PushedQueue {
    pub project_id: ProjectId,
    pub queue: String,
    pub url: String,
    pub timeout_seconds: i32,
    pub max_in_flight: i32,
    pub updated_at: DateTime<Utc>,
    /// JSON. Encrypted, if there is a master key, and so for the next two.
    pub headers: Option<Vec<u8>>,
    pub secret: Vec<u8>,
    /// Null: there is none, or it signs no more.
    pub old_secret: Option<Vec<u8>>,
    /// The project's plan.
    pub plan: String,
    /// Overrides of the plan's limits; null: there are none.
    pub overrides: Option<serde_json::Value>,
}

/// The queues to push, of projects that are not suspended and without those whose push is paused.
/// If they are more than `limit`, queues with jobs go first, then those of this node's part: each
/// node has its own part of all queues, so more nodes serve more of them. In each, projects take
/// turns: one queue of each, then a second one. The projects that begin change each minute.
pub async fn pushed_queues(
    conn: &mut PgConnection,
    node: NodeId,
    limit: i64,
) -> sqlx::Result<Vec<PushedQueue>> {
    sqlx::query_as!(
        PushedQueue,
        r#"
        with others as materialized (
            select count(*) as number, count(*) filter (where id < $2) as before
            from nodes
            where id <> $2 and delivers is not false
                and seen_at > now() - make_interval(secs => $3)
        ), known as materialized (
            select it.project_id, it.queue, counted.active is not null as has_jobs,
                   abs(hashtextextended(it.queue, it.project_id) % (1 + others.number)) = others.before
                       as is_mine
            from queue_pushes it
            cross join others
            join projects owner
                on owner.id = it.project_id
                and owner.suspended_at is null and owner.deleted_at is null
            left join lateral (
                select active
                from queue_counts
                where project_id = it.project_id and queue = it.queue and active > 0
                offset 0
            ) counted on true
            where it.paused_at is null
        ), placed as (
            select project_id, queue, has_jobs, is_mine,
                   row_number() over (
                       partition by project_id order by has_jobs desc, is_mine desc, queue
                   ) as turn
            from known
        ), chosen as materialized (
            select project_id, queue
            from placed
            order by has_jobs desc, is_mine desc, turn,
                     hashint4(project_id # (extract(epoch from now()) / 60)::int), project_id
            limit $1
        )
        select it.project_id "project_id: ProjectId", it.queue, it.url, it.timeout_seconds,
               it.max_in_flight, it.updated_at, it.headers, it.secret,
               case when it.old_secret_until > now() then it.old_secret end as old_secret,
               owner.plan, owner.overrides
        from chosen
        join queue_pushes it using (project_id, queue)
        join projects owner on owner.id = it.project_id
        "#,
        limit,
        node.0,
        NODE_SILENCE_SECONDS,
    )
    .fetch_all(conn)
    .await
}

/// Outcomes of a queue's push requests since the last flush.
#[derive(Debug, Clone, PartialEq)]
pub struct PushOutcomes {
    pub project_id: ProjectId,
    pub queue: String,
    /// The settings under which they were sent.
    pub updated_at: DateTime<Utc>,
    pub has_succeeded: bool,
    /// The last failure since the last success; none: there was none.
    pub error: Option<String>,
}

/// Notes outcomes. What was sent under other settings is not noted, nor is that of a queue which
/// another transaction changes.
pub async fn note_outcomes(conn: &mut PgConnection, outcomes: &[PushOutcomes]) -> sqlx::Result<()> {
    sqlx::query!(
        "
        with seen as (
            select it.project_id, it.queue, sent.succeeded, sent.error
            from unnest($1::int[], $2::text[], $3::timestamptz[], $4::bool[], $5::text[])
                as sent(project_id, queue, updated_at, succeeded, error)
            join queue_pushes it
                on it.project_id = sent.project_id and it.queue = sent.queue
                and it.updated_at = sent.updated_at
            order by it.project_id, it.queue
            for update of it skip locked
        )
        update queue_pushes it
        set last_success_at = case when seen.succeeded then now() else it.last_success_at end,
            last_failure_at = case when seen.error is null then it.last_failure_at else now() end,
            failing_since = case
                when seen.error is null then null
                when seen.succeeded then now()
                else coalesce(it.failing_since, now())
            end,
            last_error = coalesce(seen.error, case when not seen.succeeded then it.last_error end)
        from seen
        where it.project_id = seen.project_id and it.queue = seen.queue
        ",
        &outcomes.iter().map(|it| it.project_id.0).collect::<Vec<_>>(),
        &outcomes.iter().map(|it| it.queue.clone()).collect::<Vec<_>>(),
        &outcomes.iter().map(|it| it.updated_at).collect::<Vec<_>>(),
        &outcomes.iter().map(|it| it.has_succeeded).collect::<Vec<_>>(),
        &outcomes.iter().map(|it| it.error.clone()).collect::<Vec<_>>() as &[Option<String>],
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Secrets of a queue's push, as they are stored.
#[derive(Clone)]
pub struct StoredSecrets {
    pub project_id: ProjectId,
    pub queue: String,
    pub secret: Vec<u8>,
    pub old_secret: Option<Vec<u8>>,
    pub headers: Option<Vec<u8>>,
}

/// A page of the secrets of all queues, for an operator who encrypts them anew.
pub async fn secrets(
    conn: &mut PgConnection,
    (project_id, queue): (ProjectId, &str),
    limit: i64,
) -> sqlx::Result<Vec<StoredSecrets>> {
    sqlx::query_as!(
        StoredSecrets,
        r#"
        select project_id "project_id: ProjectId", queue, secret, old_secret, headers
        from queue_pushes
        where (project_id, queue) > ($1, $2)
        order by project_id, queue
        limit $3
        "#,
        project_id.0,
        queue,
        limit,
    )
    .fetch_all(conn)
    .await
}

/// Replaces the secrets of a queue's push, unless they were changed meanwhile.
pub async fn replace_secrets(
    conn: &mut PgConnection,
    was: &StoredSecrets,
    secret: &[u8],
    old_secret: Option<&[u8]>,
    headers: Option<&[u8]>,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        update queue_pushes
        set secret = $3, old_secret = $4, headers = $6
        where project_id = $1 and queue = $2 and secret = $5 and headers is not distinct from $7
        ",
        was.project_id.0,
        was.queue,
        secret,
        old_secret,
        was.secret,
        headers,
        was.headers.as_deref(),
    )
    .execute(conn)
    .await?;
    Ok(())
}
