//! Forged histories: bad ones are found by their invariant, and odd ones that are good are not.

mod families;
mod protocols;
mod times;

use chrono::{DateTime, TimeDelta, Utc};

use super::*;

const JOB: &str = "job_a";
/// Invariants with tests of their own: in most histories here, times and payloads are made up, and
/// ends were sent by none.
const APART: [Invariant; 3] =
    [Invariant::CallsHaveAnOrder, Invariant::NoEndAppears, Invariant::StoredAsSent];

fn at(seconds: i64) -> DateTime<Utc> {
    DateTime::UNIX_EPOCH + TimeDelta::seconds(seconds)
}

fn enqueued(key: &str, job: Option<&str>) -> Event {
    let (key, queue, job) = (key.to_owned(), "q0".to_owned(), job.map(str::to_owned));
    Event::Enqueued { tenant: 0, key, queue, job }
}

fn held(attempt: i64, lease: &str) -> Held {
    let (job, lease, worker) = (JOB.to_owned(), lease.to_owned(), "w".to_owned());
    Held { job, attempt, lease, worker }
}

fn leased(attempt: i64, lease: &str) -> Event {
    Event::Leased { tenant: 0, held: held(attempt, lease), owner: 0, is_first: true }
}

fn acked(attempt: i64, lease: &str, end: End, answer: Answer) -> Event {
    Event::Acked { tenant: 0, held: held(attempt, lease), end, answer, sent: 0 }
}

/// A heartbeat that was sent in this second.
fn beat(attempt: i64, seconds: i64, answer: Answer) -> Event {
    Event::Beat { held: held(attempt, "x"), answer, sent: seconds * 1_000 }
}

/// The endpoint takes what it is notified of the job's end.
fn reported(kind: &str) -> Event {
    let (event, job) = ("evt_a".to_owned(), JOB.to_owned());
    Event::Delivered { tenant: 0, event, kind: kind.to_owned(), job, is_taken: true }
}

/// The endpoint takes what it is notified of the end of this job.
fn end_reported(job: &BookJob) -> Event {
    let kind = match job.state.as_str() {
        "dead_letter" => "job.dead_lettered".to_owned(),
        state => format!("job.{state}"),
    };
    let (event, job) = (format!("evt_{}", job.id), job.id.clone());
    Event::Delivered { tenant: 0, event, kind, job, is_taken: true }
}

/// A job whose attempts have ended so: each takes five of ten seconds.
fn job(state: &str, outcomes: &[&str]) -> BookJob {
    let attempt = |(place, outcome): (i64, &&str)| BookAttempt {
        attempt: place,
        outcome: (*outcome).to_owned(),
        claimed_at: at(10 * place),
        ended_at: at(10 * place + 5),
    };
    let count = |kinds: &[&str]| outcomes.iter().filter(|it| kinds.contains(it)).count() as i64;
    BookJob {
        id: JOB.to_owned(),
        queue: "q0".to_owned(),
        job_type: "chaos".to_owned(),
        state: state.to_owned(),
        attempt: outcomes.len() as i64,
        failures: count(&["failed", "timeout"]),
        losses: count(&["lease_expired"]),
        dead_letter_reason: None,
        attempts: (1..).zip(outcomes).map(attempt).collect(),
        enqueued_at: at(0),
        parents: Vec::new(),
        claimed_at: None,
        completed_at: Some(at(100)),
        payload: serde_json::Value::Null,
        tenant: 0,
    }
}

/// A dead letter that was lost this many times in a row.
fn lost(times: usize) -> BookJob {
    let reason = Some("lost".to_owned());
    BookJob { dead_letter_reason: reason, ..job("dead_letter", &vec!["lease_expired"; times]) }
}

/// What is broken, when an event comes each second.
fn found(events: &[Event], book: &Book) -> Vec<Invariant> {
    let line = |(second, event): (i64, &Event)| Line { at: second * 1_000, event: event.clone() };
    let lines: Vec<_> = (1..).zip(events).map(line).collect();
    let mut all: Vec<_> = violations(&lines, book, 1).into_iter().map(|it| it.invariant).collect();
    all.retain(|it| !APART.contains(it));
    all.dedup();
    all
}

fn book(jobs: &[BookJob]) -> Book {
    Book { jobs: jobs.to_vec(), counts_losses: true, ..Book::default() }
}

