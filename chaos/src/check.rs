//! Whether what clients saw and what the server's book says fit together. The book is what the API
//! says of every job once all has ended (`book.rs`). Each attempt of a job is judged by itself, in
//! one pass, since each ack names its lease.

mod checkpoints;
mod ends;
mod families;
mod groups;
mod order;
mod servers;
#[cfg(test)]
mod tests;
mod times;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::{
    adapters::Protocol,
    book::{Book, BookAttempt, BookJob},
    clients::LEASE_SECONDS,
    history::{Answer, End, Event, Held, Line},
    producers::KEY,
    pushed,
};

pub use self::{families::callbacks, servers::unavailable, times::running};

/// Failures after which a job is a dead letter.
pub const MAX_ATTEMPTS: i64 = 3;
/// Losses in a row after which such a job is dead-lettered: the default.
const MAX_LOSSES: usize = 5;
/// The state of a job that was cancelled, and the outcome of its last attempt.
const CANCELLED: &str = "cancelled";
/// Times of the API are rounded.
const ROUNDING_MS: i64 = 2;

/// What must be true of every run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Invariant {
    /// An accepted job is in the book, and has ended.
    EveryJobEnds,
    /// The book has no job that was not sent; an idempotency key has one job, and a job one such
    /// key.
    NothingAppears,
    /// A job that was sent by itself or into a batch has the tenant, queue and key that it was sent
    /// with.
    StoredAsSent,
    /// An attempt has one lease and one worker, and attempts count 1, 2, 3 without a gap.
    OneLease,
    /// An ack that was accepted is what the book says of its attempt, as is an answer of a URL in
    /// time; a heartbeat that was accepted was sent before the end of its lease was known.
    AcceptedIsRecorded,
    /// A success or failure in the book was sent by its worker, who keeps its lease until then; a
    /// cancel was asked for.
    NoEndAppears,
    /// After a success there is no further attempt, and no lease; after an ack its lease is not
    /// given again.
    SuccessIsFinal,
    /// An ack that is recorded is never refused when it is repeated.
    RepeatedIsTheSame,
    /// Failures are within their bound, and a dead letter has used them up.
    FailuresAreCounted,
    /// No job runs before its time, or before the pause after a failure has passed.
    NotBeforeItsTime,
    /// No lease expires before its time, which an accepted heartbeat lengthens.
    NoEarlyEnd,
    /// No pause without an accepted call is longer than the faults during it allow.
    Available,
    /// Once nothing is broken, all ends soon.
    EndsInTime,
    /// Each tick of a schedule fires once, or is reported as missed.
    TicksFireOnce,
    /// No worker gets a job of another tenant, and no endpoint is notified of one.
    NoForeignJob,
    /// Jobs that were cancelled while they waited, and those of paused queues and groups, do not
    /// run.
    PausesAndCancelsHold,
    /// No more jobs of a queue run at once than its limit allows, and of a group no more run at
    /// once, or start in a window.
    LimitsAreKept,
    /// No job of a queue waits while jobs run that came much later.
    OrderIsKept,
    /// No job of a group with a strict order begins before the one ahead of it has ended.
    GroupsAreOrdered,
    /// No answer but those that the API documents for the call, and no panic.
    NoStrangeAnswer,
    /// The counts of a queue are the numbers of its jobs.
    CountsAreRight,
    /// The endpoint is notified of each end, with one event, and of no other end.
    #[serde(alias = "ends_are_told")]
    EndsAreReported,
    /// A batch calls back once, after its last job.
    BatchesEndOnce,
    /// All calls about a job have an order in which every answer is right; none is refused while
    /// its lease runs.
    CallsHaveAnOrder,
    /// A lease brings the last checkpoint that was stored under an older fence.
    CheckpointsAreKept,
    /// A child runs if its parent has ended as it waits for, and is cancelled otherwise.
    ChildrenFollow,
}

/// A broken invariant, and where.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Violation {
    pub invariant: Invariant,
    pub detail: String,
}

/// What breaks, one after the other.
struct Found(Vec<Violation>);

impl Found {
    fn add(&mut self, invariant: Invariant, detail: String) {
        self.0.push(Violation { invariant, detail });
    }
}

/// An ack, with the times of its sending and of its answer.
struct SeenAck<'a> {
    held: &'a Held,
    end: End,
    answer: Answer,
    sent: i64,
    at: i64,
}

/// The same of a heartbeat.
struct SeenBeat<'a> {
    held: &'a Held,
    answer: Answer,
    sent: i64,
    at: i64,
}

