//! A leased job, as statements return it. Its columns are listed here alone: a further one is a
//! field of [`LeasedJob`] and a line in each of the lists below.

use chrono::{DateTime, TimeDelta, Utc};
use fencepost_domain::ids::{JobId, LeaseId, ProjectId, WorkflowId};

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
    /// What the adapter that stored it keeps beside the payload.
    pub envelope: Option<String>,
}

impl LeasedJob {
    /// When it became ready to run.
    #[must_use]
    pub fn ready_at(&self) -> DateTime<Utc> {
        self.run_at.max(self.created_at)
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
            body.envelope
            "# + $after,
            $($argument),+
        )
    };
}
pub(super) use query_leased;

/// A checked statement that leases the jobs of `best` in its last part, `leased`: its text before
/// the columns. Each row also has the number of selected jobs, so there is one even if none was
/// leased.
macro_rules! query_leased_of_best {
    ($before:literal, $($argument:expr),+ $(,)?) => {
        sqlx::query!(
            $before
                + r#"
            returning
                slot.number - 1 as slot,
                jobs.project_id,
                jobs.id,
                jobs.queue,
                jobs.job_type,
                jobs.rank,
                jobs.run_at,
                jobs.created_at,
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
                body.envelope
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
            leased.envelope "envelope?"
        from (select count(*) from best) chosen
        left join leased on true
        "#,
            $($argument),+
        )
    };
}
pub(super) use query_leased_of_best;

/// The leased jobs of rows whose columns may all be null: such a row has the number of
/// selected jobs even if none was leased.
macro_rules! leased_jobs {
    ($rows:expr) => {
        $rows.into_iter().filter_map(|it| {
            Some(LeasedJob {
                slot: it.slot,
                project_id: it.project_id?,
                id: it.id?,
                queue: it.queue?,
                job_type: it.job_type?,
                rank: it.rank?,
                run_at: it.run_at?,
                created_at: it.created_at?,
                attempt: it.attempt?,
                failures: it.failures?,
                max_attempts: it.max_attempts?,
                timeout_seconds: it.timeout_seconds?,
                lease_id: it.lease_id?,
                lease_seconds: it.lease_seconds?,
                claimed_at: it.claimed_at?,
                payload: it.payload?,
                tags: it.tags,
                traceparent: it.traceparent,
                has_parents: it.has_parents?,
                labels: it.labels,
                retry: it.retry,
                workflow_id: it.workflow_id,
                workflow_key: it.workflow_key,
                envelope: it.envelope,
            })
        })
    };
}
pub(super) use leased_jobs;
