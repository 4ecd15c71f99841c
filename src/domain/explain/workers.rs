//! The condition that a worker takes the job.

use super::{Condition, Facts, MAX_COUNTED_AHEAD, MAX_OTHER_TYPES, Reason, Slots, things};

pub(super) fn condition(facts: &Facts) -> Condition {
    let Facts { queue, job_type, workers, workers_with_labels, .. } = facts;
    let (reason, message) = if *workers == 0 && facts.quiet_workers > 0 {
        let live = things(facts.quiet_workers, "live worker");
        let asked = if facts.quiet_workers == 1 { "was" } else { "were" };
        let message = format!(
            "{live} of queue {queue} {asked} asked to take no more jobs, and no other one polls it \
             for {job_type}: resume, or start one"
        );
        (Reason::NoWorkers, message)
    } else if *workers == 0 {
        let others = match facts.other_types.as_slice() {
            [] => String::new(),
            types => {
                let shown: Vec<_> =
                    types.iter().take(MAX_OTHER_TYPES).map(String::as_str).collect();
                let more = if types.len() > MAX_OTHER_TYPES { " and others" } else { "" };
                format!("; those that poll it take {}{more}", shown.join(", "))
            }
        };
        (Reason::NoWorkers, format!("no live worker polls queue {queue} for {job_type}{others}"))
    } else if *workers_with_labels == 0 {
        let labels = facts.labels.join(", ");
        let live = things(*workers, "live worker");
        (Reason::Labels, format!("none of {live} of queue {queue} has the labels {labels}"))
    } else {
        let live = things(*workers_with_labels, "live worker");
        let (jobs, is_next) = before(facts);
        match facts.slots.filter(|it| it.in_use >= it.all) {
            Some(Slots { in_use, all }) => {
                let used = format!("{in_use} of {} in use", things(all, "slot"));
                (Reason::WorkersBusy, format!("all workers are busy: {used}; {jobs}"))
            }
            None if is_next && facts.slots_in_use > 0 => {
                let running = things(facts.slots_in_use, "job");
                let workers =
                    format!("{live} with {running}, and not all have reported how many they take");
                (Reason::WorkersBusy, format!("{workers}; {jobs}"))
            }
            None if is_next => (Reason::Ready, format!("{live}; {jobs}")),
            None => (Reason::OtherJobs, format!("{live}; {jobs}")),
        }
    };
    Condition { reason, is_open: reason == Reason::Ready, message, changes_at: None }
}

/// What is before it, and whether that is nothing.
fn before(facts: &Facts) -> (String, bool) {
    let many = |count: i64, thing: &str| match count < MAX_COUNTED_AHEAD {
        true => things(count, thing),
        false => format!("{count} or more {thing}s"),
    };
    let jobs = many(facts.ahead, "job");
    match facts.groups_ahead {
        None => (format!("{jobs} before it"), facts.ahead == 0),
        Some(groups) => {
            let turns = many(groups, "group");
            let before = format!("{jobs} before it in its group, and the turn of {turns}");
            (before, facts.ahead == 0 && groups == 0)
        }
    }
}
