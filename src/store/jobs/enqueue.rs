//! Storing new jobs.

use chrono::{DateTime, Utc};
use fencepost_domain::{
    backoff::RetryPolicy,
    callbacks::Callbacks,
    dependency::Dependency,
    ids::{BatchId, JobId, LeaseId, ProjectId, WorkflowId},
    job::{self, StoredState},
    lease::{MIN_DEFAULT_LEASE_SECONDS, TIMEOUT_GRACE_SECONDS},
    limits,
};
use serde::Serialize;
use sqlx::{PgConnection, types::Json};
use uuid::Uuid;

use crate::{
    claims::{LeaseRequest, LeasedJob},
    jobs::JobRow,
};

/// When a new job may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// This many seconds after it is stored; 0 for immediately.
    After(i32),
    /// At this time, or immediately if it is past.
    At(DateTime<Utc>),
}

/// A job to store. Its fields were checked against [`limits`].
#[derive(Debug, Clone)]
pub struct NewJob {
    pub project_id: ProjectId,
    /// Made before the insert, so that a lost answer can be looked up.
    pub id: JobId,
    pub queue: String,
    pub job_type: String,
    /// Minus the priority.
    pub rank: i16,
    pub start: Start,
    /// Failures after which it is dead-lettered; none: the queue's setting or the default.
    pub max_attempts: Option<i32>,
    /// Timeout of an attempt, in seconds.
    pub timeout_seconds: i32,
    /// The JSON as it was sent.
    pub payload: String,
    /// None: the queue's setting or the default.
    pub retry: Option<Json<RetryPolicy>>,
    /// None: no tags.
    pub tags: Option<Json<std::collections::BTreeMap<String, String>>>,
    /// Fields that most jobs do not use.
    pub extras: Option<Box<Extras>>,
}

/// Fields that most jobs do not use. They are one boxed value, so that other jobs do not pay for
/// them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Extras {
    /// Labels that its worker must have, sorted.
    pub labels: Vec<String>,
    /// See [`fencepost_domain::constraint_key`].
    pub constraint_key: Option<Uuid>,
    /// At most `concurrency_limit` jobs with the same key run at a time.
    pub concurrency_key: Option<String>,
    pub concurrency_limit: Option<i32>,
    /// Its group within the queue.
    pub group: Option<String>,
    /// No two live jobs have the same.
    pub unique_key: Option<String>,
    /// Not started after this time.
    pub expires_at: Option<DateTime<Utc>>,
    /// The trace context of its enqueue.
    pub traceparent: Option<String>,
    /// How many deliveries of webhooks have led to it.
    pub hop: Option<i16>,
    /// Its parents, in the order in which they were named.
    #[serde(skip)]
    pub parents: Vec<Dependency<JobId>>,
    /// Dependencies that are not met yet.
    pub unfinished_parents: i32,
    /// Whether it was stored with parents.
    pub has_parents: bool,
    /// Jobs stored with it that wait for it.
    pub children: i32,
    /// The workflow it belongs to.
    #[serde(serialize_with = "as_uuid")]
    pub workflow_id: Option<WorkflowId>,
    pub workflow_key: Option<String>,
    /// Whether parents' results fill places of its payload.
    pub is_template: bool,
    /// Losses in a row after which it is dead-lettered; none: the default.
    pub max_losses: Option<i32>,
    /// The batch that counts its end.
    #[serde(serialize_with = "as_batch_uuid")]
    pub batch_id: Option<BatchId>,
    /// The earlier job whose work it repeats.
    #[serde(serialize_with = "as_job_uuid")]
    pub replay_of: Option<JobId>,
    /// JSON of [`Callbacks`].
    pub callbacks: Option<String>,
    /// Number of jobs in `callbacks`, nested ones included.
    #[serde(skip)]
    pub callback_count: usize,
    /// The URL that `callbacks` names.
    #[serde(skip)]
    pub callback_url: Option<String>,
    /// JSON that the adapter keeps beside the payload, opaque to all others.
    pub envelope: Option<String>,
}

