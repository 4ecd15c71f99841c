//! When jobs may run: not before their time, not in a paused queue, not more of a queue than its
//! limit allows, and in about the order in which they came.

use std::{collections::BTreeMap, iter};

use super::{Found, Invariant, ROUNDING_MS};
use crate::{
    book::{Book, BookJob},
    clients::{
        LIMITED_QUEUE, MAX_CONCURRENCY, MAX_OF_GROUP, MAX_SHARED, QUEUES, SHARED_QUEUES,
        STARTS_OF_GROUP, WINDOW_SECONDS,
    },
    history::{Event, Line},
    producers::{BACKOFF_MS, GROUP, LIMITED_GROUP, NOT_BEFORE},
};

/// A job that came this much later than another one of its queue does not run before it: a node
/// that is frozen for up to 20 s may commit a job when it thaws.
const MAX_OVERTAKEN_MS: i64 = 30_000;

pub(super) fn violations(lines: &[Line], book: &Book, found: &mut Found) {
    for job in &book.jobs {
        early_violations(job, found);
    }
    rest_violations(lines, book, found);
    for (queue, max) in [(LIMITED_QUEUE, MAX_CONCURRENCY), (SHARED_QUEUES[0], MAX_SHARED)] {
        for running in running(book, queue).values() {
            if running.most > max {
                let detail = format!("{} jobs of {queue} ran at once", running.most);
                found.add(Invariant::LimitsAreKept, detail);
            }
        }
    }
    group_violations(book, found);
    order_violations(book, found);
}

/// From when until when a job ran, by the database's clock.
fn intervals(job: &BookJob) -> impl Iterator<Item = (i64, i64)> {
    let listed = job.attempts.iter().map(|it| (it.claimed_at, it.ended_at));
    // A success need not be in the list.
    let is_listed = job.attempts.iter().any(|it| it.attempt == job.attempt);
    let last = job.claimed_at.zip(job.completed_at).filter(|_| !is_listed);
    listed.chain(last).map(|(from, to)| (from.timestamp_millis(), to.timestamp_millis()))
}

/// When its first attempt began, in milliseconds since 1970.
fn began(job: &BookJob) -> Option<i64> {
    job.began().map(|it| it.timestamp_millis())
}

fn early_violations(job: &BookJob, found: &mut Found) {
    let began = began(job);
    let may_begin = job.payload[NOT_BEFORE].as_i64();
    if may_begin.zip(began).is_some_and(|(may, began)| began < may - ROUNDING_MS) {
        let detail = format!("{} ran before its time", job.id);
        found.add(Invariant::NotBeforeItsTime, detail);
    }
    let Some(backoff) = job.payload[BACKOFF_MS].as_i64() else { return };
    for failed in job.attempts.iter().filter(|it| it.outcome == "failed") {
        let ended = failed.ended_at.timestamp_millis();
        let next = intervals(job).map(|it| it.0).filter(|it| *it >= ended).min();
        if next.is_some_and(|it| it < ended + backoff - ROUNDING_MS) {
            let detail = format!("attempt {} of {} was not waited for", failed.attempt, job.id);
            found.add(Invariant::NotBeforeItsTime, detail);
        }
    }
}

/// A tenant's queue, or a group of it.
type Pausable<'a> = (usize, &'a str, Option<&'a str>);

/// Jobs that were cancelled while they waited, and those of paused queues and groups, do not run.
fn rest_violations(lines: &[Line], book: &Book, found: &mut Found) {
    let mut cancelled = BTreeMap::new();
    let mut pauses: BTreeMap<Pausable<'_>, Vec<(i64, i64)>> = BTreeMap::new();
    for line in lines {
        match &line.event {
            Event::Cancelled { job } => _ = cancelled.insert(job.as_str(), line.at),
            Event::Paused { tenant, queue, group } => {
                pauses
                    .entry((*tenant, queue, group.as_deref()))
                    .or_default()
                    .push((line.at, i64::MAX));
            }
            Event::Resuming { tenant, queue, group } => {
                let open = pauses.get_mut(&(*tenant, queue.as_str(), group.as_deref()));
                open.and_then(|it| it.last_mut()).into_iter().for_each(|it| it.1 = line.at);
            }
            _ => (),
        }
    }
    for job in &book.jobs {
        if let Some(at) = cancelled.get(job.id.as_str())
            && (job.state != "cancelled" || intervals(job).any(|it| it.0 > *at))
        {
            let detail = format!("{} is {} after it was cancelled", job.id, job.state);
            found.add(Invariant::PausesAndCancelsHold, detail);
        }
        let of_group = job.payload[GROUP].as_str().map(Some);
        for group in iter::once(None).chain(of_group) {
            let pauses = pauses.get(&(job.tenant, job.queue.as_str(), group));
            let is_paused = |at: i64| pauses.into_iter().flatten().any(|it| it.0 < at && at < it.1);
            if let Some((began, _)) = intervals(job).find(|it| is_paused(it.0)) {
                let what = if group.is_some() { "group" } else { "queue" };
                let detail = format!("{} was leased at {began} from a paused {what}", job.id);
                found.add(Invariant::PausesAndCancelsHold, detail);
            }
        }
    }
}

