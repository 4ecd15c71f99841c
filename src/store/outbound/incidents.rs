//! Incidents: what alarms have found, and who is notified.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use fencepost_domain::{
    alarm::{Details, MAX_ALARM_MAILS_A_DAY, MAX_INCIDENTS_A_DAY, MAX_MAILED_MEMBERS, Name, Rule},
    ids::{IncidentId, ProjectId},
    limits::{MAIL_SECONDS, MAX_WAITING_MAILS},
};

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

impl IncidentRow {
    /// Its rule and details, as far as this version can read them.
    #[must_use]
    pub fn read(&self) -> (Rule, Details) {
        let rule = Rule::of_name(&self.rule).unwrap_or(Rule::DeadLetters);
        (rule, serde_json::from_str(&self.details).unwrap_or_default())
    }
}

/// Incidents of a project that were reported, newest first: all, or those that have ended.
pub async fn list(
    conn: &mut PgConnection,
    project_id: ProjectId,
    is_ended: bool,
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
            and (resolved_at is not null or not $2)
            and ($3::uuid is null or id < $3)
        order by id desc
        limit $4
        "#,
        project_id.0,
        is_ended,
        before.map(|it| it.0),
        limit,
    )
    .fetch_all(conn)
    .await
}

/// Lists the open incidents. There are few of them among many that have ended.
pub async fn list_open(
    conn: &mut PgConnection,
    project_id: ProjectId,
    before: Option<IncidentId>,
    limit: i64,
) -> sqlx::Result<Vec<IncidentRow>> {
    sqlx::query_as!(
        IncidentRow,
        r#"
        with lasting as materialized (
            select id, alarm, rule, subject, details, began_at, triggered_at, resolved_at,
                   muted_until
            from incidents
            where project_id = $1 and resolved_at is null
        )
        select id "id: IncidentId", alarm, rule, subject, details, began_at,
               triggered_at "triggered_at!", resolved_at, muted_until
        from lasting
        where triggered_at is not null and ($2::uuid is null or id < $2)
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

pub async fn find(
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
        where project_id = $1 and (
            id = $2 and triggered_at is not null
            -- An earlier mute would hold for this incident, too.
            or $3 = 0 and muted_until is not null and (alarm, subject) = (
                select alarm, subject from incidents where project_id = $1 and id = $2
            )
        )
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
    pub id: Uuid,
    pub alarm: String,
    pub rule: String,
    pub subject: String,
    /// Since it began.
    pub seconds: i32,
    /// Since it was last found, as far as that was noted.
    pub silent_seconds: i32,
    pub is_triggered: bool,
}

/// The incidents of these projects that are not resolved.
pub async fn open(conn: &mut PgConnection, projects: &[i32]) -> sqlx::Result<Vec<OpenIncident>> {
    sqlx::query_as!(
        OpenIncident,
        r#"
        select project_id "project_id: ProjectId", id, alarm, rule, subject,
               extract(epoch from now() - began_at)::int "seconds!",
               extract(epoch from now() - last_found_at)::int "silent_seconds!",
               triggered_at is not null "is_triggered!"
        from incidents
        where project_id = any($1) and resolved_at is null
        "#,
        projects,
    )
    .fetch_all(conn)
    .await
}

/// A day, in the first 48 bits of a UUIDv7, which count milliseconds.
const DAY_IN_IDS: u128 = 86_400_000 << 80;

/// A new incident.
#[derive(Debug, Clone)]
pub struct NewIncident {
    pub name: Name,
    pub rule: String,
    /// JSON.
    pub details: String,
    pub mail_to: String,
    /// Whether it is reported at once.
    pub is_triggered: bool,
}

/// Begins incidents, but for those that another node has begun, and up to a number a day. Returns
/// those that are to be reported.
pub async fn begin(
    conn: &mut PgConnection,
    project_id: ProjectId,
    new: &[NewIncident],
) -> sqlx::Result<Vec<Uuid>> {
    let now = Uuid::now_v7();
    let a_day_ago = Uuid::from_u128(now.as_u128().saturating_sub(DAY_IN_IDS));
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
            where (
                select count(*)
                from (
                    select
                    from incidents
                    where project_id = $1 and id > $9
                    limit $10
                ) bounded
            ) < $10
            order by it.alarm, it.subject
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
        a_day_ago,
        MAX_INCIDENTS_A_DAY,
    )
    .fetch_all(conn)
    .await
}

/// Replaces the details of incidents that last.
pub async fn describe(
    conn: &mut PgConnection,
    project_id: ProjectId,
    details: &[(Uuid, String)],
) -> sqlx::Result<()> {
    if details.is_empty() {
        return Ok(());
    }
    sqlx::query!(
        "
        update incidents it
        set details = known.details
        from unnest($2::uuid[], $3::text[]) as known(id, details)
        where it.project_id = $1 and it.id = known.id and it.resolved_at is null
        ",
        project_id.0,
        &details.iter().map(|it| it.0).collect::<Vec<_>>(),
        &details.iter().map(|it| it.1.as_str()).collect::<Vec<_>>() as &[&str],
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Triggers incidents that have lasted. Returns which another node has not.
pub async fn trigger(
    conn: &mut PgConnection,
    project_id: ProjectId,
    ids: &[Uuid],
) -> sqlx::Result<Vec<Uuid>> {
    sqlx::query_scalar!(
        "
        with wanted as (
            select id
            from incidents
            where project_id = $1 and id = any($2) and resolved_at is null and triggered_at is null
            order by id
            for update
        )
        update incidents it
        set triggered_at = now()
        from wanted
        where it.project_id = $1 and it.id = wanted.id
        returning it.id
        ",
        project_id.0,
        ids,
    )
    .fetch_all(conn)
    .await
}

/// Notes that incidents were found again. Those that another transaction changes are left out.
pub async fn touch(
    conn: &mut PgConnection,
    project_id: ProjectId,
    ids: &[Uuid],
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        with wanted as (
            select id
            from incidents
            where project_id = $1 and id = any($2) and resolved_at is null
            for update skip locked
        )
        update incidents it
        set last_found_at = now()
        from wanted
        where it.project_id = $1 and it.id = wanted.id
        ",
        project_id.0,
        ids,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Deletes incidents that have not lasted.
pub async fn forget(
    conn: &mut PgConnection,
    project_id: ProjectId,
    ids: &[Uuid],
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        with wanted as (
            select id
            from incidents
            where project_id = $1 and id = any($2) and resolved_at is null and triggered_at is null
            order by id
            for update
        )
        delete from incidents it
        using wanted
        where it.project_id = $1 and it.id = wanted.id
        ",
        project_id.0,
        ids,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Resolves incidents that were not found as long as their rule asks. Returns which another node
/// has not.
pub async fn resolve(
    conn: &mut PgConnection,
    project_id: ProjectId,
    incidents: &[(Uuid, i32)],
) -> sqlx::Result<Vec<Uuid>> {
    sqlx::query_scalar!(
        "
        with wanted as (
            select it.id
            from unnest($2::uuid[], $3::int[]) as silent(id, seconds)
            join incidents it on it.project_id = $1 and it.id = silent.id
            where it.resolved_at is null and it.triggered_at is not null
                and it.last_found_at <= now() - make_interval(secs => silent.seconds)
            order by it.id
            for update of it
        )
        update incidents it
        set resolved_at = now()
        from wanted
        where it.project_id = $1 and it.id = wanted.id
        returning it.id
        ",
        project_id.0,
        &incidents.iter().map(|it| it.0).collect::<Vec<_>>(),
        &incidents.iter().map(|it| it.1).collect::<Vec<_>>(),
    )
    .fetch_all(conn)
    .await
}

/// Incidents among these that are to be reported: their alarm still looks, and no incident of it
/// about the same subject is muted.
pub async fn to_notify(
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
        ) and exists (
            select from effective_alarms alarm
            where alarm.project_id = $1 and alarm.name = it.alarm and alarm.is_enabled
        )
        ",
        project_id.0,
        ids,
    )
    .fetch_all(conn)
    .await
}

/// Stores mails about incidents to the members who shall get them, up to a number a day.
pub async fn mail(
    conn: &mut PgConnection,
    project_id: ProjectId,
    ids: &[Uuid],
    is_resolved: bool,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        with recipient as (
            select account.id, member.role, mailed.today
            from members member
            join accounts account
                on account.id = member.account_id and account.verified_at is not null
                and account.suspended_at is null
            cross join lateral (
                select count(*) as today
                from mails sent
                where sent.project_id = $1 and sent.account_id = account.id
                    and sent.created_at > now() - interval '1 day'
            ) mailed
            where member.project_id = $1 and member.role in ('owner', 'admin')
            order by member.role desc, account.id
            limit $4
        ), wanted as (
            select it.id, recipient.id as account_id, recipient.today,
                   row_number() over (partition by recipient.id order by it.id) as place
            from incidents it
            join recipient
                on (recipient.role = 'owner' and it.mail_to <> 'none') or it.mail_to = 'admins'
            where it.project_id = $1 and it.id = any($2)
        )
        insert into mails (id, content, project_id, account_id, expires_at)
        select gen_random_uuid(),
               jsonb_build_object(
                   'kind', 'alarm', 'project', $1::int, 'incident', wanted.id,
                   'account', wanted.account_id, 'is_resolved', $3::bool
               )::text,
               $1, wanted.account_id, now() + make_interval(secs => $6)
        from wanted
        where wanted.place + wanted.today <= $5::int
            and not exists (select from mails waiting where sent_at is null offset $7)
        ",
        project_id.0,
        ids,
        is_resolved,
        MAX_MAILED_MEMBERS,
        MAX_ALARM_MAILS_A_DAY,
        MAIL_SECONDS as f64,
        MAX_WAITING_MAILS - 1,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// The address of a member who shall get the mail of an incident: as long as they are one, with
/// such a role and a verified address.
pub async fn recipient(
    conn: &mut PgConnection,
    (project_id, id): (ProjectId, IncidentId),
    account_id: Uuid,
) -> sqlx::Result<Option<String>> {
    sqlx::query_scalar!(
        "
        select account.email
        from incidents it
        join members member
            on member.project_id = it.project_id and member.account_id = $3
            and ((member.role = 'owner' and it.mail_to <> 'none')
                or (member.role = 'admin' and it.mail_to = 'admins'))
        join accounts account
            on account.id = member.account_id and account.verified_at is not null
            and account.suspended_at is null
        where it.project_id = $1 and it.id = $2
        ",
        project_id.0,
        id.0,
        account_id,
    )
    .fetch_optional(conn)
    .await
}
