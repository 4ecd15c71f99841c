//! The low-water mark never hides a job for longer than promised: not after a late commit, a
//! release, a priority change, or an enqueue on another node.

use chrono::DateTime;
use fencepost_domain::lease::LeaseLength;
use proptest::prelude::*;

use super::*;

/// How late a claim may be: a little longer than one step.
const SLACK_MS: i64 = 100;
const WAITERS: u64 = 8;

/// An event between two claims.
#[derive(Debug, Clone, Copy)]
enum Event {
    /// Jobs are stored here and commit this much later.
    Stored { jobs: u8, rank: i16, commits_after_ms: i64 },
    /// The same on another node, whose hint is lost.
    StoredElsewhere { rank: i16, commits_after_ms: i64 },
    /// A leased job is released.
    Released { which: usize },
    /// A waiting job is moved to the front.
    Raised { which: usize },
}

#[derive(Debug, Clone, Copy)]
struct Job {
    key: ClaimKey,
    visible_at_ms: i64,
    /// Whether this node was hinted when the job became visible.
    is_hinted: bool,
    is_leased: bool,
}

struct World {
    lanes: Lanes,
    epoch: Instant,
    now_ms: i64,
    jobs: Vec<Job>,
    /// Claims in flight: computed, but not yet completed.
    flying: Vec<(PlannedClaim, Vec<usize>)>,
}

fn at(ms: i64) -> DateTime<chrono::Utc> {
    DateTime::from_timestamp_millis(1_000_000 + ms).expect("a time")
}

impl World {
    fn new() -> Self {
        let (lanes, epoch) = (Lanes::default(), Instant::now());
        let mut this = Self { lanes, epoch, now_ms: 0, jobs: Vec::new(), flying: Vec::new() };
        (0..WAITERS).for_each(|it| this.park(it));
        this
    }

    fn now(&self) -> Instant {
        self.epoch + Duration::from_millis(self.now_ms.unsigned_abs())
    }

    fn park(&mut self, id: WaiterId) {
        let spec = PollSpec {
            project_id: ProjectId(1),
            queues: [Arc::from("q")].into(),
            job_types: [].into(),
            labels: [].into(),
            only_commands: false,
            worker_id: format!("w{id}").into(),
            capacity: 1,
            lease: LeaseLength::default(),
            poll_id: None,
            loss_fails: None,
        };
        let now = self.now();
        self.lanes.park(id, spec, false, now);
    }

    fn hint(&mut self, key: ClaimKey) {
        self.lanes.arrived(&[Arrival {
            project_id: ProjectId(1),
            queue: "q".into(),
            job_type: "t".into(),
            rank: key.rank,
            run_at: key.run_at,
            is_constrained: false,
        }]);
    }

    fn store(&mut self, rank: i16, commits_after_ms: i64, is_hinted: bool) {
        let key = ClaimKey { rank, run_at: at(self.now_ms) };
        let visible_at_ms = self.now_ms + commits_after_ms;
        self.jobs.push(Job { key, visible_at_ms, is_hinted, is_leased: false });
    }

    fn happen(&mut self, event: Event) {
        let nth = |jobs: &[Job], which: usize, is_leased: bool, now_ms: i64| {
            let those = jobs.iter().enumerate();
            let mut those =
                those.filter(|it| it.1.is_leased == is_leased && it.1.visible_at_ms <= now_ms);
            let many = those.clone().count();
            those.nth(which % many.max(1)).map(|it| it.0)
        };
        match event {
            Event::Stored { jobs, rank, commits_after_ms } => {
                (0..jobs).for_each(|_| self.store(rank, commits_after_ms, true));
            }
            Event::StoredElsewhere { rank, commits_after_ms } => {
                self.store(rank, commits_after_ms, false);
            }
            Event::Released { which } => {
                let Some(job) = nth(&self.jobs, which, true, self.now_ms) else { return };
                self.jobs[job].is_leased = false;
                self.jobs[job].is_hinted = true;
                self.hint(self.jobs[job].key);
            }
            Event::Raised { which } => {
                let Some(job) = nth(&self.jobs, which, false, self.now_ms) else { return };
                self.jobs[job].key.rank -= 5;
                self.jobs[job].is_hinted = true;
                self.hint(self.jobs[job].key);
            }
        }
    }

    /// Advances the clock; commits that become visible are hinted.
    fn pass(&mut self, ms: i64) {
        let before = self.now_ms;
        self.now_ms += ms;
        let visible = |it: &&Job| before < it.visible_at_ms && it.visible_at_ms <= self.now_ms;
        let hinted: Vec<_> =
            self.jobs.iter().filter(visible).filter(|it| it.is_hinted).map(|it| it.key).collect();
        hinted.into_iter().for_each(|it| self.hint(it));
    }

