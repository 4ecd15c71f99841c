//! Claims from queues in which groups take turns: the groups in line are read with their best jobs,
//! and the rule chooses among them.

use std::collections::{HashMap, HashSet};

use chrono::{DateTime, TimeDelta, Utc};
use fencepost_domain::{
    rate::RateLimits,
    turns::{Contender, ContendingJob, choose, next_turn, queue_turn},
};
use fencepost_store::{
    claims::{
        LeasedJob, QueueClaim,
        limited_claims::{ClaimLimits, GroupLimits},
        turn_claims::{self, GroupInLine, MAX_PAGE_GROUPS, Page},
    },
    groups::{
        rates,
        turns::{self, TurnChanges},
    },
    queues::queue_limits::QueueRules,
};
use sqlx::PgConnection;
use uuid::Uuid;

use super::limited_groups;

/// Pages of groups that one claim reads at most.
const MAX_PAGES: usize = 5;
/// Groups that a claim reads at first, beyond two for each job that it wants.
const SPARE_GROUPS: usize = 16;
/// Jobs of one group that a claim reads at most.
const MAX_JOBS_OF_GROUP: usize = 50;
/// A paused group rests no longer: its end may have been missed.
const MAX_REST: TimeDelta = TimeDelta::hours(1);

/// The findings of such a claim.
#[derive(Debug, Default)]
pub(super) struct TurnClaimed {
    pub jobs: Vec<LeasedJob>,
    /// How many jobs were selected; other transactions may have locked some of them.
    pub chosen: usize,
    /// Whether there may be more jobs.
    pub may_be_more: bool,
}

/// Claims jobs of the groups whose turn it is. The queue and the constraint keys must be locked.
pub(super) async fn claim(
    tx: &mut PgConnection,
    claim: &QueueClaim<'_>,
    rules: &QueueRules,
    (open_keys, max_jobs): (&[Uuid], i64),
) -> sqlx::Result<TurnClaimed> {
    let wanted = usize::try_from(max_jobs).unwrap_or(0).min(claim.slots.len());
    let current = turns::current(tx, claim.project_id, claim.queue).await?;
    let running = turn_claims::running(tx, claim.project_id, claim.queue).await?;
    let limits = Limits::of(rules, running.into_iter().collect());
    let (line, may_be_more) = read_line(tx, claim, rules, (open_keys, wanted), &limits).await?;
    let mut changes = limits.changes(&line);
    let chosen = choose_jobs(tx, claim, &line, &limits, (current, wanted)).await?;
    let (mut jobs, mut selected, mut next) = (Vec::new(), 0, current);
    if !chosen.is_empty() {
        let limits_of_claim = ClaimLimits {
            constraint_keys: &[],
            job_types: None,
            max_concurrency: rules.max_concurrency,
            groups: &GroupLimits::default(),
            default_lease_seconds: rules.default_lease_seconds,
            max_jobs,
        };
        (jobs, selected) = turn_claims::lease(tx, claim, limits_of_claim, &chosen).await?;
        next = add_turns(&mut changes, &line, &jobs, current);
        limits.keep_starts(tx, claim, &line, &jobs).await?;
    }
    if !changes.is_empty() {
        turns::keep(tx, (claim.project_id, claim.queue), &changes, next).await?;
    }
    Ok(TurnClaimed { jobs, chosen: selected, may_be_more })
}

/// The limits of groups, and how many jobs of each run.
struct Limits {
    rates: RateLimits,
    max_running: Option<i64>,
    running: HashMap<String, i64>,
}

impl Limits {
    fn of(rules: &QueueRules, running: HashMap<String, i64>) -> Self {
        let stored = rules.group_rate_counts.as_deref().zip(rules.group_rate_seconds.as_deref());
        let rates =
            stored.map(|(counts, seconds)| rates::limits(counts, seconds)).unwrap_or_default();
        Self { rates, max_running: rules.group_max_running.map(i64::from), running }
    }

    fn running(&self, group: &str) -> i64 {
        self.running.get(group).copied().unwrap_or(0)
    }

    /// How many jobs of a group may run; none: all. Jobs without a group have no such limits.
    fn max_running(&self, it: &GroupInLine) -> Option<i64> {
        let max = it.max_running.map(i64::from).or(self.max_running);
        max.filter(|_| !it.group.is_empty())
    }

    /// The rates of a group; none: it has none.
    fn rates<'a>(&'a self, it: &'a GroupInLine) -> Option<&'a RateLimits> {
        let rates = it.rates.as_ref().unwrap_or(&self.rates);
        Some(rates).filter(|rates| !it.group.is_empty() && !rates.is_empty())
    }

    /// How many more jobs of a group may start; none: all.
    fn room(&self, it: &GroupInLine) -> Option<i64> {
        let by_rates = self.rates(it).map(|rates| i64::from(rates.allows(&it.starts, it.now)));
        let beside = self.max_running(it).map(|max| (max - self.running(&it.group)).max(0));
        by_rates.into_iter().chain(beside).min()
    }

