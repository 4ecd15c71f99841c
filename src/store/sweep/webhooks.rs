//! Events that wait for deliveries, and endpoints that get them, across projects.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use fencepost_domain::ids::{EndpointId, NodeId, ProjectId};

use crate::connection::nodes::NODE_SILENCE_SECONDS;

/// Events of one project that one pass handles at most. The statement carries the same number as a
/// literal.
pub const MAX_EVENTS_OF_PROJECT: usize = 200;
/// Events that one pass handles at most. The statement carries the same number as a literal.
pub const MAX_EVENTS: usize = 5_000;

/// An event that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitingEvent {
    pub project_id: ProjectId,
    pub id: i64,
    /// Endpoints of its project.
    pub endpoints: i64,
}

/// Events, projects by turns and the oldest of each first: at most [`MAX_EVENTS`]. Those of
/// suspended and deleted projects wait.
pub async fn find_events(conn: &mut PgConnection) -> sqlx::Result<Vec<WaitingEvent>> {
    sqlx::query_as!(
        WaitingEvent,
        r#"
        with recursive project(id) as (
            (select project_id from outbound_events order by project_id limit 1)
            union all
            select (
                select project_id from outbound_events where project_id > project.id
                order by project_id limit 1
            )
            from project
            where project.id is not null
        )
        select project.id "project_id!: ProjectId", oldest.id "id!",
               known.endpoints "endpoints!"
        from project
        cross join lateral (
            select id, row_number() over (order by id) as turn
            from (
                select outbound_events.id
                from outbound_events
                where project_id = project.id and not exists (
                    select from set_aside
                    where project_id = project.id and work = 'events'
                        and item = outbound_events.id::text and next_try_at > now()
                )
                order by outbound_events.id
                limit 200
            ) bounded
        ) oldest
        cross join lateral (
            select count(*) as endpoints
            from webhook_endpoints
            where project_id = project.id and disabled_at is null and deleted_at is null
        ) known
        where project.id is not null and not exists (
            select from projects
            where id = project.id and (suspended_at is not null or deleted_at is not null)
        )
        order by oldest.turn, project.id
        limit 5000
        "#,
    )
    .fetch_all(conn)
    .await
}

/// Deletes the oldest events that have waited for this many hours. Returns how many.
pub async fn drop_old_events(conn: &mut PgConnection, hours: i32) -> sqlx::Result<u64> {
    let dropped = sqlx::query!(
        "
        delete from outbound_events
        where (project_id, id) in (
            select project_id, id
            from outbound_events
            where at < now() - make_interval(hours => $1)
            order by at
            limit 500
            for update skip locked
        )
        ",
        hours,
    )
    .execute(conn)
    .await?;
    Ok(dropped.rows_affected())
}

/// An endpoint to which a node delivers.
#[derive(Clone, PartialEq)]
pub struct ServedEndpoint {
    pub project_id: ProjectId,
    pub id: EndpointId,
    pub outbox: ProjectId,
    pub url: String,
    pub takes_callbacks: bool,
    pub max_in_flight: i32,
    pub timeout_seconds: i32,
    pub updated_at: DateTime<Utc>,
    /// Encrypted, if there is a master key.
    pub secret: Vec<u8>,
    /// Null: there is none, or it signs no more.
    pub old_secret: Option<Vec<u8>>,
}

