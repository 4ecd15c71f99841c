//! Which bug is planted in this process, and when it strikes. The copy of the source that has the
//! bugs gets this file as `src/store/planted.rs`.

use std::{
    collections::hash_map::RandomState,
    hash::BuildHasher,
    sync::OnceLock,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// Whether the bug of this number is planted.
#[must_use]
pub fn is(number: u8) -> bool {
    static PLANTED: OnceLock<Option<u8>> = OnceLock::new();
    let planted = PLANTED.get_or_init(|| std::env::var("FENCEPOST_BUG").ok()?.parse().ok());
    *planted == Some(number)
}

/// Whether it is planted and strikes now, as at one of this many opportunities.
#[must_use]
pub fn strikes(number: u8, opportunities: u64) -> bool {
    is(number) && RandomState::new().hash_one(number).is_multiple_of(opportunities)
}

/// Whether it is planted and strikes at this job, now and later, as at one of this many jobs.
#[must_use]
pub fn strikes_at(number: u8, jobs: u128, job: uuid::Uuid) -> bool {
    is(number) && job.as_u128().is_multiple_of(jobs)
}

/// Waits while the database is out of reach: bug 27.
#[expect(clippy::disallowed_methods, reason = "all nodes stand still at the same time")]
pub async fn stand_still() {
    const PERIOD_MS: u64 = 40_000;
    const STILL_MS: u64 = 20_000;
    if !is(27) {
        return;
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let into = now.as_secs() * 1_000 % PERIOD_MS;
    tokio::time::sleep(Duration::from_millis(STILL_MS.saturating_sub(into))).await;
}
