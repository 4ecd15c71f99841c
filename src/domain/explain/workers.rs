//! The condition that a worker takes the job.

use super::{Condition, Facts, MAX_COUNTED_AHEAD, MAX_OTHER_TYPES, Reason, Slots, things};

pub(super) fn condition(facts: &Facts) -> Condition {
    let Facts { queue, job_type, workers, workers_with_labels, ahead, .. } = facts;
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
        let more = if *ahead >= MAX_COUNTED_AHEAD { " or more" } else { "" };
        let live = things(*workers_with_labels, "live worker");
        let jobs =
            if more.is_empty() { things(*ahead, "job") } else { format!("{ahead}{more} jobs") };
        match facts.slots.filter(|it| it.in_use >= it.all) {
            Some(Slots { in_use, all }) => {
                let used = format!("{in_use} of {} in use", things(all, "slot"));
                (Reason::WorkersBusy, format!("all workers are busy: {used}; {jobs} before it"))
            }
            None if *ahead == 0 && facts.slots_in_use > 0 => {
                let running = things(facts.slots_in_use, "job");
                let workers =
                    format!("{live} with {running}, and not all have reported how many they take");
                (Reason::WorkersBusy, format!("{workers}; {jobs} before it"))
            }
            None if *ahead == 0 => (Reason::Ready, format!("{live}; {jobs} before it")),
            None => (Reason::OtherJobs, format!("{live}; {jobs} before it")),
        }
    };
    Condition { reason, is_open: reason == Reason::Ready, message, changes_at: None }
}
