//! Tests of explanations: the gate that is named first, and what it says.

use super::*;
use chrono::TimeDelta;

fn facts() -> Facts {
    Facts {
        now: DateTime::UNIX_EPOCH,
        state: StoredState::Pending,
        queue: "default".into(),
        job_type: "mail".into(),
        run_at: DateTime::UNIX_EPOCH,
        failures: 0,
        max_attempts: 3,
        loss: Loss { total: 0, in_row: 0, max_in_row: 5, death: DeadLetterReason::Failed },
        unfinished_parents: 0,
        paused_at: None,
        group: None,
        blocks_group: None,
        labels: Vec::new(),
        concurrency: None,
        queue_concurrency: None,
        queue_paused_at: None,
        type_pause: None,
        rate: None,
        rate_limited_until: None,
        shared: Vec::new(),
        push: None,
        worker_id: None,
        lease_expires_at: None,
        silent_seconds: None,
        worker_lost_at: None,
        next_try_at: None,
        cancel_requested: false,
        expires_at: None,
        workers: 1,
        quiet_workers: 0,
        other_types: Vec::new(),
        workers_with_labels: 1,
        slots: None,
        slots_in_use: 0,
        ahead: 0,
        groups_ahead: None,
    }
}

fn summary(facts: &Facts) -> String {
    explain(facts).summary
}

#[test]
fn a_pause_of_the_job_comes_before_all_else() {
    let paused = Facts {
        state: StoredState::Scheduled,
        paused_at: Some(DateTime::UNIX_EPOCH),
        unfinished_parents: 2,
        ..facts()
    };
    let explained = explain(&paused);
    assert_eq!(explained.reason, Some(Reason::JobPaused));
    assert_eq!(explained.summary, "it is paused since 1970-01-01T00:00:00Z: resume it");
    assert_eq!(explained.next_change_at, None, "nothing changes by itself");
}

#[test]
fn the_first_closed_condition_is_the_reason() {
    let crowd = |running| Some(Crowd { name: "acme".into(), running, limit: 5 });
    assert_eq!(
        summary(&Facts { concurrency: crowd(5), workers: 0, ..facts() }),
        "key acme 5/5 busy"
    );
    let free = explain(&Facts { concurrency: crowd(4), ..facts() });
    assert!(free.conditions.iter().any(|it| it.is_open && it.message == "key acme 4/5 in use"));
    assert_eq!(
        summary(&Facts { workers: 0, ..facts() }),
        "no live worker polls queue default for mail"
    );
    let other_types = vec!["mail.send".to_owned(), "sms".to_owned()];
    assert_eq!(
        summary(&Facts { workers: 0, other_types, ..facts() }),
        "no live worker polls queue default for mail; those that poll it take mail.send, sms"
    );
    let other_types = ["a", "b", "c", "d", "e", "f"].map(str::to_owned).to_vec();
    let text = summary(&Facts { workers: 0, other_types, ..facts() });
    assert!(text.ends_with("take a, b, c, d, e and others"), "{text}");
    assert_eq!(
        summary(&Facts { workers: 0, quiet_workers: 1, ..facts() }),
        "1 live worker of queue default was asked to take no more jobs, and no other one polls \
         it for mail: resume, or start one"
    );
    let labelled = Facts { labels: vec!["gpu".into()], workers_with_labels: 0, ..facts() };
    assert_eq!(summary(&labelled), "none of 1 live worker of queue default has the labels gpu");
    assert_eq!(summary(&Facts { ahead: 7, ..facts() }), "1 live worker; 7 jobs before it");
    assert_eq!(summary(&facts()), "ready: it starts as soon as a worker polls");
    let in_turn = Facts { ahead: 7, groups_ahead: Some(1), ..facts() };
    let expected = "1 live worker; 7 jobs before it in its group, and the turn of 1 group";
    assert_eq!(summary(&in_turn), expected);
    let next = Facts { groups_ahead: Some(0), ..facts() };
    assert_eq!(summary(&next), "ready: it starts as soon as a worker polls");
}

