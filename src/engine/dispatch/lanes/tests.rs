//! Which lanes are claimed from, for which polls, and in which order.

use chrono::DateTime;
use fencepost_domain::lease::LeaseLength;

use super::{
    lane::{CONTENTION_PAUSE, FAILURE_PAUSE, FULL_CLAIM_PAUSE},
    *,
};

pub(super) struct Board {
    pub lanes: Lanes,
    pub now: Instant,
}

fn queue(name: &str) -> Arc<str> {
    name.into()
}

impl Board {
    pub fn new() -> Self {
        Self { lanes: Lanes::default(), now: Instant::now() }
    }

    pub fn park(&mut self, id: WaiterId, project: i32, queues: &[&str], capacity: u32) {
        self.park_typed(id, project, queues, &[], capacity);
    }

    pub fn park_typed(
        &mut self,
        id: u64,
        project: i32,
        queues: &[&str],
        types: &[&str],
        capacity: u32,
    ) {
        let spec = PollSpec {
            project_id: ProjectId(project),
            queues: queues.iter().map(|it| queue(it)).collect(),
            job_types: types.iter().map(|it| (*it).to_owned()).collect(),
            labels: [].into(),
            only_commands: false,
            worker_id: format!("w{id}").into(),
            capacity,
            lease: LeaseLength::default(),
            poll_id: None,
            loss_fails: None,
        };
        self.lanes.park(id, spec, false, self.now);
    }

    pub fn arrive(&mut self, project: i32, name: &str, job_type: &str, count: usize) {
        self.arrive_at(project, name, job_type, count, 0, 1_000);
    }

    fn arrive_at(
        &mut self,
        project: i32,
        name: &str,
        job_type: &str,
        count: usize,
        rank: i16,
        s: i64,
    ) {
        let arrival = Arrival {
            project_id: ProjectId(project),
            queue: queue(name),
            job_type: job_type.into(),
            rank,
            run_at: DateTime::from_timestamp(s, 0).expect("a time"),
            is_constrained: false,
        };
        self.lanes.arrived(&vec![arrival; count]);
    }

    pub fn plan(&mut self) -> Vec<PlannedClaim> {
        self.lanes.plan(self.now)
    }

    /// Plans a claim; returns (queue, polls) pairs.
    fn planned(&mut self) -> Vec<(String, Vec<WaiterId>)> {
        let claims = self.plan();
        claims.iter().map(|it| (it.queue.to_string(), ids(it))).collect()
    }

    pub fn complete(&mut self, claim: &PlannedClaim, jobs: usize) {
        let last =
            ClaimKey { rank: 0, run_at: DateTime::from_timestamp(2_000, 0).expect("a time") };
        let last = (jobs > 0).then_some(last);
        let is_short = jobs < claim.slots.len();
        self.lanes.complete(
            claim,
            Some(Claimed {
                is_short,
                was_contended: false,
                last,
                has_constrained: Some(false),
                pause_for: None,
            }),
            self.now,
        );
    }

    /// Claims until nothing is planned; no claim finds a job.
    pub fn find_nothing(&mut self) {
        loop {
            let claims = self.plan();
            if claims.is_empty() {
                return;
            }
            for claim in claims {
                self.complete(&claim, 0);
            }
        }
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
    }
}

fn ids(claim: &PlannedClaim) -> Vec<WaiterId> {
    claim.slots.iter().map(|(id, _)| *id).collect()
}

#[test]
fn a_queue_that_was_found_empty_is_not_looked_at_until_something_arrives() {
    let mut board = Board::new();
    board.park(1, 1, &["q"], 1);
    board.find_nothing();
    board.park(2, 1, &["q"], 1);
    assert!(board.plan().is_empty());
    board.arrive(1, "q", "t", 1);
    assert_eq!(board.planned(), [("q".to_owned(), vec![1])]);
}

#[test]
fn no_more_polls_are_woken_than_jobs_arrived() {
    let mut board = Board::new();
    for id in 0..1_000 {
        board.park(id, 1, &["q"], 5);
    }
    board.find_nothing();
    board.arrive(1, "q", "t", 3);
    let claims = board.plan();
    assert_eq!(ids(&claims[0]), [0, 1, 2]);
    board.complete(&claims[0], 3);
    assert!(board.plan().is_empty());
}

