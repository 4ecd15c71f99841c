//! Ending attempts that did not succeed: lock and read, then write what was decided. Both run
//! in one transaction.

use std::time::Duration;

use chrono::{DateTime, Utc};
use fencepost_domain::{
    ids::{JobId, JobKey, ProjectId},
    job::{AttemptOutcome, DeadLetterReason, Losses, StoredState},
    lease::Fence,
    text::ErrorReport,
};
use sqlx::PgConnection;
use uuid::Uuid;

use super::settle_success::{FenceColumns, WaitingJob};

/// A running job, locked, with what the rules need.
#[derive(Debug, Clone)]
pub struct Held {
    pub project_id: ProjectId,
    pub id: JobId,
    /// The attempt that ends.
    pub attempt: i32,
    /// Claims before it that do not count: it was put off or met a rate limit.
    pub uncounted_claims: i32,
    /// Failures before it.
    pub failures: i32,
    /// Failures after which the job is dead-lettered.
    pub max_attempts: i32,
    /// Losses before it.
    pub losses: i32,
    /// Those of them since the last outcome or progress.
    pub losses_in_row: i32,
    /// Losses in a row after which the job is dead-lettered; none: the default.
    pub max_losses: Option<i32>,
    /// Whether the attempt came further than those that were lost before it.
    pub has_progressed: bool,
    /// Whether an expired lease counts as a failure: see
    /// [`fencepost_domain::job::Running::losses_fail`].
    pub losses_fail: bool,
    /// None: the default policy. As stored: a shape that only a newer version knows must not stop
    /// the reaper.
    pub retry: Option<serde_json::Value>,
    /// True if the job was cancelled.
    pub cancel_requested: bool,
    /// Whether the attempt has exceeded its `timeout_seconds`.
    pub timed_out: bool,
    /// From its lease to the present, by the database's clock.
    pub ran_ms: i64,
}

impl Held {
    /// The job's key.
    #[must_use]
    pub fn key(&self) -> JobKey {
        JobKey { project_id: self.project_id, id: self.id }
    }
}

/// Locks the running jobs whose fences hold, in the order of their ids. Those that another
/// transaction holds are skipped: they must not delay the others.
///
/// No job may appear twice in `fences`.
pub async fn lock_held<'a>(
    conn: &mut PgConnection,
    fences: impl Iterator<Item = (JobKey, &'a Fence)> + Clone,
) -> sqlx::Result<Vec<Held>> {
    let fences = FenceColumns::of(fences);
    sqlx::query_as!(
        Held,
        r#"
        select job.project_id "project_id: ProjectId", job.id "id: JobId", job.attempt,
               coalesce(job.rate_limited_claims, 0) + coalesce(body.snoozes, 0) "uncounted_claims!",
               job.failures, job.max_attempts, body.retry "retry?", job.cancel_requested,
               coalesce(body.losses, 0) "losses!", coalesce(body.losses_in_row, 0) "losses_in_row!",
               body.max_losses "max_losses?",
               coalesce(job.progress, 0) > coalesce(body.lost_progress, 0)
                   or exists (
                       select from job_checkpoints
                       where project_id = job.project_id and job_id = job.id
                           and attempt = job.attempt
                   ) "has_progressed!",
               coalesce(job.loss_fails, (
                   select losses_count_as_failures from projects where id = job.project_id
               ), false) "losses_fail!",
               false "timed_out!",
               (extract(epoch from statement_timestamp() - job.claimed_at) * 1000)::bigint "ran_ms!"
        from unnest($1::int[], $2::uuid[], $3::text[], $4::int[], $5::uuid[])
            as shown(project_id, job_id, worker_id, attempt, lease_id)
        join jobs job on job.project_id = shown.project_id and job.id = shown.job_id
        left join job_bodies body
            on body.project_id = shown.project_id and body.job_id = shown.job_id
        where job.worker_id = coalesce(shown.worker_id, job.worker_id)
            and (shown.attempt is null or job.attempt = shown.attempt)
            and (shown.lease_id is null or job.lease_id = shown.lease_id)
        order by job.project_id, job.id
        limit 500
        for update of job skip locked
        "#,
        &fences.project_id,
        &fences.job_id,
        &fences.worker_id as &[Option<&str>],
        &fences.attempt as &[Option<i32>],
        &fences.lease_id as &[Option<Uuid>],
    )
    .fetch_all(conn)
    .await
}

/// The losses of a job, to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LossesToWrite {
    pub losses: Losses,
    /// Whether this end is one of them.
    pub is_loss: bool,
    /// Whether it counts in the streak of its job type: the job was lost before, too.
    pub is_in_streak: bool,
    /// Why it is dead-lettered; none: it is not, or an attempt failed.
    pub death: Option<DeadLetterReason>,
}