/// One job that was sent, with these events. Its end is reported.
fn of_one(events: &[Event], job: BookJob) -> Vec<Invariant> {
    let mut all = vec![enqueued("k", Some(JOB)), end_reported(&job)];
    all.extend_from_slice(events);
    found(&all, &book(&[job]))
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
        // Heartbeats before a lease ended, one of them without an answer.
        (
            &[leased(1, "x"), beat(1, 1, Yes), beat(1, 2, Unknown), leased(2, "y")],
            job("succeeded", &["lease_expired", "succeeded"]),
        ),
        (&[leased(2, "y"), beat(1, 60, Stale)], job("succeeded", &["released", "succeeded"])),
        // A poll that was repeated has the same lease twice.
        (&[leased(1, "x"), leased(1, "x")], job("succeeded", &["succeeded"])),
        (&[], lost(5)),
        (
            &[acked(4, "z", Failed, Yes)],
            job("dead_letter", &["failed", "lease_expired", "failed", "failed"]),
        ),
        // Its worker was asked to stop, and failed.
        (
            &[leased(1, "x"), acked(1, "x", Failed, Yes)],
            BookJob { failures: 1, ..job("cancelled", &["cancelled"]) },
        ),
        (
            &[leased(1, "x"), acked(1, "x", Released, Yes)],
            BookJob { failures: 0, ..job("cancelled", &["cancelled"]) },
        ),
    ];
    for (events, job) in fine {
        assert_eq!(of_one(events, job.clone()), [], "{events:?} {job:?}");
    }
    assert_eq!(found(&[enqueued("k", None)], &book(&[])), [], "it never arrived");
    let reported = reported("job.succeeded");
    let twice = [enqueued("k", None), enqueued("k", Some(JOB)), enqueued("k", Some(JOB)), reported];
    assert_eq!(found(&twice, &book(&[job("succeeded", &["succeeded"])])), []);
}

type Bad<'a> = (&'a [Event], BookJob, &'a [Invariant]);