/// What clients know of one job.
#[derive(Default)]
struct Seen<'a> {
    leases: BTreeMap<i64, BTreeSet<(&'a str, &'a str)>>,
    /// Attempts whose lease was in the answer to the first try of a poll.
    first_tries: BTreeSet<i64>,
    /// By attempt: when its worker first had it.
    leased_at: BTreeMap<i64, i64>,
    acks: Vec<SeenAck<'a>>,
    beats: Vec<SeenBeat<'a>>,
    /// By attempt: when a client knew that it had ended.
    known_ended: BTreeMap<i64, i64>,
}

/// Every violation of a run. Pauses may be `patience` times as long as their bounds.
#[must_use]
pub fn violations(lines: &[Line], book: &Book, patience: u32) -> Vec<Violation> {
    let mut found = Found(Vec::new());
    let seen = seen(lines, &mut found);
    let sent = sent(lines, book, &mut found);
    let known: BTreeMap<_, _> = book.jobs.iter().map(|it| (it.id.as_str(), it)).collect();
    for id in known.keys().filter(|it| !sent.contains(*it)) {
        found.add(Invariant::NothingAppears, format!("{id} was never sent"));
    }
    checkpoints::add_violations(lines, &mut found);
    stored_violations(lines, &known, &mut found);
    for id in sent {
        match known.get(id) {
            Some(job) => {
                job_violations(job, seen.get(id), &mut found);
                failure_violations(job, book.counts_losses, &mut found);
            }
            None => found.add(Invariant::EveryJobEnds, format!("{id} was accepted and is gone")),
        }
    }
    for line in lines {
        let Event::Leased { tenant, held, .. } = &line.event else { continue };
        if let Some(owner) = known.get(held.job.as_str()).filter(|it| it.tenant != *tenant) {
            let detail = format!("{} of {} went to {tenant}", held.job, owner.tenant);
            found.add(Invariant::NoForeignJob, detail);
        }
    }
    for id in seen.keys().filter(|it| !known.contains_key(*it)) {
        found.add(Invariant::NothingAppears, format!("{id} was leased and is not there"));
    }
    ends::violations(lines, book, &seen, &mut found);
    let both = book.jobs.iter().filter_map(|it| Some((it, seen.get(it.id.as_str())?)));
    order::violations(both, &mut found);
    groups::violations(book, &mut found);
    families::violations(lines, book, &known, &mut found);
    times::violations(lines, book, &mut found);
    servers::violations(lines, book, patience, &mut found);
    found.0
}

/// What clients know, by job.
fn seen<'a>(lines: &'a [Line], found: &mut Found) -> BTreeMap<&'a str, Seen<'a>> {
    let mut seen: BTreeMap<&str, Seen<'_>> = BTreeMap::new();
    for line in lines {
        match &line.event {
            Event::Leased { tenant, held, owner, is_first } => {
                let job = seen.entry(&held.job).or_default();
                let is_accepted =
                    |it: &SeenAck<'_>| it.answer == Answer::Yes && it.held.lease == held.lease;
                if job.acks.iter().any(is_accepted) {
                    let detail = format!("{} was given again after its ack", held.lease);
                    found.add(Invariant::SuccessIsFinal, detail);
                }
                job.first_tries.extend(is_first.then_some(held.attempt));
                let leases = job.leases.entry(held.attempt).or_default();
                leases.insert((&held.lease, &held.worker));
                job.leased_at.entry(held.attempt).or_insert(line.at);
                // The attempts before it have ended.
                for attempt in 1..held.attempt {
                    job.known_ended.entry(attempt).or_insert(line.at);
                }
                if tenant != owner {
                    let detail = format!("{} of {owner} went to {tenant}", held.job);
                    found.add(Invariant::NoForeignJob, detail);
                }
            }
            Event::Acked { held, end, answer, sent, .. } => {
                let job = seen.entry(&held.job).or_default();
                let (end, answer, sent, at) = (*end, *answer, *sent, line.at);
                job.acks.push(SeenAck { held, end, answer, sent, at });
                if answer != Answer::Unknown {
                    job.known_ended.entry(held.attempt).or_insert(line.at);
                }
            }
            Event::Beat { held, answer, sent } => {
                let job = seen.entry(&held.job).or_default();
                let (answer, sent, at) = (*answer, *sent, line.at);
                job.beats.push(SeenBeat { held, answer, sent, at });
            }
            Event::Strange { call, status, text } => {
                let detail = format!("{call}: {status} {text:.200}");
                found.add(Invariant::NoStrangeAnswer, detail);
            }
            _ => (),
        }
    }
    seen
}

