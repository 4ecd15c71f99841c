//! Claims from the table in memory: a claim looks at one moment and answers at a later one.

use std::sync::Arc;

use fencepost_domain::ids::{LeaseId, ProjectId};
use tokio::{sync::mpsc, task::yield_now};
use uuid::Uuid;

use super::{
    dispatched::DispatchedJob,
    lanes::{Claimed, PlannedClaim},
};
use crate::store::{
    claims::LeasedJob,
    connection::pools::{Connection, Pool},
};

pub(crate) struct Claim {
    claims: Vec<PlannedClaim>,
    pool: Pool,
}

#[derive(Default)]
pub(crate) struct CompletedClaims {
    pub conn: Option<Connection>,
    pub completed: Vec<CompletedClaim>,
}

pub(crate) struct CompletedClaim {
    pub claim: PlannedClaim,
    pub outcome: ClaimOutcome,
}

pub(crate) enum ClaimOutcome {
    Found { jobs: Vec<(usize, DispatchedJob)>, finding: Claimed },
    Refused,
    InDoubt(Vec<LeaseId>),
}

impl ClaimOutcome {
    pub fn finding(&self) -> Option<Claimed> {
        match self {
            Self::Found { finding, .. } => Some(*finding),
            Self::Refused | Self::InDoubt(_) => None,
        }
    }
}

pub(crate) type Landing = mpsc::UnboundedSender<Vec<CompletedClaim>>;

impl Claim {
    pub fn new(claims: Vec<PlannedClaim>, pool: Pool, _: Option<Connection>) -> Self {
        Self { claims, pool }
    }

    pub async fn run(self, _: Landing) -> CompletedClaims {
        yield_now().await;
        let completed = self.claims.into_iter().map(|it| claim(&self.pool, it)).collect();
        yield_now().await;
        CompletedClaims { conn: Some(Connection), completed }
    }
}

fn claim(pool: &Pool, claim: PlannedClaim) -> CompletedClaim {
    let mut jobs = Vec::new();
    for (slot, (_, spec)) in claim.slots.iter().enumerate() {
        let lease_id = LeaseId(Uuid::new_v4());
        let Some(job) = pool.table.lease((claim.project_id, &claim.queue), lease_id) else { break };
        jobs.push((slot, DispatchedJob::new(job, Arc::clone(&spec.worker_id))));
    }
    let finding = Claimed {
        is_short: jobs.len() < claim.slots.len(),
        was_contended: false,
        last: jobs.iter().map(|it| it.1.job.claim_key()).max(),
        has_constrained: None,
        pause_for: None,
    };
    CompletedClaim { claim, outcome: ClaimOutcome::Found { jobs, finding } }
}

/// The fallback query finds nothing here: every job must be found by its hint.
pub(crate) async fn find_queues_with_work(
    _: Pool,
    _: Vec<(ProjectId, Arc<str>)>,
) -> Vec<(ProjectId, Arc<str>)> {
    Vec::new()
}

pub(super) fn count(_: &LeasedJob) {}

pub(super) fn record_span(_: &LeasedJob) {}
