//! Jobs that belong together: batches, workflows, ticks of schedules, and events of ends.

use std::collections::{BTreeMap, BTreeSet};

use chrono::TimeDelta;
use fencepost_domain::schedule::GRACE_SECONDS;

use super::{Found, Invariant, servers::serving_seconds};
use crate::{
    book::{Book, BookFire, BookJob},
    history::{Event, Line},
    producers::BATCH_END,
    setup::TICK_SECONDS,
};

/// Final states of jobs, each with the type of its event.
const EVENTS: [(&str, &str); 3] = [
    ("succeeded", "job.succeeded"),
    ("dead_letter", "job.dead_lettered"),
    ("cancelled", "job.cancelled"),
];
/// How late a tick may be that has no entry yet when its schedule is paused, in seconds in which
/// calls were accepted: PostgreSQL can be away for most of the time before.
const LATE_SECONDS: usize = 10;
/// How late a tick may be handled and still fire.
const GRACE_MS: i64 = GRACE_SECONDS * 1_000;
/// Times of ticks that are handled together differ by at most this.
const HANDLED_MS: i64 = 20;

/// The callbacks of batches that were sealed.
pub fn callbacks<'a>(lines: &'a [Line], book: &'a Book) -> impl Iterator<Item = &'a str> {
    let marks: BTreeSet<_> = batches(lines).map(|it| it.0).collect();
    let of_a_batch = move |it: &&BookJob| {
        it.job_type == BATCH_END && it.payload["mark"].as_str().is_some_and(|it| marks.contains(it))
    };
    book.jobs.iter().filter(of_a_batch).map(|it| it.id.as_str())
}

fn batches(lines: &[Line]) -> impl Iterator<Item = (&str, &[String])> {
    lines.iter().filter_map(|it| match &it.event {
        Event::Batch { mark, jobs, .. } => Some((mark.as_str(), jobs.as_slice())),
        _ => None,
    })
}

pub(super) fn violations(
    lines: &[Line],
    book: &Book,
    known: &BTreeMap<&str, &BookJob>,
    found: &mut Found,
) {
    batch_violations(lines, book, known, found);
    workflow_violations(lines, known, found);
    tick_violations(lines, book, known, found);
    report_violations(lines, book, known, found);
}

fn batch_violations(
    lines: &[Line],
    book: &Book,
    known: &BTreeMap<&str, &BookJob>,
    found: &mut Found,
) {
    let mut calls: BTreeMap<&str, Vec<&BookJob>> = BTreeMap::new();
    for job in book.jobs.iter().filter(|it| it.job_type == BATCH_END) {
        calls.entry(job.payload["mark"].as_str().unwrap_or_default()).or_default().push(job);
    }
    for (mark, jobs) in batches(lines) {
        let calls = calls.get(mark).map_or(&[][..], Vec::as_slice);
        let [call] = calls else {
            let detail = format!("the batch of {jobs:?} called back {} times", calls.len());
            found.add(Invariant::BatchesEndOnce, detail);
            continue;
        };
        let ends = jobs.iter().filter_map(|it| known.get(it.as_str())?.completed_at);
        if call.began().zip(ends.max()).is_some_and(|(began, last)| began < last) {
            let detail = format!("{} ran before the last job of its batch", call.id);
            found.add(Invariant::BatchesEndOnce, detail);
        }
    }
}

fn workflow_violations(lines: &[Line], known: &BTreeMap<&str, &BookJob>, found: &mut Found) {
    for line in lines {
        let Event::Workflow { first, then, otherwise, .. } = &line.event else { continue };
        let (Some(first), Some(then), Some(otherwise)) =
            (known.get(first.as_str()), known.get(then.as_str()), known.get(otherwise.as_str()))
        else {
            continue;
        };
        let has_succeeded = first.state == "succeeded";
        for (child, may_run) in [(then, has_succeeded), (otherwise, !has_succeeded)] {
            if (child.state != "cancelled") != may_run {
                let detail = format!("{} is {} after {}", child.id, child.state, first.state);
                found.add(Invariant::ChildrenFollow, detail);
            }
            if child.began().zip(first.completed_at).is_some_and(|(began, ended)| began < ended) {
                let detail = format!("{} ran before {} had ended", child.id, first.id);
                found.add(Invariant::ChildrenFollow, detail);
            }
        }
    }
}

