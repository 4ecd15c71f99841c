//! Alarms of a project, and their incidents.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::{
    domain::alarm::{MAX_ALARM_MAILS_A_DAY, MAX_MAILED_MEMBERS, Name},
    ids::{IncidentId, ProjectId},
};

/// An alarm.
#[derive(Debug, Clone)]
pub struct AlarmRow {
    pub name: String,
    pub rule: String,
    pub queues: Vec<String>,
    pub threshold: i32,
    pub for_seconds: i32,
    pub mail_to: String,
    pub is_enabled: bool,
    /// Null: it is as every project has it.
    pub updated_at: Option<DateTime<Utc>>,
}

/// Settings of an alarm.
#[derive(Debug, Clone)]
pub struct AlarmSettings {
    pub rule: &'static str,
    pub queues: Vec<String>,
    pub threshold: i32,
    pub for_seconds: i32,
    pub mail_to: &'static str,
    pub is_enabled: bool,
}

/// The alarms of a project, by name.
pub async fn list(
    conn: &mut PgConnection,
    project_id: ProjectId,
    limit: i64,
) -> sqlx::Result<Vec<AlarmRow>> {
    sqlx::query_as!(
        AlarmRow,
        r#"
        select name "name!", rule "rule!", queues "queues!", threshold "threshold!",
               for_seconds "for_seconds!", mail_to "mail_to!", is_enabled "is_enabled!", updated_at
        from effective_alarms
        where project_id = $1
        order by name
        limit $2
        "#,
        project_id.0,
        limit,
    )
    .fetch_all(conn)
    .await
}

pub async fn find(
    conn: &mut PgConnection,
    project_id: ProjectId,
    name: &str,
) -> sqlx::Result<Option<AlarmRow>> {
    sqlx::query_as!(
        AlarmRow,
        r#"
        select name "name!", rule "rule!", queues "queues!", threshold "threshold!",
               for_seconds "for_seconds!", mail_to "mail_to!", is_enabled "is_enabled!", updated_at
        from effective_alarms
        where project_id = $1 and name = $2
        "#,
        project_id.0,
        name,
    )
    .fetch_optional(conn)
    .await
}

/// What an alarm is that every project has.
#[derive(Debug, Clone)]
pub struct DefaultAlarm {
    pub rule: String,
    pub threshold: i32,
    pub for_seconds: i32,
}

/// The alarm with this name that every project has.
pub async fn default(conn: &mut PgConnection, name: &str) -> sqlx::Result<Option<DefaultAlarm>> {
    sqlx::query_as!(
        DefaultAlarm,
        "select rule, threshold, for_seconds from default_alarms where name = $1",
        name,
    )
    .fetch_optional(conn)
    .await
}

/// Stores an alarm, unless the project has `max` of its own. Returns whether it is stored.
pub async fn put(
    conn: &mut PgConnection,
    project_id: ProjectId,
    name: &str,
    it: &AlarmSettings,
    max: i64,
) -> sqlx::Result<bool> {
    let done = sqlx::query!(
        "
        insert into alarms (
            project_id, name, rule, queues, threshold, for_seconds, mail_to, is_enabled
        )
        select $1, $2, $3, $4, $5, $6, $7, $8
        where exists (select from alarms where project_id = $1 and name = $2)
            or (select count(*) from alarms where project_id = $1) < $9
        on conflict (project_id, name) do update
        set rule = excluded.rule, queues = excluded.queues, threshold = excluded.threshold,
            for_seconds = excluded.for_seconds, mail_to = excluded.mail_to,
            is_enabled = excluded.is_enabled, updated_at = now()
        ",
        project_id.0,
        name,
        it.rule,
        &it.queues,
        it.threshold,
        it.for_seconds,
        it.mail_to,
        it.is_enabled,
        max,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() > 0)
}

/// Deletes what a project has set. Returns whether there was something.
pub async fn delete(
    conn: &mut PgConnection,
    project_id: ProjectId,
    name: &str,
) -> sqlx::Result<bool> {
    let done =
        sqlx::query!("delete from alarms where project_id = $1 and name = $2", project_id.0, name)
            .execute(conn)
            .await?;
    Ok(done.rows_affected() > 0)
}

/// An incident.
#[derive(Debug, Clone)]
pub struct IncidentRow {
    pub id: IncidentId,
    pub alarm: String,
    pub rule: String,
    pub subject: String,
    /// JSON.
    pub details: String,
    pub began_at: DateTime<Utc>,
    pub triggered_at: DateTime<Utc>,
    /// Null: it lasts.
    pub resolved_at: Option<DateTime<Utc>>,
    pub muted_until: Option<DateTime<Utc>>,
}

