//! What a run did: as a line of JSON for the page, and as tables for people.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Write,
    time::Duration,
};

use fencepost_store::faults;
use serde::{Deserialize, Serialize};

use crate::{
    adapters::Protocol,
    book::{Book, BookAttempt, BookJob},
    check::{self, Invariant, Violation},
    clients::{LIMITED_QUEUE, MAX_CONCURRENCY},
    foreign,
    history::{Answer, End, Event, Line},
    nemesis::Fault,
    producers::{BACKOFF_MS, MAX_LOAD_PERCENT, NOT_BEFORE},
    pushed,
    stage::fail_points_of,
};

/// Runs of at least this length must have met everything that is rare.
pub const MIN_DURATION: Duration = Duration::from_secs(120);
/// Runs of at least this length must have failed at every fail point.
const ALL_POINTS_DURATION: Duration = Duration::from_secs(600);
/// Of a hundred enqueues, acks and heartbeats that were accepted or had no answer, those that must
/// be accepted at least. While a node is down, a third of them has none.
const MIN_ACCEPTED_PERCENT: u64 = 50;

/// A run.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Report {
    /// The commit of this program.
    pub commit: String,
    /// The day, as 2026-11-26.
    pub day: String,
    pub seed: u64,
    pub seconds: u64,
    /// How many jobs producers sent, in percent of the full load.
    #[serde(default = "full_load")]
    pub load_percent: u32,
    /// Whether Patroni led PostgreSQL.
    #[serde(default)]
    pub under_patroni: bool,
    /// The earlier release, if nodes changed between two.
    #[serde(default)]
    pub previous: Option<String>,
    pub jobs: usize,
    /// By call and outcome.
    pub operations: BTreeMap<String, u64>,
    pub faults: BTreeMap<Fault, u64>,
    /// Fail points that were hit, by name.
    pub fail_points: BTreeMap<String, u64>,
    /// By kind of fault: the longest time without an accepted call, in milliseconds.
    pub unavailable_ms: BTreeMap<Fault, i64>,
    pub sometimes: BTreeMap<String, u64>,
    /// From when nothing was broken any more until all jobs had ended.
    pub drained_ms: Option<u64>,
    /// Up to five of the jobs that were open when it was last looked.
    #[serde(default)]
    pub last_open: String,
    pub violations: Vec<Violation>,
}

const fn full_load() -> u32 {
    MAX_LOAD_PERCENT
}

impl Report {
    /// The same run, with what its history and its book say.
    #[must_use]
    pub fn judged(self, lines: &[Line], book: &Book, patience: u32) -> Self {
        let mut violations = check::violations(lines, book, patience);
        // Seen while it ran.
        let not_in_time = self.violations.into_iter();
        violations.extend(not_in_time.filter(|it| it.invariant == Invariant::EndsInTime));
        Self {
            jobs: book.jobs.len(),
            operations: operations(lines),
            faults: faults(lines),
            unavailable_ms: check::unavailable(lines),
            sometimes: sometimes(lines, book),
            violations,
            ..self
        }
    }

    /// What in a run of two minutes never happened, though it should.
    pub fn too_easy(&self) -> Vec<String> {
        // Nodes of an earlier release know no groups.
        let is_expected = |name: &str| self.previous.is_none() || name != GROUP_PAUSED;
        let never = self.sometimes.iter().filter(|it| *it.1 == 0 && is_expected(it.0));
        let mut missing: Vec<_> = never.map(|it| it.0.clone()).collect();
        let number = |outcome: &str| -> u64 {
            let of = |call: &str| self.operations.get(&format!("{call}, {outcome}"));
            ["enqueue", "ack", "heartbeat"].into_iter().filter_map(of).sum()
        };
        if self.seconds >= ALL_POINTS_DURATION.as_secs() && !self.fail_points.is_empty() {
            let names = faults::FAIL_POINTS.into_iter().flat_map(fail_points_of);
            let is_missing = |it: &String| !self.fail_points.contains_key(it);
            missing.extend(names.filter(is_missing).map(|it| format!("a failure at {it}")));
        }
        if self.previous.is_some() && !self.faults.keys().any(|it| it.changes_release()) {
            missing.push("a node changes its release".to_owned());
        }
        let (accepted, unknown) = (number("accepted"), number("unknown"));
        if accepted * 100 < (accepted + unknown) * MIN_ACCEPTED_PERCENT {
            missing.push(format!("{MIN_ACCEPTED_PERCENT} % of the calls were accepted"));
        }
        missing
    }

