//! Forged histories: bad ones are found by their invariant, and odd ones that are good are not.

use super::*;

const JOB: &str = "job_a";

fn enqueued(key: &str, job: Option<&str>) -> Event {
    Event::Enqueued { tenant: 0, key: key.to_owned(), job: job.map(str::to_owned) }
}

fn leased(attempt: i64, lease: &str) -> Event {
    Event::Leased { tenant: 0, job: JOB.to_owned(), attempt, lease: lease.to_owned(), of: 0 }
}

fn acked(attempt: i64, lease: &str, end: End, answer: Answer) -> Event {
    let (job, lease) = (JOB.to_owned(), lease.to_owned());
    Event::Acked { tenant: 0, job, attempt, lease, end, answer }
}

/// A job whose attempts have ended so.
fn job(state: &str, outcomes: &[&str]) -> BookJob {
    let attempt = |(place, outcome): (usize, &&str)| BookAttempt {
        attempt: place as i64 + 1,
        outcome: (*outcome).to_owned(),
    };
    let is_failure = |it: &&&str| ["failed", "timeout", "lease_expired"].contains(&**it);
    BookJob {
        id: JOB.to_owned(),
        state: state.to_owned(),
        attempt: outcomes.len() as i64,
        failures: outcomes.iter().filter(is_failure).count() as i64,
        attempts: outcomes.iter().enumerate().map(attempt).collect(),
    }
}

fn found(events: &[Event], book: &[BookJob]) -> Vec<Invariant> {
    let mut all: Vec<_> = violations(events, book).into_iter().map(|it| it.invariant).collect();
    all.dedup();
    all
}

/// One job that was sent, with these events.
fn of_one(events: &[Event], job: BookJob) -> Vec<Invariant> {
    let mut all = vec![enqueued("k", Some(JOB))];
    all.extend_from_slice(events);
    found(&all, &[job])
}

#[test]
fn odd_histories_that_are_good_pass() {
    use Answer::{Stale, Unknown, Yes};
    use End::{Failed, Released, Succeeded};
    let fine: &[(&[Event], BookJob)] = &[
        (&[], job("succeeded", &["succeeded"])),
        // Its success is in no list of attempts.
        (&[], BookJob { attempts: Vec::new(), ..job("succeeded", &["succeeded"]) }),
        (&[], BookJob { attempt: 2, ..job("succeeded", &["released"]) }),
        // Lost answers, and the same ack again.
        (
            &[
                leased(1, "x"),
                acked(1, "x", Succeeded, Unknown),
                acked(1, "x", Succeeded, Yes),
                acked(1, "x", Succeeded, Yes),
                acked(1, "x", Failed, Stale),
            ],
            job("succeeded", &["succeeded"]),
        ),
        // A worker that froze: its lease ended, and another one went on.
        (
            &[leased(1, "x"), leased(2, "y"), acked(1, "x", Succeeded, Stale)],
            job("succeeded", &["lease_expired", "succeeded"]),
        ),
        // An ack whose answer was lost for good.
        (&[leased(1, "x"), acked(1, "x", Succeeded, Unknown)], job("succeeded", &["succeeded"])),
        // An ack that never arrived.
        (
            &[leased(1, "x"), acked(1, "x", Succeeded, Unknown)],
            job("succeeded", &["lease_expired", "succeeded"]),
        ),
        // A lease that no worker saw.
        (&[leased(2, "y")], job("succeeded", &["released", "succeeded"])),
        // A node gave the lease back while its worker released it.
        (
            &[leased(1, "x"), acked(1, "x", Released, Stale)],
            job("succeeded", &["released", "succeeded"]),
        ),
        // A poll that was repeated has the same lease twice.
        (&[leased(1, "x"), leased(1, "x")], job("succeeded", &["succeeded"])),
        (&[acked(3, "z", Failed, Yes)], job("dead_letter", &["failed", "lease_expired", "failed"])),
    ];
    for (events, job) in fine {
        assert_eq!(of_one(events, job.clone()), [], "{events:?} {job:?}");
    }
    assert_eq!(found(&[enqueued("k", None)], &[]), [], "it never arrived");
    let twice = [enqueued("k", None), enqueued("k", Some(JOB)), enqueued("k", Some(JOB))];
    assert_eq!(found(&twice, &[job("succeeded", &["succeeded"])]), []);
}

