//! Keys of requests that ended while the database could not be told: their connection broke.
//! Without this, a repeated request would wait until the lock of its key is too old.

use std::{sync::LazyLock, time::Duration};

use tokio::{sync::Semaphore, time::sleep};
use uuid::Uuid;

use crate::{
    app::App,
    ids::ProjectId,
    store::{deadline::bounded_query, idempotency},
};

/// Pauses between tries: a database that was killed is back within seconds. A lock that stays ends
/// by its age.
const PAUSES_MS: [u64; 9] = [100, 200, 400, 800, 1_600, 3_200, 6_400, 12_800, 25_600];
/// Keys of one node that are unlocked so at a time.
const MAX_LOST_KEYS: usize = 1_000;

static ROOM: LazyLock<Semaphore> = LazyLock::new(|| Semaphore::new(MAX_LOST_KEYS));

/// Unlocks a key as soon as the database answers, if its request ran from this seed.
pub(super) fn unlock_later(app: &App, project_id: ProjectId, key: &str, seed: Option<Uuid>) {
    let Ok(room) = ROOM.try_acquire() else { return };
    let (engine, node, key) = (app.engine.clone(), app.bus.node(), key.to_owned());
    let stopping = engine.stopping.clone();
    let unlocking = async move {
        let _room = room;
        for pause in PAUSES_MS {
            sleep(Duration::from_millis(pause)).await;
            let unlocked = async {
                let mut conn = engine.pools.enqueue.acquire().await?;
                idempotency::unlock(&mut conn, project_id, &key, (seed, node)).await
            };
            if bounded_query(unlocked).await.is_ok() {
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
