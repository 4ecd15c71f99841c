//! Limits of the groups of a queue, as a claim keeps them: it holds the lock of the queue, so what
//! it counts is exact.

use std::collections::{HashMap, HashSet};

use chrono::{DateTime, Utc};
use fencepost_domain::rate::{Handout, RateLimits};
use fencepost_store::{
    claims::{LeasedJob, QueueClaim, limited_claims::GroupLimits},
    groups::{
        overrides,
        rates::{self, GroupStarts, KeptStarts, Sought},
    },
    queues::queue_limits::{self, QueueRules},
};
use sqlx::PgConnection;
use uuid::Uuid;

use super::{dispatched::count_by_group, shared_claim::SharedLimits};

/// What a claim knows of the groups of its queue.
#[derive(Debug, Default)]
pub(super) struct Groups {
    pub limits: GroupLimits,
    rates: RateLimits,
    /// Rates that groups have of their own.
    own_rates: HashMap<String, RateLimits>,
    /// Starts of the groups that are candidates.
    starts: HashMap<String, Vec<Handout>>,
}

/// Reads what limits the groups of a queue, for a claim of these types and constraint keys. The
/// queue must be locked.
pub(super) async fn read(
    tx: &mut PgConnection,
    claim: &QueueClaim<'_>,
    (rules, job_types, open): (Option<&QueueRules>, Option<&[String]>, &[Uuid]),
    shared: &mut SharedLimits,
) -> sqlx::Result<Groups> {
    let Some(rules) = rules else { return Ok(Groups::default()) };
    let mut groups = read_common(tx, claim, (rules, job_types, open)).await?;
    if rules.has_turns {
        groups.add_own(tx, claim, rules).await?;
    }
    if shared.are_by_group() {
        groups.add_shared(tx, claim, (job_types, open), shared).await?;
    }
    Ok(groups)
}

/// The same by the limits of the queue alone.
async fn read_common(
    tx: &mut PgConnection,
    claim: &QueueClaim<'_>,
    (rules, job_types, open): (&QueueRules, Option<&[String]>, &[Uuid]),
) -> sqlx::Result<Groups> {
    let max_running = rules.group_max_running.map(i64::from);
    let stored = rules.group_rate_counts.as_deref().zip(rules.group_rate_seconds.as_deref());
    let running = match max_running {
        Some(_) => queue_limits::busy_groups(tx, claim.project_id, claim.queue).await?,
        None => Vec::new(),
    };
    let Some((counts, seconds)) = stored else {
        let limits = max_running.map_or_else(GroupLimits::default, |max| beside(running, max));
        return Ok(Groups { limits, ..Groups::default() });
    };
    let limits_by_rate = rates::limits(counts, seconds);
    let (project_id, queue) = (claim.project_id, claim.queue);
    let full = running.iter().filter(|it| max_running.is_some_and(|max| it.1 >= max));
    let full: Vec<_> = full.map(|it| it.0.clone()).collect();
    let sought = Sought {
        job_types,
        constraint_keys: open,
        full: &full,
        only_commands: claim.only_commands,
    };
    let found = rates::candidates(tx, project_id, queue, sought).await?;
    let running: HashMap<_, _> = running.into_iter().collect();
    // Only candidates may start: how many of another group have is not known.
    let mut limits = GroupLimits { room_of_others: Some(0), ..GroupLimits::default() };
    let (mut starts, mut strays) = (HashMap::new(), Vec::new());
    for GroupStarts { group, starts: of_group, now } in found {
        let by_rate = i64::from(limits_by_rate.allows(&of_group, now));
        let running = running.get(&group).copied().unwrap_or(0);
        let room = max_running.map_or(by_rate, |max| by_rate.min(max - running));
        if by_rate == 0 {
            strays.push(group);
        } else if room > 0 {
            limits.open.push(group.clone());
            limits.room.push(room);
            starts.insert(group, of_group);
        }
    }
    // Where groups take turns, no job waits for its group.
    if !strays.is_empty() && !rules.has_turns {
        // Admission lets their jobs wait, so that no further claim walks over them.
        rates::note(tx, project_id, queue, &strays).await?;
    }
    Ok(Groups { limits, rates: limits_by_rate, starts, ..Groups::default() })
}

/// The limits of groups beside their running jobs, where `max` may run of each.
fn beside(running: Vec<(String, i64)>, max: i64) -> GroupLimits {
    let (full, open): (Vec<_>, Vec<_>) = running.into_iter().partition(|it| it.1 >= max);
    let (open, room) = open.into_iter().map(|(group, running)| (group, max - running)).unzip();
    let full = full.into_iter().map(|it| it.0).collect();
    GroupLimits { full, open, room, room_of_others: Some(max) }
}

