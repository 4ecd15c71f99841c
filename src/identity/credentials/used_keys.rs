//! When keys were last used, written in batches.

use std::{
    collections::{HashMap, HashSet},
    sync::Mutex,
};

use fencepost_domain::ids::{KeyId, ProjectId};
use fencepost_store::{self as store, connection::pools::Pool};

use super::lock;

/// Keys whose use is not written to the database yet.
const MAX_USED_KEYS: usize = 10_000;

/// The keys that were used since the last write, and how many of their calls were of deprecated
/// operations.
#[derive(Default)]
pub struct UsedKeys(Mutex<HashMap<(ProjectId, KeyId), i64>>);

impl UsedKeys {
    /// Records that a key was used.
    pub fn record(&self, key: (ProjectId, KeyId)) {
        let mut used = lock(&self.0);
        if used.len() < MAX_USED_KEYS {
            used.entry(key).or_default();
        }
    }

    /// Records a call of a deprecated operation by a key that was recorded.
    pub fn record_deprecated(&self, key: (ProjectId, KeyId)) {
        let mut used = lock(&self.0);
        if let Some(calls) = used.get_mut(&key) {
            *calls += 1;
        } else if used.len() < MAX_USED_KEYS {
            used.insert(key, 1);
        }
    }

    /// Writes which keys were used. What could not be written is written with the next ones.
    pub async fn write(&self, pool: &Pool) -> sqlx::Result<()> {
        let used: Vec<_> = lock(&self.0).drain().collect();
        if used.is_empty() {
            return Ok(());
        }
        let written = async {
            let mut conn = pool.acquire().await?;
            store::people::keys::record_used(&mut conn, &used).await
        };
        match written.await {
            Ok(locked) => {
                let locked: HashSet<_> = locked.into_iter().collect();
                self.put_back(used.into_iter().filter(|it| locked.contains(&it.0)));
                Ok(())
            }
            Err(error) => {
                self.put_back(used);
                Err(error)
            }
        }
    }

    fn put_back(&self, used: impl IntoIterator<Item = ((ProjectId, KeyId), i64)>) {
        let mut waiting = lock(&self.0);
        for (key, calls) in used {
            if waiting.len() < MAX_USED_KEYS || waiting.contains_key(&key) {
                *waiting.entry(key).or_default() += calls;
            }
        }
    }
}
