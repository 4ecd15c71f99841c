//! Keys with which polls are parked: each is looked up once for all of its polls, and they are
//! woken only when something about it has changed.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use tokio::sync::watch;

use super::{CREDENTIAL_TTL, Credentials, KeyGrant, lock};
use crate::accounts::key::SecretHash;

/// What a key may do now; none: nothing.
type Standing = Option<Arc<KeyGrant>>;

/// The keys that are watched on this node: at most as many as there are parked polls.
#[derive(Debug, Default)]
pub(super) struct WatchedKeys(Mutex<HashMap<SecretHash, watch::Sender<Standing>>>);

/// A key while a poll is parked.
pub struct WatchedKey {
    states: watch::Receiver<Standing>,
    /// Whether it has changed since its poll was let in.
    is_news: bool,
}

impl WatchedKey {
    /// Resolves when the key should be checked again. May be dropped at any point.
    pub async fn changed(&mut self) {
        if std::mem::take(&mut self.is_news) {
            return;
        }
        if self.states.changed().await.is_err() {
            // Its task has failed: as often as without one.
            tokio::time::sleep(CREDENTIAL_TTL).await;
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
        let mut states = known.subscribe();
        let is_news = states.borrow_and_update().as_deref() != Some(&**grant);
        return WatchedKey { states, is_news };
    }
    let (sender, states) = watch::channel(Some(Arc::clone(grant)));
    watched.insert(hash, sender.clone());
    drop(watched);
    let credentials = Arc::clone(credentials);
    tokio::spawn(follow(Following { credentials, hash, states: sender }));
    WatchedKey { states, is_news: false }
}

/// The task of a watched key. If it fails, its polls check for themselves.
struct Following {
    credentials: Arc<Credentials>,
    hash: SecretHash,
    states: watch::Sender<Standing>,
}

impl Drop for Following {
    fn drop(&mut self) {
        let mut watched = lock(&self.credentials.watched_keys.0);
        if watched.get(&self.hash).is_some_and(|it| it.same_channel(&self.states)) {
            watched.remove(&self.hash);
        }
    }
}

/// Looks a key up until no poll is parked with it.
async fn follow(following: Following) {
    let Following { credentials, hash, states } = &following;
    loop {
        credentials.until_recheck(Some(*hash)).await;
        // A database that does not answer changes nothing.
        if let Ok(now) = credentials.key(*hash).await {
            states.send_if_modified(|last| {
                let is_changed = *last != now;
                *last = now;
                is_changed
            });
        }
        let mut watched = lock(&credentials.watched_keys.0);
        if states.receiver_count() == 0 {
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
        let (states, receiver) = watch::channel(None);
        drop(states);
        let mut key = WatchedKey { states: receiver, is_news: true };
        key.changed().await;
        let checked = tokio::time::timeout(CREDENTIAL_TTL * 2, key.changed());
        assert!(checked.await.is_ok());
    }
}
