//! The order in which the jobs of a workflow get their places in groups.

use std::collections::HashMap;

use fencepost_store::{jobs::enqueue::NewJob, workflows::dependencies::Edge};

/// The jobs of a workflow in the order of their places in groups: a child would never run that is
/// ahead of its parent in their group. Otherwise as they were sent: only ancestors move, before the
/// first job that needs them.
pub(super) fn parents_first<'a>(jobs: &'a [NewJob], edges: &[Edge]) -> Vec<&'a NewJob> {
    let place: HashMap<_, _> = jobs.iter().enumerate().map(|(place, it)| (it.id, place)).collect();
    let mut parents = vec![Vec::new(); jobs.len()];
    for edge in edges {
        if let (Some(parent), Some(child)) = (place.get(&edge.parent), place.get(&edge.child)) {
            parents[*child].push(*parent);
        }
    }
    let (mut is_seen, mut ordered) = (vec![false; jobs.len()], Vec::with_capacity(jobs.len()));
    for job in 0..jobs.len() {
        place_after_parents(job, &parents, &mut is_seen, &mut ordered);
    }
    ordered.into_iter().map(|it| &jobs[it]).collect()
}

/// A workflow has no circle, and as many generations as jobs at most.
fn place_after_parents(
    job: usize,
    parents: &[Vec<usize>],
    is_seen: &mut [bool],
    ordered: &mut Vec<usize>,
) {
    if std::mem::replace(&mut is_seen[job], true) {
        return;
    }
    for parent in &parents[job] {
        place_after_parents(*parent, parents, is_seen, ordered);
    }
    ordered.push(job);
}
