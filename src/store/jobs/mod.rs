//! Reading jobs: one, with its history; `filter.rs` and `list.rs`: which ones, pages of them, and
//! how many; `past_attempts.rs`: their attempts.

pub mod control;
pub mod dead_letters;
pub mod enqueue;
pub mod events;
pub mod fences;
pub mod job_types;
pub mod logs;
pub mod pauses;
pub mod requeue;
pub mod stored_before;
pub mod stored_bytes;

mod filter;
mod list;
mod past_attempts;
mod queue_states;

use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use fencepost_domain::{
    ids::{BatchId, JobId, JobKey, LeaseId, ProjectId, WorkflowId},
    job::{Closed, StoredState},
    limits,
};

pub use self::{
    filter::{Filter, read_tag},
    list::{MAX_COUNTED, Order, Place, Walked, count, page, walk},
    past_attempts::{AttemptRow, attempts, attempts_of_all, last_errors},
};

/// Queue and job type of these jobs, live or ended, without those that the project does not have.
pub async fn kinds(
    conn: &mut PgConnection,
    keys: &[JobKey],
) -> sqlx::Result<Vec<(JobKey, (String, String))>> {
    let found = sqlx::query!(
        r#"
        select asked.project_id "project_id!: ProjectId", asked.id "id!: JobId",
               kind.queue "queue!", kind.job_type "job_type!"
        from unnest($1::int[], $2::uuid[]) as asked(project_id, id)
        -- Lateral, so that each is read by its key.
        cross join lateral (
            select queue, job_type
            from jobs
            where project_id = asked.project_id and id = asked.id
            union all
            select queue, job_type
            from finished_jobs
            where project_id = asked.project_id and id = asked.id
            limit 1
        ) kind
        "#,
        &keys.iter().map(|it| it.project_id.0).collect::<Vec<_>>(),
        &keys.iter().map(|it| it.id.0).collect::<Vec<_>>(),
    );
    let kind = |project_id, id, kind| (JobKey { project_id, id }, kind);
    let found = found.fetch_all(conn).await?.into_iter();
    Ok(found.map(|it| kind(it.project_id, it.id, (it.queue, it.job_type))).collect())
}

/// Whether rows include payload and result: a page with them can be many megabytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Payloads {
    Shown,
    /// Both are null.
    LeftOut,
}

impl Payloads {
    /// From a query's `payloads`; the default includes them.
    #[must_use]
    pub fn asked(payloads: Option<bool>) -> Self {
        if payloads.unwrap_or(true) { Self::Shown } else { Self::LeftOut }
    }
}

/// A job as it is stored, from either table.
#[derive(Debug, Clone)]
pub struct JobRow {
    pub id: JobId,
    pub queue: String,
    pub job_type: String,
    pub state: StoredState,
    pub rank: i16,
    pub run_at: DateTime<Utc>,
    pub created_at: DateTime<Utc>,
    /// Since when it is ready, if it is pending.
    pub ready_at: Option<DateTime<Utc>>,
    pub attempt: i32,
    pub failures: i32,
    pub max_attempts: i32,
    pub timeout_seconds: i32,
    /// Parents that it waits for.
    pub unfinished_parents: i32,
    /// Whether it waits for its group.
    pub waits_for_group: bool,
    /// Time at which a person paused it; none: it is not paused.
    pub paused_at: Option<DateTime<Utc>>,
    pub cancel_requested: bool,
    pub progress: Option<f32>,
    pub completed_at: Option<DateTime<Utc>>,
    pub lease_id: Option<LeaseId>,
    pub worker_id: Option<String>,
    pub claimed_at: Option<DateTime<Utc>>,
    pub lease_expires_at: Option<DateTime<Utc>>,
    pub result: Option<String>,
    pub duration_ms: Option<i64>,
    pub payload: String,
    pub retry: Option<serde_json::Value>,
    pub tags: Option<serde_json::Value>,
    pub labels: Option<Vec<String>>,
    pub concurrency_key: Option<String>,
    pub concurrency_limit: Option<i32>,
    pub group: Option<String>,
    pub unique_key: Option<String>,
    pub expires_at: Option<DateTime<Utc>>,
    pub workflow_id: Option<WorkflowId>,
    pub workflow_key: Option<String>,
    pub envelope: Option<String>,
    pub batch_id: Option<BatchId>,
    /// The jobs that its end enqueues, as [`fencepost_domain::callbacks::Callbacks`]; left out as
    /// payloads are.
    pub callbacks: Option<String>,
    /// The earlier job whose work it repeats.
    pub replay_of: Option<JobId>,
    /// Attempts whose workers have put it off.
    pub snoozes: i32,
    /// Attempts that were lost.
    pub losses: i32,
    /// Those since the last outcome or progress.
    pub losses_in_row: i32,
    /// Losses in a row after which it is dead-lettered; none: the default.
    pub max_losses: Option<i32>,
    /// Why it was dead-lettered; none: an attempt failed.
    pub death: Option<String>,
    /// Whether parents' results fill places of its payload.
    pub is_template: bool,
    /// Ids of its parents, ended or not.
    pub parents: Vec<JobId>,
    /// See [`Closed`]; so for the next three.
    pub is_crowded: bool,
    pub is_queue_paused: bool,
    pub is_type_paused: bool,
    pub is_rate_limited: bool,
}

