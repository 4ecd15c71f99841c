//! Commits that fail on purpose while histories are played.

use std::process::Command;

use fencepost_domain::error::Error;
use fencepost_store::faults::{self, FAIL_POINTS, FAIL_POINTS_VARIABLE};

use crate::harness::share_with;

/// Times that a pass of a loop, or a call, may fail in turn.
const MAX_PASSES: usize = 5;
/// Commits that fail on purpose, in percent of each kind.
const FAILED_PERCENT: u32 = 5;
/// At least one commit fails in this many histories.
const MAX_HISTORIES_PER_FAILURE: u64 = 2;

/// Commits that fail, if this process was started for that.
pub struct Faults<D>(Option<D>);

/// Reads what shall fail.
pub fn set_up() -> Faults<impl Drop> {
    let is_asked = std::env::var_os(FAIL_POINTS_VARIABLE).is_some();
    Faults(is_asked.then(faults::set_up))
}

impl<D> Faults<D> {
    /// Enough commits have failed in these histories, if any should.
    pub fn were_met(self, histories: u64) {
        let (failed, least) = (faults::failures(), histories.div_ceil(MAX_HISTORIES_PER_FAILURE));
        assert!(self.0.is_none() || failed >= least, "only {failed} commits failed");
    }
}

/// A call that is repeated while the database does not answer, as a client does.
pub async fn patiently<T>(call: impl AsyncFn() -> Result<T, Error>) -> Result<T, Error> {
    for _ in 0..MAX_PASSES {
        match call().await {
            Err(Error::Unavailable(_) | Error::InDoubt) => (),
            answer => return answer,
        }
    }
    call().await
}

/// A pass of a loop. One that fails runs again, as in its loop.
pub async fn again<T>(pass: impl AsyncFn() -> sqlx::Result<T>) -> Result<T, String> {
    for _ in 0..MAX_PASSES {
        if let Ok(done) = pass().await {
            return Ok(done);
        }
    }
    pass().await.map_err(|it| it.to_string())
}

/// The same in a process of its own, whose commits fail now and then: before anything is written,
/// or after all is. Claims are left out: those that fail cost an attempt.
#[test]
fn commits_that_fail_change_nothing_or_are_found_out() {
    // Other builds have no fail points.
    if !cfg!(debug_assertions) {
        return;
    }
    let points = FAIL_POINTS.iter().filter(|it| **it != "claim");
    let points = points.flat_map(|it| ["before", "after"].map(|side| format!("{it}.{side}")));
    let points: Vec<_> = points.map(|it| format!("{it}={FAILED_PERCENT}%return")).collect();
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    share_with(&mut command);
    // Its time is part of the time of this test.
    command.env_remove("FENCEPOST_TEST_TIMES");
    command.args(["--exact", "model::whatever_happens_the_store_is_where_the_model_says"]);
    command.env(FAIL_POINTS_VARIABLE, points.join(";"));
    let ran = command.output().expect("it runs");
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success() && said.contains("1 passed"), "{said}");
}
