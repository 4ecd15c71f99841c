//! Workflows: jobs that wait for each other, as a graph without cycles.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::{
    dependency::Dependency,
    job::JobState,
    limits::{MAX_PARENTS, MAX_WORKFLOW_JOBS},
};

/// The state of a workflow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum WorkflowState {
    /// Some job has not ended.
    Running,
    /// Every job has ended, and every failure was handled: a job that waited for it succeeded.
    Succeeded,
    /// Every job has ended, at least one without success.
    Failed,
    /// Cancelled, and every job has ended.
    Cancelled,
}

impl WorkflowState {
    /// As it is written.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}

/// A job of a workflow, as it counts for the workflow's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Member {
    /// Its state.
    pub state: JobState,
    /// Its end without success does not fail the workflow: it was cancelled because of a parent,
    /// which counts itself, or a job that waited for its failure has succeeded.
    pub is_excused: bool,
}

/// The state of a workflow, from its jobs.
#[must_use]
pub fn state(jobs: &[Member], was_cancelled: bool) -> WorkflowState {
    let is_open = |it: &Member| {
        matches!(it.state, JobState::Scheduled | JobState::Pending | JobState::Processing)
    };
    let is_good = |it: &Member| it.state == JobState::Succeeded || it.is_excused;
    if jobs.iter().any(is_open) {
        WorkflowState::Running
    } else if jobs.iter().all(is_good) {
        WorkflowState::Succeeded
    } else if was_cancelled && jobs.iter().all(|it| it.state != JobState::DeadLetter) {
        WorkflowState::Cancelled
    } else {
        WorkflowState::Failed
    }
}

/// The key of the job that takes the place of another one. Its result is that of both, once the
/// other one has failed.
#[must_use]
pub fn fallback_key(key: &str) -> String {
    format!("{key}.fallback")
}

/// A mistake in a graph, and its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BrokenGraph {
    /// The index of the job in the request, if one job is wrong.
    pub job: Option<usize>,
    /// The field of the job, or of the request.
    pub field: String,
    /// The rule that it breaks.
    pub message: String,
}

/// One job of a graph: its key, and the keys of its parents.
#[derive(Debug, Clone, Copy)]
pub struct Node<'a> {
    /// Its key in the graph.
    pub key: &'a str,
    /// The keys of its parents.
    pub depends_on: &'a [Dependency<String>],
}