#[test]
fn bad_histories_are_found() {
    use Answer::{Stale, Yes};
    use End::{Failed, Released, Succeeded};
    use Invariant::{
        AcceptedIsRecorded, EveryJobEnds, FailuresAreCounted, NoForeignJob, NoStrangeAnswer,
        NothingAppears, OneLease, RepeatedIsTheSame, SuccessIsFinal,
    };
    let succeeded = || job("succeeded", &["succeeded"]);
    let foreign =
        Event::Leased { tenant: 1, job: JOB.to_owned(), attempt: 1, lease: "x".to_owned(), of: 0 };
    let strange = Event::Strange { call: "/v1/jobs".to_owned(), status: 500, text: String::new() };
    let bad: &[(&[Event], BookJob, &[Invariant])] = &[
        (&[], job("pending", &[]), &[EveryJobEnds]),
        (&[], job("processing", &["failed"]), &[EveryJobEnds]),
        (&[leased(1, "x"), leased(1, "y")], succeeded(), &[OneLease]),
        (&[], BookJob { attempt: 3, ..job("succeeded", &["released"]) }, &[OneLease]),
        // A stale ack counted.
        (
            &[acked(1, "x", Succeeded, Yes)],
            job("succeeded", &["lease_expired", "succeeded"]),
            &[AcceptedIsRecorded],
        ),
        (&[acked(1, "x", Failed, Yes)], succeeded(), &[AcceptedIsRecorded]),
        // Both of two different acks counted.
        (
            &[acked(1, "x", Succeeded, Yes), acked(1, "x", Failed, Yes)],
            succeeded(),
            &[AcceptedIsRecorded],
        ),
        (&[acked(1, "x", Released, Yes)], succeeded(), &[AcceptedIsRecorded]),
        // An accepted success was lost.
        (
            &[acked(1, "x", Succeeded, Yes)],
            job("dead_letter", &["lease_expired", "failed", "failed"]),
            &[AcceptedIsRecorded],
        ),
        (&[acked(1, "x", Succeeded, Stale)], succeeded(), &[RepeatedIsTheSame]),
        (
            &[acked(1, "x", Failed, Stale)],
            job("succeeded", &["failed", "succeeded"]),
            &[RepeatedIsTheSame],
        ),
        (&[], job("succeeded", &["succeeded", "succeeded"]), &[SuccessIsFinal]),
        // A worker got a lease after the success, of which the book says nothing.
        (&[acked(1, "x", Succeeded, Yes), leased(2, "y")], succeeded(), &[SuccessIsFinal]),
        (&[], job("dead_letter", &["failed"]), &[FailuresAreCounted]),
        (&[], job("dead_letter", &["failed"; 4]), &[FailuresAreCounted]),
        (
            &[],
            job("succeeded", &["failed", "failed", "failed", "succeeded"]),
            &[FailuresAreCounted],
        ),
        (
            &[],
            BookJob { failures: 0, ..job("succeeded", &["failed", "succeeded"]) },
            &[FailuresAreCounted],
        ),
        (&[foreign], succeeded(), &[NoForeignJob]),
        (&[strange], succeeded(), &[NoStrangeAnswer]),
        (&[enqueued("k", Some("job_b"))], succeeded(), &[NothingAppears, EveryJobEnds]),
    ];
    for (events, job, expected) in bad {
        assert_eq!(of_one(events, job.clone()), *expected, "{events:?} {job:?}");
    }
    assert_eq!(found(&[enqueued("k", Some(JOB))], &[]), [EveryJobEnds], "it is gone");
    assert_eq!(found(&[enqueued("k", None)], &[succeeded()]), [NothingAppears]);
    let shared = [enqueued("k", Some(JOB)), enqueued("other", Some(JOB))];
    assert_eq!(found(&shared, &[succeeded()]), [NothingAppears], "one of them is lost");
}