#[test]
fn idle_workers_get_one_job_each_before_one_gets_two() {
    let mut board = Board::new();
    board.park(1, 1, &["q"], 3);
    board.park(2, 1, &["q"], 1);
    board.park(3, 1, &["q"], 2);
    let claims = board.plan();
    assert_eq!(ids(&claims[0]), [1, 2, 3, 1, 3, 1]);
}

#[test]
fn queues_are_tried_in_the_order_in_which_a_poll_names_them() {
    let mut board = Board::new();
    board.park(1, 1, &["high", "low"], 1);
    let first = board.plan();
    assert_eq!(&*first[0].queue, "high");
    assert_eq!(first.len(), 1, "low is not looked at while high may have something");
    board.complete(&first[0], 0);
    let second = board.plan();
    assert_eq!(&*second[0].queue, "low");
    board.complete(&second[0], 0);
    assert!(board.plan().is_empty());

    board.arrive(1, "low", "t", 1);
    board.arrive(1, "high", "t", 1);
    assert_eq!(board.planned(), [("high".to_owned(), vec![1])]);
}

#[test]
fn when_the_first_queue_cannot_serve_everybody_the_next_queue_serves_the_rest() {
    let mut board = Board::new();
    board.park(1, 1, &["high", "low"], 1);
    board.park(2, 1, &["high", "low"], 1);
    board.find_nothing();
    board.arrive(1, "high", "t", 1);
    board.arrive(1, "low", "t", 1);
    let first = board.plan();
    let mut served: Vec<_> = first.iter().flat_map(ids).collect();
    for claim in &first {
        board.complete(claim, 1);
        for id in ids(claim) {
            board.lanes.leave(id);
        }
    }
    served.extend(board.plan().iter().flat_map(ids));
    assert_eq!(served, [1, 2]);
}

#[test]
fn a_typed_poll_wakes_for_its_types_only() {
    let mut board = Board::new();
    board.park_typed(1, 1, &["q"], &["mail"], 1);
    board.find_nothing();
    board.arrive(1, "q", "report", 5);
    assert!(board.plan().is_empty());
    board.arrive(1, "q", "mail", 1);
    assert_eq!(board.planned(), [("q".to_owned(), vec![1])]);
}

#[test]
fn another_projects_queue_of_the_same_name_is_another_queue() {
    let mut board = Board::new();
    board.park(1, 1, &["q"], 1);
    board.park(2, 2, &["q"], 1);
    board.find_nothing();
    board.arrive(2, "q", "t", 1);
    let claims = board.plan();
    assert_eq!((claims.len(), ids(&claims[0])), (1, vec![2]));
    assert_eq!(claims[0].project_id, ProjectId(2));
}

#[test]
fn a_tenant_with_many_queues_does_not_push_another_out_of_a_claim() {
    let mut board = Board::new();
    for id in 0..200 {
        board.park(id, 1, &[&format!("q{id}")], 50);
    }
    board.park(900, 2, &["q"], 1);
    let claims = board.plan();
    assert!(claims.iter().map(|it| it.slots.len()).sum::<usize>() <= MAX_CLAIM_SLOTS);
    assert!(claims.iter().any(|it| it.project_id == ProjectId(2)), "its turn comes second");
}

#[test]
fn a_second_claim_beside_one_under_way_needs_a_deep_backlog() {
    let mut board = Board::new();
    for id in 0..400 {
        board.park(id, 1, &["q"], 1);
    }
    let first = board.plan();
    assert_eq!(first[0].slots.len(), MAX_CLAIM_SLOTS);
    assert!(board.plan().is_empty(), "its depth is unknown");
    board.complete(&first[0], MAX_CLAIM_SLOTS);
    assert_eq!(board.plan()[0].slots.len(), MAX_CLAIM_SLOTS);
    assert_eq!(board.plan()[0].slots.len(), 150);
}

#[test]
fn one_tenants_deep_backlog_never_keeps_another_waiting() {
    let mut board = Board::new();
    for id in 0..400 {
        board.park(id, 1, &["q"], 1);
    }
    board.park(900, 2, &["q"], 1);
    board.park(901, 2, &["q"], 1);
    for claim in board.plan() {
        let jobs = if claim.project_id == ProjectId(1) { claim.slots.len() } else { 0 };
        board.complete(&claim, jobs);
    }
    let busy = board.plan();
    assert!(busy.iter().all(|it| it.project_id == ProjectId(1)));
    board.arrive(2, "q", "t", 1);
    let other = board.plan();
    assert!(other.iter().any(|it| ids(it) == [900]), "beside the claims that are under way");
}

