//! Polls that name no queue: they take jobs from whichever queue of their project has some.

use std::{future::Future, sync::Arc, time::Duration};

use rand::seq::SliceRandom;
use tokio::{pin, time::Instant};
use tokio_util::sync::CancellationToken;

use super::{
    Engine,
    dispatch::{self, Delivery, Wish},
};
use crate::{error::Error, ids::ProjectId, store};

/// Queues that one such poll looks at; those that have jobs come first.
pub const MAX_QUEUES: i64 = 100;
/// A queue that is used for the first time is seen after this.
const NEW_QUEUES_PERIOD: Duration = Duration::from_secs(2);

/// Like [`dispatch::poll`], from every queue of the project. Each time it looks in another order, so that no
/// queue is passed over for ever.
///
/// # Errors
/// Those of [`dispatch::poll`], and [`Error::Unavailable`] when the store does not answer.
pub async fn poll(
    engine: &Engine,
    wish: Wish,
    wait: Duration,
    gone: &CancellationToken,
    revoked: impl Future<Output = ()>,
) -> Result<Delivery, Error> {
    pin!(revoked);
    let deadline = Instant::now() + wait;
    loop {
        let queues = shuffled_queues(engine, wish.project_id).await?;
        let left = deadline.saturating_duration_since(Instant::now()).min(NEW_QUEUES_PERIOD);
        let wish = Wish { queues, ..wish.clone() };
        let delivery =
            dispatch::poll(engine, wish, left, gone.cancelled(), revoked.as_mut()).await?;
        let is_over = deadline <= Instant::now()
            || gone.is_cancelled()
            || engine.stopping.is_cancelled()
            || !delivery.jobs().is_empty();
        if is_over {
            return Ok(delivery);
        }
    }
}

async fn shuffled_queues(engine: &Engine, project_id: ProjectId) -> Result<Vec<Arc<str>>, Error> {
    let mut conn = engine.pools.claim.acquire().await?;
    let mut queues = store::counts::busiest_queues(&mut conn, project_id, MAX_QUEUES).await?;
    queues.shuffle(&mut rand::rng());
    Ok(queues.into_iter().map(Arc::from).collect())
}