/// The outcome of an attempt, to be written.
#[derive(Debug, Clone)]
pub struct OutcomeToWrite {
    pub key: JobKey,
    /// The attempt that ended.
    pub attempt: i32,
    /// `backoff`, `pending`, `dead_letter` or `cancelled`.
    pub state: StoredState,
    pub failures: i32,
    /// What the job's losses and its death are from now on; none: they are as they were.
    pub losses: Option<LossesToWrite>,
    /// For `backoff`.
    pub wait: Duration,
    /// The outcome of the attempt.
    pub outcome: AttemptOutcome,
    /// The worker's report.
    pub error: ErrorReport,
    pub duration_ms: Option<i64>,
    pub ran_ms: i64,
}

/// A job after its attempt's outcome was written.
#[derive(Debug, Clone)]
pub struct AfterOutcome {
    /// The job as it waits again, or as it ended.
    pub job: WaitingJob,
    /// When it can run again; none if it ended.
    pub retry_at: Option<DateTime<Utc>>,
    /// Whether its lease counted against a limit.
    pub held_slot: bool,
    /// Whether its children must be cancelled or may run.
    pub has_children: bool,
    /// Whether the cascade has work: children, callbacks or a batch.
    pub has_follow_ups: bool,
    /// Whether this or another of these ends lets a group continue.
    pub has_noted_groups: bool,
}

/// Ends the running attempts of locked jobs, with a row for each in `attempts`.
///
/// A job that is `pending` again keeps its `run_at`, and with it its position in the queue. A job
/// to be `cancelled` is left `pending`, for the statement that cancels waiting jobs in the same
/// transaction.
pub async fn write_outcomes(
    conn: &mut PgConnection,
    ended: &[OutcomeToWrite],
) -> sqlx::Result<Vec<AfterOutcome>> {
    let rows = sqlx::query!(
        r#"
        with ended as materialized (
            select project_id, job_id, state, failures, outcome, error_kind, error_message,
                   error_stack_trace, error_truncated, duration_ms,
                   statement_timestamp() + make_interval(secs => wait_ms / 1000.0) as retry_at
            from unnest(
                $1::int[], $2::uuid[], $3::text[], $4::int[], $5::float8[], $6::text[], $7::text[],
                $8::text[], $9::text[], $10::bool[], $11::bigint[]
            ) as sent(
                project_id, job_id, state, failures, wait_ms, outcome, error_kind, error_message,
                error_stack_trace, error_truncated, duration_ms
            )
        ), history as (
            insert into attempts (
                project_id, job_id, attempt, worker_id, lease_id, claimed_at, ended_at, outcome,
                error_kind, error_message, error_stack_trace, error_truncated, retry_at, duration_ms
            )
            select job.project_id, job.id, job.attempt, job.worker_id, job.lease_id, job.claimed_at,
                   statement_timestamp(), ended.outcome, ended.error_kind, ended.error_message,
                   ended.error_stack_trace, ended.error_truncated,
                   case when ended.state in ('backoff', 'pending') then ended.retry_at end,
                   ended.duration_ms
            from ended
            join jobs job on job.project_id = ended.project_id and job.id = ended.job_id
        ), after as (
            update jobs
            set state = case when ended.state = 'cancelled' then 'pending' else ended.state end,
                failures = ended.failures,
                run_at = case when ended.state = 'backoff' then ended.retry_at else jobs.run_at end,
                ready_at = case
                    when ended.state in ('pending', 'cancelled') then statement_timestamp()
                end,
                completed_at = case when ended.state = 'dead_letter' then statement_timestamp() end,
                group_place = case
                    when ended.state = 'dead_letter' and jobs.group_key is not null
                        and not dead_letters_block(jobs.project_id, jobs.queue)
                    then null
                    else jobs.group_place
                end,
                lease_id = null,
                worker_id = null,
                claimed_at = null,
                lease_seconds = null,
                lease_expires_at = null,
                poll_id = null,
                loss_fails = null
            from ended
            where jobs.project_id = ended.project_id and jobs.id = ended.job_id
            returning jobs.project_id, jobs.id, jobs.queue, jobs.job_type, jobs.rank, jobs.run_at,
                      ended.state, jobs.constraint_key, jobs.holds_slot, jobs.children,
                      jobs.batch_id, jobs.has_callbacks, jobs.group_key, ended.outcome,
                      ended.retry_at, case
                          when jobs.takes_turns and ended.state = 'pending'
                          then note_turn(jobs.project_id, jobs.queue, jobs.group_key)
                      end as turn
        ), ends as (
            insert into job_ends (project_id, job_id, batch_id, callbacks, dead_letter)
            select after.project_id, after.id, after.batch_id, case when after.has_callbacks then (
                       select callbacks
                       from job_bodies
                       where project_id = after.project_id and job_id = after.id
                   ) end, 1
            from after
            where after.state = 'dead_letter' and (after.batch_id is not null or after.has_callbacks)
        ), counted as (
            insert into queue_deltas (
                project_id, queue, processing, active, backoff, dead_letter, failed
            )
            select project_id, queue, -count(*),
                   -count(*) filter (where state = 'dead_letter'),
                   count(*) filter (where state = 'backoff'),
                   count(*) filter (where state = 'dead_letter'),
                   count(*) filter (where outcome in ('failed', 'timeout', 'lease_expired'))
            from after
            group by project_id, queue
        )
        select project_id "project_id!: ProjectId", id "id!: JobId", queue "queue!",
               job_type "job_type!", rank "rank!", run_at "run_at!",
               state "state!: StoredState", constraint_key is not null "is_constrained!",
               holds_slot "holds_slot!",
               state = 'dead_letter' and children > 0 "has_children!",
               state = 'dead_letter' and (batch_id is not null or has_callbacks is true) "has_follow_ups!",
               case when state in ('backoff', 'pending') then retry_at end as retry_at,
               group_key is not null and note_group_with_rules(project_id, queue, group_key)
                   "has_noted_groups!", turn is true "has_noted_turn!"
        from after
        "#,
        &ended.iter().map(|it| it.key.project_id.0).collect::<Vec<_>>(),
        &ended.iter().map(|it| it.key.id.0).collect::<Vec<_>>(),
        &ended.iter().map(|it| it.state).collect::<Vec<_>>() as &[StoredState],
        &ended.iter().map(|it| it.failures).collect::<Vec<_>>(),
        &ended.iter().map(|it| it.wait.as_millis() as f64).collect::<Vec<_>>(),
        &ended.iter().map(|it| it.outcome).collect::<Vec<_>>() as &[AttemptOutcome],
        &ended.iter().map(|it| it.error.kind.as_deref()).collect::<Vec<_>>() as &[Option<&str>],
        &ended.iter().map(|it| it.error.message.as_deref()).collect::<Vec<_>>()
            as &[Option<&str>],
        &ended.iter().map(|it| it.error.stack_trace.as_deref()).collect::<Vec<_>>()
            as &[Option<&str>],
        &ended.iter().map(|it| it.error.truncated).collect::<Vec<_>>(),
        &ended.iter().map(|it| it.duration_ms).collect::<Vec<_>>() as &[Option<i64>],
    )
    .fetch_all(conn)
    .await?;
    let after = rows.into_iter().map(|it| AfterOutcome {
        job: WaitingJob {
            project_id: it.project_id,
            id: it.id,
            queue: it.queue,
            job_type: it.job_type,
            rank: it.rank,
            run_at: it.run_at,
            state: it.state,
            is_constrained: it.is_constrained,
            has_noted_turn: it.has_noted_turn,
        },
        retry_at: it.retry_at,
        held_slot: it.holds_slot,
        has_children: it.has_children,
        has_follow_ups: it.has_children || it.has_follow_ups,
        has_noted_groups: it.has_noted_groups,
    });
    Ok(after.collect())
}

