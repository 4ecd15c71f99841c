//! What is recorded as the end of an attempt was caused by its worker, its URL, or a cancel.

use std::collections::{BTreeMap, BTreeSet};

use super::{CANCELLED, Found, Invariant, Seen, outcome_of};
use crate::{
    book::{Book, BookJob},
    foreign,
    history::{End, Event, Line},
    pushed,
};

pub(super) fn violations(
    lines: &[Line],
    book: &Book,
    seen: &BTreeMap<&str, Seen<'_>>,
    found: &mut Found,
) {
    let cancels = cancels(lines);
    let unseen = Seen::default();
    for job in &book.jobs {
        let seen = seen.get(job.id.as_str()).unwrap_or(&unseen);
        sent_violations(job, seen, found);
        release_violations(job, seen, found);
        push_violations(job, seen, found);
        let is_cancelled = job.state == CANCELLED || attempts_with(job, CANCELLED).next().is_some();
        if is_cancelled && !cancels.contains(job.id.as_str()) {
            let detail = format!("{} was cancelled, and none asked for it", job.id);
            found.add(Invariant::NoEndAppears, detail);
        }
    }
}

/// The jobs that may be cancelled: a client asked for it, or they are children of a parent.
fn cancels(lines: &[Line]) -> BTreeSet<&str> {
    let named = lines.iter().map(|it| match &it.event {
        Event::Cancelling { job } => vec![job.as_str()],
        // Whether the right one was cancelled has a check of its own.
        Event::Workflow { then, otherwise, .. } => vec![then.as_str(), otherwise.as_str()],
        _ => Vec::new(),
    });
    named.flatten().collect()
}

fn attempts_with(job: &BookJob, outcome: &str) -> impl Iterator<Item = i64> {
    let own = job.attempts.iter().filter(move |it| it.outcome == outcome);
    own.map(|it| it.attempt)
}

/// A success or failure was sent by its worker.
fn sent_violations(job: &BookJob, seen: &Seen<'_>, found: &mut Found) {
    // Of a URL that does not answer, the server records that it has failed.
    let ends: &[End] = match job.queue == pushed::QUEUE {
        true => &[End::Succeeded],
        false => &[End::Succeeded, End::Failed],
    };
    for end in ends {
        let was_sent =
            |attempt: i64| seen.acks.iter().any(|it| (it.held.attempt, it.end) == (attempt, *end));
        let recorded = (1..=job.attempt).filter(|it| outcome_of(job, *it) == Some(end.outcome()));
        for attempt in recorded.filter(|it| !was_sent(*it)) {
            let detail = format!("attempt {attempt} of {} is {end:?}, which none sent", job.id);
            found.add(Invariant::NoEndAppears, detail);
        }
    }
}

/// A node releases the leases that it could not hand over, and no others. A lease that came with a
/// repeated poll may be one that the node of its first try releases.
fn release_violations(job: &BookJob, seen: &Seen<'_>, found: &mut Found) {
    if job.queue == pushed::QUEUE || foreign::LANGUAGES.contains(&job.queue.as_str()) {
        return;
    }
    for attempt in attempts_with(job, End::Released.outcome()) {
        let mut acks = seen.acks.iter().filter(|it| it.held.attempt == attempt);
        if seen.first_tries.contains(&attempt) && !acks.any(|it| it.end == End::Released) {
            let detail = format!("attempt {attempt} of {} was released by none", job.id);
            found.add(Invariant::NoEndAppears, detail);
        }
    }
}

/// An attempt whose URL answered in time that it is done, or busy, has not failed.
fn push_violations(job: &BookJob, seen: &Seen<'_>, found: &mut Found) {
    let failed = job.attempts.iter().filter(|it| it.outcome == End::Failed.outcome());
    for it in failed.filter(|_| job.queue == pushed::QUEUE) {
        let ended = it.ended_at.timestamp_millis();
        let own = seen.acks.iter().filter(|ack| ack.held.attempt == it.attempt);
        let in_time = 0..pushed::IN_TIME_MS;
        // After 202, its worker sends acks until one is answered. Only an answer that will come too
        // late is noted before it is sent: a failure may be recorded after that.
        if let [reply] = &own.collect::<Vec<_>>()[..]
            && reply.end != End::Failed
            && reply.sent <= reply.at
            && in_time.contains(&(ended - reply.sent))
        {
            let detail = format!("attempt {} of {} failed after its answer", it.attempt, job.id);
            found.add(Invariant::AcceptedIsRecorded, detail);
        }
    }
}
