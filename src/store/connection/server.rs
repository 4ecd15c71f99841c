//! Facts about a database server.

use sqlx::{Executor, PgConnection, Row};

/// Facts about a database.
#[derive(Debug, Clone)]
pub struct DatabaseFacts {
    pub version: i32,
    pub max_connections: i32,
    /// Settings that can lose acknowledged commits, and their values.
    pub unsafe_settings: Vec<String>,
    /// True if commits wait for a standby.
    pub awaits_standby: bool,
    /// Whether it is read-only.
    pub is_read_only: bool,
    /// Whether the user is a superuser, which no node needs.
    pub is_superuser: bool,
}

/// Reads facts about a database.
pub async fn inspect(conn: &mut PgConnection) -> sqlx::Result<DatabaseFacts> {
    let row = conn
        .fetch_one(sqlx::raw_sql(
            "select current_setting('server_version_num')::int,
                    current_setting('max_connections')::int,
                    array_remove(array[
                        case when current_setting('fsync') = 'off' then 'fsync=off' end,
                        case when current_setting('full_page_writes') = 'off'
                             then 'full_page_writes=off' end,
                        case when current_setting('synchronous_commit') = 'off'
                             then 'synchronous_commit=off' end
                    ], null),
                    pg_is_in_recovery() or current_setting('default_transaction_read_only') = 'on',
                    current_setting('is_superuser') = 'on',
                    current_setting('synchronous_standby_names') <> ''",
        ))
        .await?;
    Ok(DatabaseFacts {
        version: row.get(0),
        max_connections: row.get(1),
        unsafe_settings: row.get(2),
        is_read_only: row.get(3),
        is_superuser: row.get(4),
        awaits_standby: row.get(5),
    })
}

/// Whether the cluster has a database of this name.
pub async fn database_exists(conn: &mut PgConnection, name: &str) -> sqlx::Result<bool> {
    let found = sqlx::query("select 1 from pg_database where datname = $1").bind(name);
    Ok(found.fetch_optional(conn).await?.is_some())
}

/// Creates an empty database. The name is one of our own, never a caller's.
pub async fn create_database(conn: &mut PgConnection, name: &'static str) -> sqlx::Result<()> {
    let statement = sqlx::AssertSqlSafe(format!("create database \"{name}\""));
    conn.execute(sqlx::raw_sql(statement)).await?;
    Ok(())
}
