//! Mails that wait to be sent.

use sqlx::PgConnection;
use uuid::Uuid;

use fencepost_domain::ids::{AccountId, ProjectId};

/// A mail that this node has taken to send.
#[derive(Clone)]
pub struct TakenMail {
    pub id: Uuid,
    /// As it was stored.
    pub content: String,
    /// This try included.
    pub tries: i32,
}

/// Stores a mail, unless `max_waiting` wait. Returns whether it is stored.
pub async fn insert(
    conn: &mut PgConnection,
    content: &str,
    (project_id, account_id): (Option<ProjectId>, Option<AccountId>),
    life_seconds: i64,
    max_waiting: i64,
) -> sqlx::Result<bool> {
    let done = sqlx::query!(
        "
        insert into mails (id, content, project_id, account_id, expires_at)
        select $1, $2, $3, $4, now() + make_interval(secs => $5)
        where not exists (select from mails where sent_at is null offset $6)
        ",
        Uuid::now_v7(),
        content,
        project_id.map(|it| it.0),
        account_id.map(|it| it.0),
        life_seconds as f64,
        max_waiting - 1,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() > 0)
}

/// Takes mails that are due: no other node does for this many seconds.
pub async fn take(
    conn: &mut PgConnection,
    taken_seconds: i32,
    limit: i64,
) -> sqlx::Result<Vec<TakenMail>> {
    sqlx::query_as!(
        TakenMail,
        "
        with due as materialized (
            select id
            from mails
            where sent_at is null and next_try_at <= now() and expires_at > now()
            order by next_try_at
            limit $2
            for update skip locked
        )
        update mails
        set tries = tries + 1, next_try_at = now() + make_interval(secs => $1::int)
        from due
        where mails.id = due.id
        returning mails.id, content, tries
        ",
        taken_seconds,
        limit,
    )
    .fetch_all(conn)
    .await
}

/// Deletes mails that were not sent in time. Returns how many.
pub async fn delete_expired(conn: &mut PgConnection, limit: i64) -> sqlx::Result<u64> {
    let done = sqlx::query!(
        "
        with expired as materialized (
            select id
            from mails
            where sent_at is null and expires_at <= now()
            limit $1
            for update skip locked
        )
        delete from mails
        using expired
        where mails.id = expired.id
        ",
        limit,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected())
}

/// Seconds until the next try of a mail is due; none: no mail waits.
pub async fn next_try_seconds(conn: &mut PgConnection) -> sqlx::Result<Option<f64>> {
    sqlx::query_scalar!(
        r#"
        select extract(epoch from next_try_at - now())::float8 "seconds!"
        from mails
        where sent_at is null and expires_at > now()
        order by next_try_at
        limit 1
        "#,
    )
    .fetch_optional(conn)
    .await
}

/// Notes that a mail is sent, or never will be. Its row stays for a day, without its content, so
/// that a project's mails can be counted.
pub async fn note_done(conn: &mut PgConnection, id: Uuid) -> sqlx::Result<()> {
    sqlx::query!(
        "
        update mails
        set sent_at = now(), content = '', expires_at = now() + interval '1 day'
        where id = $1
        ",
        id,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Notes when a mail that was not accepted is tried again.
pub async fn note_failed(
    conn: &mut PgConnection,
    id: Uuid,
    pause_seconds: i32,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        update mails
        set next_try_at = now() + make_interval(secs => $2::int)
        where id = $1 and sent_at is null
        ",
        id,
        pause_seconds,
    )
    .execute(conn)
    .await?;
    Ok(())
}
