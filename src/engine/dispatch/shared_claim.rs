//! Shared limits, as a claim keeps them: it holds the lock of each limit that its queue names, so
//! what it counts over all their queues is exact.

use std::{collections::HashMap, time::Duration};

use chrono::{DateTime, Utc};
use fencepost_domain::rate::RateLimits;
use fencepost_store::{
    claims::{LeasedJob, QueueClaim},
    queues::queue_limits::QueueRules,
    shared_limits::claimed::{self, KnownKey, LockedLimit, StartsUnder},
};
use sqlx::PgConnection;

use super::dispatched::count_by_group;

/// The name of all jobs under a limit, among those of groups.
const ALL: &str = "";

/// The limits that a queue shares with others.
#[derive(Debug, Default)]
pub(super) struct SharedLimits(Vec<SharedLimit>);

#[derive(Debug)]
struct SharedLimit {
    limit: LockedLimit,
    /// Running jobs of each group; empty: those without a group.
    running: HashMap<String, i64>,
    known: HashMap<String, KnownKey>,
    now: DateTime<Utc>,
}

/// Locks the limits that a queue names, and reads what counts under them. None: another claim holds
/// one of them.
pub(super) async fn lock(
    tx: &mut PgConnection,
    claim: &QueueClaim<'_>,
    rules: Option<&QueueRules>,
) -> sqlx::Result<Option<SharedLimits>> {
    let Some(names) = rules.and_then(|it| it.shared_limits.as_deref()) else {
        return Ok(Some(SharedLimits::default()));
    };
    let Some(locked) = claimed::try_lock(tx, claim.project_id, names).await? else {
        return Ok(None);
    };
    let of_limit = |limit| SharedLimit {
        limit,
        running: HashMap::new(),
        known: HashMap::new(),
        now: DateTime::UNIX_EPOCH,
    };
    let mut shared = SharedLimits(locked.into_iter().map(of_limit).collect());
    shared.count_running(tx, claim, None).await?;
    shared.read(tx, claim, false, &[ALL]).await?;
    Ok(Some(shared))
}

/// What limits a key.
struct Standing<'a> {
    rates: &'a RateLimits,
    known: &'a KnownKey,
    max_running: Option<i64>,
    running: i64,
    now: DateTime<Utc>,
}

impl Standing<'_> {
    /// How many more jobs may start; none: all.
    fn room(&self) -> Option<i64> {
        let paused = self.known.paused_until.map(|_| 0);
        let by_rates = (!self.rates.is_empty())
            .then(|| i64::from(self.rates.allows(&self.known.starts, self.now)));
        let beside = self.max_running.map(|max| (max - self.running).max(0));
        paused.into_iter().chain(by_rates).chain(beside).min()
    }

    /// When a pause ends, or the rates let the next job start; none: they let one start now.
    fn opens_at(&self) -> Option<DateTime<Utc>> {
        let by_rates = self.rates.next_at(&self.known.starts, self.now);
        self.known.paused_until.into_iter().chain(by_rates).max()
    }
}

impl SharedLimit {
    fn counts_running(&self) -> bool {
        self.limit.by_group || self.limit.max_running.is_some()
    }

    /// `group`: [`ALL`] for all jobs.
    fn standing(&self, group: &str) -> Standing<'_> {
        static NONE: KnownKey = KnownKey {
            starts: Vec::new(),
            max_running: None,
            rates: None,
            expires_at: None,
            paused_until: None,
        };
        let known = self.known.get(group).unwrap_or(&NONE);
        let running = match self.limit.by_group {
            true => self.running.get(group).copied().unwrap_or(0),
            false => self.running.values().sum(),
        };
        Standing {
            rates: known.rates.as_ref().unwrap_or(&self.limit.rates),
            known,
            max_running: known.max_running.or(self.limit.max_running).map(i64::from),
            running,
            now: self.now,
        }
    }
}

