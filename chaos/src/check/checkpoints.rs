//! A lease brings the last checkpoint that was stored under an older fence.

use std::collections::BTreeMap;

use super::{Found, Invariant};
use crate::history::{Event, Line};

/// Adds what is wrong with the checkpoints of all leases.
pub fn add_violations(lines: &[Line], found: &mut Found) {
    let mut saved: BTreeMap<&str, Vec<(i64, i64)>> = BTreeMap::new();
    for line in lines {
        if let Event::Saved { job, attempt, sequence } = &line.event {
            saved.entry(job).or_default().push((*attempt, *sequence));
        }
    }
    for line in lines {
        let Event::Resumed { job, attempt, sequence } = &line.event else { continue };
        // Whenever the answer came: an older fence was accepted before this lease was given.
        let of_job = saved.get(job.as_str()).into_iter().flatten();
        let last = of_job.filter(|it| it.0 < *attempt).map(|it| it.1).max();
        if *sequence < last {
            let detail = format!(
                "attempt {attempt} of {job} was given the checkpoint {sequence:?}, and {last:?} was \
                 stored before"
            );
            found.add(Invariant::CheckpointsAreKept, detail);
        }
    }
}
