//! The targets that one node works for, as the database had them last.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use chrono::{DateTime, Utc};

use super::sender::{Sender, Settings, Target};

type Key<T> = <<T as Target>::Settings as Settings>::Key;

/// The targets of one kind.
pub(super) struct Targets<T: Target> {
    known: Mutex<HashMap<Key<T>, Known<T>>>,
}

enum Known<T> {
    Active(Arc<T>),
    /// It cannot be served with the settings of this time.
    Unusable(DateTime<Utc>),
}

impl<T: Target> Targets<T> {
    pub(super) fn new() -> Self {
        Self { known: Mutex::default() }
    }

    fn known(&self) -> MutexGuard<'_, HashMap<Key<T>, Known<T>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The targets that this node works for.
    pub(super) fn served(&self) -> Vec<Arc<T>> {
        self.known().values().filter_map(Known::served).collect()
    }

    /// Begins to work for targets that are new or have changed, and stops working for others.
    /// `make` makes one in place of what it was before; none: it cannot be served.
    pub(super) fn adapt(
        &self,
        sender: &Sender,
        found: Vec<T::Settings>,
        make: impl Fn(T::Settings, Option<&T>) -> Option<T>,
    ) {
        let mut known = self.known();
        let mut former = std::mem::take(&mut *known);
        for it in found {
            let (key, updated_at) = (it.key(), it.updated_at());
            let new = match former.remove(&key) {
                Some(Known::Unusable(since)) if since == updated_at => Known::Unusable(since),
                Some(Known::Active(same)) if *same.settings() == it => Known::Active(same),
                changed => {
                    let before = changed.as_ref().and_then(Known::served);
                    changed.into_iter().for_each(Known::end);
                    match make(it, before.as_deref()).map(Arc::new) {
                        Some(new) => {
                            sender.begin(Arc::clone(&new));
                            Known::Active(new)
                        }
                        None => Known::Unusable(updated_at),
                    }
                }
            };
            known.insert(key, new);
        }
        former.into_values().for_each(Known::end);
    }
}

impl<T: Target> Known<T> {
    fn served(&self) -> Option<Arc<T>> {
        match self {
            Self::Active(it) => Some(Arc::clone(it)),
            Self::Unusable(_) => None,
        }
    }

    fn end(self) {
        if let Self::Active(it) = self {
            it.target_queue().ended.cancel();
        }
    }
}
