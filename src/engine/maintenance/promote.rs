//! Making jobs claimable when they are due.

use std::time::Duration;

use metrics::counter;

use crate::{engine::Engine, store::sweep, telemetry};

/// The longest sleep: another node may have stored a job that is due earlier.
pub const MAX_SLEEP: Duration = Duration::from_secs(2);

/// The pause when another node has locked what is due.
const LOCKED_ELSEWHERE_PAUSE: Duration = Duration::from_millis(50);

/// One pass: promotes what is due and returns how long to sleep. Zero: there is more.
pub async fn pass(engine: &Engine) -> sqlx::Result<Duration> {
    let mut conn = engine.pools.background.acquire().await?;
    match sweep::next_due_ms(&mut conn).await? {
        None => return Ok(MAX_SLEEP),
        Some(wait_ms) if wait_ms > 0.0 => {
            return Ok(Duration::from_secs_f64(wait_ms / 1000.0).min(MAX_SLEEP));
        }
        Some(_) => (),
    }
    let promoted = sweep::promote(&mut conn).await?;
    drop(conn);
    counter!(telemetry::JOBS_PROMOTED).increment(promoted.len() as u64);
    if promoted.is_empty() {
        // Another node has locked them.
        return Ok(LOCKED_ELSEWHERE_PAUSE);
    }
    engine.notifier.waiting(promoted.iter());
    Ok(Duration::ZERO)
}
