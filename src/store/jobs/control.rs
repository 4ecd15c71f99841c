//! What users do to jobs: cancel and change. Each statement runs in a transaction that has
//! locked what it changes.

use chrono::{DateTime, Utc};
use fencepost_domain::{
    ids::{JobId, JobKey, ProjectId},
    job::StoredState,
};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::settle::settle_success::WaitingJob;

/// A job, locked until the end of the transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LockedJob {
    pub state: StoredState,
    /// Its latest attempt.
    pub attempt: i32,
    /// The database's clock.
    pub now: DateTime<Utc>,
    /// Whether its worker is asked to stop.
    pub cancel_requested: bool,
    /// It is cancelled then, unless it has begun.
    pub expires_at: Option<DateTime<Utc>>,
}

/// Locks a live job; none if the project has no such live job.
pub async fn lock_live(conn: &mut PgConnection, key: JobKey) -> sqlx::Result<Option<LockedJob>> {
    sqlx::query_as!(
        LockedJob,
        r#"
        select state "state: StoredState", attempt, statement_timestamp() "now!", cancel_requested,
               expires_at
        from jobs
        where project_id = $1 and id = $2
        for update
        "#,
        key.project_id.0,
        key.id.0,
    )
    .fetch_optional(conn)
    .await
}

/// Locks an ended job; none if the project has no such ended job.
pub async fn lock_ended(conn: &mut PgConnection, key: JobKey) -> sqlx::Result<Option<LockedJob>> {
    sqlx::query_as!(
        LockedJob,
        r#"
        select state "state: StoredState", attempt, statement_timestamp() "now!", cancel_requested,
               null::timestamptz as expires_at
        from finished_jobs
        where project_id = $1 and id = $2
        for update
        "#,
        key.project_id.0,
        key.id.0,
    )
    .fetch_optional(conn)
    .await
}

/// Whether a job was cancelled, or its worker should stop; none if there is no such job.
pub async fn find_cancelled(conn: &mut PgConnection, key: JobKey) -> sqlx::Result<Option<bool>> {
    sqlx::query_scalar!(
        r#"
        select cancel_requested "is_cancelled!"
        from jobs
        where project_id = $1 and id = $2
        union all
        select state = 'cancelled'
        from finished_jobs
        where project_id = $1 and id = $2
        limit 1
        "#,
        key.project_id.0,
        key.id.0,
    )
    .fetch_optional(conn)
    .await
}

/// A cancelled job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CancelledJob {
    pub key: JobKey,
    pub queue: String,
    pub job_type: String,
    /// Its latest attempt; 0 before the first.
    pub attempt: i32,
    /// Whether its children must be cancelled or may run.
    pub has_children: bool,
    /// Whether the cascade has work: children, callbacks or a batch.
    pub has_follow_ups: bool,
    /// Whether this or another of these jobs lets its group continue.
    pub has_noted_groups: bool,
}

/// Why waiting jobs are cancelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CancelReason {
    /// A caller asked for it, or a new job takes its place.
    Asked,
    /// Its `expires_at` has passed; others are left alone.
    Expired,
    /// A parent ended otherwise than they waited for; those that wait for no parent are left alone.
    Parent {
        id: JobId,
        /// False: they were not needed.
        has_failed: bool,
    },
}

