//! Whether what clients saw and what the server's book says fit together. Jobs do not depend on
//! each other, so each is judged by itself: in one pass, since each ack names its lease.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use crate::history::{Answer, End, Event};

/// Failures after which a job is a dead letter.
pub const MAX_ATTEMPTS: i64 = 3;

/// A job in the server's book, as the API shows it.
#[derive(Debug, Clone, Deserialize)]
pub struct BookJob {
    pub id: String,
    pub state: String,
    pub attempt: i64,
    pub failures: i64,
    pub attempts: Vec<BookAttempt>,
}

/// An attempt that has ended.
#[derive(Debug, Clone, Deserialize)]
pub struct BookAttempt {
    pub attempt: i64,
    pub outcome: String,
}

/// What must be true of every run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Invariant {
    /// I1: an accepted job is in the book, and has ended.
    EveryJobEnds,
    /// I2: the book has no job that was not sent; a key has one job, and a job one key.
    NothingAppears,
    /// I3: an attempt has one lease, and attempts count 1, 2, 3 without a gap.
    OneLease,
    /// I4: an ack that was accepted is what the book says of its attempt.
    AcceptedIsRecorded,
    /// I5: after a success there is no further attempt, and no lease.
    SuccessIsFinal,
    /// I6: an ack that is recorded is never refused when it is repeated.
    RepeatedIsTheSame,
    /// I7: failures are within their bound, and a dead letter has used them up.
    FailuresAreCounted,
    /// I12: no worker gets a job of another tenant.
    NoForeignJob,
    /// I16: no answer but those that the API documents for the call.
    NoStrangeAnswer,
}

/// A broken invariant, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    pub invariant: Invariant,
    pub detail: String,
}

/// What is known of one job.
#[derive(Default)]
struct Seen<'a> {
    leases: BTreeMap<i64, BTreeSet<&'a str>>,
    acks: Vec<(i64, &'a str, End, Answer)>,
}

/// Every violation of a run.
#[must_use]
pub fn violations(events: &[Event], book: &[BookJob]) -> Vec<Violation> {
    let mut found = Vec::new();
    let mut broken = |invariant, detail: String| found.push(Violation { invariant, detail });
    let mut seen: BTreeMap<&str, Seen<'_>> = BTreeMap::new();
    let mut keys: BTreeMap<(usize, &str), BTreeSet<&str>> = BTreeMap::new();
    let mut sent = BTreeSet::new();
    for event in events {
        match event {
            Event::Enqueued { tenant, key, job } => {
                let of_key = keys.entry((*tenant, key)).or_default();
                of_key.extend(job.as_deref());
                sent.extend(job.as_deref());
            }
            Event::Leased { tenant, job, attempt, lease, of } => {
                seen.entry(job).or_default().leases.entry(*attempt).or_default().insert(lease);
                if tenant != of {
                    broken(Invariant::NoForeignJob, format!("{job} of {of} went to {tenant}"));
                }
            }
            Event::Acked { job, attempt, lease, end, answer, .. } => {
                seen.entry(job).or_default().acks.push((*attempt, lease, *end, *answer));
            }
            Event::Strange { call, status, text } => {
                broken(Invariant::NoStrangeAnswer, format!("{call}: {status} {text:.200}"));
            }
            Event::Beat { .. } | Event::Fault { .. } => (),
        }
    }
    let mut owners: BTreeMap<&str, &str> = BTreeMap::new();
    for ((_, key), jobs) in &keys {
        for job in jobs {
            if let Some(other) = owners.insert(job, key) {
                broken(Invariant::NothingAppears, format!("{job} is that of {key} and {other}"));
            }
        }
    }
    for ((tenant, key), jobs) in keys {
        if jobs.len() > 1 {
            broken(Invariant::NothingAppears, format!("{key} of {tenant} has {jobs:?}"));
        }
    }
    let known: BTreeMap<_, _> = book.iter().map(|it| (it.id.as_str(), it)).collect();
    for id in known.keys().filter(|it| !sent.contains(*it)) {
        broken(Invariant::NothingAppears, format!("{id} was never sent"));
    }
    for id in sent {
        match known.get(id) {
            Some(job) => job_violations(job, seen.get(id), &mut broken),
            None => broken(Invariant::EveryJobEnds, format!("{id} was accepted and is gone")),
        }
    }
    found
}

