//! Claims from queues in which groups take turns: the groups in line are read with their best jobs,
//! and the rule chooses among them.

use std::collections::{HashMap, HashSet};

use chrono::{DateTime, TimeDelta, Utc};
use fencepost_domain::{
    ids::JobId,
    rate::RateLimits,
    turns::{Contender, ContendingJob, choose, least_turn, share, spread, turn_after},
};
use fencepost_store::{
    claims::{
        LeasedJob, QueueClaim,
        limited_claims::{self, ClaimLimits, GroupLimits},
        turn_claims::{self, GroupInLine, GroupStanding, MAX_PAGE_GROUPS, Page},
    },
    groups::{
        rates,
        turns::{self, TurnChanges},
    },
    queues::queue_limits::{self, QueueRules},
};
use rand::{Rng, RngExt};
use sqlx::PgConnection;
use uuid::Uuid;

use super::{dispatched::count_by_group, limited_groups, shared_claim::SharedLimits};

/// Pages of groups that one claim reads at most.
const MAX_PAGES: usize = 4;
/// Groups that a claim reads at first, beyond two for each job that it wants.
const SPARE_GROUPS: usize = 16;
/// Jobs of one group that a claim reads at most.
const MAX_JOBS_OF_GROUP: usize = 50;
/// Concurrency keys that a claim locks beyond one for each job that it wants.
const SPARE_KEYS: usize = 16;
/// A group that lets nothing start is looked at again after this time, whatever is noted of it.
const MAX_REST: TimeDelta = TimeDelta::minutes(1);
/// The same of a group of which as many jobs run as may: the end of one is noted.
const FULL_REST: TimeDelta = TimeDelta::seconds(5);

/// The findings of such a claim.
#[derive(Debug, Default)]
pub(super) struct TurnClaimed {
    pub jobs: Vec<LeasedJob>,
    /// How many jobs were selected; other transactions may have locked some of them.
    pub chosen: usize,
    /// Whether the next claim may find more: some have started, or groups without a job are passed.
    pub is_behind: bool,
    /// Whether another claim holds concurrency keys.
    pub was_contended: bool,
}

/// Claims jobs of the groups whose turn it is; without `job_types`, of any type. The queue must be
/// locked.
pub(super) async fn claim(
    tx: &mut PgConnection,
    claim: &QueueClaim<'_>,
    rules: &QueueRules,
    (job_types, max_jobs, max_concurrency): (Option<&[String]>, i64, Option<i32>),
    shared: &mut SharedLimits,
) -> sqlx::Result<TurnClaimed> {
    let wanted = usize::try_from(max_jobs).unwrap_or(0).min(claim.slots.len());
    if wanted == 0 {
        return Ok(TurnClaimed::default());
    }
    let running = queue_limits::busy_groups(tx, claim.project_id, claim.queue).await?;
    let in_line = turn_claims::count_in_line(tx, claim.project_id, claim.queue).await?;
    let mut limits = Limits::of(rules, running.into_iter().collect(), shared);
    let mut line = Line { groups: Vec::new(), weights: in_line, wanted, may_be_more: false };
    line.read(tx, claim, rules, (job_types, &mut limits)).await?;
    let contenders = line.contenders(tx, claim, &limits).await?;
    let mut changes = limits.rests(tx, claim, &line.groups).await?;
    let has_empty = !changes.empty.is_empty();
    let chosen = line.choose(&contenders, &limits);
    let (mut jobs, mut selected) = (Vec::new(), 0);
    if !chosen.is_empty() {
        let limits_of_claim = ClaimLimits {
            constraint_keys: &[],
            job_types: None,
            max_concurrency,
            groups: &GroupLimits::default(),
            default_lease_seconds: rules.default_lease_seconds,
            max_jobs,
        };
        (jobs, selected) = turn_claims::lease(tx, claim, limits_of_claim, &chosen).await?;
        changes.turns = line.turns(&contenders.groups, &jobs);
        limits.keep_starts(tx, claim, &line.groups, &jobs).await?;
    }
    if !changes.is_empty() {
        turns::keep(tx, (claim.project_id, claim.queue), &changes).await?;
    }
    let may_be_more = line.may_be_more || contenders.are_cut;
    let is_behind = may_be_more && (selected > 0 || has_empty);
    let was_contended = contenders.was_contended;
    Ok(TurnClaimed { jobs, chosen: selected, is_behind, was_contended })
}

