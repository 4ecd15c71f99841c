//! Ending attempts whose lease expired: the worker timed out or the job ran too long.

use std::collections::HashSet;

use fencepost_domain::{ids::ProjectId, job::Ending, text::ErrorReport};
use fencepost_signals::telemetry;
use fencepost_store::{
    faults,
    settle::settle_failure::{AfterEnd, Ended},
    sweep::{self, set_aside::Work},
};
use metrics::counter;
use sqlx::{Acquire, PgConnection};

use crate::{
    Engine,
    isolate::{self, Sweep},
    settle::failure,
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
    faults::before_commit("reap")?;
    let mut tx = conn.begin().await?;
    let held = sweep::lock_expired(&mut tx).await?;
    let mut ends: Vec<_> = held
        .iter()
        .map(|it| {
            let ending = if it.timed_out { Ending::TimedOut } else { Ending::LeaseExpired };
            let error = match it.cancel_requested {
                true => ErrorReport::default(),
                false => ending.unreported_error(),
            };
            failure::decide(it, &ending, error, None)
        })
        .collect();
    let ended = isolate::process(engine, &mut tx, &Expired, &ends).await?;
    tx.commit().await?;
    faults::after_commit("reap")?;
    drop(conn);
    let ended: Vec<_> = ended.into_iter().flatten().collect();
    let done: HashSet<_> = ended.iter().map(|it| it.job.key()).collect();
    ends.retain(|it| done.contains(&it.key));
    failure::tell(&engine.notifier, &ends, &ended);
    Ok(held.len() == sweep::MAX_SWEEP_ROWS)
}

/// Ending the attempts of expired leases.
struct Expired;

impl Sweep for Expired {
    type Item = Ended;
    type Done = Vec<AfterEnd>;
    const WORK: Work = Work::Reap;

    fn name(item: &Ended) -> (ProjectId, String) {
        isolate::job_name(item.key)
    }

    async fn process(&self, tx: &mut PgConnection, ends: &[Ended]) -> sqlx::Result<Vec<AfterEnd>> {
        failure::write(tx, ends).await
    }
}

async fn rearm(conn: &mut PgConnection) -> sqlx::Result<bool> {
    let rearmed = sweep::rearm_expired(conn).await?;
    counter!(telemetry::LEASES_REARMED).increment(rearmed);
    let is_full = rearmed == sweep::MAX_SWEEP_ROWS as u64;
    if !is_full {
        sweep::workers::reset_silence_timers(conn).await?;
        sweep::record_end_of_gap(conn).await?;
        tracing::warn!(
            "no node checked for expired leases for more than 5 s: they are extended once"
        );
    }
    Ok(is_full)
}