/// Incidents of a project that were told, newest first.
pub async fn incidents(
    conn: &mut PgConnection,
    project_id: ProjectId,
    is_open: Option<bool>,
    before: Option<IncidentId>,
    limit: i64,
) -> sqlx::Result<Vec<IncidentRow>> {
    sqlx::query_as!(
        IncidentRow,
        r#"
        select id "id: IncidentId", alarm, rule, subject, details, began_at,
               triggered_at "triggered_at!", resolved_at, muted_until
        from incidents
        where project_id = $1 and triggered_at is not null
            and ($2::bool is null or (resolved_at is null) = $2)
            and ($3::uuid is null or id < $3)
        order by id desc
        limit $4
        "#,
        project_id.0,
        is_open,
        before.map(|it| it.0),
        limit,
    )
    .fetch_all(conn)
    .await
}

pub async fn incident(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: IncidentId,
) -> sqlx::Result<Option<IncidentRow>> {
    sqlx::query_as!(
        IncidentRow,
        r#"
        select id "id: IncidentId", alarm, rule, subject, details, began_at,
               triggered_at "triggered_at!", resolved_at, muted_until
        from incidents
        where project_id = $1 and id = $2 and triggered_at is not null
        "#,
        project_id.0,
        id.0,
    )
    .fetch_optional(conn)
    .await
}

/// Mutes an incident for this many seconds; 0 ends a mute. Returns whether there is one.
pub async fn mute(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: IncidentId,
    seconds: i32,
) -> sqlx::Result<bool> {
    let done = sqlx::query!(
        "
        update incidents
        set muted_until = case when $3::int > 0 then now() + make_interval(secs => $3::int) end
        where project_id = $1 and id = $2 and triggered_at is not null
        ",
        project_id.0,
        id.0,
        seconds,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() > 0)
}

/// An incident that is not resolved.
#[derive(Debug, Clone)]
pub struct OpenIncident {
    pub project_id: ProjectId,
    pub alarm: String,
    pub subject: String,
    /// Since it began.
    pub seconds: i32,
    pub is_triggered: bool,
}

/// The incidents of these projects that are not resolved.
pub async fn open(conn: &mut PgConnection, projects: &[i32]) -> sqlx::Result<Vec<OpenIncident>> {
    sqlx::query_as!(
        OpenIncident,
        r#"
        select project_id "project_id: ProjectId", alarm, subject,
               extract(epoch from now() - began_at)::int "seconds!",
               triggered_at is not null "is_triggered!"
        from incidents
        where project_id = any($1) and resolved_at is null
        "#,
        projects,
    )
    .fetch_all(conn)
    .await
}

/// A new incident.
#[derive(Debug, Clone)]
pub struct NewIncident {
    pub name: Name,
    pub rule: String,
    /// JSON.
    pub details: String,
    pub mail_to: String,
    /// Whether it is told at once.
    pub is_triggered: bool,
}

