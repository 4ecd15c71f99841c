//! Connections of a pool that projects share.

use std::sync::Arc;

use fencepost_domain::ids::ProjectId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::each::{PerProject, take};

/// The shares of all projects in one pool: at most half of its connections each, and all together
/// all but one, which is left to what serves all projects. Further requests wait in their order,
/// without a connection.
#[derive(Debug)]
pub struct Shares {
    of_each: PerProject,
    of_all: Arc<Semaphore>,
}

/// The right to hold one connection, as long as it is kept.
#[derive(Debug)]
pub struct Share {
    _of_project: OwnedSemaphorePermit,
    _of_all: OwnedSemaphorePermit,
}

impl Shares {
    /// The shares of a pool with this many connections.
    #[must_use]
    pub fn of(connections: u32) -> Self {
        let connections = connections as usize;
        let of_all = Arc::new(Semaphore::new(connections.saturating_sub(1).max(1)));
        Self { of_each: PerProject::new((connections / 2).max(1)), of_all }
    }

    /// Waits until the project may take one more connection. The project's own share comes first:
    /// its waiting requests must not use up that of all.
    pub async fn take(&self, project_id: ProjectId) -> Share {
        Share {
            _of_project: self.of_each.take(project_id, 1).await,
            _of_all: take(Arc::clone(&self.of_all), 1).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn a_project_takes_at_most_half_and_leaves_the_rest_to_others() {
        let shares = Shares::of(5);
        let (greedy, other) = (ProjectId(1), ProjectId(2));
        let mut held: Vec<_> = (0..2).filter_map(|_| shares.take(greedy).now_or_never()).collect();
        assert_eq!(held.len(), 2);
        assert!(shares.take(greedy).now_or_never().is_none());
        assert!(shares.take(other).now_or_never().is_some());
        held.pop();
        assert!(shares.take(greedy).now_or_never().is_some());
    }

    #[test]
    fn all_projects_together_leave_one_connection() {
        let shares = Shares::of(4);
        let take = |id| shares.take(ProjectId(id)).now_or_never();
        let held: Vec<_> = [1, 1, 2].into_iter().filter_map(take).collect();
        assert_eq!(held.len(), 3);
        assert!(take(2).is_none() && take(3).is_none());
        drop(held);
        assert!(take(3).is_some());
    }
}
