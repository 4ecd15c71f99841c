//! How many polls and streams of one name are open on this node.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use super::lock;

/// The permits taken on this node, by name.
#[derive(Clone, Default)]
pub struct LocalPermits(Arc<Mutex<HashMap<String, u32>>>);

impl LocalPermits {
    /// Takes a permit; none if `max` are taken.
    #[must_use]
    pub fn take(&self, name: &str, max: u32) -> Option<LocalPermit> {
        let mut by_name = lock(&self.0);
        let taken = by_name.entry(name.to_owned()).or_default();
        if *taken >= max {
            return None;
        }
        *taken += 1;
        Some(LocalPermit { permits: self.clone(), name: name.to_owned() })
    }

    /// How many permits of this name are taken.
    #[must_use]
    pub fn taken(&self, name: &str) -> u32 {
        lock(&self.0).get(name).copied().unwrap_or_default()
    }
}

/// A permit on this node; released when dropped.
pub struct LocalPermit {
    permits: LocalPermits,
    name: String,
}

impl Drop for LocalPermit {
    fn drop(&mut self) {
        let mut by_name = lock(&self.permits.0);
        if let Some(taken) = by_name.get_mut(&self.name) {
            *taken -= 1;
            if *taken == 0 {
                by_name.remove(&self.name);
            }
        }
    }
}