impl JobRow {
    /// Takes away what only those see who may read payloads.
    pub fn redact(&mut self) {
        "null".clone_into(&mut self.payload);
        self.result = None;
        self.callbacks = None;
        self.envelope = None;
    }

    /// Why it is not claimable.
    #[must_use]
    pub fn closed(&self) -> Closed {
        let Self { waits_for_group, is_queue_paused, is_type_paused, .. } = *self;
        let Self { is_crowded, is_rate_limited, .. } = *self;
        let is_paused = self.paused_at.is_some();
        Closed {
            is_paused,
            waits_for_group,
            is_queue_paused,
            is_type_paused,
            is_crowded,
            is_rate_limited,
        }
    }
}

/// One job, live or ended. One statement reads both tables: between two, a job that moves would be
/// missed.
pub async fn find(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: JobId,
) -> sqlx::Result<Option<JobRow>> {
    Ok(find_all(conn, project_id, &[id], Payloads::Shown).await?.pop())
}

/// Finds these jobs, in no order; see [`find`]. Jobs that run in a queue or under a
/// key are counted once, however many of these jobs wait for it.
pub async fn find_all(
    conn: &mut PgConnection,
    project_id: ProjectId,
    ids: &[JobId],
    payloads: Payloads,
) -> sqlx::Result<Vec<JobRow>> {
    sqlx::query_as!(
        JobRow,
        r#"
        with job as (
            select id, queue, job_type, state, rank, run_at, created_at, attempt, failures,
                   max_attempts, timeout_seconds,
                   unfinished_parents - other_holds(waits_for_group, paused_at)
                       as unfinished_parents,
                   waits_for_group is true as waits_for_group, cancel_requested, progress,
                   completed_at, lease_id, worker_id, claimed_at, lease_expires_at,
                   null::text as result, null::bigint as duration_ms, true as is_live, expires_at,
                   ready_at, paused_at
            from jobs
            where project_id = $1 and id = any($2)
            union all
            select id, queue, job_type, state, rank, run_at, created_at, attempt, failures,
                   max_attempts, timeout_seconds, 0, false, cancel_requested, progress,
                   completed_at, lease_id, worker_id, claimed_at, null, result, duration_ms,
                   false, null, null, null
            from finished_jobs
            where project_id = $1 and id = any($2)
        ), full_queues as materialized (
            select setting.name
            from queues setting
            where setting.project_id = $1 and setting.max_concurrency is not null
                and setting.name = any(array(select queue from job where state = 'pending'))
                and setting.max_concurrency <= (
                    select count(*) from (
                        select from jobs running
                        where running.project_id = $1 and running.queue = setting.name
                            and running.state = 'processing'
                        limit setting.max_concurrency
                    ) in_queue
                )
        ), running_keys as materialized (
            select key.concurrency_key, (
                       select count(*) from (
                           select from jobs running
                           where running.project_id = $1
                               and running.concurrency_key = key.concurrency_key
                               and running.state = 'processing'
                           limit key.max_limit
                       ) under_key
                   ) as jobs
            from (
                select body.concurrency_key, max(body.concurrency_limit) as max_limit
                from job
                join job_bodies body on body.project_id = $1 and body.job_id = job.id
                where job.state = 'pending' and body.concurrency_limit is not null
                group by body.concurrency_key
            ) key
        ), used_up_queues as materialized (
            select setting.name
            from queues setting
            where setting.project_id = $1 and setting.rate_limit_count is not null
                and setting.name = any(array(select queue from job))
                and setting.rate_limit_count <= (
                    select coalesce(sum(handed.jobs), 0)
                    from queue_handouts past
                    cross join lateral unnest(past.at, past.jobs) as handed(at, jobs)
                    where past.project_id = $1 and past.queue = setting.name
                        and handed.at > now() - make_interval(secs => setting.rate_limit_per_seconds)
                )
        )
        select job.id "id!: JobId", job.queue "queue!", job.job_type "job_type!",
               job.state "state!: StoredState", job.rank "rank!", job.run_at "run_at!",
               job.created_at "created_at!",
               case when job.state = 'pending' then greatest(
                   job.run_at, job.created_at, job.ready_at, setting.resumed_at, (
                       select resumed_at from queue_types
                       where project_id = $1 and queue = job.queue and job_type = job.job_type
                   )
               ) end as ready_at,
               job.attempt "attempt!", job.failures "failures!",
               job.max_attempts "max_attempts!", job.timeout_seconds "timeout_seconds!",
               job.unfinished_parents "unfinished_parents!", job.waits_for_group "waits_for_group!",
               job.paused_at, job.cancel_requested "cancel_requested!", job.progress,
               job.completed_at,
               job.lease_id "lease_id: LeaseId", job.worker_id, job.claimed_at,
               job.lease_expires_at, case when $3 then job.result end as result, job.duration_ms,
               case when $3 then body.payload else 'null' end "payload!", body.retry, body.tags, body.labels, body.concurrency_key,
               body.concurrency_limit, body.group_key as group, body.unique_key,
               case when job.is_live then job.expires_at else body.expires_at end as expires_at,
               body.workflow_id "workflow_id: WorkflowId", body.workflow_key, body.envelope,
               body.batch_id "batch_id: BatchId", case when $3 then body.callbacks end as callbacks,
               body.replay_of "replay_of: JobId", coalesce(body.snoozes, 0) "snoozes!",
               coalesce(body.losses, 0) "losses!", coalesce(body.losses_in_row, 0) "losses_in_row!",
               body.max_losses, body.death,
               body.is_template is true "is_template!",
               case when body.has_parents then array(
                   select parent_id from job_edges
                   where project_id = $1 and child_id = job.id
                   order by ordinal
               ) else '{}' end "parents!: Vec<JobId>",
               job.state = 'pending' and (
                   job.queue in (select name from full_queues)
                   or (body.concurrency_limit <= (
                       select jobs from running_keys
                       where running_keys.concurrency_key = body.concurrency_key
                   )) is true
               ) "is_crowded!",
               setting.paused_at is not null "is_queue_paused!",
               coalesce(job.job_type = any(setting.paused_types), false) "is_type_paused!",
               job.queue in (select name from used_up_queues)
                   or (setting.rate_limited_until > now()) is true "is_rate_limited!"
        from job
        join job_bodies body on body.project_id = $1 and body.job_id = job.id
        left join queues setting on setting.project_id = $1 and setting.name = job.queue
        "#,
        project_id.0,
        &ids.iter().map(|it| it.0).collect::<Vec<Uuid>>(),
        payloads == Payloads::Shown,
    )
    .fetch_all(conn)
    .await
}

