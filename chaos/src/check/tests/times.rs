//! When jobs may run.

use serde_json::json;

use super::*;
use crate::producers::{BACKOFF_MS, GROUP, LIMITED_GROUP, NOT_BEFORE, PLACE};

/// A job that succeeded in its first attempt, leased in this second.
fn leased_at(id: &str, queue: &str, enqueued: i64, second: i64) -> BookJob {
    let mut job = job("succeeded", &["succeeded"]);
    job.attempts[0].claimed_at = at(second);
    job.attempts[0].ended_at = at(second + 5);
    (job.id, job.queue, job.enqueued_at) = (id.to_owned(), queue.to_owned(), at(enqueued));
    job
}

fn with(mut job: BookJob, name: &str, value: i64) -> BookJob {
    job.payload = json!({name: value});
    job
}

/// Broken invariants of several jobs, all of which were sent and reported.
fn of_all(events: &[Event], jobs: &[BookJob]) -> Vec<Invariant> {
    let mut all = events.to_vec();
    for job in jobs {
        all.push(enqueued(&job.id, Some(&job.id)));
        let (event, kind) = (format!("evt_{}", job.id), "job.succeeded".to_owned());
        all.push(Event::Delivered { tenant: 0, event, kind, job: job.id.clone(), is_taken: true });
    }
    found(&all, &book(jobs))
}

fn paused(group: Option<&str>) -> [Event; 2] {
    let (tenant, queue, group) = (0, "q2".to_owned(), group.map(str::to_owned));
    [
        Event::Paused { tenant, queue: queue.clone(), group: group.clone() },
        Event::Resuming { tenant, queue, group },
    ]
}

#[test]
fn jobs_that_run_too_early_are_found() {
    let late = with(job("succeeded", &["succeeded"]), NOT_BEFORE, 10_001);
    assert_eq!(of_one(&[], late), [], "times of the API are rounded");
    let early = with(job("succeeded", &["succeeded"]), NOT_BEFORE, 11_000);
    assert_eq!(of_one(&[], early), [Invariant::NotBeforeItsTime]);
    // The next attempt begins five seconds after the failure.
    let waited = with(job("succeeded", &["failed", "succeeded"]), BACKOFF_MS, 5_000);
    assert_eq!(of_one(&[], waited), []);
    let hurried = with(job("succeeded", &["failed", "succeeded"]), BACKOFF_MS, 6_000);
    assert_eq!(of_one(&[], hurried), [Invariant::NotBeforeItsTime]);
    let expired = with(job("succeeded", &["lease_expired", "succeeded"]), BACKOFF_MS, 6_000);
    assert_eq!(of_one(&[], expired), [], "it did not fail");
}

#[test]
fn cancelled_and_paused_jobs_that_run_are_found() {
    let cancelled = Event::Cancelled { job: JOB.to_owned() };
    let waits = [cancelled.clone()];
    assert_eq!(of_one(&waits, BookJob { attempt: 0, ..job("cancelled", &[]) }), []);
    let ran = job("succeeded", &["succeeded"]);
    assert_eq!(of_one(std::slice::from_ref(&cancelled), ran), [Invariant::PausesAndCancelsHold]);
    let leased = job("cancelled", &["released"]);
    assert_eq!(of_one(&waits, leased), [Invariant::PausesAndCancelsHold], "after it was cancelled");
    // Paused in the first second, resumed in the second one.
    let (paused, of_group) = (paused(None), paused(Some("g")));
    for (second, expected) in [(1, &[][..]), (2, &[])] {
        assert_eq!(of_all(&paused, &[leased_at("a", "q2", 0, second)]), expected, "{second}");
    }
    let mut between = leased_at("a", "q2", 0, 1);
    between.attempts[0].claimed_at += TimeDelta::milliseconds(500);
    assert_eq!(of_all(&paused, &[between.clone()]), [Invariant::PausesAndCancelsHold]);
    assert_eq!(of_all(&paused, &[BookJob { queue: "q0".to_owned(), ..between.clone() }]), []);
    for (group, expected) in [("g", &[Invariant::PausesAndCancelsHold][..]), ("h", &[])] {
        let payload = json!({ GROUP: group });
        assert_eq!(of_all(&of_group, &[BookJob { payload, ..between.clone() }]), expected);
    }
    assert_eq!(of_all(&of_group, &[between]), [], "it has no group");
}

