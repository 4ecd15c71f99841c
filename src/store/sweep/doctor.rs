//! What keeps a database from its work, for `fencepost doctor`. Most of it is in the views of the
//! system, in which a login without `pg_read_all_stats` sees its own sessions only. Each question
//! lists at most ten rows, the worst first, and nodes up to a hundred.

use sqlx::{PgConnection, Row, postgres::PgRow};

/// A session of a database.
#[derive(Debug, Clone, PartialEq)]
pub struct Session {
    pub pid: i32,
    pub user: String,
    pub application: String,
    /// As PostgreSQL calls it; or [`AWAITS_STANDBY`].
    pub state: String,
    /// Age of its transaction.
    pub seconds: f64,
}

/// The state of a session whose commit waits for a standby: to end it would show a commit that no
/// standby has.
pub const AWAITS_STANDBY: &str = "SyncRep";

impl Session {
    fn of(row: &PgRow) -> Self {
        Self {
            pid: row.get(0),
            user: row.get(1),
            application: row.get(2),
            state: row.get(3),
            seconds: row.get(4),
        }
    }
}

/// Sessions of other roles that this login does not see.
pub async fn hidden_sessions(conn: &mut PgConnection) -> sqlx::Result<i64> {
    let found = sqlx::raw_sql(
        "select count(*) from pg_stat_activity
         where datname = current_database() and query = '<insufficient privilege>'",
    );
    Ok(found.fetch_one(conn).await?.get(0))
}

/// Sessions that have kept dead rows from being removed for longer than this, the oldest first.
pub async fn old_snapshots(conn: &mut PgConnection, seconds: i32) -> sqlx::Result<Vec<Session>> {
    let rows = sqlx::query(
        "select pid, coalesce(usename::text, ''), coalesce(application_name, ''),
                coalesce(state, ''), extract(epoch from now() - xact_start)::float8
         from pg_stat_activity
         where datname = current_database() and pid <> pg_backend_pid()
             and (backend_xmin is not null or backend_xid is not null)
             and backend_type <> 'walsender'
             and pid not in (select pid from pg_stat_progress_vacuum)
             and xact_start < now() - make_interval(secs => $1)
         order by xact_start
         limit 10",
    )
    .bind(f64::from(seconds))
    .fetch_all(conn)
    .await?;
    Ok(rows.iter().map(Session::of).collect())
}

/// A session that others wait for, and that waits for no lock itself.
#[derive(Debug, Clone, PartialEq)]
pub struct Blocker {
    /// Its `pid` is 0 if it is a prepared transaction.
    pub session: Session,
    pub waiting: i64,
    /// The longest wait.
    pub waited_seconds: f64,
}

/// Sessions for whose locks others have waited for longer than this, those with the most first.
pub async fn blockers(conn: &mut PgConnection, seconds: i32) -> sqlx::Result<Vec<Blocker>> {
    let rows = sqlx::query(
        "select coalesce(blocker.pid, 0), coalesce(blocker.usename::text, ''),
                coalesce(blocker.application_name, ''),
                case when blocker.wait_event = 'SyncRep' then blocker.wait_event
                     else coalesce(blocker.state, '') end,
                coalesce(extract(epoch from now() - blocker.xact_start), 0)::float8,
                count(*), max(extract(epoch from now() - waiting.query_start))::float8
         from pg_stat_activity waiting
         cross join lateral unnest(pg_blocking_pids(waiting.pid)) as blocking(pid)
         left join pg_stat_activity blocker on blocker.pid = blocking.pid
         where waiting.datname = current_database() and waiting.wait_event_type = 'Lock'
             and waiting.query_start < now() - make_interval(secs => $1)
             and blocker.wait_event_type is distinct from 'Lock'
         group by 1, 2, 3, 4, 5
         order by count(*) desc
         limit 10",
    )
    .bind(f64::from(seconds))
    .fetch_all(conn)
    .await?;
    let blockers = rows.iter().map(|it| Blocker {
        session: Session::of(it),
        waiting: it.get(5),
        waited_seconds: it.get(6),
    });
    Ok(blockers.collect())
}

/// A replication slot, or a standby that keeps rows without one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slot {
    pub name: String,
    pub is_slot: bool,
    pub is_active: bool,
    /// WAL that it retains, in bytes.
    pub held_bytes: i64,
    /// Transactions since the oldest that it keeps rows for; 0 if it keeps none.
    pub held_transactions: i64,
}