fn tick_violations(
    lines: &[Line],
    book: &Book,
    known: &BTreeMap<&str, &BookJob>,
    found: &mut Found,
) {
    for (tenant, fires) in &book.fires {
        let mut ticks: Vec<_> = fires.iter().map(|it| (it.due_at.timestamp(), it)).collect();
        ticks.sort_unstable_by_key(|it| it.0);
        for pair in ticks.windows(2) {
            let passed = (pair[1].0 - pair[0].0) / TICK_SECONDS;
            // An entry stands for the ticks that end with it.
            if passed != pair[1].1.ticks {
                let detail = format!("{passed} ticks of {tenant} before {}", pair[1].1.due_at);
                found.add(Invariant::TicksFireOnce, detail);
            }
        }
        let ends = ticks.first().zip(ticks.last()).map(|(first, last)| (first.0, last.0));
        if let Some((made_at, paused_at)) = book.schedules_ran {
            let is_whole = ends.is_some_and(|(first, last)| {
                let late = serving_seconds(lines, last + TICK_SECONDS, paused_at / 1_000);
                first <= made_at / 1_000 + TICK_SECONDS && late <= LATE_SECONDS
            });
            if !is_whole {
                let detail = format!("ticks of {tenant} from {made_at} to {paused_at}: {ends:?}");
                found.add(Invariant::TicksFireOnce, detail);
            }
        }
        late_violations(fires, known, found);
        let mut jobs = BTreeSet::new();
        for fire in fires.iter().filter(|it| it.outcome == "fired") {
            let job = fire.job_id.as_deref().unwrap_or_default();
            if !jobs.insert(job) || !known.contains_key(job) {
                let detail = format!("the tick at {} has the job {job}", fire.due_at);
                found.add(Invariant::TicksFireOnce, detail);
            }
        }
    }
}

/// Ticks are missed when the first of those that are handled together is later than their grace,
/// and no other tick is missed or that late.
pub(super) fn late_violations(
    fires: &[BookFire],
    known: &BTreeMap<&str, &BookJob>,
    found: &mut Found,
) {
    let late_ms = |it: &BookFire| {
        let first = it.due_at - TimeDelta::seconds((it.ticks - 1) * TICK_SECONDS);
        (it.at - first).num_milliseconds()
    };
    for fire in fires {
        let beside = |it: &&BookFire| (it.at - fire.at).num_milliseconds().abs() <= HANDLED_MS;
        let latest = fires.iter().filter(beside).map(late_ms).max().unwrap_or_default();
        // When a tick was handled is written later; its job is as old as its transaction.
        let job = fire.job_id.as_deref().and_then(|it| known.get(it));
        let fired_late_ms = job.map(|it| (it.enqueued_at - fire.due_at).num_milliseconds());
        let is_early = fire.outcome == "missed" && latest < GRACE_MS - HANDLED_MS;
        if is_early || fired_late_ms.is_some_and(|it| it > GRACE_MS) {
            let BookFire { due_at, outcome, .. } = fire;
            let detail = format!("the tick at {due_at} is {outcome} after {latest} ms");
            found.add(Invariant::TicksFireOnce, detail);
        }
    }
}

fn report_violations(
    lines: &[Line],
    book: &Book,
    known: &BTreeMap<&str, &BookJob>,
    found: &mut Found,
) {
    let mut reported = BTreeSet::new();
    // Jobs of a run end once.
    let mut events: BTreeMap<&str, &str> = BTreeMap::new();
    for line in lines {
        let Event::Delivered { tenant, event, kind, job, is_taken } = &line.event else { continue };
        let of_event = known.get(job.as_str());
        let owner = of_event.map(|it| it.tenant);
        if owner != Some(*tenant) {
            let detail = format!("{tenant} was notified of {job} of {owner:?}");
            found.add(Invariant::NoForeignJob, detail);
        }
        let end = of_event.and_then(|it| EVENTS.into_iter().find(|end| end.0 == it.state));
        let is_second = events.insert(job, event).is_some_and(|it| it != event);
        if is_second || end.is_some_and(|it| it.1 != kind) {
            let detail = format!("{event} reported that {job} is {kind}: {end:?}");
            found.add(Invariant::EndsAreReported, detail);
        }
        if *is_taken {
            reported.insert((kind.as_str(), job.as_str()));
        }
    }
    for job in &book.jobs {
        let Some((_, kind)) = EVENTS.into_iter().find(|it| it.0 == job.state) else { continue };
        if !reported.contains(&(kind, job.id.as_str())) {
            let detail = format!("no endpoint was notified that {} is {}", job.id, job.state);
            found.add(Invariant::EndsAreReported, detail);
        }
    }
}
