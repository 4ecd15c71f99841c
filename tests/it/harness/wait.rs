//! Waits of tests: each has a deadline, and names itself when it lasts.

use std::{
    fmt::Display,
    io::Write,
    time::{Duration, Instant},
};

/// The first pause between two looks at a state for which nothing can be awaited. Each is twice as
/// long as the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
/// The longest pause: looks cost CPU time that other tests need.
const MAX_PAUSE: Duration = Duration::from_millis(160);
/// A wait, or a test, that lasts longer is named on standard error while it lasts.
pub const NAMED_AFTER: Duration = Duration::from_secs(10);
/// A wait that lasts longer has failed.
const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// Looks until there is an answer, and returns it. `what` completes "waited for".
///
/// # Panics
/// When there is none within a minute.
pub async fn eventually<T>(what: impl Display, look: impl AsyncFnMut() -> Option<T>) -> T {
    again(FIRST_PAUSE, what, look).await
}

/// Acts without a pause until there is an answer, and returns it: for what a test uses up, or
/// brings about by acting. `what` completes "waited for".
///
/// # Panics
/// When there is none within a minute.
pub async fn repeatedly<T>(what: impl Display, act: impl AsyncFnMut() -> Option<T>) -> T {
    again(Duration::ZERO, what, act).await
}

async fn again<T>(
    first_pause: Duration,
    what: impl Display,
    mut look: impl AsyncFnMut() -> Option<T>,
) -> T {
    let since = Instant::now();
    let (mut pause, mut is_named) = (first_pause, false);
    loop {
        if let Some(answer) = look().await {
            return answer;
        }
        let waited = since.elapsed();
        assert!(waited < WAIT_LIMIT, "waited for {what} for {} s", WAIT_LIMIT.as_secs());
        if waited >= NAMED_AFTER && !std::mem::replace(&mut is_named, true) {
            announce(&format!("waits for {what}"));
        }
        if pause > Duration::ZERO {
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }
}

/// Looks until a condition holds. `what` completes "waited for".
///
/// # Panics
/// When it does not hold within a minute.
pub async fn until(what: impl Display, mut holds: impl AsyncFnMut() -> bool) {
    eventually(what, async || holds().await.then_some(())).await;
}

/// Writes what this test does to standard error at once: what `eprintln!` writes is kept until the
/// test has failed.
pub fn announce(doing: &str) {
    let name = test_name();
    let _ = writeln!(std::io::stderr(), "{name} {doing}, after {} s", NAMED_AFTER.as_secs());
}

/// The name of this test, which all threads of its runtime have.
pub fn test_name() -> String {
    std::thread::current().name().unwrap_or("a test").to_owned()
}
