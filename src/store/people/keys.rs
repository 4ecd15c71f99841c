//! API keys. A key is looked up by its hash before a project is known, because it names the
//! project. Every other statement starts with the project.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use fencepost_domain::ids::{KeyId, ProjectId, ProjectPublicId};

/// The access that a key gives.
#[derive(Debug, Clone, PartialEq)]
pub struct KeyOwner {
    pub project_id: ProjectId,
    pub project_public_id: ProjectPublicId,
    /// The project's slug.
    pub project_slug: String,
    pub plan: String,
    /// Overrides of the plan's limits.
    pub overrides: Option<serde_json::Value>,
    pub key_id: KeyId,
    /// Scopes of the key.
    pub scopes: Vec<String>,
    pub expires_at: Option<DateTime<Utc>>,
    /// Own rate limit of enqueue calls, per minute.
    pub produce_per_minute: Option<i32>,
    /// Own rate limit of worker calls, per minute.
    pub work_per_minute: Option<i32>,
    /// Own rate limit of other calls, per minute.
    pub manage_per_minute: Option<i32>,
    /// The stricter of the key's and the project's.
    pub require_fence: String,
    /// The project's.
    pub default_lease_seconds: Option<i32>,
    /// True if unknown fields in bodies are refused.
    pub strict: bool,
    /// Networks from which it may be used; none: all.
    pub allowed_ips: Vec<String>,
    /// Queues that it is bound to; none: all.
    pub queues: Vec<String>,
    /// Job types that it is bound to; none: all.
    pub job_types: Vec<String>,
    /// Whether the operator has suspended the project.
    pub is_suspended: bool,
    /// Whether the project has an owner with a verified address, or no owner at all.
    pub is_verified: bool,
}

/// A key as a list shows it.
#[derive(Debug, Clone)]
pub struct ListedKey {
    pub id: KeyId,
    pub name: String,
    pub shown_prefix: String,
    pub shown_end: String,
    /// Scopes of the key.
    pub scopes: Vec<String>,
    /// Own rate limit of enqueue calls, per minute.
    pub produce_per_minute: Option<i32>,
    /// Own rate limit of worker calls, per minute.
    pub work_per_minute: Option<i32>,
    /// Own rate limit of other calls, per minute.
    pub manage_per_minute: Option<i32>,
    /// `ambiguous` or `always`.
    pub require_fence: String,
    /// True if unknown fields in bodies are refused.
    pub strict: bool,
    /// Networks from which it may be used; none: all.
    pub allowed_ips: Vec<String>,
    /// Queues that it is bound to; none: all.
    pub queues: Vec<String>,
    /// Job types that it is bound to; none: all.
    pub job_types: Vec<String>,
    /// Whose tokens are exchanged for keys with its rights; none: it has a secret.
    pub token_issuer: Option<String>,
    pub token_subject: Option<String>,
    /// Whether a token was exchanged for it.
    pub is_exchanged: bool,
    pub created_at: DateTime<Utc>,
    /// Its creator: the id of an account or key.
    pub created_by: Option<String>,
    /// When it was last used, to within some seconds.
    pub last_used_at: Option<DateTime<Utc>>,
    /// About how many of its calls were of deprecated operations.
    pub deprecated_calls: i64,
    /// The last one of them, to within some seconds.
    pub deprecated_call_at: Option<DateTime<Utc>>,
    pub expires_at: Option<DateTime<Utc>>,
    /// When it was revoked, if it was.
    pub revoked_at: Option<DateTime<Utc>>,
    pub is_live: bool,
}