impl Extras {
    /// The same with what its end leads to.
    #[must_use]
    pub fn with_callbacks(mut self, callbacks: &Callbacks) -> Self {
        self.callback_count = callbacks.count();
        self.callback_url.clone_from(&callbacks.url);
        let is_any = self.callback_count > 0 || callbacks.url.is_some();
        self.callbacks = is_any.then(|| serde_json::to_string(callbacks).ok()).flatten();
        self
    }
}

fn as_batch_uuid<S: serde::Serializer>(id: &Option<BatchId>, to: S) -> Result<S::Ok, S::Error> {
    id.map(|it| it.0).serialize(to)
}

fn as_job_uuid<S: serde::Serializer>(id: &Option<JobId>, to: S) -> Result<S::Ok, S::Error> {
    id.map(|it| it.0).serialize(to)
}

/// The database keeps ids without their prefix.
fn as_uuid<S: serde::Serializer>(id: &Option<WorkflowId>, to: S) -> Result<S::Ok, S::Error> {
    id.map(|it| it.0).serialize(to)
}

/// A new job as the database has completed it.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredJob {
    pub id: JobId,
    /// `scheduled` or `pending`.
    pub state: StoredState,
    pub run_at: DateTime<Utc>,
    pub created_at: DateTime<Utc>,
    /// The number of its last attempt: 0 if it is new and its id was never used.
    pub attempt: i32,
    /// Failures after which it is dead-lettered.
    pub max_attempts: i32,
    /// None: the default.
    pub retry: Option<serde_json::Value>,
    /// Whether its queue is paused.
    pub is_queue_paused: bool,
    /// Whether its type is paused in its queue.
    pub is_type_paused: bool,
    /// Whether it waits for its group.
    pub waits_for_group: bool,
    /// Whether its group has to be put in line.
    pub has_noted_turn: bool,
    /// Parents that it waits for.
    pub unfinished_parents: i32,
    /// Whether it was leased with the lease that was sent for it.
    pub is_leased: bool,
    /// The lease's length in seconds, if it was leased.
    pub lease_seconds: i32,
    /// When it was leased.
    pub claimed_at: DateTime<Utc>,
}

impl StoredJob {
    /// The job as its worker gets it: leased when it was stored.
    #[must_use]
    pub fn leased(&self, job: &NewJob, lease_id: LeaseId) -> LeasedJob {
        let extras = job.extras.as_deref();
        LeasedJob {
            slot: None,
            project_id: job.project_id,
            id: job.id,
            queue: job.queue.clone(),
            job_type: job.job_type.clone(),
            rank: job.rank,
            run_at: self.run_at,
            created_at: self.created_at,
            ready_at: None,
            attempt: FIRST_ATTEMPT,
            failures: 0,
            max_attempts: self.max_attempts,
            timeout_seconds: job.timeout_seconds,
            lease_id,
            lease_seconds: self.lease_seconds,
            claimed_at: self.claimed_at,
            payload: job.payload.clone(),
            tags: job.tags.as_ref().and_then(|it| serde_json::to_value(&it.0).ok()),
            traceparent: extras.and_then(|it| it.traceparent.clone()),
            has_parents: false,
            labels: None,
            retry: self.retry.clone(),
            workflow_id: None,
            workflow_key: None,
            envelope: extras.and_then(|it| it.envelope.clone()),
            group: extras.and_then(|it| it.group.clone()),
        }
    }

