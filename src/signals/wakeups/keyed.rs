//! Wake-ups by a key of a map: what changes for one worker, API key or queue wakes no waiters of
//! others.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use tokio::sync::Notify;

/// Keys without a waiter are dropped when this many are known, or twice as many as have one,
/// whichever is more.
const MIN_KNOWN: usize = 1_000;

/// A [`Notify`] for each key that has waiters.
#[derive(Debug)]
pub struct KeyedNotify<K>(Mutex<Known<K>>);

#[derive(Debug)]
struct Known<K> {
    of_key: HashMap<K, Weak<Notify>>,
    max: usize,
}

impl<K> Default for KeyedNotify<K> {
    fn default() -> Self {
        Self(Mutex::new(Known { of_key: HashMap::new(), max: MIN_KNOWN }))
    }
}

impl<K: Eq + Hash> KeyedNotify<K> {
    /// The notify of a key, which is forgotten once it is not kept: keep it while you wait.
    pub fn of(&self, key: K) -> Arc<Notify> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(notify) = known.of_key.get(&key).and_then(Weak::upgrade) {
            return notify;
        }
        if known.of_key.len() >= known.max {
            known.of_key.retain(|_, it| it.strong_count() > 0);
            known.max = MIN_KNOWN.max(known.of_key.len() * 2);
        }
        let notify = Arc::new(Notify::new());
        known.of_key.insert(key, Arc::downgrade(&notify));
        notify
    }

    /// Wakes those that wait for this key.
    pub fn wake(&self, key: &K) {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(notify) = known.of_key.get(key).and_then(Weak::upgrade) {
            notify.notify_waiters();
        }
    }
}

impl<K> KeyedNotify<K> {
    /// Wakes all that wait.
    pub fn wake_all(&self) {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.of_key.values().filter_map(Weak::upgrade).for_each(|it| it.notify_waiters());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn a_wake_up_reaches_the_waiters_of_its_key_only() {
        let notify = KeyedNotify::default();
        let (one, other) = (notify.of(1), notify.of(2));
        assert!(Arc::ptr_eq(&one, &notify.of(1)));
        let mut ones = Box::pin(one.notified());
        let mut others = Box::pin(other.notified());
        assert!(ones.as_mut().now_or_never().is_none() && others.as_mut().now_or_never().is_none());
        notify.wake(&1);
        notify.wake(&3);
        assert!(ones.now_or_never().is_some() && others.as_mut().now_or_never().is_none());
        notify.wake_all();
        assert!(others.now_or_never().is_some());
    }

    #[test]
    fn keys_without_a_waiter_are_forgotten() {
        let notify = KeyedNotify::default();
        let kept = notify.of(0);
        for key in 1..3_000 {
            drop(notify.of(key));
        }
        assert!(notify.0.lock().expect("a lock").of_key.len() <= MIN_KNOWN);
        assert!(Arc::ptr_eq(&kept, &notify.of(0)));
    }
}
