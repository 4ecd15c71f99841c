//! What is not about single jobs: counts, and how long no call was accepted.

use std::collections::{BTreeMap, BTreeSet};

use super::{Answer, Found, Invariant};
use crate::{
    book::Book,
    history::{Event, Line},
    nemesis::Fault,
    pushed,
};

pub(super) fn violations(lines: &[Line], book: &Book, patience: u32, found: &mut Found) {
    count_violations(book, found);
    for (fault, ms) in judged(lines) {
        let bound = fault.bound_seconds() * u64::from(patience);
        if ms > bound.cast_signed() * 1_000 {
            let detail = format!("{}: {ms} ms, more than {bound} s", fault.name());
            found.add(Invariant::Available, detail);
        }
    }
}

/// The states of jobs that have ended.
const ENDED: [&str; 3] = ["succeeded", "dead_letter", "cancelled"];

fn count_violations(book: &Book, found: &mut Found) {
    let mut actual: BTreeMap<(usize, &str), BTreeMap<&str, i64>> = BTreeMap::new();
    for job in &book.jobs {
        let queue = actual.entry((job.tenant, &job.queue)).or_default();
        *queue.entry(&job.state).or_default() += 1;
    }
    let queues = book.counts.iter().flat_map(|(tenant, it)| it.iter().map(move |it| (tenant, it)));
    for (tenant, (queue, counts)) in queues {
        let actual = actual.remove(&(*tenant, queue.as_str())).unwrap_or_default();
        let has_ended = actual.keys().all(|it| ENDED.contains(it));
        let open = counts.iter().filter(|it| !ENDED.contains(&it.0.as_str()) && *it.1 != 0);
        for (state, counted) in open.filter(|_| has_ended) {
            let detail = format!("{queue} of {tenant} counts {counted} {state}, not 0");
            found.add(Invariant::CountsAreRight, detail);
        }
        for state in ENDED {
            let there = actual.get(state).copied().unwrap_or_default();
            let counted = counts.get(state).copied().unwrap_or_default();
            if there != counted {
                let detail = format!("{queue} of {tenant} counts {counted} {state}, not {there}");
                found.add(Invariant::CountsAreRight, detail);
            }
        }
    }
}

/// Pauses that are too short to be a fault's, in milliseconds.
const SHORT_MS: i64 = 200;
/// How long after its end a fault can still be the reason of a pause, in milliseconds.
const AFTER_MS: i64 = 5_000;

/// A fault from its begin to its end.
#[derive(Debug, Clone, Copy)]
struct Injected {
    fault: Fault,
    from: i64,
    to: i64,
}

/// By kind of fault: the longest pause in milliseconds without an accepted call. The time in which
/// PostgreSQL took no calls does not count. Of several faults, the one is named that allows most.
pub fn unavailable(lines: &[Line]) -> BTreeMap<Fault, i64> {
    let faults = faults(lines);
    let pauses = pauses(&gaps(lines, &faults), &faults);
    longest_by_fault(pauses.into_iter().map(|it| (it.fault, it.to - it.from)))
}

/// By kind of fault: the longest time in milliseconds that its bound is about. It begins anew with
/// each fault that allows as much; but of a whole pause, half counts, so that a server that stays
/// away does not pass.
pub fn judged(lines: &[Line]) -> BTreeMap<Fault, i64> {
    let faults = faults(lines);
    let gaps = gaps(lines, &faults);
    let pauses = pauses(&gaps, &faults);
    let half = pauses.into_iter().map(|it| (it.fault, (it.to - it.from) / 2));
    let serving = gaps.iter().flat_map(|(from, to)| parts(&faults, *from, *to));
    let pieces = serving.flat_map(|(from, to)| cut_at_starts(&faults, from, to));
    longest_by_fault(half.chain(pieces))
}

fn longest_by_fault(times: impl Iterator<Item = (Fault, i64)>) -> BTreeMap<Fault, i64> {
    let mut longest: BTreeMap<Fault, i64> = BTreeMap::new();
    for (fault, ms) in times {
        let longest = longest.entry(fault).or_default();
        *longest = ms.max(*longest);
    }
    longest
}

/// A time without an accepted call.
struct Pause {
    from: i64,
    to: i64,
    /// The fault near it that allows most.
    fault: Fault,
}

