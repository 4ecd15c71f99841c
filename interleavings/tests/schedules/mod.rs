//! Many orders of the tasks of a scenario.

use std::{future::Future, panic};

use fencepost_interleavings::set_bug;

/// Orders that are tried, unless `FENCEPOST_SCHEDULES` says how many.
const SCHEDULES: usize = 1_000;
/// Times that many orders of each kind are tried before a bug counts as missed. The first order
/// that fails ends the search, and few bugs need a second round.
const ROUNDS_FOR_A_BUG: usize = 100;
/// Places at which an unlucky order interrupts a task.
const INTERRUPTIONS: usize = 3;

/// Runs it in random orders, and in those in which tasks are interrupted at few places.
pub fn hold<F: Future<Output = ()> + 'static>(scenario: fn() -> F) {
    let asked = std::env::var("FENCEPOST_SCHEDULES").ok().and_then(|it| it.parse().ok());
    run(scenario, asked.unwrap_or(SCHEDULES));
}

fn run<F: Future<Output = ()> + 'static>(scenario: fn() -> F, schedules: usize) {
    shuttle::check_random(move || shuttle::future::block_on(scenario()), schedules);
    let unlucky = move || shuttle::future::block_on(scenario());
    shuttle::check_pct(unlucky, schedules, INTERRUPTIONS);
}

/// Runs it with its bug, until an order fails in which this is said.
#[allow(dead_code, reason = "not every test has a bug")]
pub fn fail<F: Future<Output = ()> + 'static>(scenario: fn() -> F, said: &str) {
    set_bug(true);
    let search = || (0..ROUNDS_FOR_A_BUG).for_each(|_| run(scenario, SCHEDULES));
    let failed = panic::catch_unwind(search);
    set_bug(false);
    let failed = failed.expect_err("the bug is found");
    let text = failed.downcast_ref::<String>().map(String::as_str);
    let text = text.or(failed.downcast_ref::<&str>().copied()).unwrap_or_default();
    assert!(text.contains(said), "{text}");
}
