//! What a run did, as tables for people.

use std::{collections::BTreeMap, io::Write, time::Duration};

use crate::{
    check::{BookJob, Violation},
    history::{Answer, End, Event},
};

/// Runs of at least this many seconds must have seen everything that is listed as rare.
pub const MIN_SECONDS: u64 = 120;

/// How often something happened that a run must have met.
fn sometimes(events: &[Event], book: &[BookJob]) -> Vec<(&'static str, usize)> {
    let acks = |wanted: fn(End, Answer) -> bool| {
        let is =
            |it: &&Event| matches!(it, Event::Acked { end, answer, .. } if wanted(*end, *answer));
        events.iter().filter(is).count()
    };
    let outcomes = |name: &str| {
        let all = book.iter().flat_map(|it| &it.attempts);
        all.filter(|it| it.outcome == name).count()
    };
    let states = |name: &str| book.iter().filter(|it| it.state == name).count();
    let unknown_enqueues =
        events.iter().filter(|it| matches!(it, Event::Enqueued { job: None, .. }));
    let beats = |wanted: Answer| {
        let is = |it: &&Event| matches!(it, Event::Beat { answer, .. } if *answer == wanted);
        events.iter().filter(is).count()
    };
    vec![
        ("an enqueue without an answer is repeated", unknown_enqueues.count()),
        ("an ack without an answer is repeated", acks(|_, it| it == Answer::Unknown)),
        ("a stale ack is refused", acks(|_, it| it == Answer::Stale)),
        ("a heartbeat renews a lease", beats(Answer::Yes)),
        ("an attempt fails", outcomes("failed")),
        ("a lease expires", outcomes("lease_expired")),
        ("a lease is released", outcomes("released")),
        ("a job is a dead letter", states("dead_letter")),
        ("a job needs a third attempt", book.iter().filter(|it| it.attempt >= 3).count()),
    ]
}

/// Prints what happened. Returns whether everything rare did.
pub fn print(
    seed: u64,
    seconds: u64,
    events: &[Event],
    book: &[BookJob],
    violations: &[Violation],
    drained: &anyhow::Result<Duration>,
) -> bool {
    let mut out = std::io::stdout().lock();
    let mut say = |line: String| drop(writeln!(out, "{line}"));
    let mut faults: BTreeMap<&str, usize> = BTreeMap::new();
    let mut operations: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for event in events {
        let answered = |it: Answer| match it {
            Answer::Yes => "accepted",
            Answer::Stale => "refused",
            Answer::Unknown => "unknown",
        };
        let operation = match event {
            Event::Enqueued { job, .. } => {
                ("enqueue", if job.is_some() { "accepted" } else { "unknown" })
            }
            Event::Leased { .. } => ("lease", "accepted"),
            Event::Acked { answer, .. } => ("ack", answered(*answer)),
            Event::Beat { answer, .. } => ("heartbeat", answered(*answer)),
            Event::Strange { .. } => ("any", "strange"),
            Event::Fault { kind } => {
                *faults.entry(kind).or_default() += 1;
                continue;
            }
        };
        *operations.entry(operation).or_default() += 1;
    }
    say(format!("seed {seed}, {seconds} s of faults, {} jobs", book.len()));
    say("\n| operation | answer | number |\n|---|---|---:|".to_owned());
    for ((operation, answer), number) in operations {
        say(format!("| {operation} | {answer} | {number} |"));
    }
    say("\n| fault | number |\n|---|---:|".to_owned());
    faults.iter().for_each(|(kind, number)| say(format!("| {kind} | {number} |")));
    say("\n| sometimes | number |\n|---|---:|".to_owned());
    let sometimes = sometimes(events, book);
    sometimes.iter().for_each(|(what, number)| say(format!("| {what} | {number} |")));
    match drained {
        Ok(it) => {
            say(format!("\nAll jobs had ended {:.1} s after all was healed.", it.as_secs_f64()))
        }
        Err(error) => say(format!("\nJobs did not end: {error:#}")),
    }
    say(format!("{} violations", violations.len()));
    violations.iter().for_each(|it| say(format!("{:?}: {}", it.invariant, it.detail)));
    sometimes.iter().all(|it| it.1 > 0)
}
