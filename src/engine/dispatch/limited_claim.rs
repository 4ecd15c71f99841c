//! Claims from queues with constraint keys or limits: a transaction that locks what it counts, then
//! leases.

use std::time::Duration;

use fencepost_domain::rate::{Handout, RateLimit};
use rand::{Rng, seq::SliceRandom};
use sqlx::{Acquire, PgConnection};
use uuid::Uuid;

use fencepost_store::{
    claims::{
        ClaimKey, LeasedJob, QueueClaim,
        limited_claims::{self, ClaimLimits, ConstraintKey, MAX_PAGE_CONSTRAINT_KEYS},
        turn_claims,
    },
    queues::queue_limits::{self, Handouts, QueueRules},
};

use super::{
    limited_groups,
    shared_claim::{self, SharedLimits},
    turn_claim::{self, TurnClaimed},
};

/// Further pages of constraint keys that one claim reads at most.
const MAX_PAGES: usize = 5;
/// Constraint keys that a claim tries beyond one for each job that it wants: others may hold some.
/// Each may be a lock, and PostgreSQL has few thousand for everybody.
const SPARE_KEYS: usize = 16;

/// A queue that is paused, or whose rate limit is used up, is not claimed from for this long, even
/// if jobs arrive. A change of it is hinted; a node that misses the hint finds out after this.
const MAX_REST: Duration = Duration::from_secs(5);

/// A limit of running jobs that lets all run.
const ANY_NUMBER: i32 = i32::MAX;

/// The findings of such a claim.
#[derive(Debug, Default)]
pub(crate) struct LimitedClaimed {
    pub jobs: Vec<LeasedJob>,
    /// How many jobs were selected; other claims may have locked some of them.
    pub chosen: usize,
    /// Whether another claim holds locks, so that there may be more jobs.
    pub was_contended: bool,
    /// The rate limit or pause allows nothing more for this long.
    pub pause_for: Option<Duration>,
}

/// Claims the best jobs whose constraint keys have capacity, as far as the queue's own limits
/// allow.
pub(crate) async fn claim(
    conn: &mut PgConnection,
    claim: &QueueClaim<'_>,
) -> sqlx::Result<LimitedClaimed> {
    let mut tx = conn.begin().await?;
    let rules = queue_limits::lock_queue(&mut tx, claim.project_id, claim.queue).await?;
    if rules.as_ref().is_some_and(|it| !it.is_locked) {
        tx.rollback().await?;
        return Ok(LimitedClaimed { was_contended: true, ..LimitedClaimed::default() });
    }
    if rules.as_ref().is_some_and(|it| it.is_paused) {
        tx.rollback().await?;
        return Ok(LimitedClaimed { pause_for: Some(MAX_REST), ..LimitedClaimed::default() });
    }
    if let Some(milliseconds) = rules.as_ref().and_then(|it| it.rests_ms)
        && milliseconds > 0.0
    {
        tx.rollback().await?;
        let pause_for = Duration::from_secs_f64(milliseconds / 1_000.0).min(MAX_REST);
        return Ok(LimitedClaimed { pause_for: Some(pause_for), ..LimitedClaimed::default() });
    }
    let mut rate = match rules.as_ref().and_then(rate_limit) {
        Some(limit) => {
            let past = queue_limits::find_handouts(&mut tx, claim.project_id, claim.queue).await?;
            Some(Rate::new(limit, past))
        }
        None => None,
    };
    if let Some(pause_for) = rate.as_ref().and_then(Rate::wait) {
        tx.rollback().await?;
        let pause_for = Some(pause_for.min(MAX_REST));
        return Ok(LimitedClaimed { pause_for, ..LimitedClaimed::default() });
    }
    let Some(mut shared) = shared_claim::lock(&mut tx, claim, rules.as_ref()).await? else {
        tx.rollback().await?;
        return Ok(LimitedClaimed { was_contended: true, ..LimitedClaimed::default() });
    };
    if shared.room() == Some(0) {
        tx.rollback().await?;
        let pause_for = shared.wait().map(|it| it.min(MAX_REST));
        return Ok(LimitedClaimed { pause_for, ..LimitedClaimed::default() });
    }
    let found = find(&mut tx, claim, rules.as_ref(), (rate.as_ref(), &mut shared)).await?;
    shared.keep(&mut tx, claim, &found.jobs).await?;
    if let Some(rate) = rate.as_mut().filter(|_| !found.jobs.is_empty()) {
        rate.handed_out(&found.jobs);
        queue_limits::keep_handouts(&mut tx, claim.project_id, claim.queue, &rate.handouts).await?;
    }
    tx.commit().await?;
    let pause_for = rate.as_ref().and_then(Rate::wait).map(|it| it.min(MAX_REST));
    Ok(LimitedClaimed { pause_for, ..found })
}