    /// Shows it to people.
    pub fn print(&self) {
        let mut out = std::io::stdout().lock();
        let mut say = |line: String| drop(writeln!(out, "{line}"));
        say(format!("seed {}, {} s of faults, {} jobs", self.seed, self.seconds, self.jobs));
        say("\n| operation | number |\n|---|---:|".to_owned());
        self.operations.iter().for_each(|(name, number)| say(format!("| {name} | {number} |")));
        say("\n| fault | number | longest without an accepted call |\n|---|---:|---:|".to_owned());
        for (fault, number) in &self.faults {
            let ms = self.unavailable_ms.get(fault).copied().unwrap_or_default();
            say(format!("| {} | {number} | {ms} ms |", fault.name()));
        }
        say("\n| sometimes | number |\n|---|---:|".to_owned());
        self.sometimes.iter().for_each(|(name, number)| say(format!("| {name} | {number} |")));
        match self.drained_ms {
            Some(ms) => say(format!("\nAll jobs had ended {ms} ms after all was healed.")),
            None => say("\nJobs did not end.".to_owned()),
        }
        if !self.last_open.is_empty() {
            say(format!("Open last: {}", self.last_open));
        }
        say(format!("{} violations", self.violations.len()));
        self.violations.iter().for_each(|it| say(format!("{:?}: {}", it.invariant, it.detail)));
    }
}

/// Calls by their outcome.
fn operations(lines: &[Line]) -> BTreeMap<String, u64> {
    let mut operations: BTreeMap<String, u64> = BTreeMap::new();
    let answered = |it: Answer| match it {
        Answer::Yes => "accepted",
        Answer::Stale => "refused",
        Answer::Unknown => "unknown",
    };
    for line in lines {
        let (call, outcome) = match &line.event {
            Event::Enqueued { job: Some(_), .. } => ("enqueue", "accepted"),
            Event::Enqueued { job: None, .. } => ("enqueue", "unknown"),
            Event::Workflow { .. } => ("workflow", "accepted"),
            Event::Batch { .. } => ("batch", "accepted"),
            Event::Leased { held, .. } if pushed::is_pushed(held) => ("push", "sent"),
            Event::Acked { held, .. } if foreign::is_foreign(held) => ("library", "ended"),
            Event::Leased { .. } => ("lease", "accepted"),
            Event::Acked { held, answer: Answer::Unknown, .. } if pushed::is_pushed(held) => {
                ("push", "answered")
            }
            Event::Acked { answer, .. } => ("ack", answered(*answer)),
            Event::Beat { answer, .. } => ("heartbeat", answered(*answer)),
            Event::Delivered { is_taken: true, .. } => ("delivery", "accepted"),
            Event::Delivered { is_taken: false, .. } => ("delivery", "refused"),
            Event::Cancelled { .. } => ("cancel", "accepted"),
            Event::Paused { .. } => ("pause", "accepted"),
            Event::Strange { .. } => ("call", "strange"),
            Event::Saved { .. } => ("checkpoint", "stored"),
            Event::Resumed { sequence: Some(_), .. } => ("checkpoint", "delivered"),
            Event::Resumed { sequence: None, .. }
            | Event::Cancelling { .. }
            | Event::Resuming { .. }
            | Event::Refused { .. }
            | Event::Fault { .. }
            | Event::Healed { .. } => continue,
        };
        *operations.entry(format!("{call}, {outcome}")).or_default() += 1;
    }
    operations
}

/// Faults by their kind.
fn faults(lines: &[Line]) -> BTreeMap<Fault, u64> {
    let mut faults = BTreeMap::new();
    for line in lines {
        if let Event::Fault { fault } = &line.event {
            *faults.entry(*fault).or_default() += 1;
        }
    }
    faults
}

/// How often something happened that a run must have met.
fn sometimes(lines: &[Line], book: &Book) -> BTreeMap<String, u64> {
    let mut all = BTreeMap::new();
    let met = [of_calls(lines), of_acks(lines), of_jobs(lines, book)];
    for (name, number) in met.into_iter().flatten() {
        all.insert(name.to_owned(), number as u64);
    }
    for protocol in Protocol::ALL {
        let name = protocol.name();
        let acks = |wanted: Answer| {
            count(lines, |it| match it {
                Event::Acked { held, answer, .. } => {
                    *answer == wanted && held.worker.starts_with(name)
                }
                _ => false,
            })
        };
        let renewals = count(lines, |it| match it {
            Event::Beat { held, answer: Answer::Yes, .. } => held.worker.starts_with(name),
            _ => false,
        });
        all.insert(format!("an ack comes over {name}"), acks(Answer::Yes) as u64);
        all.insert(format!("an ack over {name} is refused"), acks(Answer::Stale) as u64);
        all.insert(format!("a heartbeat over {name} renews a lease"), renewals as u64);
    }
    all
}