/// A key to store.
#[derive(Debug, Clone)]
pub struct NewKey {
    pub name: String,
    pub shown_prefix: String,
    pub shown_end: String,
    /// SHA-256 of the secret.
    pub secret_hash: Vec<u8>,
    /// Scopes of the key.
    pub scopes: Vec<String>,
    pub expires_at: Option<DateTime<Utc>>,
    pub created_by: Option<String>,
    /// Own rate limit of enqueue calls, per minute.
    pub produce_per_minute: Option<i32>,
    /// Own rate limit of worker calls, per minute.
    pub work_per_minute: Option<i32>,
    /// Own rate limit of other calls, per minute.
    pub manage_per_minute: Option<i32>,
    /// `ambiguous` or `always`.
    pub require_fence: String,
    /// True if unknown fields in bodies are refused.
    pub strict: bool,
    /// Networks from which it may be used; none: all.
    pub allowed_ips: Vec<String>,
    /// Queues that it is bound to; none: all.
    pub queues: Vec<String>,
    /// Job types that it is bound to; none: all.
    pub job_types: Vec<String>,
    /// As in [`ListedKey`].
    pub token_issuer: Option<String>,
    pub token_subject: Option<String>,
    pub is_exchanged: bool,
}

/// The key with this hash, live or not.
pub async fn find_id_by_secret(
    conn: &mut PgConnection,
    secret_hash: &[u8],
) -> sqlx::Result<Option<(ProjectId, KeyId)>> {
    let found = sqlx::query!(
        r#"
        select key.project_id "project_id: ProjectId", key.id "id: KeyId"
        from api_keys key
        join projects project on project.id = key.project_id
        where key.secret_hash = $1 and project.deleted_at is null
        "#,
        secret_hash,
    );
    Ok(found.fetch_optional(conn).await?.map(|it| (it.project_id, it.id)))
}

/// The owner of the live key with this hash.
pub async fn find_by_secret(
    conn: &mut PgConnection,
    secret_hash: &[u8],
) -> sqlx::Result<Option<KeyOwner>> {
    sqlx::query_as!(
        KeyOwner,
        r#"
        select key.project_id "project_id: ProjectId",
               project.public_id "project_public_id: ProjectPublicId",
               project.slug as project_slug, project.plan, project.overrides,
               key.id "key_id: KeyId", key.scopes, key.expires_at,
               key.produce_per_minute, key.work_per_minute, key.manage_per_minute,
               case when 'always' in (key.require_fence, project.require_fence)
                   then 'always' else 'ambiguous' end "require_fence!",
               project.default_lease_seconds,
               key.strict, key.allowed_ips, key.queues, key.job_types,
               project.suspended_at is not null "is_suspended!",
               not exists (
                   select from members owner
                   where owner.project_id = project.id and owner.role = 'owner'
               ) or exists (
                   select from members owner
                   join accounts on accounts.id = owner.account_id
                   where owner.project_id = project.id and owner.role = 'owner'
                       and accounts.verified_at is not null
               ) "is_verified!"
        from api_keys key
        join projects project on project.id = key.project_id
        where key.secret_hash = $1 and key.revoked_at is null and key.token_issuer is null
            and (key.expires_at is null or key.expires_at > now())
            and project.deleted_at is null
        "#,
        secret_hash,
    )
    .fetch_optional(conn)
    .await
}

/// Stores a new key, unless the project has `max_live` live keys; exchanged ones are counted apart.
/// Two requests at the same moment
/// may both succeed.
pub async fn insert(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: KeyId,
    key: &NewKey,
    max_live: i64,
) -> sqlx::Result<Option<ListedKey>> {
    sqlx::query_as!(
        ListedKey,
        r#"
        insert into api_keys (
            project_id, id, name, secret_hash, shown_prefix, shown_end, scopes, expires_at,
            created_by, produce_per_minute, work_per_minute, manage_per_minute, require_fence,
            strict, allowed_ips, token_issuer, token_subject, is_exchanged, queues, job_types
        )
        select $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $14, $15, $16, $17, $18, $19, $20,
               $21
        where (
            select count(*) from api_keys
            where project_id = $1 and revoked_at is null and is_exchanged = $19
                and (expires_at is null or expires_at > now())
        ) < $13
        returning id "id: KeyId", name, shown_prefix, shown_end, scopes, produce_per_minute,
                  work_per_minute, manage_per_minute, require_fence, strict, allowed_ips, queues,
                  job_types, token_issuer, token_subject, is_exchanged, created_at,
                  created_by, last_used_at, deprecated_calls, deprecated_call_at, expires_at, revoked_at,
                  (expires_at is null or expires_at > now()) "is_live!"
        "#,
        project_id.0,
        id.0,
        key.name,
        key.secret_hash,
        key.shown_prefix,
        key.shown_end,
        &key.scopes,
        key.expires_at,
        key.created_by,
        key.produce_per_minute,
        key.work_per_minute,
        key.manage_per_minute,
        max_live,
        key.require_fence,
        key.strict,
        &key.allowed_ips,
        key.token_issuer,
        key.token_subject,
        key.is_exchanged,
        &key.queues,
        &key.job_types,
    )
    .fetch_optional(conn)
    .await
}

