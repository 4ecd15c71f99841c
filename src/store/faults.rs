//! Commits that fail on purpose, for tests. Only builds with debug assertions have them: in others
//! every function here is a constant.

use std::future::Future;

/// The variable that lets commits fail, in the notation of the crate `fail`:
/// `enqueue.after=5%return` lets 5 % of the enqueues fail that were committed.
pub const FAIL_POINTS_VARIABLE: &str = "FAILPOINTS";

/// Commits that tests let fail; other group commits have points, too. Each has two: before its
/// statements run, and after the commit.
pub const FAIL_POINTS: [&str; 14] = [
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
    "groups",
];

/// A fail point before the statements of a commit.
///
/// # Errors
/// The loss of a connection, if a test asked for it.
pub fn before_commit(point: &'static str) -> sqlx::Result<()> {
    imp::fail(point, "before")
}

/// A fail point after a commit: what failed was done.
///
/// # Errors
/// The loss of a connection, if a test asked for it.
pub fn after_commit(point: &'static str) -> sqlx::Result<()> {
    imp::fail(point, "after")
}

/// Work that commits once, between its two fail points.
///
/// # Errors
/// That of the work, or the loss of a connection, if a test asked for it.
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

/// Reads [`FAIL_POINTS_VARIABLE`]. The points are set until the result is dropped.
#[must_use]
pub fn set_up() -> impl Drop {
    imp::set_up()
}

#[cfg(debug_assertions)]
mod imp {
    use std::{
        io::ErrorKind,
        sync::atomic::{AtomicU64, Ordering},
    };

    static FAILURES: AtomicU64 = AtomicU64::new(0);

    pub fn failures() -> u64 {
        FAILURES.load(Ordering::Relaxed)
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

#[cfg(not(debug_assertions))]
mod imp {
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