/// The running jobs of one worker, locked in the order of their ids: at most `limit`, and at most
/// 500. They are found before they are ordered: ordering by id would invite a scan over the key.
/// With `silence_seconds` only those that were not claimed or renewed for that long.
pub async fn lock_held_by(
    conn: &mut PgConnection,
    project_id: ProjectId,
    worker_id: &str,
    limit: i64,
    silence_seconds: Option<i32>,
) -> sqlx::Result<Vec<Held>> {
    sqlx::query_as!(
        Held,
        r#"
        with mine as materialized (
            select id
            from jobs
            where project_id = $1 and state = 'processing' and worker_id = $2
                and ($4::int is null or greatest(
                    claimed_at, lease_expires_at - make_interval(secs => lease_seconds)
                ) <= now() - make_interval(secs => $4::int))
            limit $3
        ), held as materialized (
            select jobs.project_id, jobs.id, jobs.attempt, jobs.rate_limited_claims, jobs.failures,
                   jobs.max_attempts, jobs.cancel_requested, jobs.claimed_at, jobs.progress,
                   jobs.loss_fails
            from mine
            join jobs on jobs.project_id = $1 and jobs.id = mine.id
            where jobs.worker_id = $2
                and ($4::int is null or greatest(
                    jobs.claimed_at,
                    jobs.lease_expires_at - make_interval(secs => jobs.lease_seconds)
                ) <= now() - make_interval(secs => $4::int))
            order by jobs.id
            limit 500
            for update of jobs
        )
        select held.project_id "project_id: ProjectId", held.id "id: JobId", held.attempt,
               coalesce(held.rate_limited_claims, 0) + coalesce(body.snoozes, 0) "uncounted_claims!",
               held.failures, held.max_attempts, body.retry "retry?", held.cancel_requested,
               coalesce(body.losses, 0) "losses!", coalesce(body.losses_in_row, 0) "losses_in_row!",
               body.max_losses "max_losses?",
               coalesce(held.progress, 0) > coalesce(body.lost_progress, 0)
                   or exists (
                       select from job_checkpoints
                       where project_id = held.project_id and job_id = held.id
                           and attempt = held.attempt
                   ) "has_progressed!",
               coalesce(held.loss_fails, (
                   select losses_count_as_failures from projects where id = held.project_id
               ), false) "losses_fail!",
               false "timed_out!",
               (extract(epoch from statement_timestamp() - held.claimed_at) * 1000)::bigint "ran_ms!"
        from held
        left join job_bodies body
            on body.project_id = held.project_id and body.job_id = held.id
        "#,
        project_id.0,
        worker_id,
        limit,
        silence_seconds,
    )
    .fetch_all(conn)
    .await
}