const GROUP_PAUSED: &str = "a group is paused";

/// What was met, and how often.
type Met = Vec<(&'static str, usize)>;

fn count(lines: &[Line], is: impl Fn(&Event) -> bool) -> usize {
    lines.iter().filter(|it| is(&it.event)).count()
}

fn of_calls(lines: &[Line]) -> Met {
    let events = |is: &dyn Fn(&Event) -> bool| count(lines, is);
    let is_renewal = |it: &Event| matches!(it, Event::Beat { answer: Answer::Yes, .. });
    let is_busy =
        |it: &Event| matches!(it, Event::Refused { code, .. } if code == "idempotency_in_progress");
    vec![
        (
            "an enqueue that was not accepted is sent again",
            events(&|it| matches!(it, Event::Enqueued { job: None, .. })),
        ),
        ("a key is busy", events(&is_busy)),
        (
            "a node refuses a call for a while",
            events(&|it| matches!(it, Event::Refused { status: 503, .. })),
        ),
        ("a heartbeat renews a lease", events(&is_renewal)),
        ("a heartbeat of an ended lease is refused", refused(lines, false)),
        (
            "a URL that works on renews its lease",
            events(&|it| match it {
                Event::Beat { held, answer: Answer::Yes, .. } => pushed::is_pushed(held),
                _ => false,
            }),
        ),
        ("a poll is repeated and gets its leases again", repeated_leases(lines)),
        ("a waiting job is cancelled", events(&|it| matches!(it, Event::Cancelled { .. }))),
        ("a queue is paused", events(&|it| matches!(it, Event::Paused { group: None, .. }))),
        (GROUP_PAUSED, events(&|it| matches!(it, Event::Paused { group: Some(_), .. }))),
        (
            "an endpoint refuses a delivery",
            events(&|it| matches!(it, Event::Delivered { is_taken: false, .. })),
        ),
        ("an end is reported again", reported_again(lines)),
    ]
}

fn of_acks(lines: &[Line]) -> Met {
    let acks = |wanted: fn(bool, End, Answer) -> bool| {
        count(lines, |it| match it {
            Event::Acked { held, end, answer, .. } => {
                wanted(pushed::is_pushed(held), *end, *answer)
            }
            _ => false,
        })
    };
    vec![
        (
            "an ack that was not accepted is sent again",
            count(lines, |it| match it {
                Event::Acked { held, answer: Answer::Unknown, .. } => {
                    !pushed::is_pushed(held) && !foreign::is_foreign(held)
                }
                _ => false,
            }),
        ),
        ("an ack of an ended lease is refused", refused(lines, true)),
        (
            "a worker releases a lease",
            acks(|_, end, answer| end == End::Released && answer == Answer::Yes),
        ),
        ("a URL refuses a pushed job", acks(|is_pushed, end, _| is_pushed && end == End::Failed)),
        ("a URL is busy", acks(|is_pushed, end, _| is_pushed && end == End::Released)),
        (
            "a URL works on after its answer",
            acks(|is_pushed, _, answer| is_pushed && answer != Answer::Unknown),
        ),
    ]
}

fn of_jobs(lines: &[Line], book: &Book) -> Met {
    let outcomes = |name: &str| {
        let attempts = book.jobs.iter().flat_map(|it| &it.attempts);
        attempts.filter(|it| it.outcome == name).count()
    };
    let children = book.jobs.iter().filter(|it| !it.parents.is_empty());
    let with = |name: &'static str| book.jobs.iter().filter(move |it| !it.payload[name].is_null());
    let failed = |it: &&BookJob| {
        it.attempts.iter().any(|own| own.outcome == "failed" && own.attempt < it.attempt)
    };
    let full =
        check::running(book, LIMITED_QUEUE).into_values().filter(|it| it.most >= MAX_CONCURRENCY);
    let fires = book.fires.values().flatten();
    let waits = |it: &&BookJob| {
        let until = it.payload[NOT_BEFORE].as_i64();
        it.attempt > 0 && until.is_some_and(|until| it.enqueued_at.timestamp_millis() < until)
    };
    let is_done = |it: &&BookJob| it.queue == pushed::QUEUE && it.state == "succeeded";
    vec![
        ("an attempt fails", outcomes("failed")),
        ("a lease expires", outcomes("lease_expired")),
        ("a lease is released", outcomes("released")),
        ("a job is a dead letter", book.jobs.iter().filter(|it| it.state == "dead_letter").count()),
        ("a child is cancelled", children.filter(|it| it.state == "cancelled").count()),
        ("a job waits for its time", with(NOT_BEFORE).filter(waits).count()),
        ("a job waits after a failure", with(BACKOFF_MS).filter(failed).count()),
        ("a queue is at its limit", full.count()),
        ("a job needs a third attempt", book.jobs.iter().filter(|it| it.attempt >= 3).count()),
        ("a batch calls back", check::callbacks(lines, book).count()),
        ("a schedule fires", fires.filter(|it| it.outcome == "fired").count()),
        ("a URL does a pushed job", book.jobs.iter().filter(is_done).count()),
        ("a URL answers too late", late_answers(lines, book)),
        ("a late ack is accepted", late_acks(lines, book)),
    ]
}

/// Leases whose worker was refused although it had not ended them itself: by acks, or by
/// heartbeats.
fn refused(lines: &[Line], by_ack: bool) -> usize {
    let (mut ended, mut refused) = (BTreeSet::new(), BTreeSet::new());
    for line in lines {
        match &line.event {
            Event::Acked { held, answer: Answer::Stale, .. } if !ended.contains(&held.lease) => {
                refused.extend(by_ack.then_some(&held.lease));
            }
            Event::Beat { held, answer: Answer::Stale, .. } if !ended.contains(&held.lease) => {
                refused.extend((!by_ack).then_some(&held.lease));
            }
            Event::Acked { held, .. } => _ = ended.insert(&held.lease),
            _ => (),
        }
    }
    refused.len()
}

/// Acks that were accepted after their leases had run out, before these were reaped.
fn late_acks(lines: &[Line], book: &Book) -> usize {
    let length = |it: &BookJob| (it.id.clone(), check::lease_ms(it));
    let lengths: BTreeMap<_, _> = book.jobs.iter().map(length).collect();
    let mut since = BTreeMap::new();
    let mut late = 0;
    for line in lines {
        match &line.event {
            Event::Leased { held, .. } => _ = since.insert(held.lease.as_str(), line.at),
            Event::Beat { held, answer: Answer::Yes, sent } => {
                since.insert(held.lease.as_str(), *sent);
            }
            // The first of them: it may have been accepted before, and its answer lost.
            Event::Acked { held, answer, sent, .. } => {
                let since = since.remove(held.lease.as_str());
                let length = lengths.get(&held.job).copied().unwrap_or(i64::MAX);
                let is_late = since.is_some_and(|it| sent - it > length);
                late += usize::from(is_late && *answer == Answer::Yes);
            }
            _ => (),
        }
    }
    late
}

/// Pushed attempts that have failed although their URL had done the job.
fn late_answers(lines: &[Line], book: &Book) -> usize {
    let done = lines.iter().filter_map(|it| match &it.event {
        Event::Acked { held, end: End::Succeeded, sent, .. } => {
            Some(((held.job.as_str(), held.attempt), *sent))
        }
        _ => None,
    });
    let done: BTreeMap<_, _> = done.collect();
    let pushed = book.jobs.iter().filter(|it| it.queue == pushed::QUEUE);
    let attempts = pushed.flat_map(|job| job.attempts.iter().map(move |it| (job, it)));
    let failed = attempts.filter(|it| it.1.outcome == "failed");
    let is_late = |(job, it): &(&BookJob, &BookAttempt)| {
        let sent = done.get(&(job.id.as_str(), it.attempt));
        let ended = it.ended_at.timestamp_millis();
        sent.is_some_and(|sent| ended < *sent || ended - sent >= pushed::IN_TIME_MS)
    };
    failed.filter(is_late).count()
}

fn repeated_leases(lines: &[Line]) -> usize {
    let mut leases = BTreeSet::new();
    let is_again = |it: &&Line| match &it.event {
        Event::Leased { held, .. } => !leases.insert(held.lease.clone()),
        _ => false,
    };
    lines.iter().filter(is_again).count()
}

fn reported_again(lines: &[Line]) -> usize {
    let mut events = BTreeSet::new();
    let is_again = |it: &&Line| match &it.event {
        Event::Delivered { event, .. } => !events.insert(event.clone()),
        _ => false,
    };
    lines.iter().filter(is_again).count()
}