#[test]
fn two_looks_by_type_never_choose_from_one_queue_at_once() {
    let mut board = Board::new();
    for id in 0..400 {
        board.park_typed(id, 1, &["q"], &["mail"], 1);
    }
    let first = board.plan();
    board.complete(&first[0], MAX_CLAIM_SLOTS);
    let second = board.plan();
    assert!(board.plan().is_empty());
    let last = Some(ClaimKey::ZERO);
    let contended = Claimed {
        is_short: false,
        was_contended: true,
        last,
        has_constrained: Some(false),
        pause_for: None,
    };
    board.lanes.complete(&second[0], Some(contended), board.now);
    assert_eq!(board.plan().len(), 1, "what others took is not what is there");
}

#[test]
fn an_arrival_during_a_look_that_comes_back_short_is_looked_for_again() {
    let mut board = Board::new();
    board.park(1, 1, &["q"], 1);
    let claims = board.plan();
    board.arrive(1, "q", "t", 1);
    board.complete(&claims[0], 0);
    assert_eq!(board.planned(), [("q".to_owned(), vec![1])]);
}

#[test]
fn a_failed_look_leaves_the_queue_to_be_looked_at_again() {
    let mut board = Board::new();
    board.park(1, 1, &["q"], 1);
    let claims = board.plan();
    board.lanes.complete(&claims[0], None, board.now);
    assert!(board.plan().is_empty(), "it rests");
    board.pass(FAILURE_PAUSE);
    board.lanes.end_backoffs(board.now);
    assert_eq!(board.planned(), [("q".to_owned(), vec![1])]);
}

#[test]
fn the_mark_follows_what_was_claimed_and_returns_to_zero_every_second() {
    let mut board = Board::new();
    for id in 0..600 {
        board.park(id, 1, &["q"], 1);
    }
    let claims = board.plan();
    assert_eq!(claims[0].from, ClaimKey::ZERO);
    board.complete(&claims[0], MAX_CLAIM_SLOTS);
    let marked = board.plan();
    assert_eq!(marked[0].from.run_at.timestamp(), 1_999, "the margin is kept");
    board.complete(&marked[0], MAX_CLAIM_SLOTS);
    board.pass(MARK_KEEP);
    assert_eq!(board.plan()[0].from, ClaimKey::ZERO);
}

#[test]
fn a_job_that_arrives_before_the_mark_brings_the_mark_back() {
    let mut board = Board::new();
    for id in 0..600 {
        board.park(id, 1, &["q"], 1);
    }
    let claims = board.plan();
    board.complete(&claims[0], MAX_CLAIM_SLOTS);
    board.arrive_at(1, "q", "t", 1, -5, 9_999);
    assert_eq!(board.plan()[0].from.rank, -5);
}

#[test]
fn a_short_look_from_the_mark_is_repeated_from_the_beginning_after_a_pause() {
    let mut board = Board::new();
    for id in 0..600 {
        board.park(id, 1, &["q"], 1);
    }
    let claims = board.plan();
    board.complete(&claims[0], MAX_CLAIM_SLOTS);
    board.pass(FULL_CLAIM_PAUSE);
    let marked = board.plan();
    assert_ne!(marked[0].from, ClaimKey::ZERO);
    board.complete(&marked[0], 0);
    let again = board.plan();
    assert_eq!(again[0].from, ClaimKey::ZERO);
    board.complete(&again[0], 0);
    assert!(board.plan().is_empty());
}

#[test]
fn a_poll_without_patience_is_hopeless_only_after_its_queues_were_looked_at() {
    let mut board = Board::new();
    board.park(1, 1, &["q"], 1);
    assert!(!board.lanes.has_no_match_now(1));
    let claims = board.plan();
    assert!(!board.lanes.has_no_match_now(1), "a look is under way");
    board.complete(&claims[0], 0);
    assert!(board.lanes.has_no_match_now(1));
}

#[test]
fn a_lane_without_polls_is_dropped() {
    let mut board = Board::new();
    board.park(1, 1, &["q"], 1);
    board.find_nothing();
    assert_eq!(board.lanes.believed_empty(), [(ProjectId(1), queue("q"))]);
    board.lanes.leave(1);
    board.lanes.prune(board.now);
    assert_eq!(board.lanes.lanes.len(), 1, "not at once");
    board.pass(LANE_KEEP);
    board.lanes.prune(board.now);
    assert!(board.lanes.lanes.is_empty() && board.lanes.by_queue.is_empty());
    assert!(board.lanes.lane_ids.is_empty() && board.lanes.believed_empty().is_empty());
}