#[test]
fn too_many_jobs_of_a_queue_at_once_are_found() {
    let jobs = |number: usize, queue: &str, apart: i64| -> Vec<_> {
        let ids = (0..number as i64).zip(["a", "b", "c", "d"]);
        ids.map(|(place, id)| leased_at(id, queue, 0, 1 + place * apart)).collect()
    };
    assert_eq!(of_all(&[], &jobs(3, "q1", 0)), []);
    assert_eq!(of_all(&[], &jobs(4, "q1", 0)), [Invariant::LimitsAreKept]);
    assert_eq!(of_all(&[], &jobs(4, "q1", 1)), [Invariant::LimitsAreKept]);
    assert_eq!(of_all(&[], &jobs(4, "q1", 5)), [], "one after the other");
    assert_eq!(of_all(&[], &jobs(4, "q0", 0)), [], "it has no limit");
}

#[test]
fn too_many_jobs_of_a_group_at_once_or_in_a_window_are_found() {
    let of_group = |id: &str, from_ms: i64, took_ms: i64| {
        let mut job = leased_at(id, "q-groups", 0, 1);
        job.payload[LIMITED_GROUP] = json!("g");
        for attempt in &mut job.attempts {
            attempt.claimed_at += TimeDelta::milliseconds(from_ms);
            attempt.ended_at = attempt.claimed_at + TimeDelta::milliseconds(took_ms);
        }
        job
    };
    let ids = ["a", "b", "c", "d", "e", "f", "g"];
    let apart = |count: usize, apart_ms: i64, took_ms: i64| -> Vec<_> {
        let jobs = (0..).zip(&ids[..count]);
        jobs.map(|(place, id)| of_group(id, place * apart_ms, took_ms)).collect()
    };
    assert_eq!(of_all(&[], &apart(2, 0, 500)), []);
    assert_eq!(of_all(&[], &apart(3, 0, 500)), [Invariant::LimitsAreKept]);
    assert_eq!(of_all(&[], &apart(6, 100, 50)), []);
    assert_eq!(of_all(&[], &apart(7, 100, 50)), [Invariant::LimitsAreKept]);
    assert_eq!(of_all(&[], &apart(7, 400, 50)), [], "not in one window");
}

#[test]
fn a_job_that_much_later_ones_overtake_is_found() {
    let later = leased_at("b", "q0", 40, 45);
    let overtaken = leased_at("a", "q0", 0, 50);
    assert_eq!(of_all(&[], &[overtaken.clone(), later.clone()]), [Invariant::OrderIsKept]);
    let elsewhere = BookJob { queue: "q1".to_owned(), ..later.clone() };
    assert_eq!(of_all(&[], &[overtaken.clone(), elsewhere]), []);
    let soon = BookJob { enqueued_at: at(25), ..later.clone() };
    assert_eq!(of_all(&[], &[overtaken.clone(), soon]), [], "about the same time");
    let child = BookJob { parents: vec![json!({})], ..overtaken.clone() };
    assert_eq!(of_all(&[], &[child, later.clone()]), [], "it waited for its parent");
    let scheduled = with(overtaken, NOT_BEFORE, 50_000);
    assert_eq!(of_all(&[], &[scheduled, later]), [], "it waited for its time");
}

#[test]
fn jobs_that_overtake_others_of_their_group_are_found() {
    let placed = |id: &str, place: i64, second: i64, completed: i64| {
        let mut job = leased_at(id, "q-ordered", 0, second);
        job.payload = json!({GROUP: "g", PLACE: place});
        job.completed_at = Some(at(completed));
        job
    };
    let one_after_the_other = [placed("a", 0, 1, 6), placed("b", 1, 6, 20), placed("c", 2, 20, 25)];
    assert_eq!(of_all(&[], &one_after_the_other), []);
    // The one between them has ended early, and the first one runs.
    let over_two = [placed("a", 0, 1, 30), placed("b", 1, 30, 35), placed("c", 2, 29, 40)];
    assert_eq!(of_all(&[], &over_two), [Invariant::GroupsAreOrdered]);
    let other_groups = [placed("a", 0, 1, 30), leased_at("b", "q-ordered", 0, 5)];
    assert_eq!(of_all(&[], &other_groups), []);
}
