//! Alarms of a project.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use fencepost_domain::{ids::ProjectId, webhook::ALARM_TRIGGERED};

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

/// True if a webhook of the project asks for what alarms find.
pub async fn has_webhook(conn: &mut PgConnection, project_id: ProjectId) -> sqlx::Result<bool> {
    sqlx::query_scalar!(
        r#"
        select exists (
            select from webhook_endpoints
            where project_id = $1 and disabled_at is null and deleted_at is null
                and $2 = any(event_types)
        ) "has_webhook!"
        "#,
        project_id.0,
        ALARM_TRIGGERED,
    )
    .fetch_one(conn)
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

/// An alarm that every project has.
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
