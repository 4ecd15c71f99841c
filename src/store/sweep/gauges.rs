//! The state of the instance: waiting work, and the database. For operators.

use sqlx::{PgConnection, Row};

use fencepost_domain::ids::{JobId, ProjectId};

/// Queues that one query visits at most; of one project [`MAX_PLACES_OF_PROJECT`]. The statement
/// carries the same numbers as literals.
pub const MAX_PLACES: i64 = 5_000;
/// See [`MAX_PLACES`]: no project hides the others. Queues with the most jobs come first.
pub const MAX_PLACES_OF_PROJECT: i64 = 100;

/// A queue with ready jobs.
#[derive(Debug, Clone, PartialEq)]
pub struct ReadyQueue {
    pub project_id: ProjectId,
    /// The slug of its project.
    pub project: String,
    pub queue: String,
    /// Its oldest ready job.
    pub job_id: JobId,
    /// Age of the oldest ready job, in seconds.
    pub age_seconds: f64,
    pub is_polled: bool,
    pub is_paused: bool,
}

/// Queues with ready jobs, the longest waiting first: searched in queues with jobs, for twenty
/// priorities and twenty constraint keys each.
pub async fn places(conn: &mut PgConnection, alive_seconds: i32) -> sqlx::Result<Vec<ReadyQueue>> {
    sqlx::query_as!(
        ReadyQueue,
        r#"
        with busy as materialized (
            select project_id, queue
            from (
                select project_id, queue,
                       row_number() over (partition by project_id order by active desc) as place
                from queue_counts
                join projects on projects.id = queue_counts.project_id and projects.kind = 'user'
                where active > 0
            ) counted
            where place <= 100
            order by place
            limit 5000
        ), place as materialized (
            select busy.project_id, busy.queue, oldest.id, oldest.ready_at
            from busy
            cross join lateral longest_ready(busy.project_id, busy.queue, 20, true) oldest
        ), polled as materialized (
            select distinct worker.project_id, named.queue
            from (
                select project_id, queues
                from workers
                where state = 'running' and lost_at is null
                    and coalesce(directive, 'running') = 'running'
                    and last_seen_at > now() - make_interval(secs => greatest($1::int, 3 * beat_seconds))
                limit 20000
            ) worker
            cross join lateral unnest(worker.queues) as named(queue)
            union
            select project_id, queue from queue_pushes where paused_at is null
        )
        select place.project_id "project_id!: ProjectId", projects.slug as project, place.queue "queue!",
               place.id "job_id!: JobId",
               greatest(extract(epoch from now() - place.ready_at), 0)::float8 "age_seconds!",
               polled.queue is not null "is_polled!", setting.paused_at is not null "is_paused!"
        from place
        join projects on projects.id = place.project_id
        left join polled on polled.project_id = place.project_id and polled.queue = place.queue
        left join queues setting
            on setting.project_id = place.project_id and setting.name = place.queue
        order by place.ready_at
        "#,
        alive_seconds,
    )
    .fetch_all(conn)
    .await
}

/// Jobs of all projects by state, from the counters of queues: at most a second old.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ByState {
    pub scheduled: i64,
    pub active: i64,
    pub backoff: i64,
    pub dead_letter: i64,
}

/// Number of jobs of all projects, by state.
pub async fn by_state(conn: &mut PgConnection) -> sqlx::Result<ByState> {
    sqlx::query_as!(
        ByState,
        r#"
        select coalesce(sum(scheduled), 0)::bigint "scheduled!",
               coalesce(sum(active - backoff), 0)::bigint "active!",
               coalesce(sum(backoff), 0)::bigint "backoff!",
               coalesce(sum(dead_letter), 0)::bigint "dead_letter!"
        from queue_counts
        where project_id not in (select id from projects where kind <> 'user')
        "#,
    )
    .fetch_one(conn)
    .await
}

/// A table, and its dead rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Table {
    pub name: String,
    /// Size of its rows and their large values, in bytes.
    pub table_bytes: i64,
    pub index_bytes: i64,
    /// Estimated number of dead rows that are not vacuumed yet.
    pub dead_rows: i64,
}

