//! Signs of life: each renews one lease.

use std::collections::HashMap;

use sqlx::{PgPool, Postgres, pool::PoolConnection};

use super::{Engine, coalesce::Batch, settle};
use crate::{
    domain::lease,
    error::Error,
    store::{self, acks::JobKey},
};

pub use crate::store::heartbeats::Beat;

/// What a worker should do after its heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    /// Go on.
    Continue,
    /// Stop and hand the job in: it was called off.
    Cancel,
}

/// Renews a lease, if its fence holds and it has not expired.
///
/// # Errors
/// [`Error::JobNotFound`], [`Error::InvalidState`], [`Error::WorkerMismatch`] or
/// [`Error::StaleLease`] when the lease is not this worker's any more: it should stop.
pub async fn heartbeat(engine: &Engine, beat: Beat) -> Result<Advice, Error> {
    let (key, fence) = (beat.key, beat.fence.clone());
    if let Some(advice) = engine.beats.submit(beat).await? {
        return Ok(advice);
    }
    let found = settle::look_again(engine, key, &fence).await?;
    let refusal = lease::explain_heartbeat(&fence, &found.standing);
    Err(settle::refused(refusal, &found.standing))
}

/// The batch of heartbeats.
pub struct Beats {
    pub(super) pool: PgPool,
}

impl Batch for Beats {
    type Item = Beat;
    /// None: the fence did not hold.
    type Answer = Option<Advice>;
    type Key = JobKey;
    type Connection = PoolConnection<Postgres>;

    const KIND: &'static str = "heartbeat";
    const MAX_ROWS: usize = 500;

    fn bytes(_: &Beat) -> usize {
        0
    }

    fn key(item: &Beat) -> JobKey {
        item.key
    }

    async fn connect(&self) -> sqlx::Result<Self::Connection> {
        self.pool.acquire().await
    }

    async fn flush(
        &self,
        conn: &mut Self::Connection,
        items: &[Beat],
        _: bool,
    ) -> sqlx::Result<Vec<Result<Option<Advice>, Error>>> {
        let renewed: HashMap<_, _> = store::heartbeats::renew(conn, items)
            .await?
            .into_iter()
            .map(|it| (it.key, if it.cancel_requested { Advice::Cancel } else { Advice::Continue }))
            .collect();
        Ok(items.iter().map(|it| Ok(renewed.get(&it.key).copied())).collect())
    }
}
