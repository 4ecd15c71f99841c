//! Which parked polls may have a job that is about to be stored.

use chrono::DateTime;

use super::*;

const PROJECT: ProjectId = ProjectId(1);

struct Board {
    lanes: Lanes,
    now: Instant,
}

impl Board {
    fn new() -> Self {
        Self { lanes: Lanes::default(), now: Instant::now() }
    }

    fn park(&mut self, id: WaiterId, queues: &[&str], types: &[&str], capacity: u32) {
        let spec = PollSpec {
            project_id: PROJECT,
            queues: queues.iter().map(|it| (*it).into()).collect(),
            job_types: types.iter().map(|it| (*it).to_owned()).collect(),
            labels: [].into(),
            only_commands: false,
            worker_id: format!("w{id}").into(),
            capacity,
            lease_seconds: None,
            poll_id: None,
        };
        self.lanes.park(id, spec, false, self.now);
    }

    /// Claims for all lanes, and finds nothing.
    fn look_everywhere(&mut self) {
        loop {
            let claims = self.lanes.plan(self.now);
            if claims.is_empty() {
                return;
            }
            for claim in claims {
                self.lanes.complete(&claim, Some(Self::nothing()), self.now);
            }
        }
    }

    fn nothing() -> Claimed {
        Claimed {
            is_short: true,
            was_contended: false,
            last: None,
            has_constrained: Some(false),
            pause_for: None,
        }
    }

    fn arrive(&mut self, queue: &str) {
        self.lanes.arrived(&[Arrival {
            project_id: PROJECT,
            queue: queue.into(),
            job_type: "t".into(),
            rank: 0,
            run_at: DateTime::from_timestamp(1, 0).expect("a time"),
            is_constrained: false,
        }]);
    }

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
        let asked = (PROJECT, &queue.into(), job_type);
        self.lanes.reserve(asked, wanted, taken).into_iter().map(|it| it.0).collect()
    }
}

#[test]
fn polls_are_reserved_once_the_oldest_first_and_each_gets_one_before_any_gets_two() {
    let mut board = Board::new();
    board.park(1, &["a"], &[], 2);
    board.park(2, &["a"], &[], 1);
    board.look_everywhere();
    assert_eq!(board.reserve("a", "t", 3), [1, 2, 1]);
    assert_eq!(board.reserve("a", "t", 1), [0; 0], "both are in flight");
    board.lanes.free(2);
    assert_eq!(board.reserve("a", "t", 1), [2]);
    assert_eq!(board.reserve("b", "t", 1), [0; 0]);
}

#[test]
fn no_poll_is_reserved_while_another_job_may_wait() {
    let mut board = Board::new();
    board.park(1, &["a"], &[], 1);
    assert_eq!(board.reserve("a", "t", 1), [0; 0], "no claim has looked");
    board.look_everywhere();
    board.arrive("a");
    assert_eq!(board.reserve("a", "t", 1), [0; 0], "a job has arrived");
    let claims = board.lanes.plan(board.now);
    board.park(2, &["a"], &[], 1);
    assert_eq!(board.reserve("a", "t", 1), [2], "the other job is being claimed for the first");
    for claim in claims {
        board.lanes.complete(&claim, Some(Board::nothing()), board.now);
    }
    assert_eq!(board.reserve("a", "t", 1), [1], "it was gone");
    board.lanes.free(1);
    board.lanes.mark_stale(None);
    assert_eq!(board.reserve("a", "t", 1), [0; 0], "something may have changed");
}

#[test]
fn a_poll_takes_only_what_it_asks_for_and_its_first_queues_first() {
    let mut board = Board::new();
    board.park(1, &["a"], &["mail"], 1);
    board.park(2, &["b", "a"], &[], 1);
    board.look_everywhere();
    assert_eq!(board.reserve("a", "mail", 2), [1, 2]);
    board.lanes.free(1);
    board.lanes.free(2);
    board.arrive("b");
    assert_eq!(board.reserve("a", "t", 2), [0; 0], "its first queue has a job");
    assert_eq!(board.reserve("a", "mail", 2), [1]);
}

#[test]
fn jobs_that_arrive_while_a_poll_is_reserved_are_claimed_when_it_is_free() {
    let mut board = Board::new();
    board.park(1, &["a"], &[], 1);
    board.look_everywhere();
    assert_eq!(board.reserve("a", "t", 1), [1]);
    board.arrive("a");
    assert!(board.lanes.plan(board.now).is_empty(), "no poll is idle");
    board.lanes.free(1);
    let claims = board.lanes.plan(board.now);
    assert_eq!(claims.iter().map(|it| it.slots.len()).sum::<usize>(), 1);
}

#[test]
fn a_batch_fills_the_capacity_of_polls_with_jobs_of_several_types() {
    let mut board = Board::new();
    board.park(1, &["a"], &[], 3);
    board.park(2, &["a"], &[], 1);
    board.look_everywhere();
    let mut taken = HashMap::new();
    assert_eq!(board.reserve_more("a", "one", 1, &mut taken), [1]);
    assert_eq!(board.reserve_more("a", "other", 2, &mut taken), [2, 1]);
    assert_eq!(board.reserve_more("a", "more", 1, &mut taken), [1]);
    assert_eq!(board.reserve_more("a", "third", 1, &mut taken), [0; 0]);
}