/// Cancels waiting jobs: they move to `finished_jobs`. Others are left alone.
pub async fn cancel_waiting(
    conn: &mut PgConnection,
    jobs: &[JobKey],
    reason: CancelReason,
) -> sqlx::Result<Vec<CancelledJob>> {
    let (cancelled_by, is_skipped) = match reason {
        CancelReason::Parent { id, has_failed } => (Some(id), !has_failed),
        CancelReason::Asked | CancelReason::Expired => (None, false),
    };
    let rows = sqlx::query!(
        r#"
        with waiting as materialized (
            select job.project_id, job.id, job.queue, job.state
            from unnest($1::int[], $2::uuid[]) as named(project_id, id)
            join jobs job on job.project_id = named.project_id and job.id = named.id
            where job.lease_id is null and job.completed_at is null
                and (not $3 or job.expires_at <= statement_timestamp())
                and ($4::uuid is null or job.unfinished_parents > other_holds(job.waits_for_group, job.paused_at))
            order by job.project_id, job.id
            for update of job
        ), gone as (
            delete from jobs
            using waiting
            where jobs.project_id = waiting.project_id and jobs.id = waiting.id
            returning jobs.*
        ), counted as (
            insert into queue_deltas (project_id, queue, scheduled, active, backoff, cancelled)
            select project_id, queue,
                   -count(*) filter (where state = 'scheduled'),
                   -count(*) filter (where state <> 'scheduled'),
                   -count(*) filter (where state = 'backoff'),
                   count(*)
            from waiting
            group by project_id, queue
        ), ends as (
            insert into job_ends (project_id, job_id, batch_id, callbacks, cancelled, skipped)
            select gone.project_id, gone.id, gone.batch_id, case when gone.has_callbacks then (
                       select callbacks
                       from job_bodies
                       where project_id = gone.project_id and job_id = gone.id
                   ) end, (not $5)::int, $5::int
            from gone
            where gone.batch_id is not null or gone.has_callbacks
        ), moved as (
            insert into finished_jobs (
                project_id, id, queue, job_type, state, rank, run_at, created_at, attempt, failures,
                max_attempts, timeout_seconds, labels, cancel_requested, progress, completed_at,
                children, cancelled_by, is_skipped
            )
            select project_id, id, queue, job_type, 'cancelled', rank, run_at, created_at, attempt,
                   failures, max_attempts, timeout_seconds, labels, not $3 and $4 is null, progress,
                   statement_timestamp(), children, $4, case when $5::bool then true end
            from gone
        )
        select gone.project_id "project_id!: ProjectId", gone.id "id!: JobId", gone.queue "queue!",
               gone.job_type "job_type!", gone.attempt "attempt!", gone.children > 0 "has_children!",
               gone.children > 0 or gone.batch_id is not null or gone.has_callbacks is true
                   "has_follow_ups!", gone.group_key is not null
                   and note_group_with_rules(gone.project_id, gone.queue, gone.group_key)
                   "has_noted_groups!"
        from gone
        "#,
        &jobs.iter().map(|it| it.project_id.0).collect::<Vec<_>>(),
        &jobs.iter().map(|it| it.id.0).collect::<Vec<_>>(),
        reason == CancelReason::Expired,
        cancelled_by.map(|it| it.0),
        is_skipped,
    )
    .fetch_all(conn)
    .await?;
    let cancelled = rows.into_iter().map(|it| CancelledJob {
        key: JobKey { project_id: it.project_id, id: it.id },
        queue: it.queue,
        job_type: it.job_type,
        attempt: it.attempt,
        has_children: it.has_children,
        has_follow_ups: it.has_follow_ups,
        has_noted_groups: it.has_noted_groups,
    });
    Ok(cancelled.collect())
}

/// Asks the worker of a running job to stop, with its next heartbeat.
pub async fn request_cancel(conn: &mut PgConnection, key: JobKey) -> sqlx::Result<()> {
    sqlx::query!(
        "update jobs set cancel_requested = true where project_id = $1 and id = $2",
        key.project_id.0,
        key.id.0,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Asks the workers of those of these jobs that run to stop, unless they were asked before. Returns
/// the jobs and their attempts.
pub async fn request_cancels(
    conn: &mut PgConnection,
    jobs: &[JobKey],
) -> sqlx::Result<Vec<(JobKey, i32)>> {
    let rows = sqlx::query!(
        r#"
        with running as materialized (
            select job.project_id, job.id
            from unnest($1::int[], $2::uuid[]) as named(project_id, id)
            join jobs job on job.project_id = named.project_id and job.id = named.id
            where job.state = 'processing' and not job.cancel_requested
            order by job.project_id, job.id
            for update of job
        )
        update jobs
        set cancel_requested = true
        from running
        where jobs.project_id = running.project_id and jobs.id = running.id
        returning jobs.project_id "project_id: ProjectId", jobs.id "id: JobId", jobs.attempt
        "#,
        &jobs.iter().map(|it| it.project_id.0).collect::<Vec<_>>(),
        &jobs.iter().map(|it| it.id.0).collect::<Vec<_>>(),
    )
    .fetch_all(conn)
    .await?;
    let asked = rows.into_iter();
    Ok(asked.map(|it| (JobKey { project_id: it.project_id, id: it.id }, it.attempt)).collect())
}

/// Locks live jobs, so that their states stay until the end of the transaction.
pub async fn lock_all(conn: &mut PgConnection, jobs: &[JobKey]) -> sqlx::Result<()> {
    sqlx::query!(
        "
        select job.id
        from unnest($1::int[], $2::uuid[]) as named(project_id, id)
        join jobs job on job.project_id = named.project_id and job.id = named.id
        order by job.project_id, job.id
        for update of job
        ",
        &jobs.iter().map(|it| it.project_id.0).collect::<Vec<_>>(),
        &jobs.iter().map(|it| it.id.0).collect::<Vec<_>>(),
    )
    .fetch_all(conn)
    .await?;
    Ok(())
}

/// Changes to a waiting job; none keeps the value.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Change {
    pub queue: Option<String>,
    /// Minus the priority.
    pub rank: Option<i16>,
    pub run_at: Option<DateTime<Utc>>,
    /// Failures after which it is dead-lettered.
    pub max_attempts: Option<i32>,
    /// Timeout of an attempt, in seconds.
    pub timeout_seconds: Option<i32>,
    /// Losses in a row after which it is dead-lettered.
    pub max_losses: Option<i32>,
    /// All its tags.
    pub tags: Option<serde_json::Value>,
    pub labels: Option<ChangedLabels>,
}

/// The labels that the worker of a job must have, from now on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChangedLabels {
    /// Sorted.
    pub labels: Vec<String>,
    /// See [`fencepost_domain::constraint_key`].
    pub constraint_key: Option<Uuid>,
}

