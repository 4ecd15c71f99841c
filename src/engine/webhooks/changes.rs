//! Changes of endpoints and pushes: a node answers the request for one when its own loop has read
//! it. Other nodes get a hint, and read endpoints and pushes every two seconds anyway.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use fencepost_signals::wakeups::Wake;
use tokio::{sync::watch, time::timeout};

/// An answer waits for this time until its node has read the change. The change is stored already.
const REFRESH_TIMEOUT: Duration = Duration::from_secs(1);

/// Changes within this time share a refresh, which reads those of all projects.
const MIN_GATHERING: Duration = Duration::from_millis(20);
/// Changes share a refresh within this many times the duration of the last one, too: refreshes
/// leave the database most of its time, however many targets there are, and however often they
/// change.
const GATHERED_REFRESHES: u32 = 4;
/// Changes wait no longer than this for a refresh: a deleted target is sent jobs until then.
const MAX_GATHERING: Duration = Duration::from_secs(2);

/// Changes made on this node, of endpoints or of pushes, and which of them its loop has read.
#[derive(Debug)]
pub struct TargetChanges {
    /// Number of changes made on this node.
    made: AtomicU64,
    /// Number of changes that a refresh has read; none while no loop refreshes.
    read: watch::Sender<Option<u64>>,
    /// Duration of the last refresh.
    took: Mutex<Duration>,
}

impl Default for TargetChanges {
    fn default() -> Self {
        let took = Mutex::default();
        Self { made: AtomicU64::new(0), read: watch::Sender::new(None), took }
    }
}

/// A refresh that has begun.
#[derive(Debug)]
pub struct Refresh<'a> {
    of: &'a TargetChanges,
    made: u64,
    began: Instant,
}

impl TargetChanges {
    /// For how long changes are gathered before the next refresh.
    pub fn gathering(&self) -> Duration {
        let took = *self.took.lock().unwrap_or_else(PoisonError::into_inner);
        (GATHERED_REFRESHES * took).clamp(MIN_GATHERING, MAX_GATHERING)
    }

    /// A refresh begins. It reads all changes made before.
    pub fn refresh(&self) -> Refresh<'_> {
        Refresh { of: self, made: self.made.load(Ordering::Acquire), began: Instant::now() }
    }

    /// A change was committed: waits until this node's loop has read it.
    pub async fn changed(&self, wake: &Wake) {
        let change = self.made.fetch_add(1, Ordering::AcqRel) + 1;
        wake.targets_changed();
        let mut read = self.read.subscribe();
        let is_read = read.wait_for(|it| it.is_none_or(|it| it >= change));
        // Late, it counts with the next refresh.
        let _ = timeout(REFRESH_TIMEOUT, is_read).await;
    }
}

impl Refresh<'_> {
    /// The refresh is complete.
    pub fn end(self) {
        *self.of.took.lock().unwrap_or_else(PoisonError::into_inner) = self.began.elapsed();
        self.of.read.send_replace(Some(self.made));
    }
}

/// Changes of the addresses that one node calls. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Targets {
    pub endpoints: Arc<TargetChanges>,
    pub pushes: Arc<TargetChanges>,
}

#[cfg(test)]
mod tests {
    use fencepost_signals::wakeups;
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn a_change_is_answered_once_a_refresh_that_began_after_it_has_ended() {
        let (wake, _hints) = wakeups::channel();
        let changes = TargetChanges::default();
        assert!(changes.changed(&wake).now_or_never().is_some(), "nothing refreshes here");
        changes.refresh().end();
        let early = changes.refresh();
        let mut changed = Box::pin(changes.changed(&wake));
        assert!((&mut changed).now_or_never().is_none());
        early.end();
        assert!((&mut changed).now_or_never().is_none(), "it began before the change");
        changes.refresh().end();
        assert!(changed.now_or_never().is_some());
    }
}