/// The enabled endpoints of projects that are not suspended. If they are more than `limit`, those
/// of projects with deliveries go first, then those of this node's part: each node has its own part
/// of all endpoints, so more nodes serve more of them. In each, projects take turns: one endpoint
/// of each, then a second one. The projects that begin change each minute.
pub async fn served_endpoints(
    conn: &mut PgConnection,
    node: NodeId,
    limit: i64,
) -> sqlx::Result<Vec<ServedEndpoint>> {
    sqlx::query_as!(
        ServedEndpoint,
        r#"
        with others as materialized (
            select count(*) as number, count(*) filter (where id < $2) as before
            from nodes
            where id <> $2 and delivers is not false
                and seen_at > now() - make_interval(secs => $3)
        ), known as materialized (
            select outboxes.project_id, outboxes.outbox_id, exists (
                       select from queue_counts
                       where project_id = outboxes.outbox_id and active > 0
                   ) as has_deliveries
            from outboxes
            join projects owner
                on owner.id = outboxes.project_id
                and owner.suspended_at is null and owner.deleted_at is null
        ), placed as (
            select project_id, it.id, known.outbox_id, known.has_deliveries, mine.is_mine,
                   row_number() over (
                       partition by project_id order by mine.is_mine desc, it.id
                   ) as turn
            from known
            join webhook_endpoints it using (project_id)
            cross join others
            cross join lateral (
                select abs(hashtextextended(it.id::text, 0) % (1 + others.number)) = others.before
                           as is_mine
            ) mine
            where it.disabled_at is null and it.deleted_at is null
        ), chosen as materialized (
            select project_id, id, outbox_id
            from placed
            order by has_deliveries desc, is_mine desc, turn,
                     hashint4(project_id # (extract(epoch from now()) / 60)::int), project_id
            limit $1
        )
        select it.project_id "project_id: ProjectId", it.id "id: EndpointId",
               chosen.outbox_id "outbox: ProjectId", it.url, it.takes_callbacks, it.max_in_flight,
               it.timeout_seconds, it.updated_at, it.secret,
               case when it.old_secret_until > now() then it.old_secret end as old_secret
        from chosen
        join webhook_endpoints it using (project_id, id)
        "#,
        limit,
        node.0,
        NODE_SILENCE_SECONDS,
    )
    .fetch_all(conn)
    .await
}

/// Outcomes of an endpoint's deliveries since the last flush.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outcomes {
    pub project_id: ProjectId,
    pub id: EndpointId,
    /// The settings under which they were sent.
    pub updated_at: DateTime<Utc>,
    pub has_succeeded: bool,
    /// Failures since the last success.
    pub failures: i32,
    /// The endpoint answered that it wants nothing more.
    pub is_gone: bool,
}

/// An endpoint that outcomes have disabled.
#[derive(Debug, Clone)]
pub struct Disabled {
    pub project_id: ProjectId,
    pub id: EndpointId,
    pub reason: String,
}

/// Notes outcomes, and disables endpoints that are gone, or have failed for these hours and as
/// often. What was sent under other settings is not noted, nor is that of an endpoint which another
/// transaction changes. Returns those that were enabled until now.
pub async fn note_outcomes(
    conn: &mut PgConnection,
    outcomes: &[Outcomes],
    (failing_hours, failing_deliveries): (i32, i32),
) -> sqlx::Result<Vec<Disabled>> {
    sqlx::query_as!(
        Disabled,
        r#"
        with seen as (
            select it.project_id, it.id, sent.succeeded, sent.failed, sent.gone,
                   case when sent.succeeded then sent.failed else it.failures + sent.failed end
                       as failures,
                   case
                       when sent.failed = 0 then case when not sent.succeeded then it.failing_since end
                       when sent.succeeded then now()
                       else coalesce(it.failing_since, now())
                   end as failing_since,
                   it.disabled_at is null as was_enabled
            from unnest(
                $1::int[], $2::uuid[], $3::timestamptz[], $4::bool[], $5::int[], $6::bool[]
            ) as sent(project_id, id, updated_at, succeeded, failed, gone)
            join webhook_endpoints it
                on it.project_id = sent.project_id and it.id = sent.id
                and it.updated_at = sent.updated_at
            order by it.project_id, it.id
            for update of it skip locked
        ), judged as (
            select seen.*, case
                       when gone then 'gone'
                       when failures >= $8
                           and failing_since < now() - make_interval(hours => $7) then 'failing'
                   end as reason
            from seen
        ), noted as (
            update webhook_endpoints it
            set last_success_at = case when judged.succeeded then now() else it.last_success_at end,
                last_failure_at = case
                    when judged.failed > 0 then now() else it.last_failure_at
                end,
                failing_since = judged.failing_since,
                failures = judged.failures,
                disabled_at = coalesce(
                    it.disabled_at, case when judged.reason is not null then now() end
                ),
                disabled_reason = coalesce(it.disabled_reason, judged.reason)
            from judged
            where it.project_id = judged.project_id and it.id = judged.id
        )
        select project_id "project_id: ProjectId", id "id: EndpointId", reason "reason!"
        from judged
        where was_enabled and reason is not null
        "#,
        &outcomes.iter().map(|it| it.project_id.0).collect::<Vec<_>>(),
        &outcomes.iter().map(|it| it.id.0).collect::<Vec<_>>(),
        &outcomes.iter().map(|it| it.updated_at).collect::<Vec<_>>(),
        &outcomes.iter().map(|it| it.has_succeeded).collect::<Vec<_>>(),
        &outcomes.iter().map(|it| it.failures).collect::<Vec<_>>(),
        &outcomes.iter().map(|it| it.is_gone).collect::<Vec<_>>(),
        failing_hours,
        failing_deliveries,
    )
    .fetch_all(conn)
    .await
}