impl Groups {
    /// Replaces the limits of groups that have some of their own.
    async fn add_own(
        &mut self,
        tx: &mut PgConnection,
        claim: &QueueClaim<'_>,
        rules: &QueueRules,
    ) -> sqlx::Result<()> {
        let own = overrides::limited(tx, claim.project_id, claim.queue).await?;
        if own.is_empty() {
            return Ok(());
        }
        let running = queue_limits::busy_groups(tx, claim.project_id, claim.queue).await?;
        let running: HashMap<_, _> = running.into_iter().collect();
        let own_names: HashSet<_> = own.iter().map(|it| it.group.clone()).collect();
        self.limits.full.retain(|it| !own_names.contains(it));
        let others = std::mem::take(&mut self.limits.open).into_iter();
        let others = others.zip(std::mem::take(&mut self.limits.room));
        let others = others.filter(|it| !own_names.contains(&it.0));
        (self.limits.open, self.limits.room) = others.unzip();
        for it in own {
            let max = it.max_running.or(rules.group_max_running).map(i64::from);
            let beside = max.map(|max| max - running.get(&it.group).copied().unwrap_or(0));
            let rates = it.rates.unwrap_or_else(|| self.rates.clone());
            let by_rates = (!rates.is_empty()).then(|| i64::from(rates.allows(&it.starts, it.now)));
            match beside.into_iter().chain(by_rates).min() {
                Some(room) if room <= 0 => self.limits.full.push(it.group),
                room => {
                    self.limits.open.push(it.group.clone());
                    self.limits.room.push(room.unwrap_or(i64::MAX));
                    self.starts.insert(it.group.clone(), it.starts);
                    if !rates.is_empty() {
                        self.own_rates.insert(it.group, rates);
                    }
                }
            }
        }
        Ok(())
    }

    /// Narrows the room of each candidate to what its shared limits leave. Other groups start
    /// nothing.
    async fn add_shared(
        &mut self,
        tx: &mut PgConnection,
        claim: &QueueClaim<'_>,
        (job_types, open): (Option<&[String]>, &[Uuid]),
        shared: &mut SharedLimits,
    ) -> sqlx::Result<()> {
        let sought = Sought {
            job_types,
            constraint_keys: open,
            full: &self.limits.full,
            only_commands: claim.only_commands,
        };
        let found = rates::candidates(tx, claim.project_id, claim.queue, sought).await?;
        let names: Vec<_> = found.iter().map(|it| it.group.as_str()).collect();
        shared.read_groups(tx, claim, &names).await?;
        let before = std::mem::take(&mut self.limits);
        let rooms: HashMap<_, _> = before.open.into_iter().zip(before.room).collect();
        self.limits = GroupLimits { room_of_others: Some(0), ..GroupLimits::default() };
        for GroupStarts { group, .. } in found {
            let own = rooms.get(&group).copied().or(before.room_of_others);
            let room = shared.room_of_group(&group).into_iter().chain(own).min();
            if room != Some(0) {
                self.limits.room.push(room.unwrap_or(i64::MAX));
                self.limits.open.push(group);
            }
        }
        Ok(())
    }

    /// Stores that these jobs have started, if their groups have rates.
    pub(super) async fn keep(
        &self,
        tx: &mut PgConnection,
        claim: &QueueClaim<'_>,
        jobs: &[LeasedJob],
    ) -> sqlx::Result<()> {
        if self.rates.is_empty() && self.own_rates.is_empty() {
            return Ok(());
        }
        // They count from when they were claimed, all at the same time.
        let Some(now) = jobs.iter().map(|it| it.claimed_at).max() else { return Ok(()) };
        let kept = count_by_group(jobs).into_iter().filter_map(|(group, jobs)| {
            let rates = self.own_rates.get(group).unwrap_or(&self.rates);
            add_starts(rates, (group, self.starts.get(group)?), jobs, now)
        });
        let kept: Vec<_> = kept.collect();
        match kept.is_empty() {
            true => Ok(()),
            false => rates::keep(tx, claim.project_id, claim.queue, &kept).await,
        }
    }
}

/// What is kept of a group after this many of its jobs have started; none: nothing.
pub(super) fn add_starts(
    rates: &RateLimits,
    (group, before): (&str, &[Handout]),
    jobs: i32,
    now: DateTime<Utc>,
) -> Option<KeptStarts> {
    let starts = rates.remember(before, jobs, now);
    Some(KeptStarts {
        group: group.to_owned(),
        room: rates.allows(&starts, now),
        full_until: rates.next_at(&starts, now),
        ends_at: rates.empty_at(&starts, now)?,
        starts,
    })
}
