//! Forged histories of workers of other protocols, and of jobs that are pushed.

use super::*;

/// A job of this queue.
fn of_queue(queue: &str, job: BookJob) -> BookJob {
    BookJob { queue: queue.to_owned(), ..job }
}

/// A job of this queue whose first lease expired after this many seconds.
fn expired(queue: &str, seconds: i64) -> BookJob {
    let mut job = of_queue(queue, job("succeeded", &["lease_expired", "succeeded"]));
    job.attempts[0].ended_at = job.attempts[0].claimed_at + TimeDelta::seconds(seconds);
    job
}

#[test]
fn a_lease_is_as_long_as_its_protocol_says() {
    let lengths = [("open-job-spec", 2), ("workflow-graph", 2), ("mobius", 90), ("orch8", 60)];
    for (queue, seconds) in lengths.into_iter().chain([("pushed", 23)]) {
        assert_eq!(of_one(&[], expired(queue, seconds)), [], "{queue}");
        assert_eq!(of_one(&[], expired(queue, seconds - 1)), [Invariant::NoEarlyEnd], "{queue}");
    }
}

#[test]
fn a_heartbeat_over_another_protocol_lengthens_a_lease() {
    // The first lease begins in second 10.
    let beats = [leased(1, "x"), beat(1, 40, Answer::Yes)];
    assert_eq!(of_one(&beats, expired("orch8", 90)), []);
    assert_eq!(of_one(&beats, expired("orch8", 89)), [Invariant::NoEarlyEnd]);
    let refused = [leased(1, "x"), beat(1, 40, Answer::Stale)];
    assert_eq!(of_one(&refused, expired("orch8", 60)), [], "it was refused");
    let lost = [leased(1, "x"), beat(1, 40, Answer::Unknown)];
    assert_eq!(of_one(&lost, expired("orch8", 60)), [], "it may never have come");
    let late = [leased(1, "x"), leased(2, "y"), beat(1, 40, Answer::Yes)];
    let broken = [Invariant::AcceptedIsRecorded];
    assert_eq!(of_one(&late, expired("mobius", 200)), broken, "another worker had the job");
}