    /// The whole row of a new job.
    #[must_use]
    pub fn into_row(self, job: NewJob) -> JobRow {
        let extras = job.extras.map(|it| *it).unwrap_or_default();
        JobRow {
            id: job.id,
            queue: job.queue,
            job_type: job.job_type,
            state: self.state,
            rank: job.rank,
            run_at: self.run_at,
            created_at: self.created_at,
            ready_at: (self.state == StoredState::Pending)
                .then(|| self.run_at.max(self.created_at)),
            attempt: self.attempt,
            failures: 0,
            max_attempts: self.max_attempts,
            timeout_seconds: job.timeout_seconds,
            unfinished_parents: self.unfinished_parents,
            waits_for_group: self.waits_for_group,
            paused_at: None,
            cancel_requested: false,
            progress: None,
            completed_at: None,
            lease_id: None,
            worker_id: None,
            claimed_at: None,
            lease_expires_at: None,
            result: None,
            duration_ms: None,
            payload: job.payload,
            retry: self.retry,
            tags: job.tags.and_then(|it| serde_json::to_value(it.0).ok()),
            labels: Some(extras.labels),
            concurrency_key: extras.concurrency_key,
            concurrency_limit: extras.concurrency_limit,
            group: extras.group,
            unique_key: extras.unique_key,
            expires_at: extras.expires_at,
            workflow_id: extras.workflow_id,
            workflow_key: extras.workflow_key,
            envelope: extras.envelope,
            batch_id: extras.batch_id,
            callbacks: extras.callbacks,
            replay_of: extras.replay_of,
            snoozes: 0,
            losses: 0,
            losses_in_row: 0,
            max_losses: extras.max_losses,
            death: None,
            is_template: extras.is_template,
            parents: extras.parents.iter().map(|it| it.parent).collect(),
            is_crowded: false,
            is_queue_paused: self.is_queue_paused,
            is_type_paused: self.is_type_paused,
            is_rate_limited: false,
        }
    }
}

/// The attempt of a job's first lease.
const FIRST_ATTEMPT: i32 = 1;

