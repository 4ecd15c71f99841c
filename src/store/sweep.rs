//! The only statements that look across projects: what the loops do for everybody. Each is one
//! bounded batch that any number of nodes may run at once; what they answer carries the project.

use chrono::{DateTime, Utc};
use sqlx::{Executor, PgConnection};
use uuid::Uuid;

use super::endings::Held;
use crate::{
    domain::lease::TIMEOUT_GRACE_SECONDS,
    ids::{JobId, LeaseId, ProjectId},
};

/// Jobs one pass of a loop touches at the most. The statements carry the same number as a literal.
pub const MAX_SWEEP_ROWS: usize = 500;

/// A gap between two passes of the reaper from which on leases are given once more, in seconds.
pub const REAPER_GAP_SECONDS: i32 = 5;

/// A job that became due.
#[derive(Debug, Clone)]
pub struct Promoted {
    /// Whose job.
    pub project_id: ProjectId,
    /// Where it waits.
    pub queue: String,
    /// Its type.
    pub job_type: String,
    /// Its place in the order of claims.
    pub rank: i16,
    /// Its place in the order of claims, after the rank.
    pub run_at: DateTime<Utc>,
}

/// Milliseconds until the next scheduled or retried job is due; negative when one is overdue,
/// none when there is none.
///
/// # Errors
/// Only those of the store.
pub async fn next_due_ms(conn: &mut PgConnection) -> sqlx::Result<Option<f64>> {
    sqlx::query_scalar!(
        r#"
        select (extract(epoch from run_at - now()) * 1000)::float8 "wait_ms!"
        from jobs
        where state in ('scheduled', 'backoff') and unfinished_parents = 0
        order by run_at
        limit 1
        "#,
    )
    .fetch_optional(conn)
    .await
}

/// Makes due jobs claimable, the longest due first.
///
/// # Errors
/// Only those of the store.
pub async fn promote(conn: &mut PgConnection) -> sqlx::Result<Vec<Promoted>> {
    sqlx::query_as!(
        Promoted,
        r#"
        with due as materialized (
            select project_id, id
            from jobs
            where state in ('scheduled', 'backoff') and unfinished_parents = 0 and run_at <= now()
            order by run_at
            limit 500
            for update skip locked
        )
        update jobs
        set state = 'pending'
        from due
        where jobs.project_id = due.project_id and jobs.id = due.id
        returning jobs.project_id "project_id: ProjectId", jobs.queue, jobs.job_type, jobs.rank,
                  jobs.run_at
        "#,
    )
    .fetch_all(conn)
    .await
}

/// Notes that a node looks for expired leases now, and answers whether there are any. None, and nothing
/// is noted, when the last pass of any node lies more than [`REAPER_GAP_SECONDS`] back.
///
/// # Errors
/// Only those of the store.
pub async fn note_pass(conn: &mut PgConnection) -> sqlx::Result<Option<bool>> {
    sqlx::query_scalar!(
        r#"
        update reaper_state
        set last_pass_at = statement_timestamp()
        where last_pass_at > statement_timestamp() - make_interval(secs => $1::int)
        returning exists (
            select from jobs where state = 'processing' and lease_expires_at <= now()
        ) "has_expired!"
        "#,
        REAPER_GAP_SECONDS,
    )
    .fetch_optional(conn)
    .await
}

/// Notes that the gap is over: every lease that expired in it was given once more.
///
/// # Errors
/// Only those of the store.
pub async fn note_end_of_gap(conn: &mut PgConnection) -> sqlx::Result<()> {
    sqlx::query!("update reaper_state set last_pass_at = statement_timestamp()")
        .execute(conn)
        .await?;
    Ok(())
}

/// Gives leases that have expired once more, by their own length; answers with how many.
///
/// # Errors
/// Only those of the store.
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

/// Locks jobs whose leases have expired, the longest expired first; none when the last noted pass
/// lies so far back that they are to be given once more.
///
/// # Errors
/// Only those of the store.
pub async fn lock_expired(conn: &mut PgConnection) -> sqlx::Result<Vec<Held>> {
    sqlx::query_as!(
        Held,
        r#"
        with expired as materialized (
            select project_id, id, attempt, failures, max_attempts,
                   lease_expires_at
                       >= claimed_at + make_interval(secs => timeout_seconds + $1::int) as timed_out
            from jobs
            where state = 'processing' and lease_expires_at <= now()
                and exists (
                    select from reaper_state
                    where last_pass_at > now() - make_interval(secs => $2::int)
                )
            order by lease_expires_at
            limit 500
            for update skip locked
        )
        select expired.project_id "project_id: ProjectId", expired.id "id: JobId",
               expired.attempt, expired.failures, expired.max_attempts,
               body.retry "retry?", expired.timed_out "timed_out!"
        from expired
        left join job_bodies body
            on body.project_id = expired.project_id and body.job_id = expired.id
        "#,
        TIMEOUT_GRACE_SECONDS,
        REAPER_GAP_SECONDS,
    )
    .fetch_all(conn)
    .await
}

/// Clears away dead rows of the hot table, unless somebody does so already.
///
/// The tables' own autovacuum settings do nothing before the launcher wakes, once a minute.
///
/// # Errors
/// Only those of the store.
pub async fn vacuum_jobs(conn: &mut PgConnection) -> sqlx::Result<()> {
    // A vacuum takes the time it takes.
    conn.execute(sqlx::raw_sql("set statement_timeout = 0")).await?;
    let vacuumed = conn.execute(sqlx::raw_sql("vacuum (skip_locked, truncate false) jobs")).await;
    conn.execute(sqlx::raw_sql("reset statement_timeout")).await?;
    vacuumed.map(|_| ())
}

/// A lease of a claim whose answer was lost.
#[derive(Debug, Clone)]
pub struct LostLease {
    /// Whose job.
    pub project_id: ProjectId,
    /// Which job.
    pub id: JobId,
    /// Whom it was leased to.
    pub worker_id: String,
    /// The lease.
    pub lease_id: LeaseId,
}

/// Which of these leases were given after all. It walks over all leases that run: for emergencies.
///
/// # Errors
/// Only those of the store.
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
