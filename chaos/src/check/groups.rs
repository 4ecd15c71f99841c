//! Groups with a strict order: their jobs run one after the other, as they were sent.

use std::collections::BTreeMap;

use super::{Found, Invariant};
use crate::{
    book::{Book, BookJob},
    producers::{GROUP, PLACE},
};

pub(super) fn violations(book: &Book, found: &mut Found) {
    let mut groups: BTreeMap<(usize, &str), BTreeMap<i64, &BookJob>> = BTreeMap::new();
    for job in &book.jobs {
        let (group, place) = (job.payload[GROUP].as_str(), job.payload[PLACE].as_i64());
        if let (Some(group), Some(place)) = (group, place) {
            groups.entry((job.tenant, group)).or_default().insert(place, job);
        }
    }
    for jobs in groups.values() {
        let mut ahead: Option<&BookJob> = None;
        for job in jobs.values() {
            let ended = ahead.and_then(|it| it.completed_at);
            if let (Some(ahead), Some(ended), Some(began)) = (ahead, ended, job.began())
                && began < ended
            {
                let detail = format!("{} began before {} of its group had ended", job.id, ahead.id);
                found.add(Invariant::GroupsAreOrdered, detail);
            }
            if ended.is_none_or(|ended| job.completed_at.is_some_and(|it| it > ended)) {
                ahead = Some(job);
            }
        }
    }
}