/// The parents of each job, as indexes into the request.
///
/// # Errors
/// Every broken rule: missing or duplicate keys, too many jobs or parents, and one cycle, with its
/// keys.
pub fn resolve(nodes: &[Node<'_>]) -> Result<Vec<Vec<Dependency<usize>>>, Vec<BrokenGraph>> {
    let mut broken = Vec::new();
    let mut refuse = |job: Option<usize>, field: &str, message: String| {
        broken.push(BrokenGraph { job, field: field.to_owned(), message });
    };
    if nodes.is_empty() || nodes.len() > MAX_WORKFLOW_JOBS {
        let message =
            format!("must have between 1 and {MAX_WORKFLOW_JOBS} entries, has {}", nodes.len());
        refuse(None, "jobs", message);
        return Err(broken);
    }
    let mut places = HashMap::new();
    for (place, node) in nodes.iter().enumerate() {
        if places.insert(node.key, place).is_some() {
            refuse(Some(place), "key", format!("`{}` is a duplicate", node.key));
        }
    }
    let mut parents = Vec::with_capacity(nodes.len());
    for (place, node) in nodes.iter().enumerate() {
        let mut of_node: Vec<Dependency<usize>> = Vec::with_capacity(node.depends_on.len());
        if node.depends_on.len() > MAX_PARENTS {
            let message =
                format!("must have at most {MAX_PARENTS} entries, has {}", node.depends_on.len());
            refuse(Some(place), "depends_on", message);
        }
        let named = node.depends_on.iter().take(MAX_PARENTS);
        for (number, Dependency { parent: key, when }) in named.enumerate() {
            let field = format!("depends_on[{number}]");
            match places.get(key.as_str()) {
                None => refuse(Some(place), &field, format!("no job has the key `{key}`")),
                Some(it) if of_node.iter().any(|known| known.parent == *it) => {
                    refuse(Some(place), &field, format!("`{key}` is named twice"));
                }
                Some(it) => of_node.push(Dependency { parent: *it, when: *when }),
            }
        }
        parents.push(of_node);
    }
    if broken.is_empty()
        && let Some(cycle) = cycle(&parents)
    {
        let keys: Vec<_> = cycle.iter().filter_map(|it| nodes.get(*it)).map(|it| it.key).collect();
        let message = format!("waits for itself: {}", keys.join(" → "));
        broken.push(BrokenGraph {
            job: cycle.first().copied(),
            field: "depends_on".to_owned(),
            message,
        });
    }
    if broken.is_empty() { Ok(parents) } else { Err(broken) }
}

/// One cycle, from a job through its parents back to itself; none if there is none.
fn cycle(parents: &[Vec<Dependency<usize>>]) -> Option<Vec<usize>> {
    // Removes jobs without remaining parents until none is left, or only cycles and their
    // descendants are.
    let mut waits_for: Vec<_> = parents.iter().map(Vec::len).collect();
    let mut children = vec![Vec::new(); parents.len()];
    for (child, of_child) in parents.iter().enumerate() {
        of_child.iter().for_each(|it| children[it.parent].push(child));
    }
    let mut free: Vec<_> = (0..parents.len()).filter(|it| waits_for[*it] == 0).collect();
    while let Some(done) = free.pop() {
        for child in &children[done] {
            waits_for[*child] -= 1;
            if waits_for[*child] == 0 {
                free.push(*child);
            }
        }
    }
    // Every remaining job has a remaining parent: following them must return to the start.
    let mut path = vec![(0..parents.len()).find(|it| waits_for[*it] > 0)?];
    loop {
        let last = *path.last()?;
        let next = parents[last].iter().map(|it| it.parent).find(|it| waits_for[*it] > 0)?;
        if let Some(start) = path.iter().position(|it| *it == next) {
            let mut cycle = path.split_off(start);
            cycle.push(next);
            return Some(cycle);
        }
        path.push(next);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(graph: &[(&str, &[&str])]) -> Result<Vec<Vec<usize>>, Vec<String>> {
        let on = |it: &&str| Dependency::on_success((*it).to_owned());
        let owned: Vec<(&str, Vec<_>)> =
            graph.iter().map(|(key, parents)| (*key, parents.iter().map(on).collect())).collect();
        let nodes: Vec<_> = owned.iter().map(|(key, on)| Node { key, depends_on: on }).collect();
        let indexes = |of: Vec<Dependency<usize>>| of.iter().map(|it| it.parent).collect();
        resolve(&nodes).map(|all| all.into_iter().map(indexes).collect()).map_err(|broken| {
            broken.iter().map(|it| format!("{:?} {}: {}", it.job, it.field, it.message)).collect()
        })
    }

    #[test]
    fn parents_are_found_by_their_keys_in_any_order() {
        let diamond: &[(&str, &[&str])] = &[
            ("end", &["left", "right"]),
            ("left", &["start"]),
            ("right", &["start"]),
            ("start", &[]),
        ];
        assert_eq!(resolved(diamond), Ok(vec![vec![1, 2], vec![3], vec![3], vec![]]));
    }

    #[test]
    fn a_workflow_runs_until_its_last_job_has_ended() {
        use JobState::{Cancelled, DeadLetter, Processing, Scheduled, Succeeded};
        let of = |states: &[JobState], excused: &[usize], was_cancelled: bool| {
            let members = states.iter().enumerate();
            let members = members
                .map(|(index, it)| Member { state: *it, is_excused: excused.contains(&index) });
            state(&members.collect::<Vec<_>>(), was_cancelled)
        };
        assert_eq!(of(&[Succeeded, Scheduled], &[], false), WorkflowState::Running);
        assert_eq!(of(&[DeadLetter, Processing], &[], true), WorkflowState::Running);
        assert_eq!(of(&[Succeeded, Succeeded], &[], false), WorkflowState::Succeeded);
        assert_eq!(of(&[DeadLetter, Cancelled], &[1], true), WorkflowState::Failed);
        assert_eq!(of(&[Succeeded, Cancelled], &[], true), WorkflowState::Cancelled);
        assert_eq!(of(&[Succeeded, Cancelled], &[], false), WorkflowState::Failed);
        assert_eq!(of(&[Succeeded, Cancelled], &[1], false), WorkflowState::Succeeded);
        assert_eq!(of(&[DeadLetter, Succeeded], &[0], false), WorkflowState::Succeeded);
        assert_eq!(of(&[DeadLetter, Scheduled], &[0], false), WorkflowState::Running);
    }

    #[test]
    fn a_cycle_is_named_by_its_keys() {
        let graph: &[(&str, &[&str])] =
            &[("a", &[]), ("b", &["a", "d"]), ("c", &["b"]), ("d", &["c"])];
        assert_eq!(
            resolved(graph),
            Err(vec!["Some(1) depends_on: waits for itself: b → d → c → b".to_owned()])
        );
        assert!(resolved(&[("a", &["a"])]).is_err());
    }

    #[test]
    fn every_wrong_key_is_named() {
        let graph: &[(&str, &[&str])] = &[("a", &["x"]), ("a", &[]), ("b", &["a", "a"])];
        let broken = resolved(graph).expect_err("broken");
        assert_eq!(broken.len(), 3, "{broken:?}");
        assert!(broken[1].contains("no job has the key `x`"), "{broken:?}");
        assert!(resolved(&[]).is_err());
    }
}