/// The limits of groups, and how many jobs of each run.
struct Limits<'a> {
    rates: RateLimits,
    max_running: Option<i64>,
    running: HashMap<String, i64>,
    shared: &'a mut SharedLimits,
}

impl<'a> Limits<'a> {
    fn of(rules: &QueueRules, running: HashMap<String, i64>, shared: &'a mut SharedLimits) -> Self {
        let stored = rules.group_rate_counts.as_deref().zip(rules.group_rate_seconds.as_deref());
        let rates =
            stored.map(|(counts, seconds)| rates::limits(counts, seconds)).unwrap_or_default();
        Self { rates, max_running: rules.group_max_running.map(i64::from), running, shared }
    }

    fn running(&self, group: &str) -> i64 {
        self.running.get(group).copied().unwrap_or(0)
    }

    fn all_running(&self) -> i64 {
        self.running.values().sum()
    }

    /// How many jobs of a group may run; none: all. Jobs without a group have no such limits.
    fn max_running(&self, group: &str, standing: &GroupStanding) -> Option<i64> {
        let max = standing.max_running.map(i64::from).or(self.max_running);
        max.filter(|_| !group.is_empty())
    }

    /// The rates of a group; none: it has none.
    fn rates<'b>(&'b self, group: &str, standing: &'b GroupStanding) -> Option<&'b RateLimits> {
        let rates = standing.rates.as_ref().unwrap_or(&self.rates);
        Some(rates).filter(|rates| !group.is_empty() && !rates.is_empty())
    }

    /// How many more jobs of a group may start; none: all.
    fn room(&self, it: &GroupInLine) -> Option<i64> {
        let GroupInLine { group, standing, .. } = it;
        let by_rates = self.rates(group, standing);
        let by_rates = by_rates.map(|it| i64::from(it.allows(&standing.starts, standing.now)));
        let beside = self.max_running(group, standing);
        let beside = beside.map(|max| (max - self.running(group)).max(0));
        by_rates.into_iter().chain(beside).chain(self.shared.room_of_group(group)).min()
    }

    /// Until when a group lets nothing start of which this many jobs run; none: it lets some start.
    fn rests_until(
        &self,
        (group, running): (&str, i64),
        standing: &GroupStanding,
    ) -> Option<DateTime<Utc>> {
        let now = standing.now;
        let by_rates = || self.rates(group, standing)?.next_at(&standing.starts, now);
        let is_full = self.max_running(group, standing).is_some_and(|max| running >= max)
            || self.shared.room_of_group(group) == Some(0);
        let until = standing.paused_until.or_else(by_rates);
        let until = until.or_else(|| self.shared.opens_at(group));
        let until = until.or_else(|| is_full.then_some(now + FULL_REST))?;
        let until = until.min(now + MAX_REST);
        Some(self.shared.numbers_end_at(group).map_or(until, |it| it.min(until)))
    }

    /// Reads what is known of groups under shared limits.
    async fn read_shared(
        &mut self,
        tx: &mut PgConnection,
        claim: &QueueClaim<'_>,
        groups: &[GroupInLine],
    ) -> sqlx::Result<()> {
        let names: Vec<_> = groups.iter().map(|it| it.group.as_str()).collect();
        self.shared.read_groups(tx, claim, &names).await
    }

    /// Groups that let nothing start for now, and those that have nothing to start. What lets a
    /// group rest is read again with its row locked: what ends it may have been noted meanwhile,
    /// and the note be gone.
    async fn rests(
        &mut self,
        tx: &mut PgConnection,
        claim: &QueueClaim<'_>,
        line: &[GroupInLine],
    ) -> sqlx::Result<TurnChanges> {
        let rests = |it: &&GroupInLine| {
            let named = (it.group.as_str(), self.running(&it.group));
            self.rests_until(named, &it.standing).is_some()
        };
        let resting: Vec<_> = line.iter().filter(rests).map(|it| it.group.as_str()).collect();
        let empty = line.iter().filter(|it| it.is_empty && !resting.contains(&it.group.as_str()));
        let empty = empty.map(|it| it.group.clone()).collect();
        let mut changes = TurnChanges { empty, ..TurnChanges::default() };
        if !resting.is_empty() {
            let queue = (claim.project_id, claim.queue);
            turn_claims::hold(tx, queue, &resting).await?;
            self.shared.read_again(tx, claim, &resting).await?;
            for (group, standing, running) in turn_claims::standings(tx, queue, &resting).await? {
                if let Some(until) = self.rests_until((&group, running), &standing) {
                    changes.rests.push((group, until));
                }
            }
        }
        Ok(changes)
    }