/// Stores jobs of any projects, all or none. `leases` has one entry per job, or none at all: a job
/// with one is leased at once, if it is due and nothing in its queue's settings limits claims. The
/// state that is returned is that before its lease. `alone` has one entry per job, or none at all:
/// a job with true may run at once if its group has no other, however strict the order is. No two
/// of one group have true, and each may lock its group.
///
/// A request whose latest `run_at` lies more than [`limits::MAX_RUN_AT_SECONDS`] ahead is left out
/// with all its jobs: only the database's clock can decide. `latest_run_at` has one entry per job:
/// the latest `run_at` of the request that it came with. Only payloads that look like a command are
/// parsed for one: others must not pay for it.
///
/// # Errors
/// A unique violation when one of the ids exists already, or a live job has one of the unique keys.
pub async fn insert_jobs(
    conn: &mut PgConnection,
    jobs: &[&NewJob],
    latest_run_at: &[Option<DateTime<Utc>>],
    leases: &[Option<LeaseRequest<'_>>],
    alone: &[bool],
) -> sqlx::Result<Vec<StoredJob>> {
    let lease_of = |number: usize| leases.get(number).copied().flatten();
    let leases: Vec<_> = (0..jobs.len()).map(lease_of).collect();
    let run_at: Vec<_> = jobs
        .iter()
        .map(|it| match it.start {
            Start::At(run_at) => Some(run_at),
            Start::After(_) => None,
        })
        .collect();
    let delay_seconds: Vec<_> = jobs
        .iter()
        .map(|it| match it.start {
            Start::At(_) => 0,
            Start::After(seconds) => seconds,
        })
        .collect();
    sqlx::query_as!(
        StoredJob,
        r#"
        with new as materialized (
            select sent.project_id, id, queue, job_type, rank,
                   coalesce(max_attempts, setting.default_max_attempts, $16) as max_attempts,
                   timeout_seconds, payload, coalesce(retry, setting.default_retry) as retry, tags,
                   extras, setting.paused_at is not null as is_queue_paused,
                   coalesce(sent.job_type = any(setting.paused_types), false) as is_type_paused,
                   case when extras is not null and jsonb_array_length(extras->'labels') > 0
                       then array(select jsonb_array_elements_text(extras->'labels'))
                   end as labels,
                   case when payload ^@ '"' or payload like '%"command"%'
                       then nullif(offers_command(payload), false)
                   end as has_command,
                   coalesce((extras->>'unfinished_parents')::int, 0)
                       + coalesce(waits_for_group, false)::int as unfinished_parents,
                   waits_for_group, nullif(group_fair and group_order <> 'strict', false)
                       as takes_turns, case
                       when extras->>'group' is not null
                       then (select nextval('job_places')) + sent.number
                   end as group_place, starts.run_at,
                   case when starts.is_due and waits_for_group is not true then 'pending'
                       else 'scheduled'
                   end as state,
                   sent.worker_id, sent.poll_id, sent.loss_fails, case
                       when starts.is_due and waits_for_group is not true
                           and not coalesce(setting.has_rules or setting.has_gate, false)
                       then sent.lease_id
                   end as lease_id,
                   least(
                       coalesce(sent.lease_seconds, greatest($21::int, timeout_seconds / 2)),
                       timeout_seconds + $22::int
                   ) as lease_seconds
            from unnest(
                $1::int[], $2::uuid[], $3::text[], $4::text[], $5::smallint[], $6::timestamptz[],
                $7::int[], $8::timestamptz[], $9::int[], $10::int[], $11::text[], $12::jsonb[],
                $13::jsonb[], $15::jsonb[], $17::text[], $18::int[], $19::uuid[], $20::uuid[],
                $23::boolean[], $24::boolean[]
            ) with ordinality as sent(
                project_id, id, queue, job_type, rank, run_at, delay_seconds, latest_run_at,
                max_attempts, timeout_seconds, payload, retry, tags, extras, worker_id,
                lease_seconds, poll_id, lease_id, alone, loss_fails, number
            )
            left join queues setting
                on setting.project_id = sent.project_id and setting.name = sent.queue
            cross join lateral (
                select due.*, case when extras->>'group' is not null and setting.has_gate then
                           wait_of_new_job(sent.project_id, sent.queue, extras->>'group', alone, is_due)
                       end as waits_for_group
                from (
                    select at.run_at, at.run_at <= now()
                               and coalesce((extras->>'unfinished_parents')::int, 0) = 0 as is_due
                    from coalesce(sent.run_at, now() + make_interval(secs => delay_seconds)) as at(run_at)
                ) due
            ) starts
            where latest_run_at is null
                or latest_run_at <= now() + make_interval(secs => $14::bigint)
        ), bodies as (
            insert into job_bodies (
                project_id, job_id, payload, retry, tags, traceparent, labels, constraint_key,
                concurrency_key, concurrency_limit, unique_key, expires_at, workflow_id, workflow_key, has_parents,
                envelope, batch_id, callbacks, is_template, replay_of, hop, group_key,
                max_losses, counted_bytes
            )
            select project_id, id, payload, retry, tags, extras->>'traceparent', labels,
                   (extras->>'constraint_key')::uuid, extras->>'concurrency_key',
                   (extras->>'concurrency_limit')::int,
                   extras->>'unique_key', (extras->>'expires_at')::timestamptz,
                   (extras->>'workflow_id')::uuid, extras->>'workflow_key',
                   coalesce((extras->>'has_parents')::boolean, false), extras->>'envelope',
                   (extras->>'batch_id')::uuid, extras->>'callbacks',
                   nullif((extras->>'is_template')::boolean, false), (extras->>'replay_of')::uuid, (extras->>'hop')::smallint, extras->>'group',
                   (extras->>'max_losses')::int, long_names(queue, job_type)
            from new
        ), live as (
            insert into jobs (
                project_id, id, queue, job_type, state, rank, run_at, max_attempts,
                timeout_seconds, labels, unfinished_parents, constraint_key, concurrency_key,
                concurrency_limit, unique_key, expires_at, children, batch_id, has_callbacks,
                has_command, group_key, group_place, waits_for_group, takes_turns, attempt,
                lease_id, worker_id, poll_id, loss_fails, claimed_at, lease_seconds,
                lease_expires_at
            )
            select project_id, id, queue, job_type,
                   case when lease_id is null then state else 'processing' end, rank, run_at,
                   max_attempts, timeout_seconds, labels, unfinished_parents,
                   (extras->>'constraint_key')::uuid, extras->>'concurrency_key',
                   (extras->>'concurrency_limit')::int, extras->>'unique_key',
                   (extras->>'expires_at')::timestamptz, coalesce((extras->>'children')::int, 0),
                   (extras->>'batch_id')::uuid,
                   case when extras->>'callbacks' is not null then true end, has_command,
                   extras->>'group', group_place, waits_for_group, takes_turns,
                   case when lease_id is null then 0 else 1 end, lease_id,
                   case when lease_id is not null then worker_id end,
                   case when lease_id is not null then poll_id end,
                   case when lease_id is not null then loss_fails end,
                   case when lease_id is not null then now() end,
                   case when lease_id is not null then lease_seconds end,
                   case when lease_id is not null
                       then now() + make_interval(secs => lease_seconds)
                   end
            from new
        ), counted as (
            insert into queue_deltas (
                project_id, queue, scheduled, active, enqueued, processing
            )
            select project_id, queue, count(*) filter (where state = 'scheduled'),
                   count(*) filter (where state = 'pending'), count(*), count(lease_id)
            from new
            group by project_id, queue
        )
        select id "id!: JobId", state "state!: StoredState", run_at "run_at!",
               waits_for_group is true and note_group(project_id, queue, extras->>'group')
                   "waits_for_group!",
               takes_turns is true and state = 'pending'
                   and note_turn(project_id, queue, extras->>'group') "has_noted_turn!",
               unfinished_parents - (waits_for_group is true)::int "unfinished_parents!",
               now() "created_at!", 0 "attempt!", max_attempts "max_attempts!", retry,
               is_queue_paused "is_queue_paused!", is_type_paused "is_type_paused!",
               lease_id is not null "is_leased!", lease_seconds "lease_seconds!", now() "claimed_at!"
        from new
        "#,
        &jobs.iter().map(|it| it.project_id.0).collect::<Vec<_>>(),
        &jobs.iter().map(|it| it.id.0).collect::<Vec<_>>(),
        &jobs.iter().map(|it| it.queue.as_str()).collect::<Vec<_>>() as &[&str],
        &jobs.iter().map(|it| it.job_type.as_str()).collect::<Vec<_>>() as &[&str],
        &jobs.iter().map(|it| it.rank).collect::<Vec<_>>(),
        &run_at as &[Option<DateTime<Utc>>],
        &delay_seconds,
        latest_run_at as &[Option<DateTime<Utc>>],
        &jobs.iter().map(|it| it.max_attempts).collect::<Vec<_>>() as &[Option<i32>],
        &jobs.iter().map(|it| it.timeout_seconds).collect::<Vec<_>>(),
        &jobs.iter().map(|it| it.payload.as_str()).collect::<Vec<_>>() as &[&str],
        &jobs.iter().map(|it| it.retry.as_ref()).collect::<Vec<_>>()
            as &[Option<&Json<RetryPolicy>>],
        &jobs.iter().map(|it| it.tags.as_ref()).collect::<Vec<_>>() as &[Option<&Json<_>>],
        limits::MAX_RUN_AT_SECONDS,
        &jobs.iter().map(|it| it.extras.as_deref().map(Json)).collect::<Vec<_>>()
            as &[Option<Json<&Extras>>],
        job::DEFAULT_MAX_ATTEMPTS,
        &leases.iter().map(|it| it.map(|it| it.worker_id)).collect::<Vec<_>>() as &[Option<&str>],
        &leases.iter().map(|it| it.and_then(|it| it.lease.seconds(None))).collect::<Vec<_>>()
            as &[Option<i32>],
        &leases.iter().map(|it| it.and_then(|it| it.poll_id)).collect::<Vec<_>>()
            as &[Option<Uuid>],
        &leases.iter().map(|it| it.map(|it| it.lease_id.0)).collect::<Vec<_>>()
            as &[Option<Uuid>],
        MIN_DEFAULT_LEASE_SECONDS,
        TIMEOUT_GRACE_SECONDS,
        alone,
        &leases.iter().map(|it| it.and_then(|it| it.loss_fails)).collect::<Vec<_>>()
            as &[Option<bool>],
    )
    .fetch_all(conn)
    .await
}
