//! Faults on purpose: commits that fail, and bugs that a checker must find. Only builds with the
//! feature `faults` have them, and a release build with it does not compile. Without the feature
//! every function here is a constant.

#[cfg(all(feature = "faults", not(debug_assertions)))]
compile_error!("the feature `faults` is for tests: a release must not have it");

use std::{
    future::Future,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// The variable that plants a bug, by its number in [`Mutant`].
pub const MUTANT_VARIABLE: &str = "FENCEPOST_MUTANT";

/// The variable that lets commits fail, in the notation of the crate `fail`:
/// `enqueue.after=5%return` lets 5 % of the enqueues fail that were committed.
pub const FAIL_POINTS_VARIABLE: &str = "FAILPOINTS";

/// What commits at a fail point. Each has two: before its statements run, and after the commit.
pub const FAIL_POINTS: [&str; 13] = [
    "enqueue",
    "succeed",
    "succeed_parents",
    "end",
    "heartbeat",
    "claim",
    "reap",
    "promote",
    "fire",
    "cascade",
    "ends",
    "events",
    "idempotency",
];

/// A bug that can be planted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Mutant {
    /// Acks and heartbeats count for whatever attempt runs.
    NoFence = 1,
    /// A success is accepted although its commit has failed.
    AckBeforeCommit = 2,
    /// A job is accepted although its commit has failed.
    EnqueueBeforeCommit = 3,
    /// A request that is taken over from a dead node makes new jobs.
    NewSeed = 4,
    /// A leased job is delivered to two workers.
    DeliveredTwice = 5,
    /// A heartbeat is answered and not written.
    HeartbeatNotWritten = 6,
    /// A failure is recorded as a release.
    FailureAsRelease = 7,
    /// An ack that is refused is answered with 200.
    StaleAckAccepted = 8,
    /// A poll gets the jobs of another project.
    ForeignPoll = 9,
    /// A job becomes a dead letter one failure late.
    LateDeadLetter = 10,
    /// One of twenty successes is answered and not written.
    AckNotWritten = 11,
    /// Expired leases of one job in ten are never reaped.
    NotReaped = 12,
    /// The end of a batch enqueues its callbacks twice.
    BatchCallsTwice = 13,
    /// One event in twenty is deleted without a delivery.
    EventLost = 14,
    /// A job does not wait after a failure.
    RetriedEarly = 15,
    /// Paused queues are claimed from.
    PauseIgnored = 16,
    /// A queue's limit of running jobs does not count.
    LimitIgnored = 17,
    /// One job in ten waits for 45 s before it may run.
    LeftBehind = 18,
    /// A URL that refuses a pushed job has done it.
    RefusedPushSucceeds = 19,
    /// A repeated ack is refused.
    RepeatRefused = 20,
    /// One ack in twenty is refused, whatever its lease.
    AckRefused = 21,
    /// One heartbeat in twenty releases its lease, and is accepted.
    LeaseReleased = 22,
    /// A cancel of a waiting job is answered and not written.
    CancelNotWritten = 23,
    /// One tick in ten passes without a trace.
    TickLost = 24,
    /// Children that wait for the failure of a parent run after its success.
    SuccessIsFailure = 25,
    /// One enqueue in a hundred is stored, and answered with 500.
    StoredAndFailed = 26,
    /// In twenty seconds of each forty, by its own clock, a node does not reach the database.
    StandsStill = 27,
    /// Jobs that are stored together get each other's payloads.
    PayloadsMixed = 28,
    /// One heartbeat in twenty is refused, whatever its lease.
    HeartbeatRefused = 29,
    /// One attempt in twenty that does not succeed cancels its job.
    FailureCancels = 30,
    /// Queues count one success less than there are.
    CountTooLow = 31,
}

impl Mutant {
    /// All of them, by their numbers.
    pub const ALL: [Self; 31] = [
        Self::NoFence,
        Self::AckBeforeCommit,
        Self::EnqueueBeforeCommit,
        Self::NewSeed,
        Self::DeliveredTwice,
        Self::HeartbeatNotWritten,
        Self::FailureAsRelease,
        Self::StaleAckAccepted,
        Self::ForeignPoll,
        Self::LateDeadLetter,
        Self::AckNotWritten,
        Self::NotReaped,
        Self::BatchCallsTwice,
        Self::EventLost,
        Self::RetriedEarly,
        Self::PauseIgnored,
        Self::LimitIgnored,
        Self::LeftBehind,
        Self::RefusedPushSucceeds,
        Self::RepeatRefused,
        Self::AckRefused,
        Self::LeaseReleased,
        Self::CancelNotWritten,
        Self::TickLost,
        Self::SuccessIsFailure,
        Self::StoredAndFailed,
        Self::StandsStill,
        Self::PayloadsMixed,
        Self::HeartbeatRefused,
        Self::FailureCancels,
        Self::CountTooLow,
    ];