    /// Completes the claims in flight, then starts the next ones against a simulated database.
    /// Fails if the low-water mark hides a job longer than `MARK_KEEP`.
    fn claim(&mut self) -> Result<(), TestCaseError> {
        for (claim, seen) in std::mem::take(&mut self.flying) {
            self.complete(&claim, &seen);
        }
        for claim in self.lanes.plan(self.now()) {
            let mut seen: Vec<usize> = Vec::new();
            for (number, job) in self.jobs.iter().enumerate() {
                if job.is_leased || job.visible_at_ms > self.now_ms {
                    continue;
                }
                if job.key >= claim.from {
                    seen.push(number);
                    continue;
                }
                prop_assert!(
                    !job.is_hinted,
                    "{job:?} had a hint, and lies before {:?}",
                    claim.from
                );
                let hidden_ms = self.now_ms - job.visible_at_ms;
                let most = MARK_KEEP.as_millis() as i64 + SLACK_MS;
                prop_assert!(hidden_ms <= most, "{job:?} is hidden for {hidden_ms} ms");
            }
            seen.sort_by_key(|it| self.jobs[*it].key);
            seen.truncate(claim.slots.len());
            for job in &seen {
                self.jobs[*job].is_leased = true;
            }
            self.flying.push((claim, seen));
        }
        Ok(())
    }

    fn complete(&mut self, claim: &PlannedClaim, seen: &[usize]) {
        let finding = Claimed {
            is_short: seen.len() < claim.slots.len(),
            was_contended: false,
            last: seen.iter().map(|it| self.jobs[*it].key).max(),
            has_constrained: Some(false),
            pause_for: None,
        };
        let now = self.now();
        self.lanes.complete(claim, Some(finding), now);
        for (waiter, _) in claim.slots.iter().take(seen.len()) {
            self.lanes.leave(*waiter);
            self.park(*waiter);
        }
    }
}

fn event() -> impl Strategy<Value = Event> {
    // Later than the margin, too: then only a claim from the start finds the job.
    let late = prop_oneof![4 => 1_i64..20, 1 => 100_i64..400];
    prop_oneof![
        4 => (1_u8..25, -3_i16..3, late.clone())
            .prop_map(|(jobs, rank, commits_after_ms)| Event::Stored { jobs, rank, commits_after_ms }),
        3 => (-3_i16..3, late)
            .prop_map(|(rank, commits_after_ms)| Event::StoredElsewhere { rank, commits_after_ms }),
        2 => (0_usize..1_000).prop_map(|which| Event::Released { which }),
        2 => (0_usize..1_000).prop_map(|which| Event::Raised { which }),
    ]
}

proptest! {
    #[test]
    fn no_job_is_hidden_by_the_mark_for_longer_than_a_second_and_none_with_a_hint_at_all(
        events in prop::collection::vec((event(), 1_i64..60), 1..150)
    ) {
        let mut world = World::new();
        for (event, ms) in events {
            world.happen(event);
            world.pass(ms);
            world.claim()?;
        }
        // From then on only fallback claims happen.
        for round in 0..3_000 {
            if world.jobs.iter().all(|it| it.is_leased) {
                return Ok(());
            }
            world.pass(10);
            if round % 200 == 0 {
                world.lanes.mark_stale(None);
            }
            world.claim()?;
        }
        prop_assert!(false, "some are never found: {:?}", world.jobs.iter().filter(|it| !it.is_leased).count());
    }
}

#[test]
fn a_claim_beside_one_under_way_is_for_many_polls_only() {
    let mut world = World::new();
    for id in WAITERS..MAX_CLAIM_SLOTS as u64 {
        world.park(id);
    }
    let claims = world.lanes.plan(world.now());
    let full = Claimed {
        is_short: false,
        was_contended: false,
        last: Some(ClaimKey::ZERO),
        has_constrained: Some(false),
        pause_for: None,
    };
    let now = world.now();
    world.lanes.complete(&claims[0], Some(full), now);
    assert_eq!(world.lanes.plan(now)[0].slots.len(), MAX_CLAIM_SLOTS, "there is plenty");
    let more = 1_000..1_000 + MIN_SHARED_SLOTS as u64;
    for id in more.clone().skip(1) {
        world.park(id);
        assert!(world.lanes.plan(now).is_empty(), "a few wait for the claim under way");
    }
    world.park(more.start);
    assert_eq!(world.lanes.plan(now)[0].slots.len(), MIN_SHARED_SLOTS);
}