#[test]
fn explain_distinguishes_busy_workers_from_idle_ones() {
    let with = |in_use, all| Facts { slots: Some(Slots { in_use, all }), ..facts() };
    let busy = "all workers are busy: 1 of 1 slot in use; 0 jobs before it";
    assert_eq!(summary(&with(1, 1)), busy);
    assert!(summary(&with(3, 2)).contains("3 of 2 slots"), "released ones may still run");
    let ready = "ready: it starts as soon as a worker polls";
    assert_eq!(summary(&with(1, 2)), ready);
    let unknown = explain(&Facts { slots_in_use: 1, ..facts() });
    assert_eq!(unknown.reason, Some(Reason::WorkersBusy), "{}", unknown.summary);
    assert_eq!(summary(&facts()), ready);
}

#[test]
fn a_pause_says_since_when_and_whose_it_is() {
    let at = DateTime::UNIX_EPOCH;
    let paused = Facts { queue_paused_at: Some(at), workers: 0, ..facts() };
    assert_eq!(summary(&paused), "queue default is paused since 1970-01-01T00:00:00Z");
    let pause = |dead_letters| Some(TypePause { paused_at: at, dead_letters });
    assert!(summary(&Facts { type_pause: pause(None), ..facts() }).ends_with("paused manually"));
    let braked = Facts { type_pause: pause(Some(5)), ..facts() };
    assert!(
        summary(&braked)
            .ends_with("paused by the circuit breaker after 5 consecutive dead letters")
    );
}

#[test]
fn a_used_up_rate_limit_says_when_it_opens() {
    let opens_at = DateTime::UNIX_EPOCH + TimeDelta::seconds(7);
    let limit = RateLimit { count: 5, per_seconds: 60 };
    let rate = |left| Some(RateUse { limit, left, opens_at });
    let explained = explain(&Facts { rate: rate(0), ..facts() });
    assert_eq!(explained.summary, "queue default has started 5 of 5 jobs in 60 s");
    assert_eq!(explained.next_change_at, Some(opens_at));
    assert!(explain(&Facts { rate: rate(1), ..facts() }).next_change_at.is_none());
}

#[test]
fn explain_says_when_something_changes() {
    let run_at = DateTime::UNIX_EPOCH + TimeDelta::seconds(90);
    let backoff = Facts { state: StoredState::Backoff, failures: 1, run_at, ..facts() };
    let explained = explain(&backoff);
    assert_eq!(explained.summary, "failure 1 of 3: retried in 90 s");
    assert_eq!(explained.next_change_at, Some(run_at));
    let scheduled = Facts { state: StoredState::Scheduled, run_at, ..facts() };
    assert_eq!(summary(&scheduled), "its run_at is 90 s ahead");
    let expires_at = Some(DateTime::UNIX_EPOCH + TimeDelta::seconds(9));
    assert_eq!(explain(&Facts { expires_at, ..scheduled }).next_change_at, expires_at);
}

#[test]
fn a_job_that_does_not_wait_has_no_conditions() {
    let ended = Facts { state: StoredState::DeadLetter, failures: 3, ..facts() };
    let blocks = Facts { blocks_group: Some("acme".to_owned()), ..ended.clone() };
    assert!(summary(&blocks).ends_with("its group acme, so retry it or unblock the group"));
    let explained = explain(&ended);
    assert!(explained.conditions.is_empty());
    assert!(explained.summary.starts_with("dead-lettered after 3 of 3 failures"));
    let explained = explain(&Facts { failures: 1, ..ended });
    assert!(explained.summary.starts_with("dead-lettered by failure 1 of 3, which no retry"));
    let worker_id = Some("ann".to_owned());
    let running = Facts { state: StoredState::Processing, worker_id, ..facts() };
    assert_eq!(summary(&running), "worker ann runs it");
    let at = |seconds| Some(DateTime::UNIX_EPOCH + TimeDelta::seconds(seconds));
    let (worker_lost_at, lease_expires_at) = (at(30), at(900));
    let beating = Facts { worker_lost_at, lease_expires_at, ..running.clone() };
    let explained = explain(&beating);
    assert_eq!(explained.next_change_at, worker_lost_at, "before its lease ends");
    assert_eq!(
        explained.summary,
        "worker ann runs it: if it makes no call, the job returns at 1970-01-01T00:00:30Z"
    );
    let silent = Facts { silent_seconds: Some(90), ..running };
    assert!(summary(&silent).starts_with("worker ann has it, and has made no call for 90 s"));
}