/// Replication slots, and standbys that keep rows without one; those that retain most first.
pub async fn slots(conn: &mut PgConnection) -> sqlx::Result<Vec<Slot>> {
    let rows = sqlx::raw_sql(
        "select slot_name::text, true, active,
                coalesce(pg_wal_lsn_diff(
                    case when not pg_is_in_recovery() then pg_current_wal_lsn() end, restart_lsn
                ), 0)::bigint as bytes,
                coalesce(greatest(age(xmin), age(catalog_xmin)), 0)::bigint as transactions
         from pg_replication_slots
         union all
         select coalesce(application_name, ''), false, true, 0, age(backend_xmin)::bigint
         from pg_stat_replication
         where backend_xmin is not null
         order by bytes desc, transactions desc
         limit 10",
    )
    .fetch_all(conn)
    .await?;
    let slots = rows.iter().map(|it| Slot {
        name: it.get(0),
        is_slot: it.get(1),
        is_active: it.get(2),
        held_bytes: it.get(3),
        held_transactions: it.get(4),
    });
    Ok(slots.collect())
}

/// Prepared transactions that are older than this: their names as literals, and their ages in
/// seconds.
pub async fn prepared(conn: &mut PgConnection, seconds: i32) -> sqlx::Result<Vec<(String, f64)>> {
    let rows = sqlx::query(
        "select quote_literal(gid), extract(epoch from now() - prepared)::float8
         from pg_prepared_xacts
         where database = current_database() and prepared < now() - make_interval(secs => $1)
         order by prepared
         limit 10",
    )
    .bind(f64::from(seconds))
    .fetch_all(conn)
    .await?;
    Ok(rows.iter().map(|it| (it.get(0), it.get(1))).collect())
}

/// The state of vacuuming.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vacuum {
    pub is_automatic: bool,
    /// Tables with more dead rows than asked for, and how many.
    pub dead: Vec<(String, i64)>,
}

/// The tables that claims and polls read around dead rows, if they have more than this.
pub async fn vacuum(conn: &mut PgConnection, dead_rows: i64) -> sqlx::Result<Vacuum> {
    let is_automatic = sqlx::raw_sql("select current_setting('autovacuum')::bool")
        .fetch_one(&mut *conn)
        .await?
        .get(0);
    let rows = sqlx::query(
        "select relname::text, n_dead_tup
         from pg_stat_user_tables
         where schemaname = current_schema() and n_dead_tup > $1
             and relname in ('jobs', 'queue_deltas', 'workers')
         order by n_dead_tup desc
         limit 10",
    )
    .bind(dead_rows)
    .fetch_all(conn)
    .await?;
    let dead = rows.iter().map(|it| (it.get(0), it.get(1))).collect();
    Ok(Vacuum { is_automatic, dead })
}

/// Indexes that no statement uses, since their build has not ended.
pub async fn invalid_indexes(conn: &mut PgConnection) -> sqlx::Result<Vec<String>> {
    let rows = sqlx::raw_sql(
        "select indexrelid::regclass::text
         from pg_index
         join pg_class on pg_class.oid = indexrelid
         where not indisvalid and relnamespace = current_schema()::regnamespace
             and indexrelid not in (
                 select index_relid from pg_stat_progress_create_index where index_relid is not null
             )
         order by 1
         limit 10",
    )
    .fetch_all(conn)
    .await?;
    Ok(rows.iter().map(|it| it.get(0)).collect())
}

