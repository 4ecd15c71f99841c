//! The lease protocol holds in every order of events, and each broken variant is caught.

mod checks;

use std::time::Instant;

use fencepost_proof::lease::{Protocol, State, Variant};
use stateright::{Checker, Model};

/// The full protocol takes minutes, so it is for the night.
fn full_or(full: Protocol, quick: Protocol) -> Protocol {
    if std::env::var_os("FENCEPOST_MODEL_FULL").is_some() { full } else { quick }
}

/// Checks every order of events, and says how many states there are.
fn holds(protocol: Protocol) {
    let begun = Instant::now();
    let all = protocol.checker().threads(2).symmetry_fn(State::representative);
    let checked = all.spawn_dfs().join();
    checks::holds(&protocol, &checked, begun);
}

fn fails(variant: Variant, property: &'static str) {
    checks::fails(Protocol::broken(variant), variant, property);
}

#[test]
fn one_job_is_safe_in_every_order_of_events() {
    holds(full_or(Protocol::one_job(), Protocol::one_job_quickly()));
}

#[test]
fn one_job_is_safe_when_a_standby_that_lags_takes_over() {
    holds(full_or(Protocol::promotion(), Protocol::promotion_quickly()));
}

#[test]
fn two_jobs_are_safe_in_every_order_of_events() {
    holds(full_or(Protocol::two_jobs(), Protocol::two_jobs_quickly()));
}

#[test]
fn an_ack_must_name_the_lease() {
    fails(Variant::AckByJob, "an ack ends its own lease alone");
}

#[test]
fn an_ack_by_its_attempt_ends_the_lease_of_another_worker_after_a_promotion() {
    fails(Variant::AckByAttempt, "an ack ends its own lease alone");
}

#[test]
fn leases_end_by_the_clock_of_the_database() {
    fails(Variant::ReapByNodeClock, "no lease is reaped early");
}

#[test]
fn a_reaper_must_look_and_end_in_one_step() {
    fails(Variant::ReapInTwoSteps, "no lease is reaped early");
}

#[test]
fn a_retry_must_not_count_attempts_anew() {
    fails(Variant::RetryCountsAnew, "an attempt has one lease");
}

#[test]
fn a_repeated_ack_must_be_known() {
    fails(Variant::AckOnlyOnce, "a repeated ack gets the same answer");
}

#[test]
fn a_repeated_poll_must_be_known() {
    fails(Variant::PollForgets, "a poll gets its earlier lease");
}

#[test]
fn an_ack_must_wait_for_its_commit() {
    fails(Variant::AckBeforeCommit, "an accepted ack is recorded");
}

#[test]
fn a_success_must_end_its_job() {
    fails(Variant::SuccessWaits, "what succeeded is not leased again");
}

#[test]
fn the_last_failure_must_make_a_dead_letter() {
    fails(Variant::LateDeadLetter, "failures are within their bound");
}

#[test]
fn an_expired_lease_must_be_taken_from_its_job() {
    fails(Variant::ReapKeepsLease, "a job is leased or it is not");
}
