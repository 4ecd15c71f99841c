//! Endpoints of webhooks, and the outbox that delivers to them.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use fencepost_domain::ids::{EndpointId, ProjectId, ProjectPublicId};

/// An endpoint.
#[derive(Debug, Clone)]
pub struct EndpointRow {
    pub id: EndpointId,
    /// The project whose jobs are its deliveries.
    pub outbox: ProjectId,
    pub url: String,
    pub description: Option<String>,
    pub events: Vec<String>,
    pub queues: Vec<String>,
    pub job_types: Vec<String>,
    pub takes_callbacks: bool,
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
    pub dropped_events: i64,
}

/// A new endpoint.
#[derive(Debug, Clone)]
pub struct NewEndpoint {
    pub url: String,
    pub description: Option<String>,
    pub events: Vec<String>,
    /// The types that these name.
    pub event_types: Vec<String>,
    pub queues: Vec<String>,
    pub job_types: Vec<String>,
    pub takes_callbacks: bool,
    pub max_in_flight: i32,
    pub timeout_seconds: i32,
    pub is_enabled: bool,
}

/// Changes of an endpoint. None keeps what is there.
#[derive(Debug, Clone, Default)]
pub struct EndpointChange {
    pub url: Option<String>,
    /// An empty text removes it.
    pub description: Option<String>,
    /// As they were sent, and the types that these name.
    pub events: Option<(Vec<String>, Vec<String>)>,
    pub queues: Option<Vec<String>>,
    pub job_types: Option<Vec<String>>,
    pub takes_callbacks: Option<bool>,
    pub max_in_flight: Option<i32>,
    pub timeout_seconds: Option<i32>,
    pub is_enabled: Option<bool>,
}

/// Waits for others that change the project's endpoints. Returns the outbox; none: it has none.
pub async fn lock(
    conn: &mut PgConnection,
    project_id: ProjectId,
) -> sqlx::Result<Option<ProjectId>> {
    sqlx::query_scalar!(
        r#"select outbox_id "outbox: ProjectId" from outboxes where project_id = $1 for update"#,
        project_id.0,
    )
    .fetch_optional(conn)
    .await
}

/// The outbox of a project; it is created if it is missing. None: the project is deleted. No slug
/// of a person begins with a dot.
pub async fn make_outbox(
    conn: &mut PgConnection,
    project_id: ProjectId,
) -> sqlx::Result<Option<ProjectId>> {
    sqlx::query_scalar!(
        r#"
        insert into projects (public_id, slug, name, mode, plan, kind, owner_project_id)
        select $2, '.outbox-' || id, 'Outbox', 'live', 'unlimited', 'outbox', id
        from projects
        where id = $1 and deleted_at is null
        on conflict (owner_project_id) do update set slug = excluded.slug
        returning id "id: ProjectId"
        "#,
        project_id.0,
        ProjectPublicId::generate().0,
    )
    .fetch_optional(conn)
    .await
}