/// The jobs that were sent, or that others have led to.
fn sent<'a>(lines: &'a [Line], book: &'a Book, found: &mut Found) -> BTreeSet<&'a str> {
    let mut keys: BTreeMap<(usize, &str), BTreeSet<&str>> = BTreeMap::new();
    let mut sent = BTreeSet::new();
    for line in lines {
        match &line.event {
            Event::Enqueued { tenant, key, job, .. } => {
                keys.entry((*tenant, key)).or_default().extend(job.as_deref());
                sent.extend(job.as_deref());
            }
            Event::Workflow { first, then, otherwise, .. } => {
                sent.extend([first, then, otherwise].map(String::as_str));
            }
            _ => (),
        }
    }
    let mut owners: BTreeMap<&str, &str> = BTreeMap::new();
    for ((tenant, key), jobs) in keys {
        if jobs.len() > 1 {
            found.add(Invariant::NothingAppears, format!("{key} of {tenant} has {jobs:?}"));
        }
        for job in jobs {
            if let Some(other) = owners.insert(job, key) {
                let detail = format!("{job} is that of {key} and {other}");
                found.add(Invariant::NothingAppears, detail);
            }
        }
    }
    sent.extend(book.fires.values().flatten().filter_map(|it| it.job_id.as_deref()));
    sent.extend(families::callbacks(lines, book));
    sent
}

/// Jobs that are stored otherwise than they were sent: those that are stored together may be mixed
/// up.
fn stored_violations(lines: &[Line], known: &BTreeMap<&str, &BookJob>, found: &mut Found) {
    for line in lines {
        let Event::Enqueued { tenant, key, queue, job: Some(id) } = &line.event else { continue };
        let Some(job) = known.get(id.as_str()) else { continue };
        let stored = (job.tenant, job.payload[KEY].as_str(), job.queue.as_str());
        if stored != (*tenant, Some(key.as_str()), queue.as_str()) {
            let detail = format!("{id} is {stored:?}, and {key} was sent to {queue} of {tenant}");
            found.add(Invariant::StoredAsSent, detail);
        }
    }
}

/// The outcome that the book has for an attempt.
fn outcome_of(job: &BookJob, attempt: i64) -> Option<&str> {
    let listed = job.attempts.iter().find(|it| it.attempt == attempt);
    let is_success = job.state == "succeeded" && job.attempt == attempt;
    listed.map(|it| it.outcome.as_str()).or(is_success.then_some("succeeded"))
}

fn job_violations(job: &BookJob, seen: Option<&Seen<'_>>, found: &mut Found) {
    let BookJob { id, state, attempt: last, .. } = job;
    if !["succeeded", "dead_letter", "cancelled"].contains(&state.as_str()) {
        found.add(Invariant::EveryJobEnds, format!("{id} is {state}"));
    }
    let mut numbers: Vec<_> = job.attempts.iter().map(|it| it.attempt).collect();
    if state == "succeeded" && !numbers.contains(last) {
        numbers.push(*last);
    }
    numbers.sort_unstable();
    if numbers != (1..=*last).collect::<Vec<_>>() {
        let detail = format!("{id} has the attempts {numbers:?} of {last}");
        found.add(Invariant::OneLease, detail);
    }
    let is_done = |it: &&SeenAck<'_>| it.end == End::Succeeded && it.answer == Answer::Yes;
    let done = seen.and_then(|it| it.acks.iter().find(is_done)).map(|it| it.held.attempt);
    let later = seen.and_then(|it| it.leases.keys().next_back().copied()).unwrap_or_default();
    if later > done.unwrap_or(i64::MAX) || later > *last {
        let detail = format!("{id} was leased as attempt {later} after it ended");
        found.add(Invariant::SuccessIsFinal, detail);
    }
    let early = job.attempts.iter().find(|it| it.outcome == "succeeded" && it.attempt < *last);
    if let Some(early) = early {
        let detail = format!("{id} ran after attempt {}", early.attempt);
        found.add(Invariant::SuccessIsFinal, detail);
    }
    let unseen = Seen::default();
    let seen = seen.unwrap_or(&unseen);
    for (attempt, leases) in seen.leases.iter().filter(|it| it.1.len() > 1) {
        found.add(Invariant::OneLease, format!("attempt {attempt} of {id} has {leases:?}"));
    }
    ack_violations(job, seen, found);
    lease_violations(job, seen, found);
}

