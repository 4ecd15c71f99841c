//! Deleting a project: its rows in bounded batches, and finally the project.

use sqlx::{Executor, PgConnection};

use fencepost_domain::ids::ProjectId;

/// Rows of one statement.
pub const MAX_PURGED_ROWS: u64 = 2_000;

/// Every table with rows of projects but the audit log and usage, which outlive them; in the order
/// of deletion: schedules before the jobs that they create, and jobs before what belongs to them.
pub const TENANT_TABLES: &[&str] = &[
    "recurring_schedules",
    "event_subscriptions",
    "queue_pushes",
    "webhook_endpoints",
    "alarms",
    "incidents",
    "outboxes",
    "operations",
    "jobs",
    "job_bodies",
    "job_ends",
    "batches",
    "job_types",
    "job_edges",
    "attempts",
    "finished_jobs",
    // After the events that their triggers write.
    "outbound_events",
    "workflow_jobs",
    "workflow_starts",
    "workflow_definitions",
    "workflows",
    "job_events",
    "job_logs",
    "job_log_totals",
    "job_checkpoints",
    "job_expiries",
    "deleted_jobs",
    "ended_parents",
    "revived_parents",
    "dead_letters",
    "dead_letter_groups",
    "schedule_fires",
    "set_aside",
    "workers",
    "idempotency_keys",
    "queue_deltas",
    "queue_rates",
    "job_stats",
    "queue_handouts",
    "queue_types",
    "job_groups",
    "group_handouts",
    "group_turns",
    "group_overrides",
    "shared_limits",
    "shared_limit_keys",
    "group_notes",
    "queue_counts",
    "retention_dues",
    "queues",
    // After what their triggers count.
    "stored_byte_deltas",
    "stored_bytes",
    "mails",
    "invitations",
    "members",
    "api_keys",
];

/// Seconds between the deletion of a project and the purge of its rows: requests that were
/// authorized just before may still write.
const PURGE_DELAY_SECONDS: f64 = 60.0;

/// A deleted project, if there is one; locked, so that two nodes do not purge it together.
pub async fn deleted_project(conn: &mut PgConnection) -> sqlx::Result<Option<ProjectId>> {
    sqlx::query_scalar!(
        r#"
        select id "id: ProjectId"
        from projects
        where deleted_at < now() - make_interval(secs => $1) and purged_at is null
        order by deleted_at
        limit 1
        for update skip locked
        "#,
        PURGE_DELAY_SECONDS,
    )
    .fetch_optional(conn)
    .await
}

/// Deletes some rows of a project from one of [`TENANT_TABLES`], and returns how many. Waits for
/// locked rows: none that exists may be missed.
pub async fn delete_rows(
    conn: &mut PgConnection,
    table: &'static str,
    project_id: ProjectId,
) -> sqlx::Result<u64> {
    let statement = sqlx::AssertSqlSafe(format!(
        "delete from {table} where ctid = any(array(
            select ctid from {table} where project_id = {} limit {MAX_PURGED_ROWS}
         ))",
        project_id.0
    ));
    Ok(conn.execute(sqlx::raw_sql(statement)).await?.rows_affected())
}

