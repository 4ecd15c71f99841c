//! Ending attempts whose lease expired: the worker timed out or the job ran too long.

use metrics::counter;
use sqlx::Acquire;

use crate::{
    domain::{job::Ending, text::ErrorReport},
    engine::{Engine, settle::failure},
    store::sweep,
    telemetry,
};

/// One pass: ends the attempts whose leases have expired. Returns whether there may be more.
///
/// After a gap in which no node could reap, leases that expired in it are extended once instead:
/// their workers could not send heartbeats.
pub async fn pass(engine: &Engine) -> sqlx::Result<bool> {
    let mut conn = engine.pools.reap.acquire().await?;
    // Committed before the transaction below, so that a slow pass does not hold this row's lock.
    match sweep::record_pass(&mut conn).await? {
        None => return rearm(&mut conn).await,
        Some(false) => return Ok(false),
        Some(true) => (),
    }
    let mut tx = conn.begin().await?;
    let held = sweep::lock_expired(&mut tx).await?;
    let ends: Vec<_> = held
        .iter()
        .map(|it| {
            let ending = if it.timed_out { Ending::TimedOut } else { Ending::LeaseExpired };
            failure::decide(it, &ending, ErrorReport::default(), None)
        })
        .collect();
    let ended = failure::write(&mut tx, &ends).await?;
    tx.commit().await?;
    drop(conn);
    failure::tell(&engine.notifier, &ends, &ended);
    Ok(ends.len() == sweep::MAX_SWEEP_ROWS)
}

async fn rearm(conn: &mut sqlx::PgConnection) -> sqlx::Result<bool> {
    let rearmed = sweep::rearm_expired(conn).await?;
    counter!(telemetry::LEASES_REARMED).increment(rearmed);
    let is_full = rearmed == sweep::MAX_SWEEP_ROWS as u64;
    if !is_full {
        sweep::reset_silence_timers(conn).await?;
        sweep::record_end_of_gap(conn).await?;
        tracing::warn!(
            "no node checked for expired leases for more than 5 s: they are extended once"
        );
    }
    Ok(is_full)
}
