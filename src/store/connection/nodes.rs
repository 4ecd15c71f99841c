//! The running nodes, and the secrets that they share. Nothing here belongs to a project.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use fencepost_domain::{ids::NodeId, zones::Release};

/// A node counts as gone after this many seconds without a sign of life.
pub const NODE_SILENCE_SECONDS: f64 = 15.0;

/// A key that signs access tokens.
#[derive(Clone)]
pub struct SigningKey {
    /// Its id, which each token names.
    pub id: Uuid,
    pub secret: Vec<u8>,
    pub created_at: DateTime<Utc>,
    /// Its age in seconds, by the database's clock.
    pub age_seconds: f64,
}

impl std::fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SigningKey").field("id", &self.id).finish_non_exhaustive()
    }
}

/// The running nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunningNodes {
    pub count: i64,
    /// The oldest release of zone rules that one of them has as its newest.
    pub zone_rules: String,
}

/// Records that a node of a version is running, with its newest release of zone rules, deletes
/// those that are gone, and returns the running nodes.
pub async fn beat(
    conn: &mut PgConnection,
    (id, version): (NodeId, &str),
    zone_rules: &Release,
    delivers: bool,
) -> sqlx::Result<RunningNodes> {
    sqlx::query_as!(
        RunningNodes,
        r#"
        with mine as (
            insert into nodes (id, zone_rules, delivers, version)
            values ($1, $3, $5, $6)
            on conflict (id) do update set seen_at = now(), zone_rules = $3, delivers = $5
        ), gone as (
            delete from nodes
            where seen_at < now() - make_interval(secs => $2) and id <> $1
        )
        select 1 + count(*) "count!",
               least($3::text collate "C", min(coalesce(zone_rules, $4) collate "C")) "zone_rules!"
        from nodes
        where id <> $1 and seen_at >= now() - make_interval(secs => $2)
        "#,
        id.0,
        NODE_SILENCE_SECONDS,
        zone_rules.as_str(),
        Release::OF_SILENT_NODES,
        delivers,
        version,
    )
    .fetch_one(conn)
    .await
}

/// Whether a node of version 0.2.0 is running, which stores no version.
pub async fn has_earlier(conn: &mut PgConnection) -> sqlx::Result<bool> {
    sqlx::query_scalar!(
        r#"
        select exists (
            select from nodes
            where version is null and seen_at >= now() - make_interval(secs => $1)
        ) "has_earlier!"
        "#,
        NODE_SILENCE_SECONDS,
    )
    .fetch_one(conn)
    .await
}

/// Records that a node has stopped.
pub async fn leave(conn: &mut PgConnection, id: NodeId) -> sqlx::Result<()> {
    sqlx::query!("delete from nodes where id = $1", id.0).execute(conn).await?;
    Ok(())
}

/// The newest keys that sign access tokens, newest first.
pub async fn signing_keys(conn: &mut PgConnection, limit: i64) -> sqlx::Result<Vec<SigningKey>> {
    sqlx::query_as!(
        SigningKey,
        r#"
        select id, secret, created_at,
               extract(epoch from now() - created_at)::double precision "age_seconds!"
        from signing_keys
        order by created_at desc
        limit $1
        "#,
        limit,
    )
    .fetch_all(conn)
    .await
}

/// Creates a key unless one is younger than `max_age_seconds`, and deletes those that no token can
/// name any more. Nodes that do so at the same moment may create one each: all are known, and one
/// signs.
pub async fn rotate_signing_keys(
    conn: &mut PgConnection,
    id: Uuid,
    secret: &[u8],
    max_age_seconds: i64,
    keep_seconds: i64,
) -> sqlx::Result<bool> {
    let made = sqlx::query!(
        "
        with old as (
            delete from signing_keys
            where created_at < now() - make_interval(secs => $3::double precision + $4::double precision)
        )
        insert into signing_keys (id, secret)
        select $1, $2
        where not exists (
            select from signing_keys where created_at >= now() - make_interval(secs => $3)
        )
        ",
        id,
        secret,
        max_age_seconds as f64,
        keep_seconds as f64,
    )
    .execute(conn)
    .await?;
    Ok(made.rows_affected() == 1)
}

/// Replaces the stored secret of a signing key.
pub async fn replace_signing_key(
    conn: &mut PgConnection,
    id: Uuid,
    secret: &[u8],
) -> sqlx::Result<()> {
    sqlx::query!("update signing_keys set secret = $2 where id = $1", id, secret)
        .execute(conn)
        .await?;
    Ok(())
}