    /// Groups that let nothing start for now, and those that have nothing to start.
    fn changes(&self, line: &[GroupInLine]) -> TurnChanges {
        let mut changes = TurnChanges::default();
        for it in line {
            let full = self.max_running(it).filter(|max| self.running(&it.group) >= *max);
            match self.rests_until(it) {
                Some(at) => changes.rests.push((it.group.clone(), at)),
                None if it.is_empty => changes.empty.push(it.group.clone()),
                None => changes.full.extend(full.map(|max| (it.group.clone(), max))),
            }
        }
        changes
    }

    /// Until when a group is paused, or has used up its rates.
    fn rests_until(&self, it: &GroupInLine) -> Option<DateTime<Utc>> {
        let by_rates = || self.rates(it)?.next_at(&it.starts, it.now);
        Some(it.paused_until.or_else(by_rates)?.min(it.now + MAX_REST))
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
        let started = limited_groups::count_by_group(jobs);
        let kept = line.iter().filter_map(|group| {
            let (rates, jobs) = (self.rates(group)?, *started.get(group.group.as_str())?);
            limited_groups::add_starts(rates, (&group.group, &group.starts), jobs, now)
        });
        let kept: Vec<_> = kept.collect();
        match kept.is_empty() {
            true => Ok(()),
            false => rates::keep(tx, claim.project_id, claim.queue, &kept).await,
        }
    }
}

/// The groups in line, until enough jobs are found. Says whether there may be more.
async fn read_line(
    tx: &mut PgConnection,
    claim: &QueueClaim<'_>,
    rules: &QueueRules,
    (constraint_keys, wanted): (&[Uuid], usize),
    limits: &Limits,
) -> sqlx::Result<(Vec<GroupInLine>, bool)> {
    let jobs = wanted.min(MAX_JOBS_OF_GROUP);
    let (mut line, mut able): (Vec<GroupInLine>, usize) = (Vec::new(), 0);
    let mut is_whole = false;
    for number in 0..MAX_PAGES {
        let groups = match number {
            0 => MAX_PAGE_GROUPS.min(2 * wanted + SPARE_GROUPS),
            _ => MAX_PAGE_GROUPS,
        };
        let page = Page {
            after: line.last().map_or((f64::NEG_INFINITY, ""), |it| (it.turn, &it.group)),
            groups: groups as i64,
            jobs: jobs as i64,
            paused_types: &rules.paused_types,
            constraint_keys,
        };
        let found = turn_claims::page(tx, claim, page).await?;
        is_whole = found.len() < groups;
        for it in &found {
            let room = limits.room(it).map_or(usize::MAX, |it| usize::try_from(it).unwrap_or(0));
            able += it.jobs.len().min(room);
        }
        line.extend(found);
        if is_whole || able >= wanted {
            break;
        }
    }
    let may_be_more = !is_whole || line.iter().any(|it| it.jobs.len() == jobs);
    Ok((line, may_be_more))
}

/// The jobs that start next, in the order of turns.
async fn choose_jobs(
    tx: &mut PgConnection,
    claim: &QueueClaim<'_>,
    line: &[GroupInLine],
    limits: &Limits,
    (current, wanted): (f64, usize),
) -> sqlx::Result<Vec<fencepost_domain::ids::JobId>> {
    let jobs = || line.iter().flat_map(|it| &it.jobs);
    let names: HashSet<_> = jobs().filter_map(|it| it.concurrency_key.as_deref()).collect();
    let names: Vec<_> = names.into_iter().collect();
    let mut with_keys = match names.as_slice() {
        [] => Vec::new(),
        names => turn_claims::running_with_keys(tx, claim.project_id, names).await?,
    };
    let numbers: HashMap<_, _> = names.iter().enumerate().map(|(at, name)| (*name, at)).collect();
    let ids: Vec<_> = jobs().map(|it| it.id).collect();
    let mut next = 0..;
    let contenders: Vec<_> = line
        .iter()
        .map(|it| Contender {
            turn: it.turn,
            weight: it.weight,
            running: limits.running(&it.group),
            room: limits.room(it),
            jobs: it
                .jobs
                .iter()
                .zip(next.by_ref())
                .map(|(job, number)| {
                    let key = job.concurrency_key.as_deref().and_then(|it| numbers.get(it));
                    let limit = job.concurrency_limit.map(i64::from);
                    ContendingJob { number, key: key.copied().zip(limit) }
                })
                .collect(),
        })
        .collect();
    let running = limits.running.values().sum();
    let chosen = choose(&contenders, wanted, (current, running), &mut with_keys);
    Ok(chosen.into_iter().filter_map(|it| ids.get(it).copied()).collect())
}

/// Moves the turns of the groups of these jobs on. Returns the turn of the queue.
fn add_turns(
    changes: &mut TurnChanges,
    line: &[GroupInLine],
    jobs: &[LeasedJob],
    current: f64,
) -> f64 {
    let started = limited_groups::count_by_group(jobs);
    let mut now = current;
    for it in line {
        if let Some(count) = started.get(it.group.as_str()) {
            let count = usize::try_from(*count).unwrap_or(0);
            let next = next_turn(it.turn, it.weight, count, current);
            now = queue_turn(now, next, it.weight);
            changes.turns.push((it.group.clone(), next));
        }
    }
    now
}
