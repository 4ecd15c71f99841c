//! Statements that find rows without being given a project: the work of the background loops. Each
//! is one bounded batch that any number of nodes may run at once; the rows that it returns carry
//! the project.

pub mod alarmed_projects;
pub mod alarms;
pub mod completions;
pub mod counts;
pub mod doctor;
pub mod gauges;
pub mod groups;
pub mod known;
pub mod operations;
pub mod probe;
pub mod prune;
pub mod purge;
pub mod pushes;
pub mod schedules;
pub mod set_aside;
pub mod usage;
pub mod webhooks;
pub mod workers;

use fencepost_domain::{
    ids::{JobId, JobKey, LeaseId, ProjectId},
    job::StoredState,
    lease::TIMEOUT_GRACE_SECONDS,
    limits::IDEMPOTENCY_KEEP_SECONDS,
};
use sqlx::{Executor, PgConnection};
use uuid::Uuid;

use crate::settle::{settle_failure::Held, settle_success::WaitingJob};

/// Jobs that one pass of a loop touches at most. The statements carry the same number as a literal.
pub const MAX_SWEEP_ROWS: usize = 500;

/// Due jobs of one project that one pass promotes at most while there is a backlog: another project
/// waits no longer than such a pass takes. The statement carries the same number as a literal.
pub const MAX_TURN_ROWS: usize = 50;

/// After a gap of this many seconds between two passes of the reaper, expired leases are extended
/// once.
pub const REAPER_GAP_SECONDS: i32 = 5;

/// Bounds the time of each further statement of this transaction.
pub async fn limit_statements(conn: &mut PgConnection, milliseconds: u32) -> sqlx::Result<()> {
    let statement = sqlx::AssertSqlSafe(format!("set local statement_timeout = {milliseconds}"));
    conn.execute(sqlx::raw_sql(statement)).await?;
    Ok(())
}

/// Milliseconds until the next scheduled or retried job is due; negative if one is overdue, none if
/// there is none.
pub async fn next_due_ms(conn: &mut PgConnection) -> sqlx::Result<Option<f64>> {
    sqlx::query_scalar!(
        r#"
        select (extract(epoch from run_at - now()) * 1000)::float8 "wait_ms!"
        from jobs
        where state in ('scheduled', 'backoff') and unfinished_parents = 0
            and not exists (
                select from set_aside
                where project_id = jobs.project_id and work = 'promote' and item = jobs.id::text
                    and next_try_at > now()
            )
        order by run_at
        limit 1
        "#,
    )
    .fetch_optional(conn)
    .await
}

/// Jobs that one pass makes claimable. A job of another project that becomes due meanwhile waits
/// for its end, so it is short. The statements carry the same number as a literal.
pub const MAX_DUE_ROWS: usize = 200;

/// Due jobs, the longest due first: at most [`MAX_DUE_ROWS`].
pub async fn find_due(conn: &mut PgConnection) -> sqlx::Result<Vec<JobKey>> {
    sqlx::query_as!(
        JobKey,
        r#"
        select project_id "project_id: ProjectId", id "id: JobId"
        from jobs
        where state in ('scheduled', 'backoff') and unfinished_parents = 0 and run_at <= now()
            and not exists (
                select from set_aside
                where project_id = jobs.project_id and work = 'promote' and item = jobs.id::text
                    and next_try_at > now()
            )
        order by run_at
        limit 200
        "#,
    )
    .fetch_all(conn)
    .await
}