/// Leases the best jobs, as far as the limits allow. The queue must be locked.
async fn find(
    tx: &mut PgConnection,
    claim: &QueueClaim<'_>,
    rules: Option<&QueueRules>,
    (rate, shared): (Option<&Rate>, &mut SharedLimits),
) -> sqlx::Result<LimitedClaimed> {
    let paused_types = rules.map_or(&[][..], |it| &it.paused_types);
    let slots = i64::try_from(claim.slots.len()).unwrap_or(i64::MAX);
    let max_jobs = rate.map_or(slots, |it| slots.min(it.allowed().into()));
    let max_jobs = shared.room().map_or(max_jobs, |it| it.min(max_jobs));
    // The end of a job that holds a slot wakes the polls of all queues.
    let with_slots = shared.have_slots().then_some(ANY_NUMBER);
    let max_concurrency = rules.and_then(|it| it.max_concurrency).or(with_slots);
    let job_types = types(tx, claim, paused_types).await?;
    // Commands are found by an index of their own.
    if let Some(rules) = rules.filter(|it| it.has_turns && !claim.only_commands)
        && !may_all_start(tx, claim, rules, (max_jobs, shared)).await?
    {
        let by = (job_types.as_deref(), max_jobs, max_concurrency);
        let found = turn_claim::claim(tx, claim, rules, by, shared).await?;
        let TurnClaimed { jobs, chosen, is_behind, was_contended } = found;
        // While the turns begin, there are jobs that are not found by their groups yet. A claim
        // without turns does not let a group rest until a limit that queues share has room for it.
        if chosen > 0 || is_behind || !rules.begins_turns || shared.are_by_group() {
            let was_contended = was_contended || is_behind && chosen < claim.slots.len();
            return Ok(LimitedClaimed { jobs, chosen, was_contended, pause_for: None });
        }
    }
    // Turns are no order of the queue.
    let from = match rules.is_some_and(|it| it.has_turns) {
        true => ClaimKey::ZERO,
        false => claim.from,
    };
    let claim = &QueueClaim { from, ..claim.clone() };
    let Locked { open, is_all, was_contended } = lock_keys(tx, claim, paused_types).await?;
    let by = (rules, job_types.as_deref(), open.as_slice());
    let groups = limited_groups::read(tx, claim, by, shared).await?;
    let limits = ClaimLimits {
        constraint_keys: &open,
        job_types: job_types.as_deref(),
        max_concurrency,
        groups: &groups.limits,
        default_lease_seconds: rules.and_then(|it| it.default_lease_seconds),
        max_jobs,
    };
    let (jobs, chosen) = limited_claims::claim_constrained(tx, claim, limits).await?;
    groups.keep(tx, claim, &jobs).await?;
    // Keys that were not tried may have jobs, if it is not the queue that allows no more. Whether
    // they have commands is not known: to try again at once would be for nothing.
    let is_limited = rules.is_some_and(|it| it.max_concurrency.is_some())
        || max_jobs < slots
        || claim.only_commands;
    // The best jobs may be of groups that have room for some of them. Now these groups are full,
    // and the next claim looks behind them.
    let is_cut = groups.limits.room_of_others.is_some() && (1..claim.slots.len()).contains(&chosen);
    let was_contended =
        was_contended || is_cut || !is_all && !is_limited && chosen < claim.slots.len();
    Ok(LimitedClaimed { jobs, chosen, was_contended, pause_for: None })
}

/// Whether a claim of a queue in which groups take turns wants all jobs that wait: then no group is
/// before another.
async fn may_all_start(
    tx: &mut PgConnection,
    claim: &QueueClaim<'_>,
    rules: &QueueRules,
    (max_jobs, shared): (i64, &SharedLimits),
) -> sqlx::Result<bool> {
    // How many fit under the queue's limit is not known here. And groups that wait for room under a
    // limit that queues share are woken from their rest, which a claim in turn gives them.
    if rules.max_concurrency.is_some() || shared.are_by_group() {
        return Ok(false);
    }
    turn_claims::are_few(tx, claim.project_id, claim.queue, max_jobs).await
}

/// Constraint keys that a claim may use.
struct Locked {
    open: Vec<Uuid>,
    /// Whether all keys that were found and are not full were tried.
    is_all: bool,
    /// Whether another claim holds some.
    was_contended: bool,
}