/// The work of a loop that is due for longest, and for how long, in seconds. Loops without due work
/// are left out.
pub async fn late_loops(conn: &mut PgConnection) -> sqlx::Result<Vec<(String, f64)>> {
    let rows = sqlx::raw_sql(
        "select loop, extract(epoch from now() - due)::float8
         from (
             select 'reap', (
                 select lease_expires_at from jobs where state = 'processing'
                 order by lease_expires_at limit 1
             )
             union all
             select 'promote', (
                 -- A resumed job of a group is due since then.
                 select greatest(run_at, ready_at) from jobs
                 where state in ('scheduled', 'backoff') and unfinished_parents = 0
                 order by run_at limit 1
             )
             union all
             select 'expire', (select expires_at from job_expiries order by expires_at limit 1)
             union all
             select 'fire', (
                 select next_tick from recurring_schedules where next_tick is not null
                 order by next_tick limit 1
             )
             union all
             select 'operations', (
                 select next_step_at from operations where next_step_at is not null
                 order by next_step_at limit 1
             )
             union all
             -- Those of suspended projects wait.
             select 'events', (
                 select at
                 from outbound_events
                 join projects on projects.id = project_id
                 where suspended_at is null and deleted_at is null
                 order by at limit 1
             )
             union all
             select 'mails', (
                 select next_try_at from mails where sent_at is null and expires_at > now()
                 order by next_try_at limit 1
             )
             union all
             select 'retention', (select due_at from retention_dues order by due_at limit 1)
         ) as due_work(loop, due)
         where due < now()",
    )
    .fetch_all(conn)
    .await?;
    Ok(rows.iter().map(|it| (it.get(0), it.get(1))).collect())
}

/// A node that was seen lately.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeenNode {
    pub id: String,
    /// None: a node of release 0.2.0.
    pub version: Option<String>,
    pub zone_rules: Option<String>,
}

/// Nodes that were seen within this time, the oldest first.
pub async fn nodes(conn: &mut PgConnection, seconds: i32) -> sqlx::Result<Vec<SeenNode>> {
    let rows = sqlx::query(
        "select id::text, version, zone_rules
         from nodes
         where seen_at > now() - make_interval(secs => $1)
         order by started_at
         limit 100",
    )
    .bind(f64::from(seconds))
    .fetch_all(conn)
    .await?;
    let nodes =
        rows.iter().map(|it| SeenNode { id: it.get(0), version: it.get(1), zone_rules: it.get(2) });
    Ok(nodes.collect())
}

/// Items that loops have set aside because they failed, by kind of work.
pub async fn set_aside(conn: &mut PgConnection) -> sqlx::Result<Vec<(String, i64)>> {
    let rows =
        sqlx::raw_sql("select work, count(*) from set_aside group by 1 order by 2 desc limit 10")
            .fetch_all(conn)
            .await?;
    Ok(rows.iter().map(|it| (it.get(0), it.get(1))).collect())
}

/// Standbys that confirm a commit before it is answered, and the setting that asks for them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standbys {
    /// True if a commit waits for one.
    pub is_awaited: bool,
    /// None: this login does not see which they are.
    pub synchronous: Option<i64>,
    pub all: i64,
}

/// The standbys of this server.
pub async fn standbys(conn: &mut PgConnection) -> sqlx::Result<Standbys> {
    let row = sqlx::raw_sql(
        "select current_setting('synchronous_standby_names') <> ''
                    and current_setting('synchronous_commit') in ('on', 'remote_apply'),
                case when pg_has_role(current_user, 'pg_read_all_stats', 'usage')
                     then count(*) filter (where sync_state in ('sync', 'quorum')) end,
                count(*)
         from pg_stat_replication",
    )
    .fetch_one(conn)
    .await?;
    Ok(Standbys { is_awaited: row.get(0), synchronous: row.get(1), all: row.get(2) })
}

/// The clock of the server: seconds since 1970.
pub async fn clock(conn: &mut PgConnection) -> sqlx::Result<f64> {
    let now = sqlx::raw_sql("select extract(epoch from clock_timestamp())::float8");
    Ok(now.fetch_one(conn).await?.get(0))
}

/// What PostgreSQL archives.
#[derive(Debug)]
pub struct Archiver {
    /// Empty: none since its start.
    pub last_wal: String,
    /// The file that could not be archived, and was not since.
    pub failed_wal: Option<String>,
}

/// The state of PostgreSQL's archive; none, if it has none.
pub async fn archiver(conn: &mut PgConnection) -> sqlx::Result<Option<Archiver>> {
    sqlx::query_as!(
        Archiver,
        r#"
        select coalesce(last_archived_wal, '') "last_wal!",
               case
                   when last_failed_time > coalesce(last_archived_time, '-infinity')
                   then last_failed_wal
               end as failed_wal
        from pg_stat_archiver
        where current_setting('archive_mode') <> 'off'
        "#,
    )
    .fetch_optional(conn)
    .await
}