/// Due jobs, with projects taking turns: at most [`MAX_DUE_ROWS`], of at most 10,000 projects and
/// [`MAX_TURN_ROWS`] of each. For a backlog: reads an entry for each project that has jobs with a
/// time.
pub async fn find_due_by_turns(conn: &mut PgConnection) -> sqlx::Result<Vec<JobKey>> {
    sqlx::query_as!(
        JobKey,
        r#"
        with recursive project as (
            (
                select project_id, run_at, 1 as place
                from jobs
                where state in ('scheduled', 'backoff') and unfinished_parents = 0
                order by project_id, run_at
                limit 1
            )
            union all
            select next.project_id, next.run_at, project.place + 1
            from project
            cross join lateral (
                select project_id, run_at
                from jobs
                where state in ('scheduled', 'backoff') and unfinished_parents = 0
                    and project_id > project.project_id
                order by project_id, run_at
                limit 1
            ) next
            where project.place < 10000
        )
        select due.project_id "project_id!: ProjectId", due.id "id!: JobId"
        from (select project_id from project where run_at <= now()) bounded
        cross join lateral (
            select project_id, id, run_at, row_number() over (order by run_at) as turn
            from (
                select project_id, id, run_at
                from jobs
                -- No equality, and no time: else an index of run_at alone seems good, and leads
                -- through the due jobs of all other projects.
                where project_id >= bounded.project_id and project_id <= bounded.project_id
                    and state in ('scheduled', 'backoff') and unfinished_parents = 0
                    and not exists (
                        select from set_aside
                        where project_id = jobs.project_id and work = 'promote'
                            and item = jobs.id::text and next_try_at > now()
                    )
                order by project_id, run_at
                limit 50
            ) first
            where run_at <= now()
        ) due
        order by due.turn, due.run_at
        limit 200
        "#,
    )
    .fetch_all(conn)
    .await
}

/// Makes due jobs claimable, or lets them wait for room in their groups. Those that another node
/// has locked are skipped.
pub async fn promote(conn: &mut PgConnection, due: &[JobKey]) -> sqlx::Result<Vec<WaitingJob>> {
    sqlx::query_as!(
        WaitingJob,
        r#"
        with due as materialized (
            select waiting.*
            from unnest($1::int[], $2::uuid[]) as found(project_id, id)
            -- Lateral, and with states that are no constants, so that each is read by its key: a
            -- plan kept from when nothing was due would read all due jobs by their index.
            cross join lateral (
                select project_id, id, state, queue, group_key
                from jobs
                where project_id = found.project_id and id = found.id
                    and state = any($3) and unfinished_parents = 0 and run_at <= now()
                for update skip locked
            ) waiting
        ), grouped as materialized (
            select project_id, id, waits_for_room(project_id, queue, group_key, alone) as waits
            from (
                select due.*, row_number() over (
                           partition by project_id, queue, group_key order by id
                       ) = 1 as alone
                from due
                where group_key is not null
            ) of_group
        ), promoted as (
            update jobs
            set state = case when grouped.waits then 'scheduled' else 'pending' end,
                waits_for_group = coalesce(grouped.waits, jobs.waits_for_group),
                unfinished_parents = (grouped.waits is true)::int
            from due
            left join grouped on grouped.project_id = due.project_id and grouped.id = due.id
            where jobs.project_id = due.project_id and jobs.id = due.id
            returning jobs.project_id, jobs.id, jobs.queue, jobs.job_type, jobs.rank, jobs.run_at,
                      jobs.state, jobs.constraint_key, jobs.group_key, due.state as was, case
                          when jobs.takes_turns and jobs.state = 'pending'
                          then note_turn(jobs.project_id, jobs.queue, jobs.group_key)
                      end as turn
        ), noted as (
            insert into group_notes (project_id, queue, group_key)
            select distinct project_id, queue, group_key from promoted where state = 'scheduled'
        ), counted as (
            insert into queue_deltas (project_id, queue, scheduled, active, backoff)
            select project_id, queue,
                   count(*) filter (where state = 'scheduled')
                       - count(*) filter (where was = 'scheduled'),
                   count(*) filter (where was = 'scheduled')
                       - count(*) filter (where state = 'scheduled'),
                   -count(*) filter (where was = 'backoff')
            from promoted
            group by project_id, queue
        )
        select project_id "project_id!: ProjectId", id "id!: JobId", queue "queue!",
               job_type "job_type!", rank "rank!", run_at "run_at!",
               state "state!: StoredState", constraint_key is not null "is_constrained!",
               turn is true "has_noted_turn!"
        from promoted
        "#,
        &due.iter().map(|it| it.project_id.0).collect::<Vec<_>>(),
        &due.iter().map(|it| it.id.0).collect::<Vec<_>>(),
        &["scheduled", "backoff"] as &[&str],
    )
    .fetch_all(conn)
    .await
}

/// The next lease to expire.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NextEnd {
    /// Milliseconds until the first lease ends, negative if it has; none: none ends soon.
    pub wait_ms: Option<f64>,
}

