//! Many orders of the tasks of a scenario.

use std::{future::Future, panic};

use fencepost_interleavings::set_bug;

/// Orders that are tried, unless `FENCEPOST_ORDERS` says how many.
const ORDERS: usize = 1_000;
/// Rounds of [`ORDERS`] orders of each kind before a bug counts as missed. The first order that
/// fails ends the search, and few bugs need a second round.
const ROUNDS_FOR_A_BUG: usize = 100;
/// Places at which an unlucky order interrupts a task.
const INTERRUPTIONS: usize = 3;

/// Runs it in random orders, and in those in which tasks are interrupted at few places.
pub fn hold_in_all<F: Future<Output = ()> + 'static>(scenario: fn() -> F) {
    let asked = std::env::var("FENCEPOST_ORDERS").ok().and_then(|it| it.parse().ok());
    run(scenario, asked.unwrap_or(ORDERS));
}

fn run<F: Future<Output = ()> + 'static>(scenario: fn() -> F, orders: usize) {
    shuttle::check_random(move || shuttle::future::block_on(scenario()), orders);
    let unlucky = move || shuttle::future::block_on(scenario());
    shuttle::check_pct(unlucky, orders, INTERRUPTIONS);
}

/// Switches the bug of the scenario on (`build.rs` has the table of bugs), and runs it until an
/// order panics with a message that contains `said`.
#[allow(dead_code, reason = "not every test has a bug")]
pub fn fail_in_one<F: Future<Output = ()> + 'static>(scenario: fn() -> F, said: &str) {
    set_bug(true);
    let search = || (0..ROUNDS_FOR_A_BUG).for_each(|_| run(scenario, ORDERS));
    let failed = panic::catch_unwind(search);
    set_bug(false);
    let failed = failed.expect_err("the bug is found");
    let text = failed.downcast_ref::<String>().map(String::as_str);
    let text = text.or(failed.downcast_ref::<&str>().copied()).unwrap_or_default();
    assert!(text.contains(said), "{text}");
}