    /// Whether this bug was planted in this process.
    #[must_use]
    pub fn is_planted(self) -> bool {
        imp::mutant(MUTANT_VARIABLE) == Some(self as u8)
    }

    /// It strikes at one of this many opportunities.
    const fn parts(self) -> u32 {
        match self {
            Self::StoredAndFailed => 100,
            Self::ForeignPoll => 50,
            Self::AckNotWritten
            | Self::EventLost
            | Self::AckRefused
            | Self::LeaseReleased
            | Self::HeartbeatRefused
            | Self::FailureCancels => 20,
            Self::NotReaped | Self::LeftBehind | Self::TickLost => 10,
            _ => 1,
        }
    }

    /// Whether this bug was planted, and strikes now.
    #[must_use]
    pub fn strikes(self) -> bool {
        self.is_planted() && rand::random_range(0..self.parts()) == 0
    }

    /// Whether this bug was planted, and strikes at this job, now and later.
    #[must_use]
    pub fn strikes_at(self, job: uuid::Uuid) -> bool {
        self.is_planted() && job.as_u128().is_multiple_of(self.parts().into())
    }
}

/// Waits while the database is out of reach, as [`Mutant::StandsStill`] has it.
#[expect(clippy::disallowed_methods, reason = "all nodes stand still at the same time")]
pub async fn stand_still() {
    if !Mutant::StandsStill.is_planted() {
        return;
    }
    const PERIOD_MS: u64 = 40_000;
    const STILL_MS: u64 = 20_000;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let into = now.as_secs() * 1_000 % PERIOD_MS;
    tokio::time::sleep(Duration::from_millis(STILL_MS.saturating_sub(into))).await;
}

/// A fail point before the statements of a commit.
///
/// # Errors
/// The loss of a connection, if it was told to fail.
pub fn before_commit(point: &'static str) -> sqlx::Result<()> {
    imp::fail(point, "before")
}

/// A fail point after a commit: what failed was done.
///
/// # Errors
/// The loss of a connection, if it was told to fail.
pub fn after_commit(point: &'static str) -> sqlx::Result<()> {
    imp::fail(point, "after")
}

/// Work that commits once, between its two fail points.
///
/// # Errors
/// That of the work, or the loss of a connection, if it was told to fail.
pub async fn around_commit<T>(
    point: &'static str,
    work: impl Future<Output = sqlx::Result<T>>,
) -> sqlx::Result<T> {
    before_commit(point)?;
    let done = work.await?;
    after_commit(point)?;
    Ok(done)
}

/// Commits that have failed on purpose in this process.
#[must_use]
pub fn failures() -> u64 {
    imp::failures()
}

/// Reads what shall fail. The points are set until the result is dropped.
pub fn set_up() -> impl Drop {
    imp::set_up()
}

#[cfg(feature = "faults")]
mod imp {
    use std::{
        io::ErrorKind,
        sync::{
            OnceLock,
            atomic::{AtomicU64, Ordering},
        },
    };

    static FAILURES: AtomicU64 = AtomicU64::new(0);

    pub fn failures() -> u64 {
        FAILURES.load(Ordering::Relaxed)
    }

    pub fn mutant(variable: &str) -> Option<u8> {
        static MUTANT: OnceLock<Option<u8>> = OnceLock::new();
        *MUTANT.get_or_init(|| std::env::var(variable).ok()?.parse().ok())
    }

    pub fn fail(point: &'static str, side: &'static str) -> sqlx::Result<()> {
        let name = format!("{point}.{side}");
        let Some(()) = fail::eval(&name, |_| ()) else { return Ok(()) };
        tracing::warn!("fail point {name}");
        FAILURES.fetch_add(1, Ordering::Relaxed);
        Err(sqlx::Error::Io(ErrorKind::ConnectionReset.into()))
    }

    pub fn set_up() -> impl Drop {
        fail::FailScenario::setup()
    }
}

#[cfg(not(feature = "faults"))]
mod imp {
    pub const fn mutant(_: &str) -> Option<u8> {
        None
    }

    pub const fn fail(_: &str, _: &str) -> sqlx::Result<()> {
        Ok(())
    }

    pub const fn failures() -> u64 {
        0
    }

    pub fn set_up() -> impl Drop {
        struct Nothing;
        impl Drop for Nothing {
            fn drop(&mut self) {}
        }
        Nothing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mutants_have_the_numbers_of_their_places() {
        for (place, mutant) in (1..).zip(Mutant::ALL) {
            assert_eq!(mutant as u8, place, "{mutant:?}");
        }
    }
}