/// Records a pass of the reaper, and returns which lease ends first within `ahead_ms`. None, and
/// nothing is recorded, if the last pass of any node is more than [`REAPER_GAP_SECONDS`] ago.
pub async fn record_pass(conn: &mut PgConnection, ahead_ms: i64) -> sqlx::Result<Option<NextEnd>> {
    sqlx::query_as!(
        NextEnd,
        r#"
        update reaper_state
        set last_pass_at = statement_timestamp()
        where last_pass_at > statement_timestamp() - make_interval(secs => $1::int)
        -- In index order: a plan made while few jobs ran would scan all dead entries. Not beyond
        -- the time ahead: there may be as many dead entries as jobs have ended since a vacuum.
        returning (
            select (extract(epoch from lease_expires_at - now()) * 1000)::float8
            from jobs
            where state = 'processing'
                and lease_expires_at <= now() + make_interval(secs => $2::bigint / 1000.0)
            order by lease_expires_at
            limit 1
        ) as wait_ms
        "#,
        REAPER_GAP_SECONDS,
        ahead_ms,
    )
    .fetch_optional(conn)
    .await
}

/// Records the end of the gap: every lease that expired in it was extended.
pub async fn record_end_of_gap(conn: &mut PgConnection) -> sqlx::Result<()> {
    sqlx::query!("update reaper_state set last_pass_at = statement_timestamp()")
        .execute(conn)
        .await?;
    Ok(())
}

/// Extends expired leases by their own length; returns how many.
pub async fn rearm_expired(conn: &mut PgConnection) -> sqlx::Result<u64> {
    let done = sqlx::query!(
        "
        with expired as materialized (
            select project_id, id
            from jobs
            where state = 'processing' and lease_expires_at <= now()
            order by lease_expires_at
            limit 500
            for update skip locked
        )
        update jobs
        set lease_expires_at = now() + make_interval(secs => jobs.lease_seconds)
        from expired
        where jobs.project_id = expired.project_id and jobs.id = expired.id
        ",
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected())
}

/// Locks jobs whose leases have expired, the longest expired first; none after a gap, in which
/// leases are extended instead.
pub async fn lock_expired(conn: &mut PgConnection) -> sqlx::Result<Vec<Held>> {
    sqlx::query_as!(
        Held,
        r#"
        with expired as materialized (
            select project_id, id, attempt, rate_limited_claims, failures, max_attempts,
                   cancel_requested, claimed_at, progress, loss_fails,
                   -- Where its lease was cut: with its grace, or without it by an adapter.
                   lease_expires_at = claimed_at + make_interval(secs => timeout_seconds)
                       or lease_expires_at
                           >= claimed_at + make_interval(secs => timeout_seconds + $2::int)
                       as timed_out
            from jobs
            where state = 'processing' and lease_expires_at <= now()
                and not exists (
                    select from set_aside
                    where project_id = jobs.project_id and work = 'reap' and item = jobs.id::text
                        and next_try_at > now()
                )
                and exists (
                    select from reaper_state
                    where last_pass_at > now() - make_interval(secs => $1::int)
                )
            order by lease_expires_at
            limit 500
            for update skip locked
        )
        select expired.project_id "project_id: ProjectId", expired.id "id: JobId",
               expired.attempt, expired.failures, expired.max_attempts,
               coalesce(expired.rate_limited_claims, 0) + coalesce(body.snoozes, 0)
                   "uncounted_claims!",
               coalesce(body.losses, 0) "losses!", coalesce(body.losses_in_row, 0) "losses_in_row!",
               body.max_losses "max_losses?",
               coalesce(expired.progress, 0) > coalesce(body.lost_progress, 0)
                   or exists (
                       select from job_checkpoints
                       where project_id = expired.project_id and job_id = expired.id
                           and attempt = expired.attempt
                   ) "has_progressed!",
               coalesce(expired.loss_fails, (
                   select losses_count_as_failures from projects where id = expired.project_id
               ), false) "losses_fail!",
               body.retry "retry?", expired.cancel_requested, expired.timed_out "timed_out!",
               (extract(epoch from statement_timestamp() - expired.claimed_at) * 1000)::bigint "ran_ms!"
        from expired
        left join job_bodies body
            on body.project_id = expired.project_id and body.job_id = expired.id
        "#,
        REAPER_GAP_SECONDS,
        TIMEOUT_GRACE_SECONDS,
    )
    .fetch_all(conn)
    .await
}