/// What a queue shares limits with: one name for all that share them.
fn sharing(queue: &str) -> &str {
    if SHARED_QUEUES.contains(&queue) { SHARED_QUEUES[0] } else { queue }
}

/// How many jobs of a limited queue ran at once.
#[derive(Debug, Default)]
pub struct Running {
    pub most: usize,
    now: usize,
}

/// By tenant: of a queue, and those that share limits with it.
pub fn running(book: &Book, queue: &str) -> BTreeMap<usize, Running> {
    let mut by_tenant: BTreeMap<usize, Vec<&BookJob>> = BTreeMap::new();
    for job in book.jobs.iter().filter(|it| sharing(&it.queue) == queue) {
        by_tenant.entry(job.tenant).or_default().push(job);
    }
    by_tenant.into_iter().map(|(tenant, jobs)| (tenant, at_once(&jobs))).collect()
}

/// What ends in the millisecond in which another one begins does not run beside it.
fn at_once(jobs: &[&BookJob]) -> Running {
    let ran = jobs.iter().flat_map(|it| intervals(it)).filter(|it| it.1 - it.0 > ROUNDING_MS);
    let mut steps: Vec<_> =
        ran.flat_map(|(from, to)| [(from + ROUNDING_MS, true), (to, false)]).collect();
    steps.sort_unstable();
    let mut running = Running::default();
    for (_, begins) in steps {
        running.now = if begins { running.now + 1 } else { running.now.saturating_sub(1) };
        running.most = running.most.max(running.now);
    }
    running
}

/// Of each group whose queue limits its groups: no more run at once, or start in a window, than it
/// allows.
fn group_violations(book: &Book, found: &mut Found) {
    let mut groups: BTreeMap<(usize, &str, &str), Vec<&BookJob>> = BTreeMap::new();
    for job in &book.jobs {
        let Some(group) = job.payload[LIMITED_GROUP].as_str() else { continue };
        groups.entry((job.tenant, sharing(&job.queue), group)).or_default().push(job);
    }
    for ((_, _, group), jobs) in groups {
        let most = at_once(&jobs).most;
        if most > MAX_OF_GROUP {
            found.add(Invariant::LimitsAreKept, format!("{most} jobs of {group} ran at once"));
        }
        let mut starts: Vec<_> = jobs.iter().flat_map(|it| intervals(it)).map(|it| it.0).collect();
        starts.sort_unstable();
        let window_ms = WINDOW_SECONDS * 1_000 - ROUNDING_MS;
        let many = starts.windows(STARTS_OF_GROUP + 1);
        for many in many.filter(|it| it[STARTS_OF_GROUP] - it[0] < window_ms) {
            let took = many[STARTS_OF_GROUP] - many[0];
            let detail = format!("{} jobs of {group} started in {took} ms", many.len());
            found.add(Invariant::LimitsAreKept, detail);
        }
    }
}

/// A job that has run: when it came, and when it first began.
struct Came<'a> {
    at: i64,
    began: i64,
    job: &'a BookJob,
}

/// Of each tenant and queue: no job runs before one that came much earlier and could run.
fn order_violations(book: &Book, found: &mut Found) {
    let mut queues: BTreeMap<(usize, &str), Vec<Came<'_>>> = BTreeMap::new();
    for job in book.jobs.iter().filter(|it| QUEUES.contains(&it.queue.as_str())) {
        let Some(began) = began(job) else { continue };
        let own = queues.entry((job.tenant, &job.queue)).or_default();
        own.push(Came { at: job.enqueued_at.timestamp_millis(), began, job });
    }
    for mut own in queues.into_values() {
        own.sort_unstable_by_key(|it| it.at);
        // From the last one on: when the first of those that came so much later began.
        let (mut later, mut first_later) = (own.len(), i64::MAX);
        for Came { at, began, job } in own.iter().rev() {
            while later > 0 && own[later - 1].at > at + MAX_OVERTAKEN_MS {
                later -= 1;
                first_later = first_later.min(own[later].began);
            }
            // Others wait for a time, or for a parent.
            let could_run = job.payload[NOT_BEFORE].is_null() && job.parents.is_empty();
            if could_run && *began > first_later {
                let detail = format!("{} waited while later jobs ran", job.id);
                found.add(Invariant::OrderIsKept, detail);
            }
        }
    }
}
