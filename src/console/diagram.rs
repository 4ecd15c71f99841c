//! Diagrams made of rectangles: the attempts of a job over time, and the dependency graph of a
//! workflow.

use std::collections::{HashMap, HashSet};

use chrono::{DateTime, Utc};
use fencepost_domain::job::{AttemptOutcome, JobState};
use fencepost_http::routes::{
    jobs::{Job, JobError},
    workflows::{Workflow, WorkflowJob},
};

use super::format;

/// Width of the whole timeline, in the diagram's units.
pub const TIMELINE_WIDTH: i64 = 1_000;
/// Minimum width that is still visible.
const MIN_WIDTH: i64 = 4;

/// Newest attempts of a job that its page shows.
pub const MAX_SHOWN_ATTEMPTS: usize = 50;

/// The attempts of a job over time.
pub struct Timeline {
    /// A row for each of the newest attempts, oldest first.
    pub rows: Vec<Row>,
    /// Number of earlier attempts.
    pub left_out: usize,
    pub began: DateTime<Utc>,
    /// When it ended; the present, if it has not.
    pub ended: DateTime<Utc>,
}

/// An attempt.
pub struct Row {
    pub attempt: i32,
    /// Its outcome, or `processing`.
    pub outcome: &'static str,
    pub worker_id: String,
    pub claimed_at: DateTime<Utc>,
    /// Its duration so far.
    pub took_ms: i64,
    /// How long the job had waited for it.
    pub waited_ms: i64,
    pub error: Option<JobError>,
    /// When the job could run again.
    pub retry_at: Option<DateTime<Utc>>,
    /// Start and width of the wait.
    pub wait: (i64, i64),
    /// Start and width of the run.
    pub run: (i64, i64),
}

/// The timeline of a job, from when it was stored.
pub fn timeline(job: &Job, now: DateTime<Utc>) -> Timeline {
    let began = job.created_at;
    let attempts = job.attempts.as_deref().unwrap_or_default();
    let last = attempts.iter().map(|it| it.ended_at).max();
    let ended = job.completed_at.or(last.filter(|_| job.state == JobState::DeadLetter));
    let ended = ended.unwrap_or(now).max(began);
    let life_ms = (ended - began).num_milliseconds().max(1);
    let place = |at: DateTime<Utc>| {
        ((at - began).num_milliseconds() * TIMELINE_WIDTH / life_ms).clamp(0, TIMELINE_WIDTH)
    };
    let mut rows: Vec<Row> = Vec::with_capacity(attempts.len() + 1);
    let mut free_at = began;
    let mut row = |attempt, outcome, worker: &str, from: DateTime<Utc>, to: DateTime<Utc>| {
        let (wait_from, run_from) = (place(free_at), place(from));
        let width = (place(to) - run_from).max(MIN_WIDTH);
        let made = Row {
            attempt,
            outcome,
            worker_id: worker.to_owned(),
            claimed_at: from,
            took_ms: (to - from).num_milliseconds().max(0),
            waited_ms: (from - free_at).num_milliseconds().max(0),
            error: None,
            retry_at: None,
            wait: (wait_from, (run_from - wait_from).max(0)),
            run: (run_from.min(TIMELINE_WIDTH - MIN_WIDTH), width),
        };
        free_at = to;
        made
    };
    for it in attempts {
        let made = row(it.attempt, it.outcome.as_str(), &it.worker_id, it.claimed_at, it.ended_at);
        rows.push(Row { error: it.error.clone(), retry_at: it.retry_at, ..made });
    }
    if job.state == JobState::Processing
        && let (Some(worker), Some(claimed_at)) = (&job.worker_id, job.claimed_at)
    {
        rows.push(row(job.attempt, JobState::Processing.as_str(), worker, claimed_at, now));
    }
    let left_out = rows.len().saturating_sub(MAX_SHOWN_ATTEMPTS);
    rows.drain(..left_out);
    Timeline { rows, left_out, began, ended }
}

impl Row {
    /// Whether it counts as a failure.
    pub fn is_failure(&self) -> bool {
        [AttemptOutcome::Failed, AttemptOutcome::Timeout, AttemptOutcome::LeaseExpired]
            .iter()
            .any(|it| it.as_str() == self.outcome)
    }
}

