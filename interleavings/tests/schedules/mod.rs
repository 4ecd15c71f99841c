//! Many orders of the tasks of a scenario.

use std::{future::Future, panic};

use fencepost_interleavings::set_bug;

/// Orders that are tried, unless `FENCEPOST_SCHEDULES` says how many.
const SCHEDULES: usize = 1_000;
/// Places at which an unlucky order interrupts a task.
const INTERRUPTIONS: usize = 3;

/// Runs it in random orders, and in those in which tasks are interrupted at few places.
pub fn hold<F: Future<Output = ()> + 'static>(scenario: fn() -> F) {
    let asked = std::env::var("FENCEPOST_SCHEDULES").ok().and_then(|it| it.parse().ok());
    let schedules = asked.unwrap_or(SCHEDULES);
    shuttle::check_random(move || shuttle::future::block_on(scenario()), schedules);
    let unlucky = move || shuttle::future::block_on(scenario());
    shuttle::check_pct(unlucky, schedules, INTERRUPTIONS);
}

/// Runs it with its bug, until an order fails in which this is said.
#[allow(dead_code, reason = "not every test has a bug")]
pub fn fail<F: Future<Output = ()> + 'static>(scenario: fn() -> F, said: &str) {
    set_bug(true);
    let failed = panic::catch_unwind(|| hold(scenario));
    set_bug(false);
    let failed = failed.expect_err("the bug is found");
    let text = failed.downcast_ref::<String>().map(String::as_str);
    let text = text.or(failed.downcast_ref::<&str>().copied()).unwrap_or_default();
    assert!(text.contains(said), "{text}");
}
