//! What a request needs: the engine, the key cache and the secrets of this instance.

use std::{ops::Deref, sync::Arc, time::Duration};

use chrono::TimeDelta;
use moka::future::Cache;
use tokio::sync::Semaphore;

use crate::{
    domain::limits::MAX_STREAMS,
    engine::Engine,
    error::Error,
    store::{self, keys::KeyOwner},
};

/// How long a key is trusted without asking the store: so long does a revoked key live on, and twice as
/// long in a poll that is parked.
pub const KEY_CACHE_TTL: Duration = Duration::from_secs(5);
/// Keys one node remembers, unknown ones included.
const KEY_CACHE_KEYS: u64 = 100_000;

/// SHA-256 of an API key.
pub type SecretHash = [u8; 32];

/// The handles of one node. Cheap to clone.
#[derive(Clone)]
pub struct App(Arc<Handles>);

/// See [`App`].
pub struct Handles {
    /// The jobs.
    pub engine: Engine,
    /// Signs list cursors.
    pub cursor_key: Vec<u8>,
    /// Places for event streams.
    pub streams: Arc<Semaphore>,
    /// Schedules that fire more often are refused.
    pub min_schedule_period: TimeDelta,
    keys: Cache<SecretHash, Option<Arc<KeyOwner>>>,
}

impl Deref for App {
    type Target = Handles;

    fn deref(&self) -> &Handles {
        &self.0
    }
}

impl App {
    /// Puts the handles together.
    #[must_use]
    pub fn new(engine: Engine, cursor_key: Vec<u8>, min_schedule_period: TimeDelta) -> Self {
        let keys =
            Cache::builder().time_to_live(KEY_CACHE_TTL).max_capacity(KEY_CACHE_KEYS).build();
        let streams = Arc::new(Semaphore::new(MAX_STREAMS));
        Self(Arc::new(Handles { engine, cursor_key, streams, min_schedule_period, keys }))
    }

    /// Whose live key has this hash, as of at most [`KEY_CACHE_TTL`] ago. Many callers that ask
    /// for one key at once cost one look-up.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when the store does not answer.
    pub async fn key_owner(&self, hash: SecretHash) -> Result<Option<Arc<KeyOwner>>, Error> {
        if let Some(known) = self.keys.get(&hash).await {
            return Ok(known);
        }
        let look_up = async {
            let mut conn = self.engine.pools.keys.acquire().await?;
            let owner = store::keys::find_by_secret(&mut conn, &hash).await?;
            Ok::<_, sqlx::Error>(owner.map(Arc::new))
        };
        // Boxed: a miss is rare, and its ten kilobytes would be part of every parked poll.
        Box::pin(self.keys.try_get_with(hash, look_up)).await.map_err(Error::Unavailable)
    }
}
