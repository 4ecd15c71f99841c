//! Endpoints of webhooks, and the outbox that delivers to them.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use crate::ids::{EndpointId, ProjectId, ProjectPublicId};

/// An endpoint.
#[derive(Debug, Clone)]
pub struct EndpointRow {
    pub id: EndpointId,
    /// The project whose jobs are its deliveries.
    pub outbox: ProjectId,
    pub url: String,
    pub description: Option<String>,
    pub events: Vec<String>,
    pub event_types: Vec<String>,
    pub queues: Vec<String>,
    pub job_types: Vec<String>,
    /// Deliveries that one node sends at a time.
    pub max_in_flight: i32,
    pub timeout_seconds: i32,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
    /// Null: it is enabled.
    pub disabled_at: Option<DateTime<Utc>>,
    pub disabled_reason: Option<String>,
    pub last_success_at: Option<DateTime<Utc>>,
    pub last_failure_at: Option<DateTime<Utc>>,
    pub failing_since: Option<DateTime<Utc>>,
}

/// What a caller says of an endpoint.
#[derive(Debug, Clone)]
pub struct EndpointSettings {
    pub url: String,
    pub description: Option<String>,
    pub events: Vec<String>,
    /// The types that these name.
    pub event_types: Vec<String>,
    pub queues: Vec<String>,
    pub job_types: Vec<String>,
    pub max_in_flight: i32,
    pub timeout_seconds: i32,
    pub is_enabled: bool,
}

/// Waits for others that change the project's endpoints: what they subscribe to is written with
/// each change, and must fit all of them.
pub async fn lock(conn: &mut PgConnection, project_id: ProjectId) -> sqlx::Result<()> {
    sqlx::query_scalar!(
        r#"select pg_advisory_xact_lock(hashtextextended('webhooks', $1))::text "locked""#,
        i64::from(project_id.0),
    )
    .fetch_one(conn)
    .await?;
    Ok(())
}

/// How many endpoints a project has, up to `limit`.
pub async fn count(
    conn: &mut PgConnection,
    project_id: ProjectId,
    limit: i64,
) -> sqlx::Result<i64> {
    sqlx::query_scalar!(
        r#"
        select count(*) "count!"
        from (select from webhook_endpoints where project_id = $1 limit $2) bounded
        "#,
        project_id.0,
        limit,
    )
    .fetch_one(conn)
    .await
}

pub async fn insert(
    conn: &mut PgConnection,
    project_id: ProjectId,
    (id, outbox): (EndpointId, ProjectId),
    settings: &EndpointSettings,
    secret: &[u8],
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        insert into webhook_endpoints (
            project_id, id, url, description, events, event_types, queues, job_types, max_in_flight,
            timeout_seconds, secret, disabled_at, disabled_reason, outbox_id
        )
        values (
            $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11,
            case when not $12 then now() end, case when not $12 then 'by_user' end, $13
        )
        ",
        project_id.0,
        id.0,
        settings.url,
        settings.description,
        &settings.events,
        &settings.event_types,
        &settings.queues,
        &settings.job_types,
        settings.max_in_flight,
        settings.timeout_seconds,
        secret,
        settings.is_enabled,
        outbox.0,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Replaces an endpoint's settings. Enabling it forgets its failures.
pub async fn change(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: EndpointId,
    settings: &EndpointSettings,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        update webhook_endpoints
        set url = $3, description = $4, events = $5, event_types = $6, queues = $7, job_types = $8,
            max_in_flight = $9, timeout_seconds = $10, updated_at = now(),
            disabled_at = case when not $11 then coalesce(disabled_at, now()) end,
            disabled_reason = case when not $11 then coalesce(disabled_reason, 'by_user') end,
            failing_since = case when disabled_at is not null and $11 then null else failing_since end,
            failures = case when disabled_at is not null and $11 then 0 else failures end
        where project_id = $1 and id = $2
        ",
        project_id.0,
        id.0,
        settings.url,
        settings.description,
        &settings.events,
        &settings.event_types,
        &settings.queues,
        &settings.job_types,
        settings.max_in_flight,
        settings.timeout_seconds,
        settings.is_enabled,
    )
    .execute(conn)
    .await?;
    Ok(())
}

pub async fn find(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: EndpointId,
) -> sqlx::Result<Option<EndpointRow>> {
    sqlx::query_as!(
        EndpointRow,
        r#"
        select id "id: EndpointId", outbox_id "outbox: ProjectId", url, description, events, event_types, queues, job_types,
               max_in_flight, timeout_seconds, created_at, updated_at, disabled_at,
               disabled_reason, last_success_at, last_failure_at, failing_since
        from webhook_endpoints
        where project_id = $1 and id = $2
        "#,
        project_id.0,
        id.0,
    )
    .fetch_optional(conn)
    .await
}

