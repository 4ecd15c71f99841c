//! Keys with which polls are parked or streams are open: each is looked up once for all of them,
//! and they are woken only when something about it has changed.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use tokio::sync::watch;

use super::{CREDENTIAL_TTL, Credentials, KeyGrant, lock};
use crate::accounts::key::SecretHash;

/// The grant of a key now; none: it has none any more.
type CurrentGrant = Option<Arc<KeyGrant>>;

/// The keys that are watched on this node: at most as many as there are parked polls and streams,
/// or were within the last seconds.
#[derive(Debug, Default)]
pub(super) struct WatchedKeys(Mutex<HashMap<SecretHash, watch::Sender<CurrentGrant>>>);

/// A key while a poll is parked, or a stream is open.
pub struct WatchedKey {
    grants: watch::Receiver<CurrentGrant>,
    /// Whether it has changed since it was let in.
    has_changed: bool,
    /// A change was published. Its check may have got no answer, so it is repeated.
    must_repeat: bool,
}

impl WatchedKey {
    /// Resolves when the key should be checked again. May be dropped at any point.
    pub async fn changed(&mut self) {
        if std::mem::take(&mut self.has_changed) {
            self.must_repeat = true;
            return;
        }
        let changed = async {
            if self.grants.changed().await.is_err() {
                // Its task has failed: as often as without one.
                tokio::time::sleep(CREDENTIAL_TTL).await;
            }
        };
        if self.must_repeat {
            let _ = tokio::time::timeout(CREDENTIAL_TTL, changed).await;
        } else {
            changed.await;
            self.must_repeat = true;
        }
    }
}

/// Watches a key that was let in with this grant.
pub fn watch_key(
    credentials: &Arc<Credentials>,
    hash: SecretHash,
    grant: &Arc<KeyGrant>,
) -> WatchedKey {
    let mut watched = lock(&credentials.watched_keys.0);
    if let Some(known) = watched.get(&hash) {
        let mut grants = known.subscribe();
        let has_changed = grants.borrow_and_update().as_deref() != Some(&**grant);
        return WatchedKey { grants, has_changed, must_repeat: false };
    }
    let (sender, grants) = watch::channel(Some(Arc::clone(grant)));
    watched.insert(hash, sender.clone());
    drop(watched);
    let credentials = Arc::clone(credentials);
    tokio::spawn(follow(Following { credentials, hash, grants: sender }));
    WatchedKey { grants, has_changed: false, must_repeat: false }
}

/// The task of a watched key. If it fails, its polls check for themselves.
struct Following {
    credentials: Arc<Credentials>,
    hash: SecretHash,
    grants: watch::Sender<CurrentGrant>,
}

impl Drop for Following {
    fn drop(&mut self) {
        let mut watched = lock(&self.credentials.watched_keys.0);
        if watched.get(&self.hash).is_some_and(|it| it.same_channel(&self.grants)) {
            watched.remove(&self.hash);
        }
    }
}

/// Looks a key up until no poll is parked with it.
async fn follow(following: Following) {
    let Following { credentials, hash, grants } = &following;
    loop {
        credentials.until_recheck(Some(*hash)).await;
        // A database that does not answer changes nothing.
        if let Ok(now) = credentials.key(*hash).await {
            grants.send_if_modified(|last| {
                let is_changed = *last != now;
                *last = now;
                is_changed
            });
        }
        let mut watched = lock(&credentials.watched_keys.0);
        if grants.receiver_count() == 0 {
            watched.remove(hash);
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn polls_check_for_themselves_when_the_task_is_gone() {
        let (grants, receiver) = watch::channel(None);
        drop(grants);
        let mut key = WatchedKey { grants: receiver, has_changed: true, must_repeat: false };
        key.changed().await;
        let checked = tokio::time::timeout(CREDENTIAL_TTL * 2, key.changed());
        assert!(checked.await.is_ok());
    }

    #[tokio::test]
    async fn a_change_is_checked_until_the_poll_ends_because_a_check_may_get_no_answer() {
        let (grants, receiver) = watch::channel(None);
        let mut key = WatchedKey { grants: receiver, has_changed: false, must_repeat: false };
        let unchanged = tokio::time::timeout(CREDENTIAL_TTL * 2, key.changed());
        assert!(unchanged.await.is_err(), "there was none");
        grants.send_replace(None);
        key.changed().await;
        let again = tokio::time::timeout(CREDENTIAL_TTL * 2, key.changed());
        assert!(again.await.is_ok(), "without a further change");
    }
}