    /// Stores that these jobs have started, of groups with rates.
    async fn keep_starts(
        &self,
        tx: &mut PgConnection,
        claim: &QueueClaim<'_>,
        line: &[GroupInLine],
        jobs: &[LeasedJob],
    ) -> sqlx::Result<()> {
        // They count from when they were claimed, all at the same time.
        let Some(now) = jobs.iter().map(|it| it.claimed_at).max() else { return Ok(()) };
        let started = count_by_group(jobs);
        let kept = line.iter().filter_map(|of_line| {
            let GroupInLine { group, standing, .. } = of_line;
            let rates = self.rates(group, standing)?;
            let jobs = *started.get(group.as_str())?;
            limited_groups::add_starts(rates, (group, &standing.starts), jobs, now)
        });
        let kept: Vec<_> = kept.collect();
        match kept.is_empty() {
            true => Ok(()),
            false => rates::keep(tx, claim.project_id, claim.queue, &kept).await,
        }
    }
}

/// The groups in line that a claim looks at.
struct Line {
    groups: Vec<GroupInLine>,
    /// The weight of all groups in line.
    weights: i64,
    /// How many jobs the claim wants.
    wanted: usize,
    may_be_more: bool,
}

/// What the rule chooses among.
struct Contenders {
    groups: Vec<Contender>,
    /// Ids of jobs, by their numbers.
    ids: Vec<JobId>,
    /// Running jobs with each concurrency key.
    with_keys: Vec<i64>,
    /// Whether jobs are left out whose keys are not locked, some because another claim holds them.
    are_cut: bool,
    was_contended: bool,
}

