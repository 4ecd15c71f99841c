//! Which parked polls may have a job that is about to be stored.

use super::{tests::Board, *};

const PROJECT: i32 = 1;

impl Board {
    fn reserve(&mut self, queue: &str, job_type: &str, wanted: usize) -> Vec<WaiterId> {
        self.reserve_more(queue, job_type, wanted, &mut HashMap::new())
    }

    fn reserve_more(
        &mut self,
        queue: &str,
        job_type: &str,
        wanted: usize,
        taken: &mut HashMap<WaiterId, u32>,
    ) -> Vec<WaiterId> {
        let asked = (ProjectId(PROJECT), &queue.into(), job_type);
        self.lanes.reserve(asked, wanted, taken).into_iter().map(|it| it.0).collect()
    }
}

#[test]
fn polls_are_reserved_once_the_oldest_first_and_each_gets_one_before_any_gets_two() {
    let mut board = Board::new();
    board.park(1, PROJECT, &["a"], 2);
    board.park(2, PROJECT, &["a"], 1);
    board.find_nothing();
    assert_eq!(board.reserve("a", "t", 3), [1, 2, 1]);
    assert_eq!(board.reserve("a", "t", 1), [0; 0], "both are in flight");
    board.lanes.free(2);
    assert_eq!(board.reserve("a", "t", 1), [2]);
    assert_eq!(board.reserve("b", "t", 1), [0; 0]);
}

#[test]
fn no_poll_is_reserved_while_another_job_may_wait() {
    let mut board = Board::new();
    board.park(1, PROJECT, &["a"], 1);
    assert_eq!(board.reserve("a", "t", 1), [0; 0], "no claim has looked");
    board.find_nothing();
    board.arrive(PROJECT, "a", "t", 1);
    assert_eq!(board.reserve("a", "t", 1), [0; 0], "a job has arrived");
    let claims = board.lanes.plan(board.now);
    board.park(2, PROJECT, &["a"], 1);
    assert_eq!(board.reserve("a", "t", 1), [2], "the other job is being claimed for the first");
    for claim in claims {
        board.complete(&claim, 0);
    }
    assert_eq!(board.reserve("a", "t", 1), [1], "it was gone");
    board.lanes.free(1);
    board.lanes.mark_stale(None);
    assert_eq!(board.reserve("a", "t", 1), [0; 0], "something may have changed");
}

#[test]
fn a_poll_takes_only_what_it_asks_for_and_its_first_queues_first() {
    let mut board = Board::new();
    board.park_typed(1, PROJECT, &["a"], &["mail"], 1);
    board.park(2, PROJECT, &["b", "a"], 1);
    board.find_nothing();
    assert_eq!(board.reserve("a", "mail", 2), [1, 2]);
    board.lanes.free(1);
    board.lanes.free(2);
    board.arrive(PROJECT, "b", "t", 1);
    assert_eq!(board.reserve("a", "t", 2), [0; 0], "its first queue has a job");
    assert_eq!(board.reserve("a", "mail", 2), [1]);
}

#[test]
fn jobs_that_arrive_while_a_poll_is_reserved_are_claimed_when_it_is_free() {
    let mut board = Board::new();
    board.park(1, PROJECT, &["a"], 1);
    board.find_nothing();
    assert_eq!(board.reserve("a", "t", 1), [1]);
    board.arrive(PROJECT, "a", "t", 1);
    assert!(board.lanes.plan(board.now).is_empty(), "no poll is idle");
    board.lanes.free(1);
    let claims = board.lanes.plan(board.now);
    assert_eq!(claims.iter().map(|it| it.slots.len()).sum::<usize>(), 1);
}

#[test]
fn a_group_commit_fills_the_capacity_of_polls_with_jobs_of_several_types() {
    let mut board = Board::new();
    board.park(1, PROJECT, &["a"], 3);
    board.park(2, PROJECT, &["a"], 1);
    board.find_nothing();
    let mut taken = HashMap::new();
    assert_eq!(board.reserve_more("a", "one", 1, &mut taken), [1]);
    assert_eq!(board.reserve_more("a", "other", 2, &mut taken), [2, 1]);
    assert_eq!(board.reserve_more("a", "more", 1, &mut taken), [1]);
    assert_eq!(board.reserve_more("a", "third", 1, &mut taken), [0; 0]);
}