impl SharedLimits {
    fn of_all(&self) -> impl Iterator<Item = Standing<'_>> {
        self.0.iter().filter(|it| !it.limit.by_group).map(|it| it.standing(ALL))
    }

    /// Jobs without a group do not count.
    fn of_group<'a>(&'a self, group: &'a str) -> impl Iterator<Item = Standing<'a>> {
        let by_group = self.0.iter().filter(move |it| it.limit.by_group && group != ALL);
        by_group.map(move |it| it.standing(group))
    }

    /// Whether some hold for each group.
    pub(super) fn are_by_group(&self) -> bool {
        self.0.iter().any(|it| it.limit.by_group)
    }

    /// Whether the end of a job may let one start, of whichever queue. Groups may have numbers of
    /// their own.
    pub(super) fn have_slots(&self) -> bool {
        self.0.iter().any(SharedLimit::counts_running)
    }

    /// How many jobs of the queue may start; none: all.
    pub(super) fn room(&self) -> Option<i64> {
        self.of_all().filter_map(|it| it.room()).min()
    }

    /// How long none may start by pauses and the rates of all jobs; none: one may.
    pub(super) fn wait(&self) -> Option<Duration> {
        let next = self.of_all().filter_map(|it| (it.opens_at()? - it.now).to_std().ok());
        next.max()
    }

    /// How many jobs of a group may start; none: all.
    pub(super) fn room_of_group(&self, group: &str) -> Option<i64> {
        self.of_group(group).filter_map(|it| it.room()).min()
    }

    /// Until when a pause or a rate lets none of a group start; none: they let one start now.
    pub(super) fn opens_at(&self, group: &str) -> Option<DateTime<Utc>> {
        self.of_group(group).filter_map(|it| it.opens_at()).max()
    }

    /// When numbers of a group's own end; none: when they are reset.
    pub(super) fn numbers_end_at(&self, group: &str) -> Option<DateTime<Utc>> {
        self.of_group(group).filter_map(|it| it.known.expires_at).min()
    }

    /// Reads what is known of these groups, under the limits that each has for itself.
    pub(super) async fn read_groups(
        &mut self,
        tx: &mut PgConnection,
        claim: &QueueClaim<'_>,
        groups: &[&str],
    ) -> sqlx::Result<()> {
        self.read(tx, claim, true, groups).await
    }

    /// Reads it again, and how many jobs of each group run.
    pub(super) async fn read_again(
        &mut self,
        tx: &mut PgConnection,
        claim: &QueueClaim<'_>,
        groups: &[&str],
    ) -> sqlx::Result<()> {
        if !self.are_by_group() {
            return Ok(());
        }
        self.count_running(tx, claim, Some(groups)).await?;
        self.read_groups(tx, claim, groups).await
    }

    /// Counts the running jobs of these groups, or of all.
    async fn count_running(
        &mut self,
        tx: &mut PgConnection,
        claim: &QueueClaim<'_>,
        groups: Option<&[&str]>,
    ) -> sqlx::Result<()> {
        let counting = self.0.iter().filter(|it| match groups {
            Some(_) => it.limit.by_group,
            None => it.counts_running(),
        });
        let limits: Vec<_> = counting.map(|it| &it.limit).collect();
        if limits.is_empty() {
            return Ok(());
        }
        let counted = claimed::running(tx, claim.project_id, &limits, groups).await?;
        for shared in self.0.iter_mut().filter(|it| groups.is_none() || it.limit.by_group) {
            for group in groups.into_iter().flatten() {
                shared.running.remove(*group);
            }
            let of_limit = counted.iter().filter(|it| it.limit == shared.limit.name);
            shared.running.extend(of_limit.map(|it| (it.group.clone(), it.running)));
        }
        Ok(())
    }

    async fn read(
        &mut self,
        tx: &mut PgConnection,
        claim: &QueueClaim<'_>,
        by_group: bool,
        groups: &[&str],
    ) -> sqlx::Result<()> {
        let asked = self.0.iter().map(|it| &it.limit).filter(|it| it.by_group == by_group);
        let names: Vec<_> = asked.map(|it| it.name.as_str()).collect();
        if names.is_empty() || groups.is_empty() {
            return Ok(());
        }
        let (found, now) = claimed::keys(tx, claim.project_id, &names, groups).await?;
        for shared in &mut self.0 {
            shared.now = now;
            if shared.limit.by_group == by_group {
                // What was forgotten since is known no more.
                shared.known.retain(|group, _| !groups.contains(&group.as_str()));
            }
        }
        for (limit, group, known) in found {
            if let Some(shared) = self.0.iter_mut().find(|it| it.limit.name == limit) {
                shared.known.insert(group, known);
            }
        }
        Ok(())
    }

    /// Stores that these jobs have started.
    pub(super) async fn keep(
        &self,
        tx: &mut PgConnection,
        claim: &QueueClaim<'_>,
        jobs: &[LeasedJob],
    ) -> sqlx::Result<()> {
        // They count from when they were claimed, all at the same time.
        let Some(now) = jobs.iter().map(|it| it.claimed_at).max() else { return Ok(()) };
        let counts = count_by_group(jobs);
        let mut kept = Vec::new();
        for shared in &self.0 {
            let started: Vec<_> = match shared.limit.by_group {
                true => counts.iter().map(|it| (*it.0, *it.1)).filter(|it| it.0 != ALL).collect(),
                false => vec![(ALL, counts.values().sum())],
            };
            kept.extend(started.into_iter().filter_map(|(group, jobs)| {
                let Standing { rates, known, .. } = shared.standing(group);
                // Those of the limit count again when numbers of its own have ended.
                let all = rates.with(&shared.limit.rates);
                let starts = all.remember(&known.starts, jobs, now);
                let ends_at = all.empty_at(&starts, now)?;
                let full_until = rates.next_at(&starts, now);
                let (limit, group) = (shared.limit.name.clone(), group.to_owned());
                Some(StartsUnder { limit, group, starts, full_until, ends_at })
            }));
        }
        match kept.is_empty() {
            true => Ok(()),
            false => claimed::keep_starts(tx, claim.project_id, &kept).await,
        }
    }
}
