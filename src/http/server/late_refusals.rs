//! While a node refuses many calls, it answers refusals late: a client that repeats them without a
//! pause costs little then, and its neighbours notice less. Only those of projects and addresses
//! with more than a few a second: others are answered at once.

use std::{sync::Arc, time::Duration};

use fencepost_domain::{
    error::{Class, Error},
    ids::ProjectId,
};
use tokio::sync::Semaphore;

use fencepost_signals::limiter::{Limiter, Rate};

/// Refusals of one node above which some are late.
pub const CALM_REFUSALS: Rate = Rate { count: 400, window_seconds: 2 };
/// Refusals of one project, or of an address without one, that are never late.
pub const PROMPT_REFUSALS: Rate = Rate { count: 10, window_seconds: 5 };
/// How late a refusal is.
pub const LATENESS: Duration = Duration::from_secs(1);
/// Late refusals that one node holds at a time; more are answered at once.
const MAX_LATE: usize = 4_000;

/// Clients that are refused late, on this node.
#[derive(Clone)]
pub struct LateRefusals {
    limiter: Limiter,
    room: Arc<Semaphore>,
}

impl LateRefusals {
    /// None yet.
    #[must_use]
    pub fn new(limiter: Limiter) -> Self {
        Self { limiter, room: Arc::new(Semaphore::new(MAX_LATE)) }
    }

    /// Waits, if this refusal should be late.
    pub async fn hold(&self, refusal: &Error, project: Option<ProjectId>, address: &str) {
        if !self.is_late(refusal, project, address) {
            return;
        }
        let Ok(_room) = self.room.try_acquire() else { return };
        tokio::time::sleep(LATENESS).await;
    }

    fn is_late(&self, refusal: &Error, project: Option<ProjectId>, address: &str) -> bool {
        if !matches!(refusal.class(), Class::Unauthorized | Class::Limited) {
            return false;
        }
        let name = match project {
            Some(project) => format!("refusals:p{}", project.0),
            None => format!("refusals:{address}"),
        };
        // Both count each refusal.
        let is_calm = self.limiter.count_here("refusals".to_owned(), CALM_REFUSALS).is_none();
        let is_rare = self.limiter.count_here(name, PROMPT_REFUSALS).is_none();
        !is_calm && !is_rare
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    use fencepost_signals::redis_bus::{Bus, DEFAULT_BUDGET};

    #[test]
    fn a_refusal_is_late_if_its_client_gets_many_and_so_does_the_node() {
        let bus = Bus::new(None, Uuid::nil(), DEFAULT_BUDGET).expect("a bus");
        let late = LateRefusals::new(Limiter::new(bus));
        let refused = |address: &str| late.is_late(&Error::Unauthorized, None, address);
        for _ in 0..CALM_REFUSALS.count {
            assert!(!refused("many"), "the node is calm");
        }
        // The limits grow meanwhile.
        assert!((0..CALM_REFUSALS.count).any(|_| refused("many")), "none was late");
        assert!(!refused("few"));
        assert!(!late.is_late(&Error::JobNotFound, None, "many"));
    }
}
