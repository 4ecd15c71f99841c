//! A leased job, as statements return it. Its columns are listed here alone: a further one is a
//! field of [`LeasedJob`] and a line in each of the lists below.

use chrono::{DateTime, TimeDelta, Utc};
use fencepost_domain::ids::{JobId, LeaseId, ProjectId, WorkflowId};
use uuid::Uuid;

/// A position in the claim order of one queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClaimKey {
    /// Minus the priority.
    pub rank: i16,
    pub run_at: DateTime<Utc>,
}

impl ClaimKey {
    /// Before every job.
    pub const ZERO: Self = Self { rank: i16::MIN, run_at: DateTime::UNIX_EPOCH };
}

/// A leased job.
#[derive(Debug, Clone)]
pub struct LeasedJob {
    /// The index of its lease request over all claims, from 0.
    pub slot: Option<i64>,
    pub project_id: ProjectId,
    pub id: JobId,
    pub queue: String,
    pub job_type: String,
    /// Minus the priority.
    pub rank: i16,
    pub run_at: DateTime<Utc>,
    pub created_at: DateTime<Utc>,
    /// Null: it has been ready since the later of these two.
    pub ready_at: Option<DateTime<Utc>>,
    /// The attempt, counted from 1.
    pub attempt: i32,
    /// Failures before this attempt.
    pub failures: i32,
    /// Failures after which it is dead-lettered.
    pub max_attempts: i32,
    /// Timeout of an attempt, in seconds.
    pub timeout_seconds: i32,
    pub lease_id: LeaseId,
    /// The lease's length, in seconds.
    pub lease_seconds: i32,
    pub claimed_at: DateTime<Utc>,
    /// The JSON as it was sent.
    pub payload: String,
    /// Null: no tags.
    pub tags: Option<serde_json::Value>,
    /// Its trace context.
    pub traceparent: Option<String>,
    /// Whether it was stored with parents, whose results are delivered with it.
    pub has_parents: bool,
    /// Labels that its worker must have, sorted.
    pub labels: Option<Vec<String>>,
    /// None: the default policy.
    pub retry: Option<serde_json::Value>,
    /// The workflow it belongs to.
    pub workflow_id: Option<WorkflowId>,
    pub workflow_key: Option<String>,
    /// Data that the adapter which stored it keeps beside the payload.
    pub envelope: Option<String>,
    /// Its group within the queue.
    pub group: Option<String>,
}

impl LeasedJob {
    /// When it became ready to run.
    #[must_use]
    pub fn ready_at(&self) -> DateTime<Utc> {
        let ready_at = self.run_at.max(self.created_at);
        self.ready_at.map_or(ready_at, |it| it.max(ready_at))
    }

    /// From when it could first run to its first lease; none for a later attempt.
    #[must_use]
    pub fn waited(&self) -> Option<TimeDelta> {
        (self.attempt == 1).then(|| self.claimed_at - self.ready_at())
    }

    /// Its position in the claim order.
    #[must_use]
    pub fn claim_key(&self) -> ClaimKey {
        ClaimKey { rank: self.rank, run_at: self.run_at }
    }
}

/// A checked statement that returns leased jobs: its text before the columns of `jobs` and
/// `job_bodies body`, and after them.
macro_rules! query_leased {
    ($before:literal + LEASED + $after:literal, $($argument:expr),+ $(,)?) => {
        sqlx::query_as!(
            LeasedJob,
            $before
                + r#"
            jobs.project_id "project_id: ProjectId",
            jobs.id "id: JobId",
            jobs.queue,
            jobs.job_type,
            jobs.rank,
            jobs.run_at,
            jobs.created_at,
            jobs.ready_at,
            jobs.attempt,
            jobs.failures,
            jobs.max_attempts,
            jobs.timeout_seconds,
            jobs.lease_id "lease_id!: LeaseId",
            jobs.lease_seconds "lease_seconds!",
            jobs.claimed_at "claimed_at!",
            jobs.labels,
            body.payload,
            body.tags,
            body.traceparent,
            body.has_parents,
            body.retry,
            body.workflow_id "workflow_id: WorkflowId",
            body.workflow_key,
            body.envelope,
            body.group_key as group
            "# + $after,
            $($argument),+
        )
    };
}
pub(super) use query_leased;

/// What limits the groups of a queue; none: there is no `room_of_others`, and the lists are empty.
#[derive(Debug, Clone, Default)]
pub struct GroupLimits {
    /// Groups of which no job may start.
    pub full: Vec<String>,
    /// Groups of which some may.
    pub open: Vec<String>,
    /// How many jobs of each of these may start.
    pub room: Vec<i64>,
    /// How many jobs of each other group may start; none: all.
    pub room_of_others: Option<i64>,
}

/// Limits of one claim of a queue.
#[derive(Debug, Clone, Copy)]
pub struct ClaimLimits<'a> {
    pub constraint_keys: &'a [Uuid],
    /// For jobs without a constraint key: only these types; none: all.
    pub job_types: Option<&'a [String]>,
    /// Jobs of the queue that may run at a time.
    pub max_concurrency: Option<i32>,
    pub groups: &'a GroupLimits,
    /// Minimum lease if the poll sets none.
    pub default_lease_seconds: Option<i32>,
    pub max_jobs: i64,
}