fn pauses(gaps: &[(i64, i64)], faults: &[Injected]) -> Vec<Pause> {
    let mut pauses = Vec::new();
    for &(from, to) in gaps {
        let longest = parts(faults, from, to).into_iter().max_by_key(|it| it.1 - it.0);
        let (from, to) = longest.unwrap_or((from, from));
        let near = faults.iter().filter(|it| it.from < to && it.to + AFTER_MS > from);
        let most = near.max_by_key(|it| it.fault.bound_seconds());
        pauses.extend(most.map(|it| Pause { from, to, fault: it.fault }));
    }
    pauses
}

/// The times between two accepted calls that are not short.
fn gaps(lines: &[Line], faults: &[Injected]) -> Vec<(i64, i64)> {
    let Some(end) = faults.iter().map(|it| it.to).max() else { return Vec::new() };
    let mut accepted_at = lines.first().map_or(0, |it| it.at);
    let mut gaps = Vec::new();
    for line in lines.iter().filter(|it| is_accepted(&it.event)) {
        let (from, to) = (accepted_at, line.at);
        accepted_at = to;
        // Once all is healed there is little to do: pauses are long.
        if to - from >= SHORT_MS && from <= end {
            gaps.push((from, to));
        }
    }
    gaps
}

/// Number of seconds between two times, in seconds, in which a call was accepted.
pub(super) fn serving_seconds(lines: &[Line], from: i64, to: i64) -> usize {
    let accepted = lines.iter().filter(|line| is_accepted(&line.event));
    let seconds = accepted.map(|line| line.at / 1_000).filter(|it| (from..to).contains(it));
    seconds.collect::<BTreeSet<_>>().len()
}

/// The parts of a pause in which no fault stopped all.
fn parts(faults: &[Injected], from: i64, to: i64) -> Vec<(i64, i64)> {
    let mut stops: Vec<_> = faults.iter().filter(|it| it.fault.stops_all()).collect();
    stops.sort_by_key(|it| it.from);
    let (mut parts, mut since) = (Vec::new(), from);
    for stop in stops.into_iter().filter(|it| it.from < to && it.to > from) {
        if stop.from > since {
            parts.push((since, stop.from));
        }
        since = since.max(stop.to.min(to));
    }
    if to > since {
        parts.push((since, to));
    }
    parts
}

/// A part, cut where a fault begins that allows as much as those before it: what had begun at the
/// start of a piece says how long it may be.
fn cut_at_starts(faults: &[Injected], from: i64, to: i64) -> Vec<(Fault, i64)> {
    let mut pieces = Vec::new();
    let mut since = from;
    while since < to {
        let bound_ms = |it: &Injected| it.fault.bound_seconds().cast_signed() * 1_000;
        let had_begun = faults.iter().filter(|it| it.from <= since);
        let near = had_begun.filter(|it| it.to + AFTER_MS.max(bound_ms(it)) > since);
        let most = near.max_by_key(|it| bound_ms(it));
        let least = most.map_or(0, bound_ms);
        let begins = faults.iter().filter(|it| it.from > since && bound_ms(it) >= least);
        let until = begins.map(|it| it.from).min().map_or(to, |it| it.min(to));
        pieces.extend(most.map(|it| (it.fault, until - since)));
        since = until;
    }
    pieces
}

fn faults(lines: &[Line]) -> Vec<Injected> {
    let mut faults: Vec<Injected> = Vec::new();
    for line in lines {
        match &line.event {
            Event::Fault { fault } => {
                faults.push(Injected { fault: *fault, from: line.at, to: line.at });
            }
            Event::Healed { fault } => {
                let open = faults.iter_mut().rev().find(|it| it.fault == *fault);
                open.into_iter().for_each(|it| it.to = line.at);
            }
            _ => (),
        }
    }
    faults
}

fn is_accepted(event: &Event) -> bool {
    match event {
        Event::Enqueued { job, .. } => job.is_some(),
        // What nodes send to a URL is no call of a client.
        Event::Leased { held, .. } => !pushed::is_pushed(held),
        Event::Acked { answer, .. } | Event::Beat { answer, .. } => *answer == Answer::Yes,
        _ => false,
    }
}