/// Notes the outbox of a project, if it is not noted yet.
pub async fn note_outbox(
    conn: &mut PgConnection,
    project_id: ProjectId,
    outbox: ProjectId,
) -> sqlx::Result<()> {
    sqlx::query!(
        "insert into outboxes (project_id, outbox_id) values ($1, $2) on conflict do nothing",
        project_id.0,
        outbox.0,
    )
    .execute(conn)
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
        from (
            select from webhook_endpoints where project_id = $1 and deleted_at is null limit $2
        ) bounded
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
    id: EndpointId,
    new: &NewEndpoint,
    secret: &[u8],
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        insert into webhook_endpoints (
            project_id, id, url, description, events, event_types, queues, job_types, max_in_flight,
            timeout_seconds, secret, disabled_at, disabled_reason, takes_callbacks
        )
        values (
            $1, $2, $3, nullif($4, ''), $5, $6, $7, $8, $9, $10, $11,
            case when not $12 then now() end, case when not $12 then 'by_user' end, $13
        )
        ",
        project_id.0,
        id.0,
        new.url,
        new.description,
        &new.events,
        &new.event_types,
        &new.queues,
        &new.job_types,
        new.max_in_flight,
        new.timeout_seconds,
        secret,
        new.is_enabled,
        new.takes_callbacks,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Changes an endpoint. Enabling it forgets its failures. Returns whether there is one.
pub async fn change(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: EndpointId,
    change: &EndpointChange,
) -> sqlx::Result<bool> {
    let (events, event_types) = change.events.clone().unzip();
    let done = sqlx::query!(
        "
        update webhook_endpoints
        set url = coalesce($3, url),
            description = case when $4::text is null then description else nullif($4, '') end,
            events = coalesce($5, events),
            event_types = coalesce($6, event_types),
            queues = coalesce($7, queues),
            job_types = coalesce($8, job_types),
            max_in_flight = coalesce($9, max_in_flight),
            timeout_seconds = coalesce($10, timeout_seconds),
            takes_callbacks = coalesce($12, takes_callbacks),
            updated_at = now(),
            subscribed_at = case
                when $5::text[] is not null or (disabled_at is not null and $11) then now()
                else subscribed_at
            end,
            disabled_at = case
                when $11 then null
                when not $11 then coalesce(disabled_at, now())
                else disabled_at
            end,
            disabled_reason = case
                when $11 then null
                when not $11 then coalesce(disabled_reason, 'by_user')
                else disabled_reason
            end,
            is_emptied = is_emptied and $11 is not true,
            failing_since = case when disabled_at is null or $11 is not true then failing_since end,
            failures = case when disabled_at is null or $11 is not true then failures else 0 end
        where project_id = $1 and id = $2 and deleted_at is null
        ",
        project_id.0,
        id.0,
        change.url,
        change.description,
        events.as_deref(),
        event_types.as_deref(),
        change.queues.as_deref(),
        change.job_types.as_deref(),
        change.max_in_flight,
        change.timeout_seconds,
        change.is_enabled,
        change.takes_callbacks,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() > 0)
}

pub async fn find(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: EndpointId,
) -> sqlx::Result<Option<EndpointRow>> {
    sqlx::query_as!(
        EndpointRow,
        r#"
        select id "id: EndpointId", outbox_id "outbox: ProjectId", url, description, events, queues,
               job_types, takes_callbacks, max_in_flight, timeout_seconds, created_at, updated_at,
               disabled_at, disabled_reason, last_success_at, last_failure_at, failing_since,
               dropped_events
        from webhook_endpoints
        join outboxes using (project_id)
        where project_id = $1 and id = $2 and deleted_at is null
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
        select id "id: EndpointId", outbox_id "outbox: ProjectId", url, description, events, queues,
               job_types, takes_callbacks, max_in_flight, timeout_seconds, created_at, updated_at,
               disabled_at, disabled_reason, last_success_at, last_failure_at, failing_since,
               dropped_events
        from webhook_endpoints
        join outboxes using (project_id)
        where project_id = $1 and deleted_at is null and ($2::uuid is null or id < $2)
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

/// Deletes an endpoint for all callers; a loop does the rest. Returns whether there was one.
pub async fn delete(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: EndpointId,
) -> sqlx::Result<bool> {
    let done = sqlx::query!(
        "
        update webhook_endpoints
        set deleted_at = now()
        where project_id = $1 and id = $2 and deleted_at is null
        ",
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
        where project_id = $1 and id = $2 and deleted_at is null
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
            where project_id = $1 and disabled_at is null and deleted_at is null
            union
            select 'workflow.callback'
            from webhook_endpoints
            where project_id = $1 and disabled_at is null and deleted_at is null and takes_callbacks
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

/// Adds types of events that have come since to endpoints that asked for their groups. `types` are
/// all that there are.
pub(crate) async fn widen_groups(conn: &mut PgConnection, types: &[&str]) -> sqlx::Result<()> {
    sqlx::query!(
        r#"
        with widened as (
            update webhook_endpoints it
            set event_types = named.types
            from webhook_endpoints old
            cross join lateral (
                select array(
                    select type
                    from unnest($1::text[]) as known(type)
                    where old.events && array['*', type, split_part(type, '.', 1) || '.*']
                    order by type collate "C"
                ) as types
            ) named
            where it.project_id = old.project_id and it.id = old.id
                and old.deleted_at is null
                and old.events::text like '%*%'
                and named.types <> old.event_types
            returning it.project_id, it.disabled_at, it.event_types
        )
        insert into event_subscriptions (project_id, type)
        select distinct project_id, unnest(event_types)
        from widened
        where disabled_at is null
        on conflict do nothing
        "#,
        types as &[&str],
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// The URLs of a project's endpoints that take callbacks. Also of those that are disabled: that a
/// receiver is gone must not keep jobs from being enqueued.
pub async fn callback_urls(
    conn: &mut PgConnection,
    project_id: ProjectId,
    limit: i64,
) -> sqlx::Result<Vec<String>> {
    sqlx::query_scalar!(
        "
        select url
        from webhook_endpoints
        where project_id = $1 and takes_callbacks and deleted_at is null
        order by id
        limit $2
        ",
        project_id.0,
        limit,
    )
    .fetch_all(conn)
    .await
}
