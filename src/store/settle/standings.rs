//! Why a fence did not match: the state of its job, and the answer recorded for its attempt.

use chrono::{DateTime, Utc};
use fencepost_domain::{
    ids::{JobId, JobKey, LeaseId, ProjectId},
    job::{AttemptOutcome, StoredState},
    lease::{Fence, Holder, Standing},
};
use sqlx::PgConnection;
use uuid::Uuid;

use super::{settle_success::FenceColumns, uncounted::Uncounted};

/// A job after a refused ack: its state, and the answer recorded for the attempt that the fence
/// names.
#[derive(Debug, Clone)]
pub struct SettledAttempt {
    pub standing: Standing,
    /// True if the job is live, and [`succeed`](super::settle_success::succeed) leaves it alone: it
    /// has children, callbacks or a batch.
    pub has_follow_ups: bool,
    /// Why a recorded release does not count as a claim; none: it does, or it is no release.
    pub uncounted: Option<Uncounted>,
    /// When a recorded failure or release was to run again.
    pub retry_at: Option<DateTime<Utc>>,
    /// Children that a recorded success activated.
    pub children_activated: Option<i32>,
}

/// Reads jobs to explain why their fences did not match. Jobs that do not exist are left out.
///
/// No job may appear twice in `fences`.
pub async fn find_standings<'a>(
    conn: &mut PgConnection,
    fences: impl Iterator<Item = (JobKey, &'a Fence)> + Clone,
) -> sqlx::Result<Vec<(JobKey, SettledAttempt)>> {
    let fences = FenceColumns::of(fences);
    let rows = sqlx::query_as!(
        StandingRow,
        r#"
        select sought.project_id "project_id!: ProjectId", sought.id "id!: JobId",
               coalesce(live.state, ended.state) "state!: StoredState",
               coalesce(live.attempt, ended.attempt) "attempt!",
               live.children > 0 or live.batch_id is not null or live.has_callbacks is true "has_follow_ups?",
               live.worker_id "live_worker_id?",
               live.lease_id "live_lease_id?: LeaseId",
               live.lease_expires_at < now() "live_expired?",
               ended.state "ended_state?: StoredState",
               ended.worker_id "ended_worker_id?",
               ended.lease_id "ended_lease_id?: LeaseId",
               ended.children_activated "children_activated?",
               past.attempt "past_attempt?",
               past.worker_id "past_worker_id?",
               past.lease_id "past_lease_id?: LeaseId",
               past.outcome "past_outcome?: AttemptOutcome",
               past.error_kind "past_error_kind?",
               past.retry_at "past_retry_at?"
        from unnest($1::int[], $2::uuid[], $3::int[], $4::uuid[])
            as sought(project_id, id, attempt, lease_id)
        -- Lateral, so that each is read by its key.
        left join lateral (
            select * from jobs where project_id = sought.project_id and id = sought.id
        ) live on true
        left join lateral (
            select * from finished_jobs where project_id = sought.project_id and id = sought.id
        ) ended on true
        left join lateral (
            select attempt, worker_id, lease_id, outcome, retry_at, error_kind
            from attempts
            where project_id = sought.project_id
                and job_id = sought.id
                and (attempt = sought.attempt or lease_id = sought.lease_id)
            order by attempt desc
            limit 1
        ) past on true
        where live.id is not null or ended.id is not null
        "#,
        &fences.project_id,
        &fences.job_id,
        &fences.attempt as &[Option<i32>],
        &fences.lease_id as &[Option<Uuid>],
    )
    .fetch_all(conn)
    .await?;
    Ok(rows.into_iter().map(|it| (it.key(), it.settled())).collect())
}

/// A job, live or ended, and the attempt that a fence names.
struct StandingRow {
    project_id: ProjectId,
    id: JobId,
    state: StoredState,
    attempt: i32,
    has_follow_ups: Option<bool>,
    live_worker_id: Option<String>,
    live_lease_id: Option<LeaseId>,
    live_expired: Option<bool>,
    ended_state: Option<StoredState>,
    ended_worker_id: Option<String>,
    ended_lease_id: Option<LeaseId>,
    children_activated: Option<i32>,
    past_attempt: Option<i32>,
    past_worker_id: Option<String>,
    past_lease_id: Option<LeaseId>,
    past_outcome: Option<AttemptOutcome>,
    past_error_kind: Option<String>,
    past_retry_at: Option<DateTime<Utc>>,
}

impl StandingRow {
    fn key(&self) -> JobKey {
        JobKey { project_id: self.project_id, id: self.id }
    }

    fn settled(self) -> SettledAttempt {
        let holder =
            |worker_id: Option<String>, attempt: Option<i32>, lease_id: Option<LeaseId>| {
                Some(Holder { worker_id: worker_id?, attempt: attempt?, lease_id: lease_id? })
            };
        let running = holder(self.live_worker_id, Some(self.attempt), self.live_lease_id);
        let succeeded = holder(self.ended_worker_id, Some(self.attempt), self.ended_lease_id)
            .filter(|_| self.ended_state == Some(StoredState::Succeeded))
            .map(|it| (it, AttemptOutcome::Succeeded));
        let past = holder(self.past_worker_id, self.past_attempt, self.past_lease_id)
            .zip(self.past_outcome);
        SettledAttempt {
            standing: Standing {
                state: self.state.public(),
                attempt: self.attempt,
                running: running.map(|it| (it, self.live_expired.unwrap_or(false))),
                recorded: past.or(succeeded),
            },
            has_follow_ups: self.has_follow_ups.unwrap_or(false),
            uncounted: self
                .past_outcome
                .and_then(|outcome| Uncounted::of(outcome, self.past_error_kind.as_deref())),
            retry_at: self.past_retry_at,
            children_activated: self.children_activated,
        }
    }
}