/// How many of these jobs fit on a page of [`limits::MAX_PAGE_BYTES`], by the bytes of what
/// [`Payloads::Shown`] shows; at least one.
pub async fn fitting(
    conn: &mut PgConnection,
    project_id: ProjectId,
    ids: &[JobId],
) -> sqlx::Result<usize> {
    let fitting = sqlx::query_scalar!(
        r#"
        select count(*) "count!"
        from (
            select sum(
                octet_length(body.payload) + coalesce(octet_length(body.callbacks::text), 0)
                + coalesce(octet_length(ended.result), 0)
            ) over (order by sought.place) as bytes
            from unnest($2::uuid[]) with ordinality as sought(id, place)
            left join job_bodies body on body.project_id = $1 and body.job_id = sought.id
            left join finished_jobs ended on ended.project_id = $1 and ended.id = sought.id
        ) together
        where coalesce(bytes, 0) <= $3
        "#,
        project_id.0,
        &ids.iter().map(|it| it.0).collect::<Vec<Uuid>>(),
        limits::MAX_PAGE_BYTES as i64,
    );
    let fitting = fitting.fetch_one(conn).await?;
    Ok(usize::try_from(fitting).unwrap_or(usize::MAX).max(1))
}

/// A value that changes whenever something happens to a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version {
    pub project_id: ProjectId,
    pub id: JobId,
    pub version: String,
}

/// The versions of these jobs.
pub async fn versions(
    conn: &mut PgConnection,
    jobs: &[(ProjectId, JobId)],
) -> sqlx::Result<Vec<Version>> {
    sqlx::query_as!(
        Version,
        r#"
        select asked.project_id "project_id!: ProjectId", asked.id "id!: JobId",
               concat_ws(
                   ' ', live.state, live.attempt, live.cancel_requested, ended.state, ended.attempt,
                   (
                       select event.id from job_events event
                       where event.project_id = asked.project_id and event.job_id = asked.id
                       order by event.id desc
                       limit 1
                   ),
                   (
                       select sum(kept_chunks) from job_log_totals
                       where project_id = asked.project_id and job_id = asked.id
                   )
               ) "version!"
        from unnest($1::int[], $2::uuid[]) as asked(project_id, id)
        left join jobs live on live.project_id = asked.project_id and live.id = asked.id
        left join finished_jobs ended
            on ended.project_id = asked.project_id and ended.id = asked.id
        "#,
        &jobs.iter().map(|it| it.0.0).collect::<Vec<_>>(),
        &jobs.iter().map(|it| it.1.0).collect::<Vec<_>>(),
    )
    .fetch_all(conn)
    .await
}
