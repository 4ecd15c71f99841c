//! Admission keeps the order of a group however its statements overlap, and each broken variant is
//! caught.

mod checks;

use std::time::Instant;

use fencepost_proof::order::{Admission, Variant};
use stateright::{Checker, Model};

/// Checks every order of steps, and says how many states there are.
fn holds(protocol: Admission) {
    let begun = Instant::now();
    let checked = protocol.checker().threads(2).spawn_dfs().join();
    checks::holds(&protocol, &checked, begun);
}

fn fails(variant: Variant, property: &'static str) {
    checks::fails(Admission::broken(variant), variant, property);
}

#[test]
fn jobs_run_in_their_order_however_the_statements_overlap() {
    // With a failure it takes half a minute, so that is for the night.
    let is_full = std::env::var_os("FENCEPOST_MODEL_FULL").is_some();
    holds(if is_full { Admission::three_jobs() } else { Admission::three_jobs_without_failures() });
}

#[test]
fn an_order_that_begins_lets_what_runs_end_first() {
    holds(Admission::order_begins());
}

#[test]
fn a_job_that_has_the_lock_must_look_once_more() {
    fails(Variant::LookOnce, "one job runs at a time");
}

#[test]
fn an_empty_group_must_be_locked() {
    fails(Variant::NoLock, "one job runs at a time");
}

#[test]
fn a_job_that_waits_must_leave_a_note() {
    fails(Variant::WaitWithoutNote, "no job waits for ever");
}

#[test]
fn an_end_must_leave_a_note() {
    fails(Variant::EndWithoutNote, "no job waits for ever");
}

#[test]
fn a_pass_must_forget_before_it_decides() {
    fails(Variant::ForgetAtCommit, "no job waits for ever");
}

#[test]
fn only_notes_that_were_seen_are_about_nothing() {
    fails(Variant::ForgetAllIdle, "no job waits for ever");
}

#[test]
fn a_pass_must_close_before_it_opens() {
    fails(Variant::OpenBesideStrays, "one job runs at a time");
}
