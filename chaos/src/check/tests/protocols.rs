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

#[test]
fn ends_that_no_worker_has_sent_are_found() {
    use Answer::Unknown;
    use End::{Failed, Released, Succeeded};
    let appears = |acks: &[Event], job: BookJob| {
        let mut events = vec![enqueued("k", Some(JOB))];
        events.extend_from_slice(acks);
        let lines: Vec<_> = events.into_iter().map(|event| Line { at: 1, event }).collect();
        let broken = violations(&lines, &book(&[job]), 1);
        broken.iter().any(|it| it.invariant == Invariant::NoEndAppears)
    };
    let (done, failed) = (job("succeeded", &["succeeded"]), job("succeeded", &["failed"]));
    for queue in ["q0", "mobius", "pushed"] {
        let done = of_queue(queue, done.clone());
        assert!(!appears(&[acked(1, "x", Succeeded, Unknown)], done.clone()), "{queue}");
        assert!(appears(&[acked(1, "x", Failed, Unknown)], done.clone()), "{queue}");
        assert!(appears(&[acked(2, "x", Succeeded, Unknown)], done.clone()), "another attempt");
        assert!(appears(&[], done), "{queue}");
    }
    assert!(!appears(&[], of_queue("python", done)), "it does not say how it ended it");
    assert!(appears(&[acked(1, "x", Released, Unknown)], failed.clone()));
    assert!(!appears(&[acked(1, "x", Failed, Unknown)], failed.clone()));
    assert!(!appears(&[], of_queue("pushed", failed)), "the URL did not answer in time");
}
