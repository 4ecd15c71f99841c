//! A table of jobs in memory, and connections to it. A change of it is one act, as a statement is.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use chrono::DateTime;
use fencepost_domain::ids::{JobId, JobKey, LeaseId, ProjectId};
use fencepost_store::claims::LeasedJob;
pub use fencepost_store::connection::pools::Kept;
use tokio::task::yield_now;

use crate::wakeups::Arrival;

/// The pools of a node.
pub struct Pools {
    pub claim: Pool,
    pub background: Pool,
}

/// Lends connections.
#[derive(Clone)]
pub struct Pool {
    pub table: Table,
}

impl Pool {
    pub async fn acquire(&self) -> sqlx::Result<Connection> {
        yield_now().await;
        Ok(Connection)
    }
}

/// A connection.
#[derive(Debug)]
pub struct Connection;

impl Kept for Connection {
    fn reuse(self) -> Option<Self> {
        Some(self)
    }
}

/// A job with its lease, if it has one.
struct Row {
    queue: (ProjectId, String),
    lease: Option<LeaseId>,
}

/// All jobs.
#[derive(Clone, Default)]
pub struct Table(Arc<Mutex<HashMap<JobId, Row>>>);

impl Table {
    pub const JOB_TYPE: &'static str = "t";

    fn rows(&self) -> MutexGuard<'_, HashMap<JobId, Row>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The hint of a job that has arrived.
    #[must_use]
    pub fn arrival((project_id, queue): (ProjectId, &str)) -> Arrival {
        Arrival {
            project_id,
            queue: queue.into(),
            job_type: Self::JOB_TYPE.into(),
            rank: 0,
            run_at: DateTime::UNIX_EPOCH,
            is_constrained: false,
        }
    }

    pub fn insert(&self, (project_id, queue): (ProjectId, &str), id: JobId) {
        let queue = (project_id, queue.to_owned());
        self.rows().insert(id, Row { queue, lease: None });
    }

    #[must_use]
    pub fn insert_leased(
        &self,
        (project_id, queue): (ProjectId, &str),
        id: JobId,
        lease_id: LeaseId,
    ) -> LeasedJob {
        let row = Row { queue: (project_id, queue.to_owned()), lease: Some(lease_id) };
        let leased = leased(id, &row, lease_id);
        self.rows().insert(id, row);
        leased
    }

    /// Leases the first job of a queue.
    #[must_use]
    pub fn lease(
        &self,
        (project_id, queue): (ProjectId, &str),
        lease_id: LeaseId,
    ) -> Option<LeasedJob> {
        let mut rows = self.rows();
        let is_free = |it: &Row| it.lease.is_none() && it.queue == (project_id, queue.to_owned());
        let first = rows.iter().filter(|it| is_free(it.1)).map(|it| *it.0).min()?;
        let row = rows.get_mut(&first)?;
        row.lease = Some(lease_id);
        Some(leased(first, row, lease_id))
    }

    /// Releases leases that still hold, and returns the hints of it.
    #[must_use]
    pub fn release(&self, leases: &[(JobKey, LeaseId)]) -> Vec<Arrival> {
        let mut rows = self.rows();
        let mut arrivals = Vec::new();
        for (key, lease_id) in leases {
            let row = rows.get_mut(&key.id).filter(|it| it.lease == Some(*lease_id));
            if let Some(row) = row {
                row.lease = None;
                arrivals.push(Self::arrival((row.queue.0, &row.queue.1)));
            }
        }
        arrivals
    }

    /// The job that has this lease.
    #[must_use]
    pub fn leased_with(&self, lease_id: LeaseId) -> Option<JobKey> {
        let rows = self.rows();
        let (id, row) = rows.iter().find(|it| it.1.lease == Some(lease_id))?;
        Some(JobKey { project_id: row.queue.0, id: *id })
    }

    /// Jobs without a lease.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.rows().values().filter(|it| it.lease.is_none()).count()
    }
}

fn leased(id: JobId, row: &Row, lease_id: LeaseId) -> LeasedJob {
    LeasedJob {
        slot: None,
        project_id: row.queue.0,
        id,
        queue: row.queue.1.clone(),
        job_type: Table::JOB_TYPE.to_owned(),
        rank: 0,
        run_at: DateTime::UNIX_EPOCH,
        created_at: DateTime::UNIX_EPOCH,
        ready_at: None,
        attempt: 1,
        failures: 0,
        max_attempts: 1,
        timeout_seconds: 60,
        lease_id,
        lease_seconds: 30,
        claimed_at: DateTime::UNIX_EPOCH,
        payload: "null".to_owned(),
        tags: None,
        traceparent: None,
        has_parents: false,
        labels: None,
        retry: None,
        workflow_id: None,
        workflow_key: None,
        envelope: None,
        group: None,
    }
}