/// The outcome that the book has for an attempt.
fn outcome_of(job: &BookJob, attempt: i64) -> Option<&str> {
    let listed = job.attempts.iter().find(|it| it.attempt == attempt);
    let is_success = job.state == "succeeded" && job.attempt == attempt;
    listed.map(|it| it.outcome.as_str()).or(is_success.then_some("succeeded"))
}

fn job_violations(
    job: &BookJob,
    seen: Option<&Seen<'_>>,
    broken: &mut impl FnMut(Invariant, String),
) {
    let BookJob { id, state, attempt: last, failures, .. } = job;
    if !["succeeded", "dead_letter", "cancelled"].contains(&state.as_str()) {
        broken(Invariant::EveryJobEnds, format!("{id} is {state}"));
    }
    let mut numbers: Vec<_> = job.attempts.iter().map(|it| it.attempt).collect();
    if state == "succeeded" && !numbers.contains(last) {
        numbers.push(*last);
    }
    numbers.sort_unstable();
    if numbers != (1..=*last).collect::<Vec<_>>() {
        broken(Invariant::OneLease, format!("{id} has the attempts {numbers:?} of {last}"));
    }
    let counted = job.attempts.iter();
    let counted =
        counted.filter(|it| ["failed", "timeout", "lease_expired"].contains(&&*it.outcome));
    let counted = i64::try_from(counted.count()).unwrap_or(i64::MAX);
    let is_used_up = (state == "dead_letter") == (*failures >= MAX_ATTEMPTS);
    if counted != *failures || *failures > MAX_ATTEMPTS || !is_used_up {
        let detail = format!("{id} is {state} with {failures} failures, {counted} in its attempts");
        broken(Invariant::FailuresAreCounted, detail);
    }
    let is_done = |it: &&(i64, &str, End, Answer)| it.2 == End::Succeeded && it.3 == Answer::Yes;
    let done = seen.and_then(|it| it.acks.iter().find(is_done)).map(|it| it.0);
    let later = seen.and_then(|it| it.leases.keys().next_back().copied()).unwrap_or_default();
    if later > done.unwrap_or(i64::MAX) || later > *last {
        broken(
            Invariant::SuccessIsFinal,
            format!("{id} was leased as attempt {later} after it ended"),
        );
    }
    let early = job.attempts.iter().find(|it| it.outcome == "succeeded" && it.attempt < *last);
    if let Some(early) = early {
        broken(Invariant::SuccessIsFinal, format!("{id} ran after attempt {}", early.attempt));
    }
    let Some(seen) = seen else { return };
    for (attempt, leases) in seen.leases.iter().filter(|it| it.1.len() > 1) {
        broken(Invariant::OneLease, format!("attempt {attempt} of {id} has {leases:?}"));
    }
    ack_violations(job, seen, broken);
}

fn ack_violations(job: &BookJob, seen: &Seen<'_>, broken: &mut impl FnMut(Invariant, String)) {
    let id = &job.id;
    for (attempt, lease, end, answer) in &seen.acks {
        let recorded = outcome_of(job, *attempt);
        let as_recorded = match end {
            End::Succeeded => "succeeded",
            End::Failed => "failed",
            End::Released => "released",
        };
        let is_recorded = recorded == Some(as_recorded);
        match answer {
            Answer::Yes if !is_recorded => {
                let detail =
                    format!("{end:?} of attempt {attempt} of {id} by {lease} is {recorded:?}");
                broken(Invariant::AcceptedIsRecorded, detail);
            }
            // A node releases leases, too: of polls whose answer it could not write.
            Answer::Stale if is_recorded && *end != End::Released => {
                let detail = format!("{end:?} of attempt {attempt} of {id} by {lease}");
                broken(Invariant::RepeatedIsTheSame, detail);
            }
            _ => (),
        }
    }
}

#[cfg(test)]
mod tests;