/// The tables of this schema.
pub async fn tables(conn: &mut PgConnection) -> sqlx::Result<Vec<Table>> {
    let rows = sqlx::raw_sql(
        "select relname::text, coalesce(pg_table_size(relid), 0), coalesce(pg_indexes_size(relid), 0),
                n_dead_tup
         from pg_stat_user_tables
         where schemaname = current_schema()
         limit 200",
    )
    .fetch_all(conn)
    .await?;
    let tables = rows.iter().map(|it| Table {
        name: it.get(0),
        table_bytes: it.get(1),
        index_bytes: it.get(2),
        dead_rows: it.get(3),
    });
    Ok(tables.collect())
}

/// Statistics of the database.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Server {
    /// Age of the oldest snapshot or transaction that blocks vacuum, in seconds. Those of other
    /// roles are visible to `pg_read_all_stats` only.
    pub oldest_snapshot_seconds: f64,
    /// The same in transactions, including replication slots and prepared transactions, which have
    /// no age.
    pub oldest_snapshot_transactions: i64,
    pub connections: i64,
    pub max_connections: i64,
    /// WAL written since initialisation; 0 if the server does not report it.
    pub wal_bytes: i64,
    /// WAL that the slowest replication slot retains, in bytes.
    pub held_wal_bytes: i64,
    /// Standbys that follow it. The tools that copy it do so, too, and do not count.
    pub standbys: i64,
    /// Time since the archive took its last WAL, while it refuses the next; 0: it does not, or
    /// there is none.
    pub archive_failing_seconds: f64,
    pub commits: i64,
    pub deadlocks: i64,
}

/// Reads statistics of the database.
pub async fn server(conn: &mut PgConnection) -> sqlx::Result<Server> {
    let row = sqlx::raw_sql(
        "with wal as (
             select case when not pg_is_in_recovery() then pg_current_wal_lsn() end as at
         ), holding as (
             select backend_xmin as xmin from pg_stat_activity where pid <> pg_backend_pid()
             union all
             select xmin from pg_replication_slots
             union all
             select catalog_xmin from pg_replication_slots
             union all
             select transaction from pg_prepared_xacts
         )
         select coalesce((
                    select max(extract(epoch from now() - xact_start)) from pg_stat_activity
                    where pid <> pg_backend_pid() and backend_xmin is not null
                        and backend_type <> 'walsender' and datname = current_database()
                        and pid not in (select pid from pg_stat_progress_vacuum)
                ), 0)::float8,
                coalesce((select max(age(xmin)) from holding where xmin is not null), 0)::bigint,
                (select sum(numbackends) from pg_stat_database)::bigint,
                current_setting('max_connections')::bigint,
                coalesce(pg_wal_lsn_diff((select at from wal), '0/0'), 0)::bigint,
                coalesce((
                    select max(pg_wal_lsn_diff((select at from wal), restart_lsn))
                    from pg_replication_slots
                ), 0)::bigint,
                (
                    select count(*) from pg_stat_replication
                    where state = 'streaming'
                        and application_name not in ('pg_basebackup', 'pg_receivewal')
                ),
                coalesce((
                    select extract(epoch from now() - coalesce(last_archived_time, stats_reset))
                    from pg_stat_archiver
                    where last_failed_time > coalesce(last_archived_time, '-infinity')
                        and current_setting('archive_mode') <> 'off'
                ), 0)::float8,
                xact_commit, deadlocks
         from pg_stat_database
         where datname = current_database()",
    )
    .fetch_one(conn)
    .await?;
    Ok(Server {
        oldest_snapshot_seconds: row.get(0),
        oldest_snapshot_transactions: row.get(1),
        connections: row.get(2),
        max_connections: row.get(3),
        wal_bytes: row.get(4),
        held_wal_bytes: row.get(5),
        standbys: row.get(6),
        archive_failing_seconds: row.get(7),
        commits: row.get(8),
        deadlocks: row.get(9),
    })
}