fn all_are_found(bad: &[Bad<'_>]) {
    for (events, job, expected) in bad {
        assert_eq!(of_one(events, job.clone()), *expected, "{events:?} {job:?}");
    }
}

fn succeeded() -> BookJob {
    job("succeeded", &["succeeded"])
}

#[test]
fn acks_that_contradict_the_book_are_found() {
    use Answer::{Stale, Yes};
    use End::{Failed, Released, Succeeded};
    use Invariant::{AcceptedIsRecorded, RepeatedIsTheSame, SuccessIsFinal};
    all_are_found(&[
        // A stale ack counted.
        (
            &[acked(1, "x", Succeeded, Yes)],
            job("succeeded", &["lease_expired", "succeeded"]),
            &[AcceptedIsRecorded],
        ),
        (&[acked(1, "x", Failed, Yes)], succeeded(), &[AcceptedIsRecorded]),
        (&[acked(1, "x", Succeeded, Yes)], job("cancelled", &["cancelled"]), &[AcceptedIsRecorded]),
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
            job("dead_letter", &["lease_expired", "failed", "failed", "failed"]),
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
        (
            &[leased(1, "x"), acked(1, "x", Succeeded, Yes), leased(1, "x")],
            succeeded(),
            &[SuccessIsFinal],
        ),
        // A heartbeat after the next attempt was known.
        (
            &[leased(2, "y"), beat(1, 60, Yes)],
            job("succeeded", &["released", "succeeded"]),
            &[AcceptedIsRecorded],
        ),
    ]);
}

#[test]
fn leases_that_are_wrong_are_found() {
    use Invariant::{NoEarlyEnd, NoForeignJob, OneLease};
    let foreign = Event::Leased { tenant: 1, held: held(1, "x"), owner: 0, is_first: true };
    let foreign_too = Event::Leased { tenant: 1, held: held(1, "x"), owner: 1, is_first: true };
    let other = Held { worker: "v".to_owned(), ..held(1, "x") };
    let other = Event::Leased { tenant: 0, held: other, owner: 0, is_first: true };
    let soon = BookAttempt { ended_at: at(11), ..job("", &["lease_expired"]).attempts.remove(0) };
    all_are_found(&[
        (&[leased(1, "x"), leased(1, "y")], succeeded(), &[OneLease]),
        (&[], BookJob { attempt: 3, ..job("succeeded", &["released"]) }, &[OneLease]),
        // One lease, two workers.
        (&[leased(1, "x"), other], succeeded(), &[OneLease]),
        // A lease of two seconds that ended after one, and one that a heartbeat had renewed.
        (
            &[],
            BookJob { attempts: vec![soon], ..job("succeeded", &["lease_expired", "succeeded"]) },
            &[NoEarlyEnd],
        ),
        (
            &[leased(1, "x"), beat(1, 14, Answer::Yes)],
            job("succeeded", &["lease_expired", "succeeded"]),
            &[NoEarlyEnd],
        ),
        // By what the payload says, and by what the book says.
        (&[foreign], succeeded(), &[NoForeignJob]),
        (&[foreign_too], succeeded(), &[NoForeignJob]),
    ]);
}

#[test]
fn a_lease_without_the_last_checkpoint_is_found() {
    let saved = |attempt, sequence| Event::Saved { job: JOB.to_owned(), attempt, sequence };
    let resumed = |attempt, sequence| Event::Resumed { job: JOB.to_owned(), attempt, sequence };
    let check = |events: &[Event]| {
        let lines: Vec<_> = events.iter().map(|it| Line { at: 0, event: it.clone() }).collect();
        let mut found = Found(Vec::new());
        checkpoints::add_violations(&lines, &mut found);
        found.0.iter().map(|it| it.invariant).collect::<Vec<_>>()
    };
    let kept = [Invariant::CheckpointsAreKept];
    assert_eq!(check(&[resumed(1, None), saved(1, 5), resumed(2, Some(5))]), []);
    // An answer that was lost: a later one is there. A poll that was repeated has its own.
    assert_eq!(check(&[saved(1, 5), resumed(2, Some(6)), saved(2, 9), resumed(2, Some(9))]), []);
    // What a stale holder stored, though its answer came late.
    assert_eq!(check(&[saved(1, 5), resumed(2, Some(5)), saved(1, 7)]), kept);
    assert_eq!(check(&[saved(1, 5), resumed(2, None)]), kept);
    assert_eq!(check(&[saved(1, 5), saved(2, 8), resumed(3, Some(5))]), kept);
}

#[test]
fn jobs_that_are_wrong_are_found() {
    use Invariant::{EveryJobEnds, FailuresAreCounted, NoStrangeAnswer, NothingAppears};
    let strange = Event::Strange { call: "/v1/jobs".to_owned(), status: 500, text: String::new() };
    all_are_found(&[
        (&[], job("pending", &[]), &[EveryJobEnds]),
        (&[], job("processing", &["failed"]), &[EveryJobEnds]),
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
        // A loss that was forgotten, one that was counted as a failure, and one too early.
        (
            &[],
            BookJob { losses: 0, ..job("succeeded", &["lease_expired", "succeeded"]) },
            &[FailuresAreCounted],
        ),
        (&[], BookJob { failures: 1, ..lost(5) }, &[FailuresAreCounted]),
        (&[], lost(4), &[FailuresAreCounted]),
        // Where all nodes count losses, an expired lease of the native API is no failure.
        (
            &[],
            BookJob { failures: 1, losses: 0, ..job("succeeded", &["lease_expired", "succeeded"]) },
            &[FailuresAreCounted],
        ),
        (&[strange], succeeded(), &[NoStrangeAnswer]),
        (&[enqueued("k", Some("job_b"))], succeeded(), &[NothingAppears, EveryJobEnds]),
    ]);
    let all = |events: &[Event], jobs: &[BookJob]| found(events, &book(jobs));
    let reported = reported("job.succeeded");
    assert_eq!(all(&[enqueued("k", Some(JOB))], &[]), [EveryJobEnds], "it is gone");
    assert_eq!(all(&[leased(1, "x")], &[]), [NothingAppears], "it was never there");
    assert_eq!(all(&[enqueued("k", None), reported.clone()], &[succeeded()]), [NothingAppears]);
    let shared = [enqueued("k", Some(JOB)), enqueued("other", Some(JOB)), reported];
    assert_eq!(all(&shared, &[succeeded()]), [NothingAppears], "one of them is lost");
}