/// Endpoints of a project, newest first.
pub async fn list(
    conn: &mut PgConnection,
    project_id: ProjectId,
    before: Option<EndpointId>,
    limit: i64,
) -> sqlx::Result<Vec<EndpointRow>> {
    sqlx::query_as!(
        EndpointRow,
        r#"
        select id "id: EndpointId", outbox_id "outbox: ProjectId", url, description, events, event_types, queues, job_types,
               max_in_flight, timeout_seconds, created_at, updated_at, disabled_at,
               disabled_reason, last_success_at, last_failure_at, failing_since
        from webhook_endpoints
        where project_id = $1 and ($2::uuid is null or id < $2)
        order by id desc
        limit $3
        "#,
        project_id.0,
        before.map(|it| it.0),
        limit,
    )
    .fetch_all(conn)
    .await
}

/// Deletes an endpoint. Returns whether there was one.
pub async fn delete(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: EndpointId,
) -> sqlx::Result<bool> {
    let done = sqlx::query!(
        "delete from webhook_endpoints where project_id = $1 and id = $2",
        project_id.0,
        id.0,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() > 0)
}

/// Replaces the secret. The present one signs as well for this many seconds.
pub async fn replace_secret(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: EndpointId,
    secret: &[u8],
    overlap_seconds: i32,
) -> sqlx::Result<bool> {
    let done = sqlx::query!(
        "
        update webhook_endpoints
        set old_secret = case when $4 > 0 then secret end,
            old_secret_until = case when $4 > 0 then now() + make_interval(secs => $4::int) end,
            secret = $3, updated_at = now()
        where project_id = $1 and id = $2
        ",
        project_id.0,
        id.0,
        secret,
        overlap_seconds,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() > 0)
}

/// Writes which types of events the enabled endpoints of a project want. To be called under
/// [`lock`], with every change of endpoints.
pub async fn write_subscriptions(
    conn: &mut PgConnection,
    project_id: ProjectId,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        with wanted as materialized (
            select distinct unnest(event_types) as type
            from webhook_endpoints
            where project_id = $1 and disabled_at is null
        ), gone as (
            delete from event_subscriptions
            where project_id = $1 and type not in (select type from wanted)
        )
        insert into event_subscriptions (project_id, type)
        select $1, type from wanted
        on conflict do nothing
        ",
        project_id.0,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// The outbox of a project; it is created if it is missing. No slug of a person begins with a dot.
pub async fn make_outbox(
    conn: &mut PgConnection,
    project_id: ProjectId,
) -> sqlx::Result<ProjectId> {
    sqlx::query_scalar!(
        r#"
        insert into projects (public_id, slug, name, mode, plan, kind, owner_project_id)
        values ($2, '.outbox-' || $1::int, 'Outbox', 'live', 'unlimited', 'outbox', $1)
        on conflict (owner_project_id) do update set slug = excluded.slug
        returning id "id: ProjectId"
        "#,
        project_id.0,
        ProjectPublicId::generate().0,
    )
    .fetch_one(conn)
    .await
}

/// What deliveries to an endpoint led to, since it was last written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Outcomes {
    pub has_succeeded: bool,
    /// Failures since the last success.
    pub failures: i32,
    /// The endpoint answered that it wants nothing more.
    pub is_gone: bool,
}

/// Notes outcomes, and disables an endpoint that is gone, or has failed for these hours and as
/// often. Returns whether it is disabled now, and was not before.
pub async fn note_outcomes(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: EndpointId,
    outcomes: Outcomes,
    (failing_hours, failing_deliveries): (i32, i32),
) -> sqlx::Result<bool> {
    let disabled = sqlx::query_scalar!(
        r#"
        with noted as (
            select case when $3 then $4 else failures + $4 end as failures,
                   case
                       when $4 = 0 then null
                       when $3 then now()
                       else coalesce(failing_since, now())
                   end as failing_since,
                   disabled_at
            from webhook_endpoints
            where project_id = $1 and id = $2
            for update
        ), judged as (
            select noted.*, case
                       when $5 then 'gone'
                       when failures >= $7
                           and failing_since < now() - make_interval(hours => $6) then 'failing'
                   end as reason
            from noted
        )
        update webhook_endpoints it
        set last_success_at = case when $3 then now() else it.last_success_at end,
            last_failure_at = case when $4 > 0 then now() else it.last_failure_at end,
            failing_since = judged.failing_since,
            failures = judged.failures,
            disabled_at = coalesce(it.disabled_at, case when judged.reason is not null then now() end),
            disabled_reason = coalesce(it.disabled_reason, judged.reason)
        from judged
        where it.project_id = $1 and it.id = $2
        returning judged.disabled_at is null and it.disabled_at is not null "is_news!"
        "#,
        project_id.0,
        id.0,
        outcomes.has_succeeded,
        outcomes.failures,
        outcomes.is_gone,
        failing_hours,
        failing_deliveries,
    )
    .fetch_optional(conn)
    .await?;
    Ok(disabled.unwrap_or(false))
}
