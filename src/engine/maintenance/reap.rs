//! Ending attempts whose lease expired: the worker timed out or the job ran too long.

use std::collections::HashSet;

use fencepost_domain::{ids::ProjectId, job::OutcomeCause, text::ErrorReport};
use fencepost_signals::telemetry;
use fencepost_store::{
    faults,
    settle::settle_failure::{AfterOutcome, OutcomeToWrite},
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
    let mut outcomes: Vec<_> = held
        .iter()
        .map(|lease| {
            let cause =
                if lease.timed_out { OutcomeCause::TimedOut } else { OutcomeCause::LeaseExpired };
            let error = match lease.cancel_requested {
                true => ErrorReport::default(),
                false => cause.unreported_error(),
            };
            failure::decide(lease, &cause, error, None)
        })
        .collect();
    let settled = isolate::process(engine, &mut tx, &Expired, &outcomes).await?;
    tx.commit().await?;
    faults::after_commit("reap")?;
    drop(conn);
    let settled: Vec<_> = settled.into_iter().flatten().collect();
    let done: HashSet<_> = settled.iter().map(|it| it.job.key()).collect();
    outcomes.retain(|it| done.contains(&it.key));
    failure::publish(&engine.notifier, &outcomes, &settled);
    Ok(held.len() == sweep::MAX_SWEEP_ROWS)
}

/// Ending the attempts of expired leases.
struct Expired;

impl Sweep for Expired {
    type Item = OutcomeToWrite;
    type Done = Vec<AfterOutcome>;
    const WORK: Work = Work::Reap;

    fn name(item: &OutcomeToWrite) -> (ProjectId, String) {
        isolate::job_name(item.key)
    }

    async fn process(
        &self,
        tx: &mut PgConnection,
        outcomes: &[OutcomeToWrite],
    ) -> sqlx::Result<Vec<AfterOutcome>> {
        failure::write(tx, outcomes).await
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
