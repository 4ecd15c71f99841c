//! Migrations: the schema of a database, and bringing it to this binary's version.

use std::time::Duration;

use anyhow::ensure;
use fencepost_domain::webhook::event_types;
use sqlx::{ConnectOptions, Executor, PgConnection, Row, postgres::PgConnectOptions};

use crate::outbound::webhooks;

/// Lock timeout of a migration, in milliseconds; then it is tried again.
const MIGRATION_LOCK_TIMEOUT_MS: u32 = 2_000;
/// The advisory lock of migrations; an arbitrary number.
const TRY_MIGRATION_LOCK: &str = "select pg_try_advisory_lock(731946205)";
/// Tries, and the pause between them.
const MAX_TRIES: u32 = 10;
const PAUSE: Duration = Duration::from_secs(3);

static MIGRATIONS: sqlx::migrate::Migrator = sqlx::migrate!("../../migrations");

/// The answer of `migrate` about a database whose migrations are not ours.
const OTHER_HISTORY: &str = "this database was made by a version before the first release, and \
    cannot be migrated: create an empty database, migrate that, and enqueue what still waits again";

/// The schema of a database, for this binary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Schema {
    /// This version, or a newer one.
    Current,
    /// A migration is missing.
    Older,
    /// The database was never migrated.
    Missing,
    /// It was made by other migrations: released ones never change.
    OtherHistory,
}

/// The schema of a database.
///
/// # Errors
/// When the database cannot be read.
pub async fn schema(conn: &mut PgConnection) -> sqlx::Result<Schema> {
    let is_new = "select to_regclass('_sqlx_migrations') is null";
    if conn.fetch_one(sqlx::raw_sql(is_new)).await?.get(0) {
        return Ok(Schema::Missing);
    }
    let applied = "select version, checksum from _sqlx_migrations where success order by version";
    let applied = conn.fetch_all(sqlx::raw_sql(applied)).await?;
    let applied: Vec<(i64, Vec<u8>)> = applied.iter().map(|it| (it.get(0), it.get(1))).collect();
    let known = |version: i64| MIGRATIONS.iter().find(|it| it.version == version);
    let is_ours = |(version, checksum): &(i64, Vec<u8>)| {
        known(*version).is_none_or(|it| *it.checksum == **checksum)
    };
    let newest = MIGRATIONS.iter().map(|it| it.version).max().unwrap_or_default();
    Ok(match applied.last() {
        None => Schema::Missing,
        Some(_) if !applied.iter().all(is_ours) => Schema::OtherHistory,
        Some((version, _)) if *version < newest => Schema::Older,
        Some(_) => Schema::Current,
    })
}

/// Migrates the schema to this binary's version, one migration after the other. Endpoints that
/// asked for a group of events get the types that this version adds to it.
///
/// # Errors
/// When the database cannot be reached, a lock times out, or the schema is newer than this binary
/// or has another history.
pub async fn migrate(database_url: &str) -> anyhow::Result<()> {
    change(&mut connect(database_url).await?, migrate_once).await
}

/// Changes the schema: tries again while another session holds a lock for too long.
pub(super) async fn change(
    conn: &mut PgConnection,
    try_once: impl AsyncFn(&mut PgConnection) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut tries = 1;
    loop {
        match try_once(conn).await {
            Ok(()) => return Ok(()),
            // Another session held a lock, or an index build met old transactions.
            Err(error) if tries < MAX_TRIES && is_lock_failure(&error) => {
                tries += 1;
                tokio::time::sleep(PAUSE).await;
            }
            Err(error) => return Err(error),
        }
    }
}

/// A connection that changes the schema, while no other one does.
pub(super) async fn connect(database_url: &str) -> sqlx::Result<PgConnection> {
    let options: PgConnectOptions = database_url.parse()?;
    let options = options.options([("lock_timeout", MIGRATION_LOCK_TIMEOUT_MS.to_string())]);
    let mut conn = options.connect().await?;
    // One at a time. The lock is polled: waiting for it would block indexes that are built
    // concurrently. It ends with the connection.
    while !conn.fetch_one(sqlx::raw_sql(TRY_MIGRATION_LOCK)).await?.get::<bool, _>(0) {
        tokio::time::sleep(PAUSE).await;
    }
    Ok(conn)
}

async fn migrate_once(conn: &mut PgConnection) -> anyhow::Result<()> {
    ensure!(schema(conn).await? != Schema::OtherHistory, OTHER_HISTORY);
    drop_broken_indexes(conn).await?;
    MIGRATIONS.run(&mut *conn).await?;
    webhooks::widen_groups(conn, &event_types().collect::<Vec<_>>()).await?;
    Ok(())
}

fn is_lock_failure(error: &anyhow::Error) -> bool {
    const LOCK_NOT_AVAILABLE: &str = "55P03";
    const DEADLOCK: &str = "40P01";
    error.chain().any(|error| {
        let Some(sqlx::Error::Database(it)) = error.downcast_ref::<sqlx::Error>() else {
            return false;
        };
        it.code().is_some_and(|it| [LOCK_NOT_AVAILABLE, DEADLOCK].contains(&&*it))
    })
}

/// Indexes that migrations build concurrently.
fn built_concurrently() -> Vec<&'static str> {
    let built =
        MIGRATIONS.iter().flat_map(|it| it.sql.as_str().split("index concurrently ").skip(1));
    built.filter_map(|it| it.split_whitespace().next()).collect()
}

/// An index whose concurrent build was interrupted stays behind as invalid: it is rebuilt. Others
/// are left alone, since someone may be building them.
async fn drop_broken_indexes(conn: &mut PgConnection) -> sqlx::Result<()> {
    let broken = sqlx::query(
        "select format('drop index concurrently if exists %s', indexrelid::regclass)
         from pg_index
         join pg_class on pg_class.oid = indexrelid
         where not indisvalid and relnamespace = current_schema()::regnamespace
             and relname = any($1)",
    )
    .bind(built_concurrently())
    .fetch_all(&mut *conn)
    .await?;
    for row in broken {
        let statement = sqlx::AssertSqlSafe(row.get::<String, _>(0));
        conn.execute(sqlx::raw_sql(statement)).await?;
    }
    Ok(())
}