/// A checked statement that leases the jobs of `best`. Its text ends within the parenthesis of
/// `best as materialized (`, which this closes. It may use the claim's values, `$1` to `$16` as
/// they are bound here; its own follow. Each row also has the number of selected jobs, so there is
/// one even if none was leased.
macro_rules! query_leased_of_best {
    ($best:literal, $claim:expr, $limits:expr, $columns:expr $(, $argument:expr)* $(,)?) => {
        sqlx::query!(
            $best
                + r#"
        ), held as materialized (
            select jobs.project_id, jobs.id, jobs.rank, jobs.run_at
            from best
            join jobs on jobs.project_id = $1 and jobs.id = best.id
            where jobs.state = best.state and jobs.queue = $2
            order by jobs.id
            limit 250
            for update of jobs skip locked
        ), due as materialized (
            select project_id, id, row_number() over (order by rank, run_at, id) as place
            from held
        ), slot as materialized (
            select number, place, worker_id, lease_seconds, poll_id, lease_id, loss_fails
            from unnest(
                $3::bigint[], $4::text[], $5::int[], $6::uuid[], $7::uuid[], $16::boolean[]
            ) with ordinality as sent(
                place, worker_id, lease_seconds, poll_id, lease_id, loss_fails, number
            )
        ), leased as (
            update jobs
            set state = 'processing',
                attempt = jobs.attempt + 1,
                lease_id = slot.lease_id,
                worker_id = slot.worker_id,
                poll_id = slot.poll_id,
                loss_fails = slot.loss_fails,
                progress = null,
                holds_slot = jobs.concurrency_key is not null or $11::int is not null,
                claimed_at = statement_timestamp(),
                lease_seconds = least(
                    coalesce(
                        slot.lease_seconds, greatest($8::int, $10::int, jobs.timeout_seconds / 2)
                    ),
                    jobs.timeout_seconds + $9::int
                ),
                lease_expires_at = statement_timestamp() + make_interval(secs => least(
                    coalesce(
                        slot.lease_seconds, greatest($8::int, $10::int, jobs.timeout_seconds / 2)
                    ),
                    jobs.timeout_seconds + $9::int
                ))
            from due
            join slot on slot.place = due.place
            join job_bodies body on body.project_id = due.project_id and body.job_id = due.id
            where jobs.project_id = due.project_id and jobs.id = due.id
            returning
                slot.number - 1 as slot,
                jobs.project_id,
                jobs.id,
                jobs.queue,
                jobs.job_type,
                jobs.rank,
                jobs.run_at,
                jobs.created_at,
                jobs.ready_at,
                jobs.attempt,
                jobs.failures,
                jobs.max_attempts,
                jobs.timeout_seconds,
                jobs.lease_id,
                jobs.lease_seconds,
                jobs.claimed_at,
                jobs.labels,
                body.payload,
                body.tags,
                body.traceparent,
                body.has_parents,
                body.retry,
                body.workflow_id,
                body.workflow_key,
                body.envelope,
                body.group_key
        ), counted as (
            insert into queue_deltas (project_id, queue, processing)
            select project_id, queue, count(*) from leased group by project_id, queue
        )
        select
            chosen.count "chosen!",
            leased.slot "slot?",
            leased.project_id "project_id?: ProjectId",
            leased.id "id?: JobId",
            leased.queue "queue?",
            leased.job_type "job_type?",
            leased.rank "rank?",
            leased.run_at "run_at?",
            leased.created_at "created_at?",
            leased.ready_at "ready_at?",
            leased.attempt "attempt?",
            leased.failures "failures?",
            leased.max_attempts "max_attempts?",
            leased.timeout_seconds "timeout_seconds?",
            leased.lease_id "lease_id?: LeaseId",
            leased.lease_seconds "lease_seconds?",
            leased.claimed_at "claimed_at?",
            leased.labels "labels?",
            leased.payload "payload?",
            leased.tags "tags?",
            leased.traceparent "traceparent?",
            leased.has_parents "has_parents?",
            leased.retry "retry?",
            leased.workflow_id "workflow_id?: WorkflowId",
            leased.workflow_key "workflow_key?",
            leased.envelope "envelope?",
            leased.group_key "group?"
        from (select count(*) from best) chosen
        left join leased on true
        "#,
            $claim.project_id.0,
            $claim.queue,
            &$columns.slot_place,
            &$columns.slot_worker_id as &[&str],
            &$columns.slot_lease_seconds as &[Option<i32>],
            &$columns.slot_poll_id as &[Option<Uuid>],
            &$columns.slot_lease_id,
            MIN_DEFAULT_LEASE_SECONDS,
            TIMEOUT_GRACE_SECONDS,
            $limits.default_lease_seconds,
            $limits.max_concurrency,
            $claim.from.rank,
            $claim.from.run_at,
            $limits.max_jobs,
            $limits.job_types,
            &$columns.slot_loss_fails as &[Option<bool>]
            $(, $argument)*
        )
    };
}
pub(super) use query_leased_of_best;

/// The leased jobs of rows whose columns may all be null: such a row has the number of
/// selected jobs even if none was leased.
macro_rules! leased_jobs {
    ($rows:expr) => {
        $rows.into_iter().filter_map(|row| {
            Some(LeasedJob {
                slot: row.slot,
                project_id: row.project_id?,
                id: row.id?,
                queue: row.queue?,
                job_type: row.job_type?,
                rank: row.rank?,
                run_at: row.run_at?,
                created_at: row.created_at?,
                ready_at: row.ready_at,
                attempt: row.attempt?,
                failures: row.failures?,
                max_attempts: row.max_attempts?,
                timeout_seconds: row.timeout_seconds?,
                lease_id: row.lease_id?,
                lease_seconds: row.lease_seconds?,
                claimed_at: row.claimed_at?,
                payload: row.payload?,
                tags: row.tags,
                traceparent: row.traceparent,
                has_parents: row.has_parents?,
                labels: row.labels,
                retry: row.retry,
                workflow_id: row.workflow_id,
                workflow_key: row.workflow_key,
                envelope: row.envelope,
                group: row.group,
            })
        })
    };
}
pub(super) use leased_jobs;