/// Replaces addresses of people who were invited to a deleted project by hashes, in its audit log.
/// Returns how many entries had one, up to [`MAX_PURGED_ROWS`].
pub async fn forget_invitees(conn: &mut PgConnection, id: ProjectId) -> sqlx::Result<u64> {
    let most = i32::try_from(MAX_PURGED_ROWS).unwrap_or(i32::MAX);
    let forgotten = sqlx::query_scalar!(r#"select forget_invitees($1, $2) "count!""#, id.0, most);
    Ok(forgotten.fetch_one(conn).await?.unsigned_abs())
}

/// Clears names of projects that were purged this many days ago; their slugs stay taken until their
/// audit log has gone. Returns how many, up to 500.
pub async fn forget_names(conn: &mut PgConnection, days: i32) -> sqlx::Result<u64> {
    let forgotten = sqlx::query!(
        "
        update projects
        set name = 'deleted'
        where id in (
            select id
            from projects
            where purged_at < now() - make_interval(days => $1) and name <> 'deleted'
            limit 500
        )
        ",
        days,
    );
    Ok(forgotten.execute(conn).await?.rows_affected())
}

/// Notes that a project's rows are gone. The project itself goes when its audit log has gone.
pub async fn note_purged(conn: &mut PgConnection, id: ProjectId) -> sqlx::Result<()> {
    sqlx::query!(
        "update projects set purged_at = now() where id = $1 and deleted_at is not null",
        id.0,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Rows of one kind that [`prune_expired`] and [`prune_logs`] delete at a time. The statements
/// carry the same number as a literal.
pub const MAX_PRUNED_PEOPLE: i64 = 500;

/// Deletes expired sessions, tokens, mails, logins, challenges, changes of address, unconfirmed
/// apps, invitations, and keys that tokens were exchanged for. Returns the number of rows.
pub async fn prune_expired(conn: &mut PgConnection) -> sqlx::Result<i64> {
    sqlx::query_scalar!(
        r#"
        with old_sessions as (
            delete from sessions
            where id in (
                select id from sessions where expires_at < now() - interval '1 day' limit 500
            )
            returning 1
        ), old_mail as (
            delete from mail_tokens
            where secret_hash in (
                select secret_hash from mail_tokens
                where expires_at < now() - interval '1 day'
                limit 500
            )
            returning 1
        ), old_mails as (
            delete from mails
            where id in (
                select id from mails where expires_at < now() and sent_at is not null limit 500
            )
            returning 1
        ), old_logins as (
            delete from login_challenges
            where secret_hash in (
                select secret_hash from login_challenges where expires_at < now() limit 500
            )
            returning 1
        ), old_devices as (
            delete from device_logins
            where secret_hash in (
                select secret_hash from device_logins where expires_at < now() limit 500
            )
            returning 1
        ), old_challenges as (
            delete from used_challenges
            where challenge in (
                select challenge from used_challenges where expires_at < now() limit 500
            )
            returning 1
        ), old_apps as (
            delete from totp
            where account_id in (
                select account_id from totp
                where pending_until < now() and secret is null
                limit 500
            )
            returning 1
        ), old_secrets as (
            update totp
            set pending_secret = null, pending_until = null
            where account_id in (
                select account_id from totp
                where pending_until < now() and secret is not null
                limit 500
            )
            returning 1
        ), old_keys as (
            delete from api_keys
            using (
                select project_id, id from api_keys
                where is_exchanged and expires_at < now() - interval '1 day'
                limit 500
            ) old
            where api_keys.project_id = old.project_id and api_keys.id = old.id
            returning 1
        ), old_changes as (
            delete from email_changes
            where account_id in (
                select account_id from email_changes where expires_at < now() limit 500
            )
            returning 1
        ), old_invitations as (
            delete from invitations
            using (
                select project_id, id from invitations
                where expires_at < now() - interval '1 day'
                limit 500
            ) old
            where invitations.project_id = old.project_id and invitations.id = old.id
            returning 1
        )
        select (select count(*) from old_sessions) + (select count(*) from old_mail)
             + (select count(*) from old_mails) + (select count(*) from old_logins)
             + (select count(*) from old_devices) + (select count(*) from old_challenges)
             + (select count(*) from old_apps) + (select count(*) from old_secrets)
             + (select count(*) from old_keys) + (select count(*) from old_changes)
             + (select count(*) from old_invitations) "count!"
        "#,
    )
    .fetch_one(conn)
    .await
}

/// Deletes old entries of the audit log and of accounts' logs, and projects whose audit log is
/// gone, with their usage. Returns the number of rows.
pub async fn prune_logs(
    conn: &mut PgConnection,
    audit_keep_days: i32,
    account_log_keep_days: i32,
) -> sqlx::Result<i64> {
    sqlx::query_scalar!(
        r#"
        with old_entries as (
            delete from audit_log
            using (
                select project_id, id from audit_log
                where at < now() - make_interval(days => $1)
                order by at
                limit 500
            ) old
            where audit_log.project_id = old.project_id and audit_log.id = old.id
            returning 1
        ), old_account_entries as (
            delete from account_log
            using (
                select account_id, id from account_log
                where at < now() - make_interval(days => $2)
                order by at
                limit 500
            ) old
            where account_log.account_id = old.account_id and account_log.id = old.id
            returning 1
        ), old_projects as (
            delete from projects
            where id in (
                select id from projects
                where purged_at < now() - make_interval(days => $1)
                    and not exists (select from audit_log where project_id = projects.id)
                order by purged_at
                limit 500
            )
            returning id
        ), old_days as (
            delete from usage_days using old_projects where project_id = old_projects.id
        ), old_months as (
            delete from usage_months using old_projects where project_id = old_projects.id
        )
        select (select count(*) from old_entries)
             + (select count(*) from old_account_entries)
             + (select count(*) from old_projects) "count!"
        "#,
        audit_keep_days,
        account_log_keep_days,
    )
    .fetch_one(conn)
    .await
}

/// Deletes accounts that were never used nor verified for this many days: no later login, no use of
/// their keys, no job and no schedule. Their projects without another member are deleted with them.
/// The same rule for all addresses: known ones must look like others. Each account is looked
/// at for a month. Returns how many accounts.
pub async fn prune_unused(conn: &mut PgConnection, unused_days: i32) -> sqlx::Result<i64> {
    sqlx::query_scalar!(
        r#"
        with unused as materialized (
            select account.id
            from accounts account
            where account.verified_at is null
                and account.created_at < now() - make_interval(days => $1)
                and account.created_at > now() - make_interval(days => $1, months => 1)
                and coalesce(account.last_login_at, account.created_at)
                    < account.created_at + interval '1 minute'
                and not exists (
                    select from sessions
                    where account_id = account.id
                        and last_used_at > account.created_at + interval '1 hour'
                )
                and not exists (
                    select from members own
                    where own.account_id = account.id and (
                        exists (
                            select from api_keys
                            where project_id = own.project_id and last_used_at is not null
                        )
                        or exists (select from job_bodies where project_id = own.project_id)
                        or exists (
                            select from recurring_schedules where project_id = own.project_id
                        )
                    )
                )
            order by account.created_at
            limit 100
            for update skip locked
        ), deleted_projects as (
            update projects
            set deleted_at = now()
            from unused
            join members own on own.account_id = unused.id and own.role = 'owner'
            where (projects.id = own.project_id or projects.owner_project_id = own.project_id)
                and projects.deleted_at is null and not exists (
                select from members other
                where other.project_id = own.project_id and other.account_id <> unused.id
            )
        ), deleted_accounts as (
            delete from accounts
            using unused
            where accounts.id = unused.id
            returning 1
        )
        select count(*) "count!" from deleted_accounts
        "#,
        unused_days,
    )
    .fetch_one(conn)
    .await
}
