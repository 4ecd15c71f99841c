//! Changes of endpoints and pushes: the node that answers one has seen it before the answer. Other
//! nodes are hinted, and look every two seconds anyway.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use fencepost_signals::wakeups::Wake;
use tokio::{sync::watch, time::timeout};

/// How long an answer waits for its node to see the change. The change itself counts already.
const SEEN_TIMEOUT: Duration = Duration::from_secs(1);

/// One node's view of what is called: endpoints, or queues that are pushed.
#[derive(Debug)]
pub struct Seen {
    /// Changes that were made here.
    made: AtomicU64,
    /// Those of them that a refresh has seen; none while nothing refreshes.
    seen: watch::Sender<Option<u64>>,
}

impl Default for Seen {
    fn default() -> Self {
        Self { made: AtomicU64::new(0), seen: watch::Sender::new(None) }
    }
}

/// A refresh that has begun.
#[derive(Debug)]
pub struct Refresh<'a> {
    of: &'a Seen,
    made: u64,
}

impl Seen {
    /// A refresh begins. What was changed before is seen by it.
    pub fn refresh(&self) -> Refresh<'_> {
        Refresh { of: self, made: self.made.load(Ordering::Acquire) }
    }

    /// A change was committed: waits until this node has seen it.
    pub async fn changed(&self, wake: &Wake) {
        let change = self.made.fetch_add(1, Ordering::AcqRel) + 1;
        wake.targets_changed();
        let mut seen = self.seen.subscribe();
        let is_seen = seen.wait_for(|it| it.is_none_or(|it| it >= change));
        // Late, it counts with the next refresh.
        let _ = timeout(SEEN_TIMEOUT, is_seen).await;
    }
}

impl Refresh<'_> {
    /// The refresh is complete.
    pub fn end(self) {
        self.of.seen.send_replace(Some(self.made));
    }
}

/// The views of one node. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Changes {
    pub endpoints: Arc<Seen>,
    pub pushes: Arc<Seen>,
}

#[cfg(test)]
mod tests {
    use fencepost_signals::wakeups;
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn a_change_is_answered_once_a_refresh_that_began_after_it_has_ended() {
        let (wake, _hints) = wakeups::channel();
        let seen = Seen::default();
        assert!(seen.changed(&wake).now_or_never().is_some(), "nothing refreshes here");
        seen.refresh().end();
        let early = seen.refresh();
        let mut changed = Box::pin(seen.changed(&wake));
        assert!((&mut changed).now_or_never().is_none());
        early.end();
        assert!((&mut changed).now_or_never().is_none(), "it began before the change");
        seen.refresh().end();
        assert!(changed.now_or_never().is_some());
    }
}