/// Size of a job in a workflow's diagram, and the gaps.
pub const BOX: (i64, i64) = (190, 46);
const GAP: (i64, i64) = (60, 14);
/// Characters of a key that fit into its box.
const MAX_KEY_CHARS: usize = 22;

/// A workflow's diagram.
pub struct Graph {
    /// Its size.
    pub size: (i64, i64),
    pub nodes: Vec<Node>,
    pub edges: Vec<Edge>,
}

impl Graph {
    /// Whether a line shows the critical path.
    pub fn has_critical(&self) -> bool {
        self.edges.iter().any(|it| it.is_critical)
    }
}

/// A dependency in a workflow's diagram.
pub struct Edge {
    /// An SVG path.
    pub path: String,
    pub is_critical: bool,
}

/// A job in a workflow's diagram.
pub struct Node {
    pub at: (i64, i64),
    /// Its key, cut to fit.
    pub key: String,
    pub full_key: String,
    pub id: String,
    /// Its state; `gone` if retention has deleted it.
    pub state: &'static str,
    /// Time from the end of its last parent to its own, if it has ended.
    pub took: Option<String>,
}

/// Of each job that has ended: milliseconds from the end of its last parent to its own.
fn spans(jobs: &[WorkflowJob], parents: &[Vec<usize>], stored: DateTime<Utc>) -> Vec<Option<i64>> {
    let span = |(job, of): (&WorkflowJob, &Vec<usize>)| {
        let since = of.iter().filter_map(|it| jobs[*it].completed_at).max().unwrap_or(stored);
        Some((job.completed_at? - since).num_milliseconds().max(0))
    };
    jobs.iter().zip(parents).map(span).collect()
}

/// The chain of jobs that the workflow took its time for, as dependencies: from the job that ended
/// last to the last of its parents, and so on.
fn critical_path(
    ends: &[Option<DateTime<Utc>>],
    parents: &[Vec<usize>],
) -> HashSet<(usize, usize)> {
    let last_of = |jobs: &mut dyn Iterator<Item = usize>| {
        jobs.filter(|it| ends[*it].is_some()).max_by_key(|it| ends[*it])
    };
    let mut path = HashSet::new();
    let mut at = last_of(&mut (0..ends.len()));
    while let Some(child) = at {
        let parent = last_of(&mut parents[child].iter().copied());
        at = parent.filter(|it| path.insert((*it, child)));
    }
    path
}

/// The jobs of a workflow in columns: each is to the right of its parents.
pub fn graph(workflow: &Workflow) -> Graph {
    let places: HashMap<&str, usize> =
        workflow.jobs.iter().enumerate().map(|(place, it)| (it.key.as_str(), place)).collect();
    let parents: Vec<Vec<usize>> = workflow
        .jobs
        .iter()
        .map(|job| {
            job.depends_on.iter().filter_map(|it| places.get(it.as_str()).copied()).collect()
        })
        .collect();
    let columns = columns(&parents);
    let rows = rows(&parents, &columns);
    let spans = spans(&workflow.jobs, &parents, workflow.created_at);
    let ends: Vec<_> = workflow.jobs.iter().map(|it| it.completed_at).collect();
    let critical = critical_path(&ends, &parents);
    let node = |(place, job): (usize, &WorkflowJob)| {
        let at = |place: usize, step: i64| i64::try_from(place).unwrap_or_default() * step + 1;
        Node {
            at: (at(columns[place], BOX.0 + GAP.0), at(rows[place], BOX.1 + GAP.1)),
            key: shorten(&job.key),
            full_key: job.key.clone(),
            id: job.id.clone(),
            state: job.state.map_or("gone", JobState::as_str),
            took: spans[place].map(format::millis),
        }
    };
    let nodes: Vec<Node> = workflow.jobs.iter().enumerate().map(node).collect();
    let edges =
        parents.iter().enumerate().flat_map(|(child, of)| of.iter().map(move |it| (*it, child)));
    let edges = edges.map(|it| Edge {
        path: edge(&nodes[it.0], &nodes[it.1]),
        is_critical: critical.contains(&it),
    });
    let edges = edges.collect();
    let width = nodes.iter().map(|it| it.at.0).max().unwrap_or(0) + BOX.0 + 1;
    let height = nodes.iter().map(|it| it.at.1).max().unwrap_or(0) + BOX.1 + 1;
    Graph { size: (width, height), nodes, edges }
}