/// Jobs whose `expires_at` has passed, in any state.
pub async fn find_outdated(conn: &mut PgConnection) -> sqlx::Result<Vec<JobKey>> {
    sqlx::query_as!(
        JobKey,
        r#"
        select project_id "project_id: ProjectId", job_id "id: JobId"
        from job_expiries
        where expires_at <= now()
            and not exists (
                select from set_aside
                where project_id = job_expiries.project_id and work = 'expire'
                    and item = job_expiries.job_id::text and next_try_at > now()
            )
        order by expires_at
        limit 500
        "#,
    )
    .fetch_all(conn)
    .await
}

/// Ended jobs whose children must be cancelled or may run.
pub async fn find_ended_parents(conn: &mut PgConnection) -> sqlx::Result<Vec<JobKey>> {
    sqlx::query_as!(
        JobKey,
        r#"
        select project_id "project_id: ProjectId", job_id "id: JobId"
        from ended_parents
        where not exists (
            select from set_aside
            where project_id = ended_parents.project_id and work = 'cascade'
                and item = ended_parents.job_id::text and next_try_at > now()
        )
        limit 20
        "#,
    )
    .fetch_all(conn)
    .await
}

/// Retried jobs whose cancelled children are to be retried, one of each project.
pub async fn find_revived(conn: &mut PgConnection) -> sqlx::Result<Vec<JobKey>> {
    sqlx::query_as!(
        JobKey,
        r#"
        select distinct on (project_id) project_id "project_id: ProjectId", job_id "id: JobId"
        from revived_parents
        where not exists (
            select from set_aside
            where project_id = revived_parents.project_id and work = 'cascade'
                and item = revived_parents.job_id::text and next_try_at > now()
        )
        order by project_id, job_id
        limit 100
        "#,
    )
    .fetch_all(conn)
    .await
}

/// Deletes the oldest idempotency answers that are past their retention.
pub async fn prune_idempotency_keys(conn: &mut PgConnection) -> sqlx::Result<u64> {
    let pruned = sqlx::query!(
        "
        delete from idempotency_keys
        using (
            select project_id, key
            from idempotency_keys
            where created_at < now() - make_interval(secs => $1::bigint)
            order by created_at
            limit 500
            for update skip locked
        ) old
        where idempotency_keys.project_id = old.project_id and idempotency_keys.key = old.key
        ",
        IDEMPOTENCY_KEEP_SECONDS,
    )
    .execute(conn)
    .await?;
    Ok(pruned.rows_affected())
}

/// Vacuums the hot tables, unless another session does.
///
/// The tables' own autovacuum settings have no effect until the launcher wakes, once a minute.
pub async fn vacuum_hot_tables(conn: &mut PgConnection) -> sqlx::Result<()> {
    // A vacuum may take long, and ends when its connection is closed.
    const PREPARE: &str = "set statement_timeout = 0; set client_connection_check_interval = '1s'";
    conn.execute(sqlx::raw_sql(PREPARE)).await?;
    let vacuumed = conn.execute(sqlx::raw_sql("vacuum (skip_locked, truncate false) jobs")).await;
    // Its readers read all of it: let it shrink.
    let vacuumed =
        vacuumed.and(conn.execute(sqlx::raw_sql("vacuum (skip_locked) queue_deltas")).await);
    const RESET: &str = "reset statement_timeout; reset client_connection_check_interval";
    conn.execute(sqlx::raw_sql(RESET)).await?;
    vacuumed.map(|_| ())
}

/// A lease of a claim whose result was lost.
#[derive(Debug, Clone)]
pub struct LostLease {
    pub project_id: ProjectId,
    pub id: JobId,
    pub worker_id: String,
    pub lease_id: LeaseId,
}

/// Which of these leases were given after all. Scans all running leases: for emergencies.
pub async fn find_leases(
    conn: &mut PgConnection,
    lease_ids: &[Uuid],
) -> sqlx::Result<Vec<LostLease>> {
    sqlx::query_as!(
        LostLease,
        r#"
        select project_id "project_id: ProjectId", id "id: JobId", worker_id "worker_id!",
               lease_id "lease_id!: LeaseId"
        from jobs
        where state = 'processing'
            and lease_expires_at > '-infinity'
            and lease_id = any($1)
        "#,
        lease_ids,
    )
    .fetch_all(conn)
    .await
}