/// Failures and losses are those of the attempts. An expired lease is a failure or a loss, as its
/// protocol says; an attempt that was released may be a loss, since its worker was gone; and one
/// that ended after it was to be cancelled may be either.
fn failure_violations(job: &BookJob, counts_losses: bool, found: &mut Found) {
    let BookJob { id, state, failures, losses, .. } = job;
    let count = |outcomes: &[&str]| {
        let those = job.attempts.iter().filter(|it| outcomes.contains(&&*it.outcome)).count();
        i64::try_from(those).unwrap_or(i64::MAX)
    };
    let (failed, expired) = (count(&["failed", "timeout"]), count(&["lease_expired"]));
    let (released, cancelled) = (count(&["released"]), count(&[CANCELLED]));
    let together = failures + losses;
    // Those of other protocols are failures.
    let is_native = counts_losses && Protocol::of_queue(&job.queue).is_none();
    let may_be_failures = if is_native { 0 } else { expired };
    let are_counted = (failed..=failed + may_be_failures + cancelled).contains(failures)
        && (failed + expired..=failed + expired + released + cancelled).contains(&together);
    let is_lost = job.dead_letter_reason.as_deref() == Some("lost");
    let is_silent = |it: &&BookAttempt| ["lease_expired", "released"].contains(&&*it.outcome);
    let in_row = job.attempts.iter().rev().take_while(is_silent).count();
    let is_used_up = match state.as_str() {
        CANCELLED => true,
        "dead_letter" if is_lost => in_row >= MAX_LOSSES,
        "dead_letter" => *failures >= MAX_ATTEMPTS,
        _ => *failures < MAX_ATTEMPTS,
    };
    if !are_counted || *failures > MAX_ATTEMPTS || !is_used_up {
        let detail = format!(
            "{id} is {state} with {failures} failures and {losses} losses; its attempts have \
             {failed} and {expired}"
        );
        found.add(Invariant::FailuresAreCounted, detail);
    }
}

/// Whether an end that does not succeed is recorded as that of a job that was to be cancelled.
fn is_cancelled(recorded: Option<&str>, end: End) -> bool {
    recorded == Some(CANCELLED) && end != End::Succeeded
}

fn ack_violations(job: &BookJob, seen: &Seen<'_>, found: &mut Found) {
    let id = &job.id;
    for SeenAck { held, end, answer, .. } in &seen.acks {
        let Held { attempt, lease, .. } = held;
        let recorded = outcome_of(job, *attempt);
        let is_recorded = recorded == Some(end.outcome());
        match answer {
            Answer::Yes if !is_recorded && !is_cancelled(recorded, *end) => {
                let detail =
                    format!("{end:?} of attempt {attempt} of {id} by {lease} is {recorded:?}");
                found.add(Invariant::AcceptedIsRecorded, detail);
            }
            // A node releases leases, too: of polls whose answer it could not write.
            Answer::Stale if is_recorded && *end != End::Released => {
                let detail = format!("{end:?} of attempt {attempt} of {id} by {lease}");
                found.add(Invariant::RepeatedIsTheSame, detail);
            }
            _ => (),
        }
    }
}

/// How long the leases of a job are, in milliseconds.
pub fn lease_ms(job: &BookJob) -> i64 {
    let seconds = match Protocol::of_queue(&job.queue) {
        Some(protocol) => protocol.lease_seconds(),
        None if job.queue == pushed::QUEUE => pushed::LEASE_SECONDS,
        None => LEASE_SECONDS,
    };
    seconds.cast_signed() * 1_000
}

/// Leases end in time, and not before.
fn lease_violations(job: &BookJob, seen: &Seen<'_>, found: &mut Found) {
    let length = lease_ms(job) - ROUNDING_MS;
    for it in job.attempts.iter().filter(|it| it.outcome == "lease_expired") {
        let ended = it.ended_at.timestamp_millis();
        let own = seen.beats.iter().filter(|beat| beat.held.attempt == it.attempt);
        let renewed = own.filter(|beat| beat.answer == Answer::Yes).map(|beat| beat.sent);
        let since = renewed.max().unwrap_or_default().max(it.claimed_at.timestamp_millis());
        if ended - since < length {
            let after = ended - since;
            let detail = format!("attempt {} of {} expired after {after} ms", it.attempt, job.id);
            found.add(Invariant::NoEarlyEnd, detail);
        }
    }
    for SeenBeat { held, answer, sent, .. } in &seen.beats {
        let ended = seen.known_ended.get(&held.attempt);
        if *answer == Answer::Yes && ended.is_some_and(|it| it < sent) {
            let detail = format!("a heartbeat of attempt {} of {} came late", held.attempt, job.id);
            found.add(Invariant::AcceptedIsRecorded, detail);
        }
    }
}