/// A project's keys, newest first, below the last one of the page before: those that tokens were
/// exchanged for, or all others.
pub async fn list(
    conn: &mut PgConnection,
    project_id: ProjectId,
    are_exchanged: bool,
    before: Option<KeyId>,
    limit: i64,
) -> sqlx::Result<Vec<ListedKey>> {
    sqlx::query_as!(
        ListedKey,
        r#"
        select id "id: KeyId", name, shown_prefix, shown_end, scopes, produce_per_minute,
               work_per_minute, manage_per_minute, require_fence, strict, allowed_ips, queues, job_types,
               token_issuer, token_subject, is_exchanged, created_at,
               created_by, last_used_at, deprecated_calls, deprecated_call_at, expires_at, revoked_at,
               (revoked_at is null and (expires_at is null or expires_at > now())) "is_live!"
        from api_keys
        where project_id = $1 and ($2::uuid is null or id < $2) and is_exchanged = $4
        order by id desc
        limit $3
        "#,
        project_id.0,
        before.map(|it| it.0),
        limit,
        are_exchanged,
    )
    .fetch_all(conn)
    .await
}

/// The keys that these accounts or keys have created.
pub async fn created_by(
    conn: &mut PgConnection,
    project_id: ProjectId,
    creators: &[String],
) -> sqlx::Result<Vec<ListedKey>> {
    sqlx::query_as!(
        ListedKey,
        r#"
        select id "id: KeyId", name, shown_prefix, shown_end, scopes, produce_per_minute,
               work_per_minute, manage_per_minute, require_fence, strict, allowed_ips, queues, job_types,
               token_issuer, token_subject, is_exchanged, created_at,
               created_by, last_used_at, deprecated_calls, deprecated_call_at, expires_at, revoked_at,
               (revoked_at is null and (expires_at is null or expires_at > now())) "is_live!"
        from api_keys
        where project_id = $1 and created_by = any($2)
            -- Keys that one of these has created end with it, at the latest.
            and not (is_exchanged and expires_at <= now())
        "#,
        project_id.0,
        creators,
    )
    .fetch_all(conn)
    .await
}

/// One of a project's keys, locked until the transaction ends.
pub async fn lock(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: KeyId,
) -> sqlx::Result<Option<ListedKey>> {
    sqlx::query_as!(
        ListedKey,
        r#"
        select id "id: KeyId", name, shown_prefix, shown_end, scopes, produce_per_minute,
               work_per_minute, manage_per_minute, require_fence, strict, allowed_ips, queues, job_types,
               token_issuer, token_subject, is_exchanged, created_at,
               created_by, last_used_at, deprecated_calls, deprecated_call_at, expires_at, revoked_at,
               (revoked_at is null and (expires_at is null or expires_at > now())) "is_live!"
        from api_keys
        where project_id = $1 and id = $2
        for no key update
        "#,
        project_id.0,
        id.0,
    )
    .fetch_optional(conn)
    .await
}

/// How far a time lies ahead of the database's clock, in seconds; negative if it is past.
pub async fn seconds_until(conn: &mut PgConnection, at: DateTime<Utc>) -> sqlx::Result<f64> {
    sqlx::query_scalar!(
        r#"select extract(epoch from $1::timestamptz - now())::double precision "seconds!""#,
        at,
    )
    .fetch_one(conn)
    .await
}