#[test]
fn open_job_spec_says_which_leases_it_renews() {
    let renewed = |body: &str| {
        let body = serde_json::from_str(body).expect("JSON");
        Protocol::OpenJobSpec.heartbeat_answer("a", Some(&(200, body)))
    };
    assert_eq!(renewed(r#"{"jobs_extended": ["b", "a"]}"#), Answer::Yes);
    assert_eq!(renewed(r#"{"jobs_extended": ["b"]}"#), Answer::Stale);
    assert_eq!(renewed("{}"), Answer::Stale);
    assert_eq!(Protocol::OpenJobSpec.heartbeat_answer("a", None), Answer::Unknown);
    let body = serde_json::Value::Null;
    assert_eq!(Protocol::Orch8.heartbeat_answer("a", Some(&(409, body))), Answer::Stale);
}

/// Whether an end of this job is one that none has caused.
fn appears(events: &[Event], job: BookJob) -> bool {
    let mut all = vec![enqueued("k", Some(JOB))];
    all.extend_from_slice(events);
    let lines: Vec<_> = all.into_iter().map(|event| Line { at: 1, event }).collect();
    let broken = violations(&lines, &book(&[job]), 1);
    broken.iter().any(|it| it.invariant == Invariant::NoEndAppears)
}

#[test]
fn cancels_that_none_asked_for_are_found() {
    let job = job("cancelled", &["cancelled"]);
    let id = JOB.to_owned();
    assert!(appears(&[], job.clone()));
    assert!(!appears(&[Event::Cancelling { job: id.clone() }], job.clone()));
    let other = || "job_b".to_owned();
    let (first, then, otherwise) = (other(), id, other());
    assert!(!appears(&[Event::Workflow { tenant: 0, first, then, otherwise }], job), "a child");
}

#[test]
fn releases_that_no_worker_has_sent_are_found() {
    let job = |queue: &str| of_queue(queue, job("cancelled", &["released"]));
    let asked = [Event::Cancelling { job: JOB.to_owned() }];
    let of = |events: &[Event], queue: &str| appears(&[&asked, events].concat(), job(queue));
    assert!(!of(&[], "q0"), "a node could not hand it over");
    assert!(of(&[leased(1, "x")], "q0"));
    assert!(!of(&[leased(1, "x")], "pushed"), "its URL was busy");
    assert!(!of(&[leased(1, "x"), acked(1, "x", End::Released, Answer::Unknown)], "q0"));
    let held = held(1, "x");
    let again = Event::Leased { tenant: 0, held, owner: 0, is_first: false };
    assert!(!of(&[again], "q0"), "the node of the first try released it");
}

#[test]
fn a_push_that_was_answered_in_time_has_not_failed() {
    // The attempt lasts from second 10 to 15.
    let failed = of_queue("pushed", job("succeeded", &["failed", "succeeded"]));
    let fails = |end: End, noted: i64, sent: i64| {
        let (held, answer, sent) = (held(1, "x"), Answer::Unknown, sent * 1_000);
        let event = Event::Acked { tenant: 0, held, end, answer, sent };
        let lines = [Line { at: noted * 1_000, event }];
        let broken = violations(&lines, &book(std::slice::from_ref(&failed)), 1);
        broken.iter().any(|it| it.invariant == Invariant::AcceptedIsRecorded)
    };
    assert!(fails(End::Succeeded, 14, 14) && fails(End::Released, 14, 14));
    assert!(!fails(End::Failed, 14, 14));
    assert!(!fails(End::Succeeded, 16, 16), "the answer came late");
    assert!(!fails(End::Succeeded, 11, 11), "its node was frozen");
    assert!(!fails(End::Succeeded, 10, 14), "it is noted before it comes late");
}

#[test]
fn refusals_of_a_lease_that_runs_are_found() {
    // The attempt lasts from second 10 to 15, and its lease for two seconds.
    let refused = |events: &[(i64, Event)]| {
        let line = |(at, event): &(i64, Event)| Line { at: at * 1_000, event: event.clone() };
        let lines: Vec<_> = events.iter().map(line).collect();
        let mut found = Found(Vec::new());
        let seen = seen(&lines, &mut found);
        let job = job("succeeded", &["lease_expired", "succeeded"]);
        order::refusal_violations(&job, &seen[JOB], &mut found);
        !found.0.is_empty()
    };
    let ack = || acked(1, "x", End::Succeeded, Answer::Stale);
    assert!(refused(&[(14, ack())]));
    assert!(!refused(&[(16, ack())]));
    let refused_beat = |second: i64| (second, beat(1, second, Answer::Stale));
    assert!(refused(&[refused_beat(11)]));
    assert!(!refused(&[refused_beat(13)]), "its lease had run out");
    assert!(refused(&[(11, beat(1, 12, Answer::Yes)), refused_beat(13)]), "it was renewed");
}

#[test]
fn ends_that_no_worker_has_sent_are_found() {
    use Answer::Unknown;
    use End::{Failed, Released, Succeeded};
    let (done, failed) = (job("succeeded", &["succeeded"]), job("succeeded", &["failed"]));
    for queue in ["q0", "mobius", "pushed"] {
        let done = of_queue(queue, done.clone());
        assert!(!appears(&[acked(1, "x", Succeeded, Unknown)], done.clone()), "{queue}");
        assert!(appears(&[acked(1, "x", Failed, Unknown)], done.clone()), "{queue}");
        assert!(appears(&[acked(2, "x", Succeeded, Unknown)], done.clone()), "another attempt");
        assert!(appears(&[], done), "{queue}");
    }
    assert!(!appears(&[acked(1, "x", Succeeded, Unknown)], of_queue("python", done.clone())));
    assert!(appears(&[], of_queue("python", done)));
    assert!(appears(&[acked(1, "x", Released, Unknown)], failed.clone()));
    assert!(!appears(&[acked(1, "x", Failed, Unknown)], failed.clone()));
    assert!(!appears(&[], of_queue("pushed", failed)), "the URL did not answer in time");
}