impl Line {
    /// Reads groups until enough jobs are found of those that have less than their share.
    async fn read(
        &mut self,
        tx: &mut PgConnection,
        claim: &QueueClaim<'_>,
        rules: &QueueRules,
        (job_types, limits): (Option<&[String]>, &mut Limits<'_>),
    ) -> sqlx::Result<()> {
        let jobs = self.wanted.min(MAX_JOBS_OF_GROUP);
        let in_line = self.weights;
        let after_key = Uuid::from_u128(u128::from(rand::rng().next_u64()) << 64);
        let mut able = 0;
        let mut is_whole = false;
        for number in 0..MAX_PAGES {
            let groups = match number {
                0 => MAX_PAGE_GROUPS.min(2 * self.wanted + SPARE_GROUPS),
                _ => MAX_PAGE_GROUPS,
            };
            let last = self.groups.last();
            let page = Page {
                after: last.map_or((f64::NEG_INFINITY, ""), |it| (it.turn, &it.group)),
                groups: groups as i64,
                jobs: jobs as i64,
                job_types: claim.job_types,
                paused_types: &rules.paused_types,
                after_key,
                in_line,
            };
            let found = turn_claims::page(tx, claim, page).await?;
            is_whole = found.len() < groups;
            limits.read_shared(tx, claim, &found).await?;
            self.weights += found.iter().map(|it| i64::from(it.standing.weight) - 1).sum::<i64>();
            able += found.iter().map(|it| self.able(it, limits)).sum::<usize>();
            self.groups.extend(found);
            if is_whole || able >= self.wanted {
                break;
            }
        }
        let is_cut = |it: &GroupInLine| {
            it.jobs.is_empty() && !it.is_empty && it.standing.paused_until.is_none()
        };
        if let Some(job_types) = job_types.filter(|_| self.groups.iter().any(is_cut) || !is_whole) {
            let found = turn_claims::of_types(tx, claim, job_types).await?;
            limits.read_shared(tx, claim, &found).await?;
            self.add(found, jobs);
        }
        let has_more = |it: &GroupInLine| {
            it.jobs.len() == jobs || limits.room(it).is_some_and(|room| room < it.jobs.len() as i64)
        };
        self.may_be_more = !is_whole || self.groups.iter().any(has_more);
        Ok(())
    }

    /// How many jobs of a group may start within its share.
    fn able(&self, it: &GroupInLine, limits: &Limits<'_>) -> usize {
        let running = limits.all_running() + self.wanted as i64;
        let share = share(it.standing.weight, self.weights, running) - limits.running(&it.group);
        let room = limits.room(it).map_or(share, |room| room.min(share));
        it.jobs.len().min(usize::try_from(room).unwrap_or(0))
    }

    /// Adds jobs of groups, up to `most` of each.
    fn add(&mut self, found: Vec<GroupInLine>, most: usize) {
        let known: HashMap<_, _> =
            self.groups.iter().enumerate().map(|(at, it)| (it.group.clone(), at)).collect();
        for mut group in found {
            match known.get(&group.group) {
                Some(&at) => {
                    let jobs = &mut self.groups[at].jobs;
                    group.jobs.retain(|it| !jobs.contains(it));
                    jobs.extend(group.jobs);
                    jobs.truncate(most);
                }
                None => {
                    group.jobs.truncate(most);
                    self.groups.push(group);
                }
            }
        }
    }

    /// Locks concurrency keys, those of the first groups first, and leaves out jobs with others.
    async fn contenders(
        &self,
        tx: &mut PgConnection,
        claim: &QueueClaim<'_>,
        limits: &Limits<'_>,
    ) -> sqlx::Result<Contenders> {
        let with_room = self.groups.iter().filter(|it| limits.room(it) != Some(0));
        let mut seen = HashSet::new();
        let names = with_room.flat_map(|it| &it.jobs);
        let names = names.filter_map(|it| it.concurrency_key.as_deref());
        let names: Vec<_> = names.filter(|it| seen.insert(*it)).collect();
        let first = &names[..names.len().min(self.wanted + SPARE_KEYS)];
        let locked = match first {
            [] => Vec::new(),
            first => limited_claims::lock_concurrency_keys(tx, claim.project_id, first).await?,
        };
        let open: Vec<_> =
            first.iter().zip(&locked).filter(|it| *it.1).map(|(name, _)| *name).collect();
        let with_keys = match open.as_slice() {
            [] => Vec::new(),
            open => turn_claims::running_with_keys(tx, claim.project_id, open).await?,
        };
        let numbers: HashMap<_, _> = open.iter().enumerate().map(|(at, it)| (*it, at)).collect();
        let mut ids = Vec::new();
        let groups = self.groups.iter().map(|group| {
            let able = group.jobs.iter().filter_map(|job| {
                let key = match job.concurrency_key.as_deref() {
                    None => None,
                    Some(name) => Some(*numbers.get(name)?),
                };
                ids.push(job.id);
                let limit = job.concurrency_limit.map(i64::from);
                Some(ContendingJob { number: ids.len() - 1, key: key.zip(limit) })
            });
            Contender {
                turn: group.turn,
                is_new: group.is_new,
                weight: group.standing.weight,
                running: limits.running(&group.group),
                room: limits.room(group),
                jobs: able.collect(),
            }
        });
        let groups = groups.collect();
        let (are_cut, was_contended) = (open.len() < names.len(), open.len() < first.len());
        Ok(Contenders { groups, ids, with_keys, are_cut, was_contended })
    }

    /// The jobs that start next, in the order of turns.
    fn choose(&self, contenders: &Contenders, limits: &Limits<'_>) -> Vec<JobId> {
        let Contenders { groups, ids, with_keys, .. } = contenders;
        let by = (self.weights, limits.all_running());
        let chosen = choose(groups, self.wanted, by, &mut with_keys.clone());
        chosen.into_iter().filter_map(|it| ids.get(it).copied()).collect()
    }

    /// The next turns of the groups of these jobs.
    fn turns(&self, contenders: &[Contender], jobs: &[LeasedJob]) -> Vec<(String, f64)> {
        let (started, least) = (count_by_group(jobs), least_turn(contenders));
        let moved = self.groups.iter().zip(contenders).filter_map(|(group, contender)| {
            let count = usize::try_from(*started.get(group.group.as_str())?).unwrap_or(0);
            let spread = spread(contender, rand::rng().random());
            Some((group.group.clone(), turn_after(contender, count, least) + spread))
        });
        moved.collect()
    }
}
