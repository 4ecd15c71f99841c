//! Whether there is an order of all that happened to a job, each thing within the time of its call,
//! in which every answer is right: linearizability, by the algorithm of Wing and Gong.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

use todc_utils::{Action, History, Specification, WGLChecker};

use super::{
    Answer, BookJob, CANCELLED, Found, Held, Invariant, ROUNDING_MS, Seen, SeenAck, SeenBeat,
    is_cancelled, lease_ms, outcome_of,
};

/// Jobs that are looked at: those with most calls.
const MAX_JOBS: usize = 5_000;
/// Calls of one job; with more, an answer could take too long.
const MAX_CALLS: usize = 40;
/// How long after its time in the book the end of an attempt may have been committed.
const COMMIT_MS: i64 = 10_000;

/// Something that happened to a job at some moment of its call.
#[derive(Debug, Clone)]
struct Call {
    /// In milliseconds since 1970. Without a second one the answer was lost.
    from: i64,
    to: Option<i64>,
    attempt: i64,
    does: Does,
}

#[derive(Debug, Clone)]
enum Does {
    Lease,
    /// It was accepted, refused, or neither is known.
    Ack(String, Answer),
    /// A heartbeat that was accepted.
    Renew,
    /// The server ended the attempt.
    End(String),
}

/// A job: the attempt that runs, and how each of the others ended.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Now {
    running: Option<i64>,
    ended: BTreeMap<i64, String>,
}

struct Lease;

impl Specification for Lease {
    type State = Now;
    type Operation = Call;

    fn init() -> Now {
        Now { running: None, ended: BTreeMap::new() }
    }

    fn apply(call: &Call, now: &Now) -> (bool, Now) {
        let runs = now.running == Some(call.attempt);
        let recorded = now.ended.get(&call.attempt);
        let end = |outcome: &String| {
            let mut next = now.clone();
            next.running = None;
            next.ended.insert(call.attempt, outcome.clone());
            next
        };
        match &call.does {
            Does::Lease => {
                let next = Now { running: Some(call.attempt), ..now.clone() };
                let has_succeeded = now.ended.values().any(|it| it == "succeeded");
                (now.running.is_none() && recorded.is_none() && !has_succeeded, next)
            }
            Does::Renew => (runs, now.clone()),
            Does::End(outcome) | Does::Ack(outcome, Answer::Yes) if runs => (true, end(outcome)),
            Does::End(outcome) | Does::Ack(outcome, Answer::Yes) => {
                (recorded == Some(outcome), now.clone())
            }
            Does::Ack(outcome, Answer::Unknown) if runs => (true, end(outcome)),
            Does::Ack(_, Answer::Unknown) => (true, now.clone()),
            // A node may have released it in the same moment.
            Does::Ack(outcome, Answer::Stale) => {
                (!runs && (recorded != Some(outcome) || outcome == "released"), now.clone())
            }
        }
    }
}

/// Looks at jobs of which there is something to order.
pub(super) fn violations<'a>(
    jobs: impl Iterator<Item = (&'a BookJob, &'a Seen<'a>)>,
    found: &mut Found,
) {
    let jobs: Vec<_> = jobs.collect();
    for (job, seen) in &jobs {
        refusal_violations(job, seen, found);
    }
    let with_calls = jobs.into_iter().map(|(job, seen)| (job, calls(job, seen)));
    let mut some: Vec<_> = with_calls.filter(|it| it.1.len() <= MAX_CALLS).collect();
    some.sort_by_key(|it| Reverse(it.1.len()));
    for (job, calls) in some.into_iter().take(MAX_JOBS) {
        if !is_ordered(calls) {
            let detail = format!("no order of the calls of {} fits their answers", job.id);
            found.add(Invariant::CallsHaveAnOrder, detail);
        }
    }
}

/// No ack is refused before its attempt has ended, and no heartbeat while its lease lasts.
pub(super) fn refusal_violations(job: &BookJob, seen: &Seen<'_>, found: &mut Found) {
    let span = |attempt: i64| {
        let listed = job.attempts.iter().find(|it| it.attempt == attempt);
        let last = job.completed_at.filter(|_| attempt == job.attempt);
        let ended = listed.map(|it| it.ended_at).or(last)?.timestamp_millis();
        Some((listed.map(|it| it.claimed_at).or(job.claimed_at)?.timestamp_millis(), ended))
    };
    let mut refused = |what: &str, held: &Held| {
        let detail = format!("{what} of {} was refused while it ran", held.lease);
        found.add(Invariant::CallsHaveAnOrder, detail);
    };
    for SeenAck { held, answer, at, .. } in &seen.acks {
        let runs = span(held.attempt).is_some_and(|it| *at < it.1 - ROUNDING_MS);
        if *answer == Answer::Stale && runs {
            refused("an ack", held);
        }
    }
    for SeenBeat { held, answer, at, .. } in &seen.beats {
        let Some((claimed, ended)) = span(held.attempt) else { continue };
        let own = seen.beats.iter().filter(|it| it.held.lease == held.lease && it.at < *at);
        let renewed = own.filter(|it| it.answer == Answer::Yes).map(|it| it.sent).max();
        let lasts_until = claimed.max(renewed.unwrap_or_default()) + lease_ms(job);
        if *answer == Answer::Stale && *at < ended.min(lasts_until) - ROUNDING_MS {
            refused("a heartbeat", held);
        }
    }
}