/// An endpoint for which nothing is to be sent any more.
#[derive(Debug, Clone, Copy)]
pub struct Emptied {
    pub project_id: ProjectId,
    pub id: EndpointId,
    pub outbox: ProjectId,
}

/// Endpoints that were deleted, or disabled for this many hours, and whose deliveries are not
/// cancelled yet; locked.
pub async fn to_empty(conn: &mut PgConnection, hours: i32) -> sqlx::Result<Vec<Emptied>> {
    sqlx::query_as!(
        Emptied,
        r#"
        select it.project_id "project_id: ProjectId", it.id "id: EndpointId",
               outboxes.outbox_id "outbox: ProjectId"
        from webhook_endpoints it
        join outboxes using (project_id)
        where (
                it.deleted_at is not null
                or (it.disabled_at < now() - make_interval(hours => $1) and not it.is_emptied)
            )
            and (it.deleted_at is not null or (it.disabled_at is not null and not it.is_emptied))
        limit 100
        for update of it skip locked
        "#,
        hours,
    )
    .fetch_all(conn)
    .await
}

/// Notes that an endpoint's deliveries are being cancelled; a deleted one is gone with it.
pub async fn note_emptied(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: EndpointId,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        with gone as (
            delete from webhook_endpoints
            where project_id = $1 and id = $2 and deleted_at is not null
        )
        update webhook_endpoints
        set is_emptied = true
        where project_id = $1 and id = $2 and deleted_at is null
        ",
        project_id.0,
        id.0,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Secrets of an endpoint, as they are stored.
#[derive(Clone)]
pub struct StoredSecrets {
    pub project_id: ProjectId,
    pub id: EndpointId,
    pub secret: Vec<u8>,
    pub old_secret: Option<Vec<u8>>,
}

/// A page of the secrets of all endpoints, for an operator who encrypts them anew.
pub async fn secrets(
    conn: &mut PgConnection,
    (project_id, id): (ProjectId, EndpointId),
    limit: i64,
) -> sqlx::Result<Vec<StoredSecrets>> {
    sqlx::query_as!(
        StoredSecrets,
        r#"
        select project_id "project_id: ProjectId", id "id: EndpointId", secret, old_secret
        from webhook_endpoints
        where (project_id, id) > ($1, $2)
        order by project_id, id
        limit $3
        "#,
        project_id.0,
        id.0,
        limit,
    )
    .fetch_all(conn)
    .await
}

/// Replaces the secrets of an endpoint, unless they were changed meanwhile.
pub async fn replace_secrets(
    conn: &mut PgConnection,
    was: &StoredSecrets,
    secret: &[u8],
    old_secret: Option<&[u8]>,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        update webhook_endpoints
        set secret = $3, old_secret = $4
        where project_id = $1 and id = $2 and secret = $5
        ",
        was.project_id.0,
        was.id.0,
        secret,
        old_secret,
        was.secret,
    )
    .execute(conn)
    .await?;
    Ok(())
}
