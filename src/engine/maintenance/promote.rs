//! Making jobs claimable when they are due.

use std::time::{Duration, Instant};

use fencepost_domain::{
    ids::{JobKey, ProjectId},
    job::StoredState,
};
use fencepost_signals::telemetry;
use fencepost_store::{
    faults,
    settle::settle_success::WaitingJob,
    sweep::{self, MAX_DUE_ROWS, set_aside::Work},
};
use metrics::counter;
use sqlx::PgConnection;

use crate::{
    Engine,
    isolate::{self, Sweep},
};

/// The longest sleep: another node may have stored a job that is due earlier.
pub const MAX_SLEEP: Duration = Duration::from_secs(2);

/// The pause when another node has locked what is due.
const LOCKED_ELSEWHERE_PAUSE: Duration = Duration::from_millis(50);

/// The longest pause between two passes over a backlog. It lasts as long as the pass, so that the
/// database has as much time for all else.
const MAX_BACKLOG_PAUSE: Duration = Duration::from_millis(8);

/// Jobs of a backlog that one pass promotes at least. A job of another project that becomes due
/// meanwhile waits for its end.
const MIN_BACKLOG_ROWS: usize = 50;

/// Jobs that are promoted in about a millisecond. Promoting takes as long as finding, or else
/// finding would take most of the time where many projects have jobs with a time.
const ROWS_PER_MILLISECOND: usize = 15;

/// One pass: promotes what is due and returns how long to sleep. Zero: there is more.
pub async fn pass(engine: &Engine) -> sqlx::Result<Duration> {
    let mut conn = engine.pools.promote.acquire().await?;
    match sweep::next_due_ms(&mut conn).await? {
        None => return Ok(MAX_SLEEP),
        Some(wait_ms) if wait_ms > 0.0 => {
            return Ok(Duration::from_secs_f64(wait_ms / 1000.0).min(MAX_SLEEP));
        }
        Some(_) => (),
    }
    let started = Instant::now();
    let mut due = sweep::find_due(&mut conn).await?;
    let is_backlog = due.len() == MAX_DUE_ROWS;
    if is_backlog {
        // One project's backlog must not delay the others; alone, it need not wait for them.
        let turns = sweep::find_due_by_turns(&mut conn).await?;
        let first = turns.first().map(|it| it.project_id);
        if turns.iter().any(|it| Some(it.project_id) != first) {
            due = turns;
        }
        due.truncate(backlog_rows(started.elapsed()));
    }
    let promoting = isolate::process(engine, &mut conn, &Promotion, &due);
    let promoted = faults::around_commit("promote", promoting).await?;
    drop(conn);
    let promoted: Vec<_> = promoted.into_iter().flatten().collect();
    // The others wait for room in their groups.
    let ready = promoted.iter().filter(|it| it.state == StoredState::Pending).count();
    counter!(telemetry::JOBS_PROMOTED).increment(ready as u64);
    if promoted.is_empty() {
        // Another node has locked them.
        return Ok(LOCKED_ELSEWHERE_PAUSE);
    }
    engine.notifier.waiting(promoted.iter());
    Ok(if is_backlog { started.elapsed().min(MAX_BACKLOG_PAUSE) } else { Duration::ZERO })
}

/// The jobs of a pass over a backlog, which took this long to find.
fn backlog_rows(finding: Duration) -> usize {
    let milliseconds = usize::try_from(finding.as_millis()).unwrap_or(MAX_DUE_ROWS);
    milliseconds.saturating_mul(ROWS_PER_MILLISECOND).clamp(MIN_BACKLOG_ROWS, MAX_DUE_ROWS)
}

/// Making jobs claimable.
struct Promotion;

impl Sweep for Promotion {
    type Item = JobKey;
    type Done = Vec<WaitingJob>;
    const WORK: Work = Work::Promote;

    fn name(item: &JobKey) -> (ProjectId, String) {
        isolate::job_name(*item)
    }

    async fn process(
        &self,
        tx: &mut PgConnection,
        due: &[JobKey],
    ) -> sqlx::Result<Vec<WaitingJob>> {
        sweep::promote(tx, due).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promoting_a_backlog_takes_as_long_as_finding_it_within_bounds() {
        assert_eq!(backlog_rows(Duration::ZERO), MIN_BACKLOG_ROWS);
        assert_eq!(backlog_rows(Duration::from_millis(3)), MIN_BACKLOG_ROWS);
        assert_eq!(backlog_rows(Duration::from_millis(8)), 120);
        assert_eq!(backlog_rows(Duration::from_secs(1)), MAX_DUE_ROWS);
        assert_eq!(backlog_rows(Duration::MAX), MAX_DUE_ROWS);
    }
}
