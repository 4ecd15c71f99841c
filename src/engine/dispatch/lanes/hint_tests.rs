//! Hints to other nodes: they are about those jobs that the polls of this node may be unable to
//! take.

use chrono::DateTime;

use super::{tests::Board, *};

const PROJECT: i32 = 1;

fn jobs(queue: &str, job_type: &str, count: usize) -> Vec<Arrival> {
    let arrival = Arrival {
        project_id: ProjectId(PROJECT),
        queue: queue.into(),
        job_type: job_type.into(),
        rank: 0,
        run_at: DateTime::from_timestamp(1_000, 0).expect("a time"),
        is_constrained: false,
    };
    vec![arrival; count]
}

impl Board {
    /// Number of these jobs that other nodes get hints of, when they arrive.
    fn hinted(&mut self, arrivals: Vec<Arrival>) -> usize {
        self.lanes.arrived(&arrivals);
        self.lanes.beyond_polls(arrivals).len()
    }
}

#[test]
fn no_hint_is_sent_of_jobs_for_which_a_poll_each_is_idle() {
    let mut board = Board::new();
    board.park(1, PROJECT, &["a"], 9);
    board.park(2, PROJECT, &["a"], 1);
    assert_eq!(board.hinted(jobs("a", "t", 1)), 1, "nothing is known of the queue");
    board.find_nothing();
    assert_eq!(board.hinted(jobs("a", "t", 1)), 0);
    assert_eq!(board.hinted(jobs("a", "t", 1)), 0);
    assert_eq!(board.hinted(jobs("a", "t", 2)), 2, "two polls, four jobs");
    assert_eq!(board.hinted(jobs("b", "t", 1)), 1, "no poll");
}

#[test]
fn polls_that_a_claim_is_for_are_not_idle() {
    let mut board = Board::new();
    board.park(1, PROJECT, &["a"], 1);
    board.find_nothing();
    assert_eq!(board.hinted(jobs("a", "t", 1)), 0);
    let claims = board.plan();
    assert_eq!((claims.len(), board.hinted(jobs("a", "t", 1))), (1, 1));
    board.park(2, PROJECT, &["a"], 1);
    board.complete(&claims[0], 1);
    assert_eq!(board.hinted(jobs("a", "t", 1)), 0, "a second poll and the first one");
}

#[test]
fn a_poll_counts_for_the_types_and_the_first_queue_that_may_have_jobs() {
    let mut board = Board::new();
    board.park_typed(1, PROJECT, &["a", "b"], &["mail"], 1);
    board.find_nothing();
    assert_eq!(board.hinted(jobs("a", "sms", 1)), 1, "another type");
    assert_eq!(board.hinted(jobs("a", "mail", 1)), 0);
    assert_eq!(board.hinted(jobs("b", "mail", 1)), 1, "it will have the other job");
}

#[test]
fn hints_are_sent_of_constrained_jobs_and_of_a_lane_in_backoff() {
    let mut board = Board::new();
    board.park(1, PROJECT, &["a"], 1);
    board.find_nothing();
    let mut constrained = jobs("a", "t", 1);
    constrained[0].is_constrained = true;
    assert_eq!(board.hinted(constrained), 1);
    board.find_nothing();
    assert_eq!(board.hinted(jobs("a", "t", 1)), 0);
    let claims = board.plan();
    board.lanes.complete(&claims[0], None, board.now);
    assert_eq!(board.hinted(jobs("a", "t", 1)), 1, "the claim failed");
}

#[test]
fn a_lane_without_polls_remembers_that_a_slot_was_freed() {
    let mut board = Board::new();
    board.park(1, PROJECT, &["a"], 10);
    let claims = board.plan();
    let found = Claimed {
        is_short: true,
        was_contended: false,
        last: None,
        has_constrained: Some(true),
        pause_for: None,
    };
    board.lanes.complete(&claims[0], Some(found), board.now);
    board.lanes.leave(1);
    board.lanes.slots_freed(ProjectId(PROJECT + 1));
    board.park(2, PROJECT, &["a"], 10);
    assert!(board.plan().is_empty(), "another project's");
    board.lanes.leave(2);
    board.lanes.slots_freed(ProjectId(PROJECT));
    board.park(3, PROJECT, &["a"], 10);
    assert_eq!(board.plan().len(), 1);
}