#[test]
fn a_poll_renamed_in_flight_keeps_its_place() {
    let mut board = Board::new();
    board.park(1, 1, &["q"], 1);
    let claims = board.plan();
    board.lanes.rename(1, 2);
    assert!(board.lanes.is_in_flight(2) && !board.lanes.is_in_flight(1));
    let mut followed = claims[0].clone();
    followed.slots[0].0 = 2;
    board.complete(&followed, 0);
    assert!(!board.lanes.is_in_flight(2));
}

#[test]
fn lanes_that_failed_one_after_the_other_all_go_on() {
    let mut board = Board::new();
    board.park(1, 1, &["a"], 1);
    board.park(2, 2, &["b"], 1);
    let claims = board.plan();
    board.lanes.complete(&claims[0], None, board.now);
    board.pass(Duration::from_millis(100));
    board.lanes.complete(&claims[1], None, board.now);
    for _ in 0..2 {
        board.now = board.lanes.backoff_ends_at().expect("one still rests");
        board.lanes.end_backoffs(board.now);
        assert_eq!(board.plan().len(), 1);
    }
    assert_eq!(board.lanes.backoff_ends_at(), None);
}

#[test]
fn a_claim_planned_before_a_fallback_found_work_does_not_mark_the_lane_empty() {
    let mut board = Board::new();
    board.park(1, 1, &["q"], 1);
    let claims = board.plan();
    board.lanes.mark_stale(Some(&(ProjectId(1), queue("q"))));
    board.complete(&claims[0], 0);
    assert_eq!(board.plan().len(), 1);
}

#[test]
fn a_queue_whose_jobs_are_all_held_is_not_hammered() {
    let mut board = Board::new();
    board.park_typed(1, 1, &["q"], &["mail"], 1);
    let claims = board.plan();
    let held = Claimed {
        is_short: false,
        was_contended: true,
        last: None,
        has_constrained: Some(false),
        pause_for: None,
    };
    board.lanes.complete(&claims[0], Some(held), board.now);
    assert!(board.plan().is_empty());
    board.pass(CONTENTION_PAUSE);
    board.lanes.end_backoffs(board.now);
    assert_eq!(board.plan().len(), 1);
}

#[test]
fn a_busy_lane_without_constraint_keys_reads_them_only_from_its_beginning() {
    let mut board = Board::new();
    board.park(1, 1, &["q"], 1);
    let first = board.plan();
    assert!(first[0].may_have_constrained, "not asked yet");
    board.arrive(1, "q", "t", 5);
    board.complete(&first[0], 1);
    let second = board.plan();
    assert!(!second.is_empty() && !second[0].may_have_constrained, "what came is behind no gate");
    board.complete(&second[0], 1);
    board.now += MARK_KEEP;
    assert!(board.plan()[0].may_have_constrained, "from the beginning it asks again");
}

#[test]
fn a_busy_lane_reads_constraint_keys_again_though_it_always_begins_at_zero() {
    let mut board = Board::new();
    board.park(1, 1, &["q"], 1);
    let first = board.plan();
    board.complete(&first[0], 1);
    for round in 1..=4 {
        board.now += MARK_KEEP / 4;
        let claim = board.plan();
        assert_eq!(claim[0].may_have_constrained, round == 4, "{round}");
        // While jobs keep arriving, the mark stays at the start.
        board.arrive(1, "q", "t", 5);
        let finding = Claimed {
            is_short: false,
            was_contended: false,
            last: None,
            has_constrained: claim[0].may_have_constrained.then_some(false),
            pause_for: None,
        };
        board.lanes.complete(&claim[0], Some(finding), board.now);
    }
    board.lanes.mark_stale(None);
    assert!(board.plan()[0].may_have_constrained, "the queue has changed");
}

#[test]
fn a_look_for_commands_that_found_none_is_trusted_for_a_while() {
    let mut board = Board::new();
    let park = |board: &mut Board, id| {
        board.park(id, 1, &["q"], 1);
        let spec =
            PollSpec { only_commands: true, ..board.lanes.spec(id).expect("it is parked").clone() };
        board.lanes.leave(id);
        board.lanes.park(id, spec, true, board.now);
    };
    park(&mut board, 1);
    board.find_nothing();
    park(&mut board, 2);
    assert!(board.lanes.has_no_match_now(2));
    board.pass(MARK_KEEP);
    park(&mut board, 3);
    assert!(!board.lanes.has_no_match_now(3));
}