/// The column of each job. A graph has no cycles, so as many rounds as jobs are enough.
fn columns(parents: &[Vec<usize>]) -> Vec<usize> {
    let mut columns = vec![0; parents.len()];
    for _ in 0..parents.len() {
        let mut has_moved = false;
        for (job, of) in parents.iter().enumerate() {
            let least = of.iter().map(|it| columns[*it] + 1).max().unwrap_or(0);
            if columns[job] < least {
                columns[job] = least;
                has_moved = true;
            }
        }
        if !has_moved {
            break;
        }
    }
    columns
}

/// The row of each job: the first free one in its column. An edge that passes a column reserves its
/// row there, so it never crosses an unrelated job.
fn rows(parents: &[Vec<usize>], columns: &[usize]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..parents.len()).collect();
    order.sort_by_key(|it| columns[*it]);
    let mut rows = vec![0; parents.len()];
    let mut taken: HashSet<(usize, usize)> = HashSet::new();
    for job in order {
        let column = columns[job];
        let row =
            (0..=parents.len()).find(|row| !taken.contains(&(column, *row))).unwrap_or_default();
        rows[job] = row;
        taken.insert((column, row));
        let children = (0..parents.len()).filter(|it| parents[*it].contains(&job));
        for past in children.flat_map(|it| column + 1..columns[it]) {
            taken.insert((past, row));
        }
    }
    rows
}

/// Straight along the parent's row, and at the end to the child.
fn edge(parent: &Node, child: &Node) -> String {
    let (from_x, from_y) = (parent.at.0 + BOX.0, parent.at.1 + BOX.1 / 2);
    let (to_x, to_y) = (child.at.0, child.at.1 + BOX.1 / 2);
    let (turn, bend) = (to_x - GAP.0, GAP.0 / 2);
    let (near, far) = (turn + bend, to_x - bend);
    format!("M{from_x} {from_y} H{turn} C{near} {from_y} {far} {to_y} {to_x} {to_y}")
}

fn shorten(key: &str) -> String {
    if key.chars().count() <= MAX_KEY_CHARS {
        return key.to_owned();
    }
    let cut: String = key.chars().take(MAX_KEY_CHARS - 1).collect();
    format!("{cut}…")
}

impl Timeline {
    /// The timeline in words.
    pub fn length(&self) -> String {
        format::millis((self.ended - self.began).num_milliseconds())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_job_is_right_of_all_that_it_waits_for() {
        // A diamond with one longer side, in an unfavourable order.
        let parents = vec![vec![1, 3], vec![2], vec![4], vec![4], vec![]];
        assert_eq!(columns(&parents), [3, 2, 1, 1, 0]);
        assert_eq!(columns(&[]), Vec::<usize>::new());
    }

    #[test]
    fn a_line_past_a_column_keeps_its_row_free() {
        // 0 → 1 → 2 → 3, and 0 → 4 → 3, and 0 → 3.
        let parents = vec![vec![], vec![0], vec![1], vec![2, 4, 0], vec![0]];
        let columns = columns(&parents);
        assert_eq!(columns, [0, 1, 2, 3, 1]);
        // The line from 0 to 3 takes row 0 of columns 1 and 2, the one from 4 row 2 of column 2.
        assert_eq!(rows(&parents, &columns), [0, 1, 1, 0, 2]);
    }

    #[test]
    fn the_critical_path_goes_back_from_the_last_end_by_the_last_parents() {
        let at = |seconds| DateTime::from_timestamp(seconds, 0);
        // 0 → 1 → 3, 0 → 2 → 3, and 4 apart; 2 ends after 1.
        let parents = vec![vec![], vec![0], vec![0], vec![1, 2], vec![]];
        let ends = [at(1), at(2), at(5), at(9), at(3)];
        assert_eq!(critical_path(&ends, &parents), HashSet::from([(0, 2), (2, 3)]));
        assert_eq!(critical_path(&[None], &[vec![]]), HashSet::new());
    }

    #[test]
    fn long_keys_are_shortened() {
        assert_eq!(shorten("fetch"), "fetch");
        let long = shorten(&"é".repeat(40));
        assert_eq!((long.chars().count(), long.ends_with('…')), (MAX_KEY_CHARS, true));
    }
}
