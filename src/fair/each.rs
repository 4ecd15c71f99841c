//! The same number of permits for each project, or for each of anything else that has an id.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use fencepost_domain::ids::ProjectId;

/// Above this many known keys, those without a permit in use are removed.
const MAX_KNOWN: usize = 1_000;

/// The same number of permits for each project. Requests for more wait in their order.
pub type PerProject = Each<ProjectId>;

/// The same number of permits for each key. Requests for more wait in their order.
#[derive(Debug)]
pub struct Each<Key> {
    permits: usize,
    of_key: Mutex<HashMap<Key, Weak<Semaphore>>>,
}

impl<Key: Copy + Eq + Hash> Each<Key> {
    #[must_use]
    pub fn new(permits: usize) -> Self {
        Self { permits, of_key: Mutex::default() }
    }

    /// Waits for this many permits of the key. More than there are would be awaited for ever.
    pub async fn take(&self, key: Key, permits: u32) -> OwnedSemaphorePermit {
        take(self.of(key), permits).await
    }

    /// Number of the key's permits in use.
    pub(crate) fn used(&self, key: Key) -> usize {
        self.permits - self.of(key).available_permits()
    }

    /// Waits until the key has a free permit.
    pub async fn until_free(&self, key: Key) {
        drop(take(self.of(key), 1).await);
    }

    /// Number of the key's free permits.
    pub fn free(&self, key: Key) -> usize {
        self.of(key).available_permits()
    }

    /// This many permits of the key, if they are free.
    pub fn try_take(&self, key: Key, permits: u32) -> Option<OwnedSemaphorePermit> {
        self.of(key).try_acquire_many_owned(permits).ok()
    }

    fn of(&self, key: Key) -> Arc<Semaphore> {
        let mut known = self.of_key.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(semaphore) = known.get(&key).and_then(Weak::upgrade) {
            return semaphore;
        }
        if known.len() >= MAX_KNOWN {
            known.retain(|_, it| it.strong_count() > 0);
        }
        let semaphore = Arc::new(Semaphore::new(self.permits));
        known.insert(key, Arc::downgrade(&semaphore));
        semaphore
    }
}

/// Waits for this many permits of a semaphore: for ever, if it has fewer in all.
pub(crate) async fn take(from: Arc<Semaphore>, permits: u32) -> OwnedSemaphorePermit {
    from.acquire_many_owned(permits).await.unwrap_or_else(|_| unreachable!("it is never closed"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn permits_of_one_project_run_out_for_that_project_only() {
        let per_project = PerProject::new(1_000);
        let take = |id, permits| per_project.take(ProjectId(id), permits).now_or_never();
        let held: Vec<_> = [500, 500].into_iter().filter_map(|it| take(1, it)).collect();
        assert_eq!(held.len(), 2);
        assert!(take(1, 1).is_none() && take(2, 1_000).is_some());
        drop(held);
        assert!(take(1, 1_000).is_some());
    }

    #[test]
    fn keys_that_hold_nothing_are_forgotten() {
        let per_project = PerProject::new(2);
        let take = || per_project.take(ProjectId(0), 1).now_or_never();
        let kept = [take(), take()];
        assert!(kept.iter().all(Option::is_some));
        for id in 1..=3_000 {
            assert!(per_project.take(ProjectId(id), 1).now_or_never().is_some());
        }
        assert!(per_project.of_key.lock().expect("a lock").len() <= MAX_KNOWN);
        assert!(take().is_none(), "its permits are kept");
        drop(kept);
    }
}
