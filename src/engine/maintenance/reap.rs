//! Ending attempts whose lease expired: the worker timed out or the job ran too long.

use std::{collections::HashSet, time::Duration};

use fencepost_domain::{ids::ProjectId, job::OutcomeCause, lease::REAPER_SLEEP, text::ErrorReport};
use fencepost_signals::telemetry;
use fencepost_store::{
    faults,
    settle::settle_failure::{AfterOutcome, OutcomeToWrite},
    sweep::{self, NextEnd, set_aside::Work},
};
use metrics::counter;
use sqlx::{Acquire, PgConnection};

use crate::{
    Engine,
    isolate::{self, Sweep},
    settle::failure,
};

/// The shortest sleep: many leases that end one after the other share a pass.
const MIN_SLEEP: Duration = Duration::from_millis(20);
/// The pause when expired leases are locked or set aside: the holder of the lock may settle them.
const HELD_ELSEWHERE_PAUSE: Duration = Duration::from_millis(250);

/// One pass: ends the attempts whose leases have expired. Returns how long to sleep: until the next
/// lease ends, if it ends soon. Zero: there may be more.
///
/// After a gap in which no node could reap, leases that expired in it are extended once instead:
/// their workers could not send heartbeats.
pub async fn pass(engine: &Engine) -> sqlx::Result<Duration> {
    let mut conn = engine.pools.reap.acquire().await?;
    let ahead_ms = i64::try_from(REAPER_SLEEP.as_millis()).unwrap_or(i64::MAX);
    // Committed before the transaction below, so that a slow pass does not hold this row's lock.
    match sweep::record_pass(&mut conn, ahead_ms).await? {
        None => return rearm(&mut conn).await,
        Some(NextEnd { wait_ms: None }) => return Ok(REAPER_SLEEP),
        Some(NextEnd { wait_ms: Some(wait_ms) }) if wait_ms > 0.0 => {
            let wait = Duration::from_secs_f64(wait_ms / 1_000.0);
            return Ok(wait.clamp(MIN_SLEEP, REAPER_SLEEP));
        }
        Some(_) => (),
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
    let has_ended_some = !settled.is_empty();
    Ok(if has_ended_some { Duration::ZERO } else { HELD_ELSEWHERE_PAUSE })
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

async fn rearm(conn: &mut PgConnection) -> sqlx::Result<Duration> {
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
    Ok(if is_full { Duration::ZERO } else { MIN_SLEEP })
}