/// Renames a key.
pub async fn rename(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: KeyId,
    name: &str,
) -> sqlx::Result<()> {
    sqlx::query!(
        "update api_keys set name = $3 where project_id = $1 and id = $2",
        project_id.0,
        id.0,
        name,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Lets a key expire after this many seconds, unless it expires earlier. Returns its hash.
pub async fn end_after(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: KeyId,
    seconds: i64,
) -> sqlx::Result<Option<Vec<u8>>> {
    sqlx::query_scalar!(
        "
        update api_keys
        set expires_at = least(expires_at, now() + make_interval(secs => $3))
        where project_id = $1 and id = $2
        returning secret_hash
        ",
        project_id.0,
        id.0,
        seconds as f64,
    )
    .fetch_optional(conn)
    .await
}

/// Revokes a key. Returns its hash; revoking twice is no error.
pub async fn revoke(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: KeyId,
) -> sqlx::Result<Option<Vec<u8>>> {
    sqlx::query_scalar!(
        "
        update api_keys
        set revoked_at = coalesce(revoked_at, now()), queues = '{}', job_types = '{}',
            allowed_ips = '{}'
        where project_id = $1 and id = $2
        returning secret_hash
        ",
        project_id.0,
        id.0,
    )
    .fetch_optional(conn)
    .await
}

/// The end of a key that lives this many seconds, and no longer than these.
pub async fn end_within(
    conn: &mut PgConnection,
    seconds: i64,
    ends: &[DateTime<Utc>],
) -> sqlx::Result<DateTime<Utc>> {
    sqlx::query_scalar!(
        r#"
        select least(now() + make_interval(secs => $1), min(ends)) "end!"
        from unnest($2::timestamptz[]) ends
        "#,
        seconds as f64,
        ends,
    )
    .fetch_one(conn)
    .await
}

/// Number of live keys of a project, without exchanged ones.
pub async fn count(conn: &mut PgConnection, project_id: ProjectId) -> sqlx::Result<i64> {
    sqlx::query_scalar!(
        r#"
        select count(*) "count!"
        from api_keys
        where project_id = $1 and revoked_at is null and not is_exchanged
            and (expires_at is null or expires_at > now())
        "#,
        project_id.0,
    )
    .fetch_one(conn)
    .await
}

/// Records that these keys were just used, and how many of their calls were of deprecated
/// operations. Returns the keys that another transaction has locked, and that are unchanged.
pub async fn record_used(
    conn: &mut PgConnection,
    used: &[((ProjectId, KeyId), i64)],
) -> sqlx::Result<Vec<(ProjectId, KeyId)>> {
    let projects: Vec<i32> = used.iter().map(|it| it.0.0.0).collect();
    let ids: Vec<Uuid> = used.iter().map(|it| it.0.1.0).collect();
    let deprecated: Vec<i64> = used.iter().map(|it| it.1).collect();
    let locked = sqlx::query!(
        r#"
        with noted as materialized (
            select key.project_id, key.id, noted.deprecated_calls
            from unnest($1::int[], $2::uuid[], $3::bigint[])
                noted (project_id, id, deprecated_calls)
            join api_keys key on key.project_id = noted.project_id and key.id = noted.id
        ),
        used as materialized (
            select key.project_id, key.id, noted.deprecated_calls
            from noted
            join api_keys key on key.project_id = noted.project_id and key.id = noted.id
            order by key.project_id, key.id
            for no key update of key skip locked
        ),
        written as (
            update api_keys
            set last_used_at = now(),
                deprecated_calls = api_keys.deprecated_calls + used.deprecated_calls,
                deprecated_call_at =
                    case when used.deprecated_calls > 0 then now()
                         else api_keys.deprecated_call_at end
            from used
            where api_keys.project_id = used.project_id and api_keys.id = used.id
        )
        select project_id "project_id!", id "id!" from noted
        except
        select project_id, id from used
        "#,
        &projects,
        &ids,
        &deprecated,
    )
    .fetch_all(conn)
    .await?;
    Ok(locked.into_iter().map(|it| (ProjectId(it.project_id), KeyId(it.id))).collect())
}
