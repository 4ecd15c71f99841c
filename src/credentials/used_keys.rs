//! When keys were last used, written in batches.

use std::{collections::HashSet, sync::Mutex};

use super::lock;
use crate::{
    ids::{KeyId, ProjectId},
    store::{self, pools::Pool},
};

/// Keys whose use is not written to the database yet.
const MAX_USED_KEYS: usize = 10_000;

/// The keys that were used since the last write.
#[derive(Default)]
pub struct UsedKeys(Mutex<HashSet<(ProjectId, KeyId)>>);

impl UsedKeys {
    /// Records that a key was used.
    pub fn record(&self, key: (ProjectId, KeyId)) {
        let mut used = lock(&self.0);
        if used.len() < MAX_USED_KEYS {
            used.insert(key);
        }
    }

    /// Writes which keys were used.
    pub async fn write(&self, pool: &Pool) -> sqlx::Result<()> {
        let used: Vec<_> = lock(&self.0).drain().collect();
        if used.is_empty() {
            return Ok(());
        }
        let mut conn = pool.acquire().await?;
        store::keys::record_used(&mut conn, &used).await
    }
}
