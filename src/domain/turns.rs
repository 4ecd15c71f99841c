//! Turns of groups: which job of which group starts next, in a queue in which groups take turns.
//!
//! Each group has a **turn**, a number that grows by 1 / weight with each of its jobs that starts.
//! The group with the least turn is next, so over time groups start jobs in proportion to their
//! weights: this is start-time fair queueing (Goyal, Vin and Cheng, 1996). A group that comes into
//! line is not ahead of those that are in it: it begins at the least of their turns. So no group
//! saves up turns. A group is passed over while it has its share of the running jobs and another
//! has less: so one with slow jobs does not hold all workers.

/// The least weight of a group: that of groups which have none of their own.
pub const MIN_WEIGHT: i16 = 1;
/// The greatest weight of a group.
pub const MAX_WEIGHT: i16 = 100;

/// A group with jobs that may start.
#[derive(Debug, Clone, Default)]
pub struct Contender {
    /// Groups with less come first.
    pub turn: f64,
    /// Whether it has come into line since it started a job last.
    pub is_new: bool,
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

/// The least turn of those that are in line longer and have jobs; less than all if there is none.
#[must_use]
pub fn least_turn(contenders: &[Contender]) -> f64 {
    let longer = contenders.iter().filter(|it| !it.is_new && !it.jobs.is_empty());
    longer.map(|it| it.turn).min_by(f64::total_cmp).unwrap_or(f64::NEG_INFINITY)
}

/// The turn of a group after this many of its jobs have started beside groups whose least turn is
/// this.
///
/// ```
/// use fencepost_domain::turns::{Contender, turn_after};
/// let group = |turn, is_new| Contender { turn, is_new, weight: 2, ..Contender::default() };
/// assert_eq!(turn_after(&group(5.0, false), 3, 9.0), 6.5);
/// assert_eq!(turn_after(&group(5.0, true), 3, 9.0), 10.5);
/// ```
#[must_use]
pub fn turn_after(group: &Contender, started: usize, least: f64) -> f64 {
    let begins = if group.is_new { group.turn.max(least) } else { group.turn };
    begins + started as f64 / f64::from(group.weight.max(MIN_WEIGHT))
}

/// What is added to the next turn of a group after it has come into line: up to half a job more or
/// less, by a `chance` from 0 to 1. Groups that came at the same time would have the same turns,
/// and each of greater weight would start its jobs in a row between their rounds.
#[must_use]
pub fn spread(group: &Contender, chance: f64) -> f64 {
    match group.is_new {
        true => (chance - 0.5) / f64::from(group.weight.max(MIN_WEIGHT)),
        false => 0.0,
    }
}

/// How many jobs of a group may run while others wait: its share of all that run then, rounded up.
#[must_use]
pub fn share(weight: i16, weights: i64, running: i64) -> i64 {
    let weights = weights.max(weight.into()).max(1);
    (i64::from(weight) * running + weights - 1) / weights
}

/// Chooses which jobs start, up to `wanted`, in the order in which they are chosen. `weights` is
/// the weight of all groups in line, `running` how many jobs of the queue run, and `with_keys` how
/// many with each concurrency key.
#[must_use]
pub fn choose(
    contenders: &[Contender],
    wanted: usize,
    (weights, running): (i64, i64),
    with_keys: &mut [i64],
) -> Vec<usize> {
    let all = running + i64::try_from(wanted).unwrap_or(i64::MAX - running);
    let least = least_turn(contenders);
    let mut places: Vec<_> = contenders.iter().map(Place::of).collect();
    let mut chosen = Vec::with_capacity(wanted);
    while chosen.len() < wanted {
        let next = (0..places.len())
            .filter_map(|number| {
                let (group, place) = (&contenders[number], &places[number]);
                let job = place.next_job(group, with_keys)?;
                let started = i64::try_from(place.started).unwrap_or(i64::MAX);
                let has_share = group.running + started >= share(group.weight, weights, all);
                let turn = turn_after(group, place.started, least);
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
    started: usize,
    taken: Vec<bool>,
}

impl Place {
    fn of(group: &Contender) -> Self {
        Self { started: 0, taken: vec![false; group.jobs.len()] }
    }

    /// The index of its best job that may start.
    fn next_job(&self, group: &Contender, with_keys: &[i64]) -> Option<usize> {
        let started = i64::try_from(self.started).unwrap_or(i64::MAX);
        if group.room.is_some_and(|room| started >= room) {
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
        Contender { turn, is_new: false, weight, running, room: None, jobs }
    }

    #[test]
    fn a_single_job_of_another_group_comes_before_the_second_of_many() {
        let groups = [group(0.0, 1, 0, 0..500), group(0.0, 1, 0, 500..501)];
        assert_eq!(choose(&groups, 3, (2, 0), &mut []), [0, 500, 1]);
    }

    #[test]
    fn a_group_of_slow_jobs_leaves_workers_to_others() {
        // It holds five of six workers, and would be next by its turn.
        let groups = [group(0.0, 1, 5, 0..10), group(9.0, 1, 1, 10..20)];
        assert_eq!(choose(&groups, 2, (2, 6), &mut []), [10, 11]);
        // No other group has a job: no worker waits.
        assert_eq!(choose(&groups[..1], 2, (1, 6), &mut []), [0, 1]);
    }

    #[test]
    fn a_full_concurrency_key_and_a_full_group_are_passed_over() {
        let mut keyed = group(0.0, 1, 0, 0..3);
        for job in &mut keyed.jobs[..2] {
            job.key = Some((0, 1));
        }
        assert_eq!(choose(std::slice::from_ref(&keyed), 3, (1, 0), &mut [0]), [0, 2]);
        keyed.room = Some(1);
        assert_eq!(choose(&[keyed], 3, (1, 0), &mut [1]), [2]);
    }

    /// Lets `workers` take jobs of groups that always have some, one at a time, and counts starts.
    /// A job takes as many steps as its group says. A claim sees the groups with the least turns,
    /// as many as `seen`, and more if those have their share.
    fn simulate(
        weights: &[i16],
        steps_of: &[usize],
        (workers, seen): (usize, usize),
        steps: usize,
    ) -> Vec<usize> {
        let all: i64 = weights.iter().map(|it| i64::from(*it)).sum();
        let mut turns = vec![0.0; weights.len()];
        let (mut started, mut running) = (vec![0; weights.len()], Vec::<(usize, usize)>::new());
        for step in 0..steps {
            running.retain(|it| it.1 > step);
            while running.len() < workers {
                let of_group = |group| running.iter().filter(|it| it.0 == group).count() as i64;
                let mut line: Vec<_> = (0..weights.len()).collect();
                line.sort_by(|a, b| f64::total_cmp(&turns[*a], &turns[*b]));
                let runs = running.len() as i64 + 1;
                let is_able = |it: &&usize| of_group(**it) < share(weights[**it], all, runs);
                let mut first = line.iter().position(|it| is_able(&it)).unwrap_or(0) + 1;
                first = first.max(seen).min(line.len());
                let contenders: Vec<_> = line[..first]
                    .iter()
                    .map(|it| group(turns[*it], weights[*it], of_group(*it), *it..*it + 1))
                    .collect();
                let chosen = choose(&contenders, 1, (all, running.len() as i64), &mut [])[0];
                started[chosen] += 1;
                turns[chosen] += 1.0 / f64::from(weights[chosen]);
                running.push((chosen, step + steps_of[chosen]));
            }
        }
        started
    }

    #[test]
    fn groups_of_equal_jobs_start_them_in_proportion_to_their_weights() {
        let weights: Vec<i16> = (0..1_000).map(|it| it % 10 + 1).collect();
        let started = simulate(&weights, &vec![1; weights.len()], (20, 18), 500);
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
        let started = simulate(&[1; 10], &steps_of, (20, 18), 1_000);
        let time: Vec<_> = started.iter().zip(&steps_of).map(|(a, b)| a * b).collect();
        assert!((1_800..=2_100).contains(&time[0]), "two of 20 workers for 1,000 steps: {time:?}");
        assert!(time[1..].iter().all(|it| *it >= 1_900), "{time:?}");
    }

    #[test]
    fn many_groups_of_slow_jobs_have_a_worker_each_and_no_more() {
        let mut steps_of = vec![1; 200];
        steps_of[..30].fill(500);
        let started = simulate(&[1; 200], &steps_of, (50, 18), 400);
        assert!(started[..30].iter().all(|it| *it == 1), "{:?}", &started[..30]);
        assert_eq!(started[30..].iter().sum::<usize>(), 20 * 400 + 30 - 30, "20 workers are left");
    }

    #[test]
    fn a_group_that_comes_into_line_begins_beside_the_others() {
        let mut new = group(0.0, 1, 0, 10..20);
        new.is_new = true;
        let groups = [group(500.0, 1, 0, 0..10), new];
        let chosen = choose(&groups, 4, (2, 0), &mut []);
        assert_eq!(chosen.iter().filter(|it| **it >= 10).count(), 2, "{chosen:?}");
    }

    #[test]
    fn a_group_of_greater_weight_starts_its_jobs_among_those_of_others() {
        let mut groups: Vec<_> = (0..21)
            .map(|at| Contender { is_new: true, ..group(0.0, 1, 0, at * 200..at * 200 + 200) })
            .collect();
        groups[20].weight = 5;
        let (mut in_a_row, mut most, mut started) = (0, 0, 0);
        for step in 0..525 {
            // As claims read them.
            groups.sort_by(|one, other| one.turn.total_cmp(&other.turn));
            let chosen = choose(&groups, 1, (25, 0), &mut [])[0] / 200;
            let least = least_turn(&groups);
            let next = groups.iter_mut().find(|it| it.jobs[0].number / 200 == chosen);
            let next = next.expect("the group of the job");
            let chance = (chosen * 7 % 21) as f64 / 20.0;
            next.turn = turn_after(next, 1, least) + spread(next, chance);
            next.is_new = false;
            next.jobs.remove(0);
            // In the first round all groups have the same turn.
            in_a_row = if chosen == 20 && step >= 25 { in_a_row + 1 } else { 0 };
            most = most.max(in_a_row);
            started += usize::from(chosen == 20);
        }
        assert!(most <= 2, "{most} in a row");
        assert!((100..=107).contains(&started), "{started} of 525");
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
                Contender { turn, is_new: number % 3 == 0, weight, running, room, jobs }
            }).collect();
            let mut with_keys = [0_i64; 4];
            let running = contenders.iter().map(|it| it.running).sum();
            let chosen = choose(&contenders, wanted, (100, running), &mut with_keys);
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