/// Begins incidents, but for those that another node has begun. Returns those that are to be told.
pub async fn begin(
    conn: &mut PgConnection,
    project_id: ProjectId,
    new: &[NewIncident],
) -> sqlx::Result<Vec<Uuid>> {
    sqlx::query_scalar!(
        "
        with begun as (
            insert into incidents (
                project_id, id, alarm, subject, rule, details, mail_to, triggered_at
            )
            select $1, it.id, it.alarm, it.subject, it.rule, it.details, it.mail_to,
                   case when it.is_triggered then now() end
            from unnest(
                $2::uuid[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::bool[]
            ) as it(id, alarm, subject, rule, details, mail_to, is_triggered)
            on conflict (project_id, alarm, subject) where resolved_at is null do nothing
            returning id, triggered_at
        )
        select id from begun where triggered_at is not null
        ",
        project_id.0,
        &new.iter().map(|_| Uuid::now_v7()).collect::<Vec<_>>(),
        &new.iter().map(|it| it.name.0.clone()).collect::<Vec<_>>(),
        &new.iter().map(|it| it.name.1.clone()).collect::<Vec<_>>(),
        &new.iter().map(|it| it.rule.clone()).collect::<Vec<_>>(),
        &new.iter().map(|it| it.details.clone()).collect::<Vec<_>>(),
        &new.iter().map(|it| it.mail_to.clone()).collect::<Vec<_>>(),
        &new.iter().map(|it| it.is_triggered).collect::<Vec<_>>(),
    )
    .fetch_all(conn)
    .await
}

/// Triggers incidents that have lasted. Returns which another node has not.
pub async fn trigger(
    conn: &mut PgConnection,
    project_id: ProjectId,
    names: &[Name],
) -> sqlx::Result<Vec<Uuid>> {
    sqlx::query_scalar!(
        "
        update incidents it
        set triggered_at = now()
        from unnest($2::text[], $3::text[]) as named(alarm, subject)
        where it.project_id = $1 and it.alarm = named.alarm and it.subject = named.subject
            and it.resolved_at is null and it.triggered_at is null
        returning it.id
        ",
        project_id.0,
        &names.iter().map(|it| it.0.clone()).collect::<Vec<_>>(),
        &names.iter().map(|it| it.1.clone()).collect::<Vec<_>>(),
    )
    .fetch_all(conn)
    .await
}

/// Deletes incidents that have not lasted.
pub async fn forget(
    conn: &mut PgConnection,
    project_id: ProjectId,
    names: &[Name],
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        delete from incidents it
        using unnest($2::text[], $3::text[]) as named(alarm, subject)
        where it.project_id = $1 and it.alarm = named.alarm and it.subject = named.subject
            and it.resolved_at is null and it.triggered_at is null
        ",
        project_id.0,
        &names.iter().map(|it| it.0.clone()).collect::<Vec<_>>(),
        &names.iter().map(|it| it.1.clone()).collect::<Vec<_>>(),
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Resolves incidents. Returns which another node has not.
pub async fn resolve(
    conn: &mut PgConnection,
    project_id: ProjectId,
    names: &[Name],
) -> sqlx::Result<Vec<Uuid>> {
    sqlx::query_scalar!(
        "
        update incidents it
        set resolved_at = now()
        from unnest($2::text[], $3::text[]) as named(alarm, subject)
        where it.project_id = $1 and it.alarm = named.alarm and it.subject = named.subject
            and it.resolved_at is null and it.triggered_at is not null
        returning it.id
        ",
        project_id.0,
        &names.iter().map(|it| it.0.clone()).collect::<Vec<_>>(),
        &names.iter().map(|it| it.1.clone()).collect::<Vec<_>>(),
    )
    .fetch_all(conn)
    .await
}

/// Those of these incidents about whose subject no incident of their alarm is muted.
pub async fn not_muted(
    conn: &mut PgConnection,
    project_id: ProjectId,
    ids: &[Uuid],
) -> sqlx::Result<Vec<Uuid>> {
    sqlx::query_scalar!(
        "
        select it.id
        from incidents it
        where it.project_id = $1 and it.id = any($2) and not exists (
            select from incidents muted
            where muted.project_id = $1 and muted.alarm = it.alarm and muted.subject = it.subject
                and muted.muted_until > now()
        )
        ",
        project_id.0,
        ids,
    )
    .fetch_all(conn)
    .await
}

/// Stores events about incidents, if an endpoint wants them.
pub async fn tell(
    conn: &mut PgConnection,
    project_id: ProjectId,
    ids: &[Uuid],
    event_type: &str,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        insert into outbound_events (project_id, type, incident_id)
        select $1, wanted.type, told.id
        from event_subscriptions wanted
        cross join unnest($2::uuid[]) as told(id)
        where wanted.project_id = $1 and wanted.type = $3
        ",
        project_id.0,
        ids,
        event_type,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Stores mails about incidents to the members who shall get them, up to a number a day.
pub async fn mail(
    conn: &mut PgConnection,
    project_id: ProjectId,
    ids: &[Uuid],
    is_resolved: bool,
    (life_seconds, max_waiting): (i64, i64),
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        with recipient as (
            select account.id, account.email, member.role
            from members member
            join accounts account
                on account.id = member.account_id and account.verified_at is not null
                and account.suspended_at is null
            where member.project_id = $1 and member.role in ('owner', 'admin')
            order by member.role desc, account.id
            limit $4
        ), wanted as (
            select it.id, recipient.id as account_id, recipient.email,
                   row_number() over (partition by recipient.id order by it.id) as place
            from incidents it
            join recipient
                on (recipient.role = 'owner' and it.mail_to <> 'none') or it.mail_to = 'admins'
            where it.project_id = $1 and it.id = any($2)
        )
        insert into mails (id, content, project_id, account_id, expires_at)
        select gen_random_uuid(),
               jsonb_build_object(
                   'kind', 'alarm', 'project', $1::int, 'incident', wanted.id, 'to', wanted.email,
                   'is_resolved', $3::bool
               )::text,
               $1, wanted.account_id, now() + make_interval(secs => $6)
        from wanted
        where wanted.place + (
                select count(*)
                from mails sent
                where sent.project_id = $1 and sent.account_id = wanted.account_id
                    and sent.created_at > now() - interval '1 day'
            ) <= $5::int
            and not exists (select from mails waiting where sent_at is null offset $7)
        ",
        project_id.0,
        ids,
        is_resolved,
        MAX_MAILED_MEMBERS,
        MAX_ALARM_MAILS_A_DAY,
        life_seconds as f64,
        max_waiting - 1,
    )
    .execute(conn)
    .await?;
    Ok(())
}