/// Locks the constraint keys with the best first jobs: one for each wanted job, and some to spare.
/// The best jobs of the queue are among theirs.
async fn lock_keys(
    tx: &mut PgConnection,
    claim: &QueueClaim<'_>,
    paused_types: &[String],
) -> sqlx::Result<Locked> {
    let mut keys = find_keys(tx, claim, paused_types).await?;
    if claim.only_commands {
        // Which of them have commands is not known: all have their turn.
        keys.shuffle(&mut rand::rng());
    } else {
        keys.sort_by_key(|it| (it.is_full, it.rank, it.run_at));
    }
    let most = match claim.only_commands {
        true => MAX_PAGE_CONSTRAINT_KEYS,
        false => claim.slots.len() + SPARE_KEYS,
    };
    let is_all = keys.iter().skip(most).all(|it| it.is_full);
    keys.truncate(most);
    let names: Vec<_> = keys.iter().filter_map(|it| it.concurrency_key.as_deref()).collect();
    let locked = match names.as_slice() {
        [] => Vec::new(),
        names => limited_claims::lock_concurrency_keys(tx, claim.project_id, names).await?,
    };
    let was_contended = locked.contains(&false);
    let mut locked = locked.into_iter();
    let is_open = |it: &&ConstraintKey| it.concurrency_key.is_none() || locked.next() == Some(true);
    let open = keys.iter().filter(is_open).map(|it| it.constraint_key).collect();
    Ok(Locked { open, is_all, was_contended })
}

/// The constraint keys of a queue. If they do not fit in a page, further pages begin at a random
/// key, so that none is starved.
async fn find_keys(
    tx: &mut PgConnection,
    claim: &QueueClaim<'_>,
    paused_types: &[String],
) -> sqlx::Result<Vec<ConstraintKey>> {
    let first = limited_claims::find_constraint_keys(tx, claim, paused_types, Uuid::nil()).await?;
    let mut found = first.keys;
    if first.next.is_some() {
        let random = Uuid::from_u128(rand::rng().next_u64().into()).as_u128() << 64;
        let mut after = Uuid::from_u128(random);
        for _ in 0..MAX_PAGES {
            let page = limited_claims::find_constraint_keys(tx, claim, paused_types, after).await?;
            // Past the end: continue from the first key.
            after = page.next.unwrap_or_else(Uuid::nil);
            found.extend(page.keys);
        }
        found.sort_by_key(|it| it.constraint_key);
        found.dedup_by_key(|it| it.constraint_key);
    }
    Ok(found)
}

/// Which types may run; none: all.
async fn types(
    tx: &mut PgConnection,
    claim: &QueueClaim<'_>,
    paused: &[String],
) -> sqlx::Result<Option<Vec<String>>> {
    match (claim.job_types, paused) {
        ([], []) => Ok(None),
        ([], paused) => {
            queue_limits::open_types(tx, claim.project_id, claim.queue, paused).await.map(Some)
        }
        (wanted, paused) => {
            Ok(Some(wanted.iter().filter(|it| !paused.contains(it)).cloned().collect()))
        }
    }
}

fn rate_limit(rules: &QueueRules) -> Option<RateLimit> {
    let (count, per_seconds) = (rules.rate_limit_count?, rules.rate_limit_per_seconds?);
    Some(RateLimit { count, per_seconds })
}

/// A queue's rate limit and its recent starts.
struct Rate {
    limit: RateLimit,
    handouts: Vec<Handout>,
    now: chrono::DateTime<chrono::Utc>,
}

impl Rate {
    fn new(limit: RateLimit, past: Handouts) -> Self {
        let (at, jobs) = (past.at.unwrap_or_default(), past.jobs.unwrap_or_default());
        let handouts = at.into_iter().zip(jobs).map(|(at, jobs)| Handout { at, jobs }).collect();
        Self { limit, handouts, now: past.now }
    }

    fn allowed(&self) -> i32 {
        self.limit.allows(&self.handouts, self.now)
    }

    /// They count from when they were claimed.
    fn handed_out(&mut self, jobs: &[LeasedJob]) {
        self.now = jobs.iter().map(|it| it.claimed_at).max().unwrap_or(self.now);
        let jobs = i32::try_from(jobs.len()).unwrap_or(i32::MAX);
        self.handouts = self.limit.remember(&self.handouts, jobs, self.now);
    }

    /// How long nothing more may start; none: something may.
    fn wait(&self) -> Option<Duration> {
        let wait = self.limit.wait(&self.handouts, self.now).to_std().unwrap_or_default();
        (!wait.is_zero()).then_some(wait)
    }
}
