//! Turns of groups: which job of which group starts next, in a queue in which groups take turns.
//!
//! Each group has a **turn**, a number that grows by 1 / weight with each of its jobs that starts.
//! The group with the least turn is next, so over time groups start jobs in proportion to their
//! weights: this is start-time fair queueing (Goyal, Vin and Cheng, 1996). A group that had no jobs
//! for a while comes back at the queue's turn, so no group saves up turns: it keeps one at most.
//! A group is passed over while it has its share of the running jobs and another has less: so one
//! with slow jobs does not hold all workers.

/// The least weight of a group: that of groups which have none of their own.
pub const MIN_WEIGHT: i16 = 1;
/// The greatest weight of a group.
pub const MAX_WEIGHT: i16 = 100;

/// A group with jobs that may start.
#[derive(Debug, Clone, Default)]
pub struct Contender {
    /// Groups with less come first.
    pub turn: f64,
    /// Its share beside others.
    pub weight: i16,
    /// Jobs of it that run.
    pub running: i64,
    /// How many more may start by its limits; none: all.
    pub room: Option<i64>,
    /// Its best jobs, in their order.
    pub jobs: Vec<ContendingJob>,
}

/// A job that may start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContendingJob {
    /// Identifies it among all.
    pub number: usize,
    /// The index of its concurrency key, and how many jobs may run with it.
    pub key: Option<(usize, i64)>,
}

/// Where a group stands after some of its jobs have started at the queue's turn `current`.
///
/// ```
/// use fencepost_domain::turns::next_turn;
/// assert_eq!(next_turn(5.0, 2, 3, 5.0), 6.5);
/// assert_eq!(next_turn(0.0, 2, 1, 100.0), 100.0); // It keeps one turn that it has missed.
/// ```
#[must_use]
pub fn next_turn(turn: f64, weight: i16, started: usize, current: f64) -> f64 {
    let step = 1.0 / f64::from(weight.max(MIN_WEIGHT));
    turn.max(current - step) + step * started as f64
}

/// The turn of a queue after a group of this weight has come to this next turn.
#[must_use]
pub fn queue_turn(current: f64, next_turn: f64, weight: i16) -> f64 {
    current.max(next_turn - 1.0 / f64::from(weight.max(MIN_WEIGHT)))
}

/// How many jobs of a group may run while others wait: its share of all that run then, rounded up.
fn share(weight: i16, weights: i64, running: i64) -> i64 {
    (i64::from(weight) * running + weights - 1) / weights.max(1)
}

/// Chooses which jobs start, up to `wanted`, in the order in which they are chosen. `running` is
/// how many jobs of the queue run, and `with_keys` how many with each concurrency key.
#[must_use]
pub fn choose(
    contenders: &[Contender],
    wanted: usize,
    (current, running): (f64, i64),
    with_keys: &mut [i64],
) -> Vec<usize> {
    let weights = contenders.iter().filter(|it| !it.jobs.is_empty());
    let weights = weights.map(|it| i64::from(it.weight)).sum::<i64>();
    let all = running + i64::try_from(wanted).unwrap_or(i64::MAX - running);
    let mut places: Vec<_> = contenders.iter().map(Place::of).collect();
    let mut chosen = Vec::with_capacity(wanted);
    while chosen.len() < wanted {
        let next = (0..places.len())
            .filter_map(|number| {
                let (it, place) = (&contenders[number], &places[number]);
                let job = place.next_job(it, with_keys)?;
                let has_share = it.running + place.started >= share(it.weight, weights, all);
                let started = usize::try_from(place.started).unwrap_or(usize::MAX);
                let turn = match started {
                    0 => it.turn,
                    _ => next_turn(it.turn, it.weight, started, current),
                };
                Some(((has_share, turn), number, job))
            })
            .min_by(|a, b| a.0.0.cmp(&b.0.0).then(a.0.1.total_cmp(&b.0.1)));
        let Some((_, number, job)) = next else { break };
        let taken = contenders[number].jobs[job];
        if let Some((key, _)) = taken.key {
            with_keys[key] += 1;
        }
        places[number].started += 1;
        places[number].taken[job] = true;
        chosen.push(taken.number);
    }
    chosen
}

/// What was chosen of a group.
struct Place {
    started: i64,
    taken: Vec<bool>,
}

impl Place {
    fn of(group: &Contender) -> Self {
        Self { started: 0, taken: vec![false; group.jobs.len()] }
    }

