//! Answers that are repeated, by the idempotency key of the first request.

use fencepost_domain::{
    ids::{NodeId, ProjectId},
    limits::{IDEMPOTENCY_KEEP_SECONDS, IDEMPOTENCY_LOCK_SECONDS},
};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::connection::nodes::NODE_SILENCE_SECONDS;

/// The idempotency key of a request.
#[derive(Debug, Clone, Copy)]
pub struct Presented<'a> {
    pub project_id: ProjectId,
    pub key: &'a str,
    /// SHA-256 of route and body.
    pub fingerprint: &'a [u8; 32],
}

/// Starts a request, if its key is new or older than [`IDEMPOTENCY_KEEP_SECONDS`]; returns whether
/// it did. The ids of what it makes are derived from `seed`.
pub async fn begin(
    conn: &mut PgConnection,
    presented: Presented<'_>,
    seed: Uuid,
    (node, lock): (NodeId, Uuid),
) -> sqlx::Result<bool> {
    let begun = sqlx::query!(
        "
        insert into idempotency_keys (project_id, key, fingerprint, seed, locked_by, lock_id)
        values ($1, $2, $3, $4, $5, $7)
        on conflict (project_id, key) do update
        set fingerprint = excluded.fingerprint, seed = excluded.seed, created_at = now(),
            locked_at = now(), locked_by = excluded.locked_by, lock_id = excluded.lock_id,
            status = null, location = null, body = null
        where idempotency_keys.created_at < now() - make_interval(secs => $6::bigint)
        ",
        presented.project_id.0,
        presented.key,
        presented.fingerprint,
        seed,
        node.0,
        IDEMPOTENCY_KEEP_SECONDS,
        lock,
    )
    .execute(conn)
    .await?;
    Ok(begun.rows_affected() == 1)
}

/// The answer stored for a key.
#[derive(Debug, Clone)]
pub struct StoredAnswer {
    pub fingerprint: Vec<u8>,
    pub status: Option<i16>,
    pub location: Option<String>,
    pub body: Option<String>,
    /// See [`StoredBody`].
    pub has_payloads: bool,
}

/// The body of a stored answer.
#[derive(Debug, Clone)]
pub struct StoredBody {
    pub text: String,
    /// False if the payloads of its jobs are left out.
    pub has_payloads: bool,
}

/// The answer stored for a key.
pub async fn find(
    conn: &mut PgConnection,
    project_id: ProjectId,
    key: &str,
) -> sqlx::Result<Option<StoredAnswer>> {
    sqlx::query_as!(
        StoredAnswer,
        "
        select fingerprint, status, location, body, has_payloads
        from idempotency_keys
        where project_id = $1 and key = $2
        ",
        project_id.0,
        key,
    )
    .fetch_optional(conn)
    .await
}

/// Takes over a request that no node is running any more; returns its seed if it did.
pub async fn take_over(
    conn: &mut PgConnection,
    project_id: ProjectId,
    key: &str,
    (node, lock): (NodeId, Uuid),
) -> sqlx::Result<Option<Uuid>> {
    sqlx::query_scalar!(
        "
        update idempotency_keys
        set locked_at = now(), locked_by = $3, lock_id = $6
        where project_id = $1 and key = $2 and status is null
            and (
                locked_at < now() - make_interval(secs => $4::int)
                or not exists (
                    select from nodes
                    where id = locked_by and seen_at >= now() - make_interval(secs => $5)
                )
            )
        returning seed
        ",
        project_id.0,
        key,
        node.0,
        IDEMPOTENCY_LOCK_SECONDS,
        NODE_SILENCE_SECONDS,
        lock,
    )
    .fetch_optional(conn)
    .await
}

/// Stores an answer, unless another run has taken the lock.
pub async fn finish(
    conn: &mut PgConnection,
    project_id: ProjectId,
    (key, lock): (&str, Uuid),
    status: u16,
    location: Option<&str>,
    body: &StoredBody,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        update idempotency_keys set status = $3, location = $4, body = $5, has_payloads = $6
        where project_id = $1 and key = $2 and lock_id = $7
        ",
        project_id.0,
        key,
        status.cast_signed(),
        location,
        body.text,
        body.has_payloads,
        lock,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Lets the next request with this key run at once, from the same seed: the one with this lock has
/// failed, possibly after its commit. Returns false if another run holds the lock.
pub async fn unlock(
    conn: &mut PgConnection,
    project_id: ProjectId,
    key: &str,
    lock: Uuid,
) -> sqlx::Result<bool> {
    let unlocked = sqlx::query!(
        "
        update idempotency_keys set locked_at = '-infinity'
        where project_id = $1 and key = $2 and status is null and lock_id = $3
        ",
        project_id.0,
        key,
        lock,
    )
    .execute(conn)
    .await?;
    Ok(unlocked.rows_affected() > 0)
}

/// Forgets a key whose request was refused before it stored anything: another request may use it.
pub async fn forget(
    conn: &mut PgConnection,
    project_id: ProjectId,
    key: &str,
    lock: Uuid,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        delete from idempotency_keys
        where project_id = $1 and key = $2 and status is null and lock_id = $3
        ",
        project_id.0,
        key,
        lock,
    )
    .execute(conn)
    .await?;
    Ok(())
}
