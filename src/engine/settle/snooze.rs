//! A worker puts its job off: it goes back without a failure, and is ready after the delay.
//! In a transaction of its project: the group commits are shared.

use fencepost_domain::{
    error::Error,
    ids::JobKey,
    job::{OutcomeCause, StoredState},
    lease::Fence,
};
use fencepost_store::settle::{
    settle_failure::{self, AfterOutcome, OutcomeToWrite},
    uncounted::{self, Uncounted},
};
use sqlx::{Acquire, PgConnection};

use super::{Acked, KEPT_UNCOUNTED_ATTEMPTS, Settling, explain_left, failure};
use crate::{Engine, jobs::control};

/// Ends an attempt, if its fence holds.
pub async fn settle(
    engine: &Engine,
    key: JobKey,
    fence: &Fence,
    delay_seconds: u32,
    duration_ms: Option<i64>,
) -> Result<Settling<Acked>, Error> {
    let mut conn = engine.pools.read_for(key.project_id).await?;
    let mut tx = conn.begin().await?;
    let done = settle_in(&mut tx, key, fence, delay_seconds, duration_ms).await;
    let Some((outcome, after)) = control::finish(tx, done).await? else {
        let mut left = explain_left(&mut conn, std::iter::once((key, fence))).await?;
        return Ok(left.remove(&key).unwrap_or(Settling::NoJob));
    };
    drop(conn);
    failure::publish(&engine.notifier, &[outcome], std::slice::from_ref(&after));
    Ok(Settling::Done(match after.retry_at {
        Some(at) => Acked::Retry { at, paused: None },
        None => Acked::Done { children_activated: None },
    }))
}

/// None: the fence does not hold.
async fn settle_in(
    tx: &mut PgConnection,
    key: JobKey,
    fence: &Fence,
    delay_seconds: u32,
    duration_ms: Option<i64>,
) -> Result<Option<(OutcomeToWrite, AfterOutcome)>, Error> {
    let held = settle_failure::lock_held(tx, std::iter::once((key, fence))).await?;
    let Some(held) = held.first() else { return Ok(None) };
    let cause = OutcomeCause::Snoozed { delay_seconds };
    let outcome = failure::decide(held, &cause, failure::unreported(held, &cause), duration_ms);
    let after = failure::write(tx, std::slice::from_ref(&outcome)).await?;
    let Some(after) = after.into_iter().next() else { return Ok(None) };
    if outcome.state != StoredState::Cancelled {
        uncounted::note(tx, key, Uncounted::Snooze, KEPT_UNCOUNTED_ATTEMPTS).await?;
    }
    Ok(Some((outcome, after)))
}