    /// The index of its best job that may start.
    fn next_job(&self, group: &Contender, with_keys: &[i64]) -> Option<usize> {
        if group.room.is_some_and(|room| self.started >= room) {
            return None;
        }
        (0..group.jobs.len()).find(|&index| {
            !self.taken[index]
                && group.jobs[index].key.is_none_or(|(key, limit)| with_keys[key] < limit)
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A group with this many jobs, numbered from `first`.
    fn group(turn: f64, weight: i16, running: i64, jobs: std::ops::Range<usize>) -> Contender {
        let jobs = jobs.map(|number| ContendingJob { number, key: None }).collect();
        Contender { turn, weight, running, room: None, jobs }
    }

    #[test]
    fn a_single_job_of_another_group_comes_before_the_second_of_many() {
        let groups = [group(0.0, 1, 0, 0..500), group(0.0, 1, 0, 500..501)];
        assert_eq!(choose(&groups, 3, (0.0, 0), &mut []), [0, 500, 1]);
    }

    #[test]
    fn a_group_of_slow_jobs_leaves_workers_to_others() {
        // It holds five of six workers, and would be next by its turn.
        let groups = [group(0.0, 1, 5, 0..10), group(9.0, 1, 1, 10..20)];
        assert_eq!(choose(&groups, 2, (9.0, 6), &mut []), [10, 11]);
        // No other group has a job: no worker waits.
        assert_eq!(choose(&groups[..1], 2, (9.0, 6), &mut []), [0, 1]);
    }

    #[test]
    fn a_full_concurrency_key_and_a_full_group_are_passed_over() {
        let mut keyed = group(0.0, 1, 0, 0..3);
        for job in &mut keyed.jobs[..2] {
            job.key = Some((0, 1));
        }
        assert_eq!(choose(std::slice::from_ref(&keyed), 3, (0.0, 0), &mut [0]), [0, 2]);
        keyed.room = Some(1);
        assert_eq!(choose(&[keyed], 3, (0.0, 0), &mut [1]), [2]);
    }

    /// Lets `workers` take jobs of groups that always have some, and counts starts. A job takes as
    /// many steps as its group says.
    fn simulate(weights: &[i16], steps_of: &[usize], workers: usize, steps: usize) -> Vec<usize> {
        let (mut turns, mut current) = (vec![0.0; weights.len()], 0.0);
        let (mut started, mut running) = (vec![0; weights.len()], Vec::<(usize, usize)>::new());
        for step in 0..steps {
            running.retain(|it| it.1 > step);
            let of_group = |group| running.iter().filter(|it| it.0 == group).count() as i64;
            let contenders: Vec<_> = weights
                .iter()
                .enumerate()
                .map(|(number, weight)| {
                    let jobs = number * workers..(number + 1) * workers;
                    group(turns[number], *weight, of_group(number), jobs)
                })
                .collect();
            let wanted = workers - running.len();
            let chosen = choose(&contenders, wanted, (current, running.len() as i64), &mut []);
            let mut counts = vec![0; weights.len()];
            for number in chosen {
                counts[number / workers] += 1;
                running.push((number / workers, step + steps_of[number / workers]));
            }
            let before = current;
            for (number, count) in counts.iter().enumerate().filter(|it| *it.1 > 0) {
                started[number] += count;
                turns[number] = next_turn(turns[number], weights[number], *count, before);
                current = queue_turn(current, turns[number], weights[number]);
            }
        }
        started
    }

    #[test]
    fn groups_of_equal_jobs_start_them_in_proportion_to_their_weights() {
        let weights: Vec<i16> = (0..1_000).map(|it| it % 10 + 1).collect();
        let started = simulate(&weights, &vec![1; weights.len()], 20, 1_000);
        let all: usize = started.iter().sum();
        let sum: usize = weights.iter().map(|it| *it as usize).sum();
        for (weight, jobs) in weights.iter().zip(&started) {
            let fair = (all * *weight as usize) as f64 / sum as f64;
            let off = (*jobs as f64 - fair).abs();
            assert!(off <= 2.0 || off <= fair / 10.0, "{jobs} of weight {weight}, not {fair}");
        }
    }

    #[test]
    fn a_group_of_slow_jobs_has_its_share_of_the_workers_and_no_more() {
        // Ten groups, of which one has jobs that take 50 times as long.
        let mut steps_of = vec![1; 10];
        steps_of[0] = 50;
        let started = simulate(&[1; 10], &steps_of, 20, 1_000);
        let time: Vec<_> = started.iter().zip(&steps_of).map(|(a, b)| a * b).collect();
        assert!((1_800..=2_100).contains(&time[0]), "two of 20 workers for 1,000 steps: {time:?}");
        assert!(time[1..].iter().all(|it| *it >= 1_900), "{time:?}");
    }

    proptest! {
        /// Nothing is chosen twice, no limit is passed, and no worker waits for a job that may
        /// start.
        #[test]
        fn a_choice_keeps_all_limits_and_leaves_nothing(
            groups in proptest::collection::vec(
                (0.0..50.0, 1..=100_i16, 0..20_i64, proptest::option::of(0..5_i64), 0..8_usize),
                0..12,
            ),
            keys in proptest::collection::vec((0..4_usize, 1..4_i64, proptest::bool::ANY), 100),
            wanted in 0..40_usize,
        ) {
            let mut number = 0;
            let contenders: Vec<_> = groups.into_iter().map(|(turn, weight, running, room, jobs)| {
                let jobs = (0..jobs).map(|_| {
                    number += 1;
                    let (key, limit, is_keyed) = keys[number];
                    ContendingJob { number, key: is_keyed.then_some((key, limit)) }
                }).collect();
                Contender { turn, weight, running, room, jobs }
            }).collect();
            let mut with_keys = [0_i64; 4];
            let running = contenders.iter().map(|it| it.running).sum();
            let chosen = choose(&contenders, wanted, (10.0, running), &mut with_keys);
            prop_assert!(chosen.len() <= wanted);
            let mut sorted = chosen.clone();
            sorted.sort_unstable();
            sorted.dedup();
            prop_assert_eq!(sorted.len(), chosen.len());
            for group in &contenders {
                let started = group.jobs.iter().filter(|it| chosen.contains(&it.number)).count();
                let has_room = group.room.is_none_or(|room| (started as i64) < room);
                prop_assert!(group.room.is_none_or(|room| started as i64 <= room));
                let left = group.jobs.iter().filter(|it| !chosen.contains(&it.number));
                let mut able = left
                    .filter(|it| it.key.is_none_or(|(key, limit)| with_keys[key] < limit));
                prop_assert!(chosen.len() == wanted || !has_room || able.next().is_none());
            }
        }
    }
}