/// What the labels of a job are hashed with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Constraint {
    pub job_type: String,
    pub concurrency_key: Option<String>,
    pub concurrency_limit: Option<i32>,
}

/// What the labels of a live job are hashed with; none if the project has no such live job.
pub async fn find_constraint(
    conn: &mut PgConnection,
    key: JobKey,
) -> sqlx::Result<Option<Constraint>> {
    sqlx::query_as!(
        Constraint,
        "
        select job_type, concurrency_key, concurrency_limit
        from jobs
        where project_id = $1 and id = $2
        ",
        key.project_id.0,
        key.id.0,
    )
    .fetch_optional(conn)
    .await
}

/// Changes what only the body of a job has, or has as well.
pub async fn change_body(
    conn: &mut PgConnection,
    key: JobKey,
    change: &Change,
) -> sqlx::Result<()> {
    let labels = change.labels.as_ref();
    sqlx::query!(
        "
        update job_bodies
        set max_losses = coalesce($3, max_losses),
            tags = case when $4 then $5 else tags end,
            labels = case when $6 then nullif($7::text[], '{}') else labels end,
            constraint_key = case when $6 then $8 else constraint_key end
        where project_id = $1 and job_id = $2
        ",
        key.project_id.0,
        key.id.0,
        change.max_losses,
        change.tags.is_some(),
        change.tags.as_ref().filter(|it| it.as_object().is_some_and(|it| !it.is_empty())),
        labels.is_some(),
        labels.map(|it| it.labels.as_slice()).unwrap_or_default(),
        labels.and_then(|it| it.constraint_key),
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Changes a waiting job; none if it does not wait.
pub async fn change(
    conn: &mut PgConnection,
    key: JobKey,
    change: &Change,
) -> sqlx::Result<Option<WaitingJob>> {
    let labels = change.labels.as_ref();
    sqlx::query_as!(
        WaitingJob,
        r#"
        with before as materialized (
            select queue, state from jobs where project_id = $1 and id = $2
        ), after as (
            update jobs
            set queue = coalesce($3, queue),
                -- What its group let run in another queue is nothing here.
                waits_for_group = case
                    when $3 <> queue then nullif(waits_for_group, false) else waits_for_group
                end,
                takes_turns = case
                    when $3 <> queue then nullif(takes_turns($1, $3), false) else takes_turns
                end,
                rank = coalesce($4, rank),
                max_attempts = coalesce($6, max_attempts),
                timeout_seconds = coalesce($7, timeout_seconds),
                labels = case when $8 then nullif($9::text[], '{}') else labels end,
                constraint_key = case when $8 then $10 else constraint_key end,
                run_at = coalesce($5, run_at),
                ready_at = case
                    when unfinished_parents = 0 and $5 > statement_timestamp() then null
                    when state = 'pending' and $3 <> queue then statement_timestamp()
                    when $5::timestamptz is null or unfinished_parents > 0 then ready_at
                    when state = 'pending' then greatest(run_at, created_at, ready_at)
                    else statement_timestamp()
                end,
                state = case
                    when $5::timestamptz is null or unfinished_parents > 0 then state
                    when $5 <= statement_timestamp() then 'pending'
                    when state = 'backoff' then 'backoff'
                    else 'scheduled'
                end
            where project_id = $1 and id = $2 and lease_id is null and completed_at is null
            returning project_id, id, queue, job_type, rank, run_at, state, constraint_key,
                      group_key, case
                          when takes_turns and state = 'pending'
                          then note_turn(project_id, queue, group_key)
                      end as turn
        ), noted as (
            insert into group_notes (project_id, queue, group_key)
            select $1, after.queue, group_key
            from before, after
            where group_key is not null and (
                $3 is not null or before.state = 'pending' and after.state <> 'pending'
            )
        ), counted as (
            insert into queue_deltas (project_id, queue, scheduled, active, backoff)
            select $1, queue, by * (state = 'scheduled')::int, by * (state <> 'scheduled')::int,
                   by * (state = 'backoff')::int
            from (
                select -1 as by, before.queue, before.state from before, after
                union all
                select 1, queue, state from after
            ) moves
        )
        select project_id "project_id!: ProjectId", id "id!: JobId", queue "queue!", job_type "job_type!",
               rank "rank!", run_at "run_at!", state "state!: StoredState",
               constraint_key is not null "is_constrained!",
               turn is true "has_noted_turn!"
        from after
        "#,
        key.project_id.0,
        key.id.0,
        change.queue,
        change.rank,
        change.run_at,
        change.max_attempts,
        change.timeout_seconds,
        labels.is_some(),
        labels.map(|it| it.labels.as_slice()).unwrap_or_default(),
        labels.and_then(|it| it.constraint_key),
    )
    .fetch_optional(conn)
    .await
}