/// What happened to a job, from the history and the book.
fn calls(job: &BookJob, seen: &Seen<'_>) -> Vec<Call> {
    let mut calls = Vec::new();
    let last = job.claimed_at.filter(|_| job.attempts.iter().all(|it| it.attempt != job.attempt));
    let last = last.map(|it| (job.attempt, it, job.completed_at, "succeeded"));
    let listed = job.attempts.iter();
    let listed = listed.map(|it| (it.attempt, it.claimed_at, Some(it.ended_at), &*it.outcome));
    for (attempt, claimed_at, ended_at, outcome) in listed.chain(last) {
        let from = claimed_at.timestamp_millis();
        let ended = ended_at.map_or(from, |it| it.timestamp_millis());
        let leased_at = seen.leased_at.get(&attempt).copied();
        let to = Some(leased_at.unwrap_or(ended + COMMIT_MS));
        calls.push(Call { from, to, attempt, does: Does::Lease });
        let (from, to) = (ended, Some(ended + COMMIT_MS));
        calls.push(Call { from, to, attempt, does: Does::End(outcome.to_owned()) });
    }
    // Of acks without an answer, one that may happen from the first of them on stands for all:
    // each more would double the orders that are tried.
    let mut unanswered = BTreeSet::new();
    for SeenAck { held, end, answer, sent, at } in &seen.acks {
        let (from, attempt) = (*sent, held.attempt);
        let is_unknown = *answer == Answer::Unknown;
        if is_unknown && !unanswered.insert((attempt, *end)) {
            continue;
        }
        let to = Some(*at).filter(|_| !is_unknown);
        let outcome = match is_cancelled(outcome_of(job, attempt), *end) {
            true if *answer != Answer::Stale => CANCELLED,
            _ => end.outcome(),
        };
        calls.push(Call { from, to, attempt, does: Does::Ack(outcome.to_owned(), *answer) });
    }
    for SeenBeat { held, answer, sent, at } in &seen.beats {
        if *answer == Answer::Yes {
            let (attempt, does) = (held.attempt, Does::Renew);
            calls.push(Call { from: *sent, to: Some(*at), attempt, does });
        }
    }
    calls
}

fn is_ordered(calls: Vec<Call>) -> bool {
    let mut moments = Vec::new();
    for (process, call) in calls.into_iter().enumerate() {
        // In one millisecond, calls come before answers: they may have met.
        moments.push((call.from, 0, process, Action::Call(call.clone())));
        let to = call.to.map_or(i64::MAX, |it| it.max(call.from));
        moments.push((to, 1, process, Action::Response(call)));
    }
    moments.sort_by_key(|it| (it.0, it.1));
    let actions = moments.into_iter().map(|it| (it.2, it.3)).collect();
    WGLChecker::<Lease>::is_linearizable(History::from_actions(actions))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(attempt: i64, from: i64, to: i64) -> Call {
        Call { from, to: Some(to), attempt, does: Does::Lease }
    }

    fn ack(attempt: i64, from: i64, to: i64, answer: Answer) -> Call {
        Call { from, to: Some(to), attempt, does: Does::Ack("succeeded".to_owned(), answer) }
    }

    fn end(attempt: i64, from: i64, outcome: &str) -> Call {
        let does = Does::End(outcome.to_owned());
        Call { from, to: Some(from + COMMIT_MS), attempt, does }
    }

    #[test]
    fn answers_that_fit_some_order_pass() {
        let lost = Call { to: None, ..ack(1, 2, 0, Answer::Unknown) };
        assert!(is_ordered(vec![lease(1, 0, 1), ack(1, 2, 3, Answer::Yes)]));
        assert!(is_ordered(vec![lease(1, 0, 1), lost.clone(), end(1, 5, "succeeded")]));
        assert!(is_ordered(vec![lease(1, 0, 1), lost, ack(1, 8, 9, Answer::Yes)]));
        let late = [lease(1, 0, 1), end(1, 5, "lease_expired"), ack(1, 6, 7, Answer::Stale)];
        assert!(is_ordered(late.to_vec()));
        assert!(is_ordered([&late[..], &[lease(2, 8, 9)]].concat()));
    }

    #[test]
    fn answers_that_fit_no_order_do_not() {
        let twice = vec![lease(1, 0, 1), ack(1, 2, 3, Answer::Yes), lease(2, 4, 5)];
        assert!(!is_ordered(twice), "leased after its success");
        let both = vec![lease(1, 0, 1), lease(2, 2, 3), ack(2, 4, 5, Answer::Yes)];
        assert!(!is_ordered(both), "the first lease had not ended");
        let refused = vec![lease(1, 0, 1), ack(1, 2, 3, Answer::Stale), ack(1, 4, 5, Answer::Yes)];
        assert!(!is_ordered(refused), "it ran when it was refused");
        let early = vec![ack(1, 0, 1, Answer::Yes), lease(1, 2, 3)];
        assert!(!is_ordered(early), "it was not leased yet");
        let renew = Call { from: 9, to: Some(10), attempt: 1, does: Does::Renew };
        let after = vec![lease(1, 0, 1), ack(1, 2, 3, Answer::Yes), renew];
        assert!(!is_ordered(after), "renewed after its end");
    }
}
