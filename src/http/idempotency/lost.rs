//! Keys of requests that ended without a word to the database: their connection broke, or was
//! silent for too long. Without this, a repeated request would be refused until the lock is too
//! old.

use std::{sync::LazyLock, time::Duration};

use fencepost_domain::ids::ProjectId;
use fencepost_store::{connection::deadline::bounded_query, idempotency};
use tokio::{sync::Semaphore, time::sleep};
use uuid::Uuid;

use fencepost_web::app::App;

/// Pauses between tries: a database that was killed is back within seconds, and a lost commit may
/// still be in progress. A lock that stays ends by its age.
const PAUSES_MS: [u64; 9] = [100, 200, 400, 800, 1_600, 3_200, 6_400, 12_800, 25_600];
/// Keys of one node that are unlocked so at a time.
const MAX_LOST_KEYS: usize = 1_000;

static ROOM: LazyLock<Semaphore> = LazyLock::new(|| Semaphore::new(MAX_LOST_KEYS));

/// The lock of a key for one run of its request. Dropped while it may be held, it is freed as soon
/// as the database answers.
pub(super) struct Lock<'a> {
    app: &'a App,
    project_id: ProjectId,
    key: &'a str,
    /// Distinguishes this run from others with the same key.
    pub id: Uuid,
    may_be_held: bool,
}

impl<'a> Lock<'a> {
    pub fn new(app: &'a App, project_id: ProjectId, key: &'a str) -> Self {
        Self { app, project_id, key, id: Uuid::new_v4(), may_be_held: false }
    }

    /// A statement that takes it begins.
    pub fn taking(&mut self) {
        self.may_be_held = true;
    }

    /// It was not taken, or the database knows that the request has ended.
    pub fn freed(&mut self) {
        self.may_be_held = false;
    }
}

impl Drop for Lock<'_> {
    fn drop(&mut self) {
        if self.may_be_held {
            unlock_later(self.app, self.project_id, self.key.to_owned(), self.id);
        }
    }
}

fn unlock_later(app: &App, project_id: ProjectId, key: String, lock: Uuid) {
    let Ok(room) = ROOM.try_acquire() else { return };
    let engine = app.engine.clone();
    let stopping = engine.stopping.clone();
    let unlocking = async move {
        let _room = room;
        for pause in PAUSES_MS {
            sleep(Duration::from_millis(pause)).await;
            let unlocked = async {
                let mut conn = engine.pools.enqueue.acquire().await?;
                idempotency::unlock(&mut conn, project_id, &key, lock).await
            };
            if bounded_query(unlocked).await.is_ok_and(|was_locked| was_locked) {
                return;
            }
        }
    };
    app.engine.tasks.spawn(async move {
        tokio::select! {
            // Another node takes over what a node has begun that is gone.
            () = stopping.cancelled() => (),
            () = unlocking => (),
        }
    });
}
