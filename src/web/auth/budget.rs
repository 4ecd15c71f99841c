//! Rate limits of calls: budgets of projects and keys, and permits for parked polls.

use std::{
    marker::PhantomData,
    num::NonZeroU32,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

use axum::http::{
    HeaderMap,
    header::{CONTENT_ENCODING, CONTENT_LENGTH},
};
use fencepost_domain::{
    error::Error,
    ids::{KeyId, ProjectId, ProjectPublicId},
    limits::MAX_POLL_WAIT_SECONDS,
    plan::Limits,
};
use fencepost_identity::credentials::LocalPermit;
use fencepost_signals::{
    limiter::{Charge, Rate, SharedPermit, Standing, share},
    telemetry,
};
use metrics::counter;
use uuid::Uuid;

use super::{Bound, Caller, CallerKind, Polling, Settling, Who};
use crate::app::App;

/// Added to a poll's wait: the permit of a crashed node expires after both.
const PERMIT_GRACE_SECONDS: u32 = 15;

/// Read calls per minute that one member's pages may make in one project. They must work when the
/// project has used up its own budgets, and must not use up any.
pub const CONSOLE_READS_PER_MEMBER: Rate = Rate::per_minute(1_200);
/// All other calls of pages: a button must work when many open pages have refreshed too often.
pub const CONSOLE_ACTIONS_PER_MEMBER: Rate = Rate::per_minute(300);

/// All members of a project together may make this many times `manage_per_minute`; at least as many
/// as one.
pub const CONSOLE_CALLS_PER_MANAGE_CALL: u32 = 20;

/// In the extensions of a request that a page of the console makes for a member.
#[derive(Debug, Clone, Copy)]
pub struct FromConsole;

/// The budget that a call is counted against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Budget {
    Produce,
    Work,
    Manage,
}

impl Budget {
    pub const ALL: [Self; 3] = [Self::Produce, Self::Work, Self::Manage];

    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Produce => "produce",
            Self::Work => "work",
            Self::Manage => "manage",
        }
    }

    /// Calls per minute that a project may make of it; none: unlimited.
    #[must_use]
    pub const fn of(self, limits: &Limits) -> Option<u32> {
        match self {
            Self::Produce => limits.produce_per_minute,
            Self::Work => limits.work_per_minute,
            Self::Manage => limits.manage_per_minute,
        }
    }

    fn of_key(self, who: &Who) -> Option<u32> {
        let Who::Key(grant, _) = who else { return None };
        let owner = &grant.owner;
        let own = match self {
            Self::Produce => owner.produce_per_minute,
            Self::Work => owner.work_per_minute,
            Self::Manage => owner.manage_per_minute,
        };
        own.and_then(|it| u32::try_from(it).ok())
    }
}

/// The cost of a call in its budget. A poll and whatever is not named here cost 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cost {
    /// Jobs to store, acks or events: 1 each.
    Items(usize),
    /// Leases that a heartbeat of a whole worker renews: 1 for each `LEASES_PER_BEAT` begun.
    Leases(usize),
}

/// Leases that a heartbeat renews at the cost of one call.
const LEASES_PER_BEAT: usize = 50;

impl Cost {
    /// At least 1: the call itself.
    #[must_use]
    pub fn calls(self) -> u32 {
        let calls = match self {
            Self::Items(items) => items,
            Self::Leases(leases) => leases.div_ceil(LEASES_PER_BEAT),
        };
        u32::try_from(calls).unwrap_or(u32::MAX).max(1)
    }

    /// How many of them cost as much as `calls`.
    fn most(self, calls: u32) -> u64 {
        match self {
            Self::Items(_) => calls.into(),
            Self::Leases(_) => u64::from(calls) * LEASES_PER_BEAT as u64,
        }
    }

    fn count(self) -> usize {
        match self {
            Self::Items(count) | Self::Leases(count) => count,
        }
    }
}

/// Shows the layers around a handler its project and its budgets.
#[derive(Debug, Clone, Default)]
pub struct CallReport {
    charged: Arc<Mutex<Option<(&'static str, Standing)>>>,
    caller: Arc<OnceLock<(ProjectId, ProjectPublicId, Option<KeyId>)>>,
}

impl CallReport {
    /// The budget and its state, if the call was counted.
    #[must_use]
    pub fn charged(&self) -> Option<(&'static str, Standing)> {
        *self.charged.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The caller's project, once it is known.
    #[must_use]
    pub fn project(&self) -> Option<ProjectId> {
        self.caller.get().map(|it| it.0)
    }

    /// The public id of the caller's project, once it is known.
    #[must_use]
    pub fn public_id(&self) -> Option<ProjectPublicId> {
        self.caller.get().map(|it| it.1)
    }

    /// The caller's key and its project, once they are known.
    #[must_use]
    pub fn key(&self) -> Option<(ProjectId, KeyId)> {
        self.caller.get().and_then(|it| Some((it.0, it.2?)))
    }

    pub(super) fn of_caller(&self, project: (ProjectId, ProjectPublicId), key: Option<KeyId>) {
        // A request has one caller.
        self.caller.get_or_init(|| (project.0, project.1, key));
    }

    pub(super) fn record(&self, budget: &'static str, standing: Option<Standing>) {
        if let Some(standing) = standing {
            *self.charged.lock().unwrap_or_else(PoisonError::into_inner) = Some((budget, standing));
        }
    }
}

/// The permits of a parked poll; released when dropped.
pub struct PollPermit {
    app: App,
    shared: Vec<SharedPermit>,
    local: Vec<LocalPermit>,
}

impl Drop for PollPermit {
    fn drop(&mut self) {
        if self.shared.is_empty() {
            return;
        }
        let (app, permits) = (self.app.clone(), std::mem::take(&mut self.shared));
        tokio::spawn(async move { app.accounts.limiter.release(&permits).await });
    }
}

/// The budgets of a call: the project's, and the key's own.
fn charges(
    who: &Who,
    project_id: ProjectId,
    limits: &Limits,
    budget: Budget,
    overdraft: u32,
) -> Vec<Charge> {
    let charge = |owner: String, per_minute| Charge {
        name: format!("limit:{owner}:{}", budget.name()),
        rate: Rate::per_minute(per_minute),
        overdraft_windows: overdraft,
    };
    // The part in braces decides which node of a Redis cluster holds a name.
    let project = format!("{{p{}}}", project_id.0);
    let of_project = budget.of(limits).map(|it| charge(project.clone(), it));
    let of_key = budget.of_key(who).map(|it| charge(format!("{project}:{}", who.id()), it));
    of_project.into_iter().chain(of_key).collect()
}

/// The permits that a poll needs: one of the project, and one of the key.
fn permits(who: &Who, project_id: ProjectId, limits: &Limits) -> Vec<SharedPermit> {
    let token = Uuid::new_v4().simple().to_string();
    let life_seconds = MAX_POLL_WAIT_SECONDS + PERMIT_GRACE_SECONDS;
    let permit = |name: String, max| SharedPermit { name, max, token: token.clone(), life_seconds };
    let project = format!("polls:{{p{}}}", project_id.0);
    let of_project = limits.parked_polls.map(|it| permit(project.clone(), it));
    let of_key =
        limits.parked_polls_per_key.map(|it| permit(format!("{project}:{}", who.id()), it));
    of_project.into_iter().chain(of_key).collect()
}

/// Counts a call of the console: against the member's own budget, and one that all members of the
/// project share, but none that its programs use.
pub(super) async fn charge_console(
    app: &App,
    who: &Who,
    (project_id, limits): (ProjectId, &Limits),
    is_read: bool,
) -> Result<(), Error> {
    let (kind, rate) = if is_read {
        ("console-reads", CONSOLE_READS_PER_MEMBER)
    } else {
        ("console-actions", CONSOLE_ACTIONS_PER_MEMBER)
    };
    let charge = |owner: &str, rate| {
        let name = format!("limit:{{p{}}}:{owner}:{kind}", project_id.0);
        Charge { name, rate, overdraft_windows: 0 }
    };
    // People get more than programs, but not each of any number of members.
    let of_project = limits.manage_per_minute.map(|per_minute| {
        let count = per_minute.saturating_mul(CONSOLE_CALLS_PER_MANAGE_CALL).max(rate.count);
        charge("all", Rate::per_minute(count))
    });
    let charges: Vec<_> = of_project.into_iter().chain([charge(&who.id(), rate)]).collect();
    match app.accounts.limiter.charge(&charges, &[]).await.retry_after_seconds() {
        None => Ok(()),
        Some(retry_after_seconds) => {
            counter!(telemetry::LIMITED, "budget" => "console").increment(1);
            Err(Error::RateLimited { retry_after_seconds })
        }
    }
}

/// Counts a call, and takes its permits.
pub(super) async fn charge<P: CallerKind>(
    app: &App,
    who: &Who,
    project_id: ProjectId,
    limits: &Limits,
    report: &CallReport,
) -> Result<Option<Arc<PollPermit>>, Error> {
    let budget = P::BUDGET;
    let charges = charges(who, project_id, limits, budget, P::OVERDRAFT_WINDOWS);
    let permits = if P::PARKS { permits(who, project_id, limits) } else { Vec::new() };
    if charges.is_empty() && permits.is_empty() {
        return Ok(None);
    }
    // Before they are taken: a call that ends without an answer may have taken them all the same.
    let held = if app.bus.has_redis() { permits.clone() } else { Vec::new() };
    let mut parked = PollPermit { app: app.clone(), shared: held, local: Vec::new() };
    let verdict = app.accounts.limiter.charge(&charges, &permits).await;
    report.record(budget.name(), verdict.tightest());
    // Without an answer, Redis may have taken them.
    if !verdict.is_local && (verdict.wait.is_some() || verdict.full.is_some()) {
        parked.shared.clear();
    }
    let too_many = |max: u32| {
        counter!(telemetry::LIMITED, "budget" => "polls").increment(1);
        Error::QuotaExceeded { what: "parked polls", max: max.into() }
    };
    if let Some(retry_after_seconds) = verdict.retry_after_seconds()
        && verdict.full.is_none()
    {
        counter!(telemetry::LIMITED, "budget" => budget.name()).increment(1);
        return Err(Error::RateLimited { retry_after_seconds });
    }
    if let Some(full) = verdict.full.and_then(|it| permits.get(it)) {
        return Err(too_many(full.max));
    }
    // Counted here as well, for when Redis is down.
    let nodes = if verdict.is_local { app.bus.nodes() } else { 1 };
    for permit in &permits {
        let max = share(permit.max, nodes);
        parked
            .local
            .push(app.local_permits.take(&permit.name, max).ok_or_else(|| too_many(permit.max))?);
    }
    Ok(Some(Arc::new(parked)))
}

impl Caller<Bound<Settling>> {
    /// The same caller as one that polls: counted, and with a permit for that.
    ///
    /// # Errors
    /// [`Error::RateLimited`], [`Error::QuotaExceeded`], [`Error::Suspended`].
    pub async fn polling(&self, app: &App) -> Result<Caller<Bound<Polling>>, Error> {
        if let Some(refusal) = self.who.suspension::<Polling>() {
            return Err(refusal);
        }
        let (limits, report) = (&self.limits, &self.report);
        let permit = charge::<Polling>(app, &self.who, self.project_id, limits, report).await?;
        Ok(Caller {
            project_id: self.project_id,
            who: self.who.clone(),
            limits: self.limits,
            client: self.client.clone(),
            _poll_permit: permit,
            _room: None,
            report: self.report.clone(),
            hop: self.hop,
            permission: PhantomData,
        })
    }
}

/// Counts what a call costs beyond the 1 that was counted before its body was read.
pub(super) async fn charge_rest<P: CallerKind>(
    app: &App,
    caller: &Caller<P>,
    field: &str,
    cost: Cost,
) -> Result<(), Error> {
    let (project_id, budget) = (caller.project_id, P::BUDGET);
    let charges = charges(&caller.who, project_id, &caller.limits, budget, P::OVERDRAFT_WINDOWS);
    let burst = charges.iter().map(|it| it.rate.count).min().unwrap_or(u32::MAX);
    if cost.calls() > burst {
        let (max, has) = (cost.most(burst), cost.count());
        let budget = budget.name();
        let message =
            format!("must have at most {max} entries, as many as the {budget} budget, has {has}");
        return Err(Error::invalid(field, message));
    }
    let Some(rest) = NonZeroU32::new(cost.calls() - 1).filter(|_| !charges.is_empty()) else {
        return Ok(());
    };
    let verdict = app.accounts.limiter.charge_rest(&charges, rest).await;
    caller.report.record(budget.name(), verdict.tightest());
    match verdict.retry_after_seconds() {
        None => Ok(()),
        Some(retry_after_seconds) => {
            counter!(telemetry::LIMITED, "budget" => budget.name()).increment(1);
            Err(Error::RateLimited { retry_after_seconds })
        }
    }
}

/// Bodies up to this size are not counted: calls are.
pub const FREE_BODY_BYTES: u64 = 4_096;
/// Bodies are counted in units of this many bytes.
const BODY_UNIT_BYTES: u64 = 1_024;

/// The limit on the bytes of bodies, for a body whose size is known only when it was read.
#[derive(Clone)]
pub struct BodyMeter {
    app: App,
    charge: Charge,
}

impl BodyMeter {
    /// The limit of a project; none: it has none.
    pub(super) fn of(
        app: &App,
        project_id: ProjectId,
        limits: &Limits,
        overdraft_windows: u32,
    ) -> Option<Self> {
        let charge = body_charge(project_id, limits, overdraft_windows)?;
        Some(Self { app: app.clone(), charge })
    }

    /// Counts a body, or a part of one.
    ///
    /// # Errors
    /// [`Error::RateLimited`].
    pub async fn count(&self, bytes: u64) -> Result<(), Error> {
        if bytes <= FREE_BODY_BYTES {
            return Ok(());
        }
        // One body must fit, however small the limit is.
        let units = bytes.div_ceil(BODY_UNIT_BYTES).min(self.charge.rate.count.into());
        let units = u32::try_from(units).ok().and_then(NonZeroU32::new);
        let Some(units) = units else { return Ok(()) };
        let charges = std::slice::from_ref(&self.charge);
        match self.app.accounts.limiter.charge_many(charges, units).await.retry_after_seconds() {
            None => Ok(()),
            Some(retry_after_seconds) => {
                counter!(telemetry::LIMITED, "budget" => "bytes").increment(1);
                Err(Error::RateLimited { retry_after_seconds })
            }
        }
    }
}

/// The size of the body, if it is known before it is read.
pub(super) fn content_length(headers: &HeaderMap) -> Option<u64> {
    // Of a compressed body it is not the size of the content.
    if headers.contains_key(CONTENT_ENCODING) {
        return None;
    }
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

fn body_charge(project_id: ProjectId, limits: &Limits, overdraft_windows: u32) -> Option<Charge> {
    let units = (limits.bytes_per_minute? / BODY_UNIT_BYTES).max(1);
    let rate = Rate::per_minute(u32::try_from(units).unwrap_or(u32::MAX));
    let name = format!("limit:{{p{}}}:bytes", project_id.0);
    Some(Charge { name, rate, overdraft_windows })
}

/// Bytes of bodies that a project has sent within the minute, and seconds until none count.
pub async fn body_bytes(app: &App, project_id: ProjectId, limits: &Limits) -> Option<(i64, u32)> {
    let charge = body_charge(project_id, limits, 0)?;
    let standing = app.accounts.limiter.peek(&[charge]).await.pop()?;
    let units = u64::from(standing.rate.count.saturating_sub(standing.remaining));
    Some((i64::try_from(units * BODY_UNIT_BYTES).unwrap_or(i64::MAX), standing.reset_seconds))
}

/// The state of each budget of a project for this caller, and the number of parked polls.
pub async fn project_limits(
    app: &App,
    who: &Who,
    project_id: ProjectId,
    limits: &Limits,
) -> (Vec<(&'static str, Standing)>, Option<u32>) {
    let mut standings = Vec::new();
    for budget in Budget::ALL {
        let charges = charges(who, project_id, limits, budget, 0);
        let standings_of_budget = app.accounts.limiter.peek(&charges).await;
        let tightest = standings_of_budget.into_iter().min_by_key(|it| it.remaining);
        standings.extend(tightest.map(|it| (budget.name(), it)));
    }
    let name = format!("polls:{{p{}}}", project_id.0);
    let parked = match limits.parked_polls {
        Some(_) => {
            let counted = app.accounts.limiter.taken(&name).await;
            Some(counted.unwrap_or_else(|| app.local_permits.taken(&name)))
        }
        None => None,
    };
    (standings, parked)
}

#[cfg(test)]
mod tests {
    use fencepost_domain::{limits, plan::Plans};

    use super::*;

    #[test]
    fn every_plan_allows_its_own_largest_calls() {
        let plans = Plans::built_in();
        for plan in plans.names() {
            let limits = plans.limits(plan);
            let calls = [
                (Budget::Produce, Cost::Items(limits::MAX_ENQUEUE_BATCH_JOBS)),
                (Budget::Produce, Cost::Items(limits::MAX_WORKFLOW_JOBS)),
                (Budget::Work, Cost::Items(limits::MAX_ACK_BATCH)),
                (Budget::Work, Cost::Items(limits::MAX_EVENTS)),
                (Budget::Work, Cost::Leases(limits::MAX_BEAT_JOBS)),
            ];
            for (budget, cost) in calls {
                let burst = budget.of(&limits).unwrap_or(u32::MAX);
                assert!(cost.calls() <= burst, "{plan}, {}: {cost:?}", budget.name());
            }
        }
    }

    #[test]
    fn a_worker_with_fifty_slots_fits_every_plan() {
        const SLOTS: u32 = 50;
        const JOBS_PER_MINUTE: u32 = SLOTS * 60;
        let plans = Plans::built_in();
        for plan in plans.names() {
            let limits = plans.limits(plan);
            // Jobs of a second, each polled, renewed and acked by itself; and a heartbeat of the
            // worker every five seconds.
            let beat = Cost::Leases(SLOTS as usize).calls();
            let needed = JOBS_PER_MINUTE * 3 + 12 * beat;
            assert!(limits.work_per_minute.is_none_or(|it| needed <= it), "{plan}: {needed}");
            assert!(limits.produce_per_minute.is_none_or(|it| JOBS_PER_MINUTE <= it), "{plan}");
        }
    }

    #[test]
    fn a_call_costs_at_least_one() {
        let costs = [Cost::Items(0), Cost::Items(7), Cost::Leases(0), Cost::Leases(51)];
        assert_eq!(costs.map(Cost::calls), [1, 7, 1, 2]);
        assert_eq!((Cost::Items(7).most(5), Cost::Leases(7).most(5)), (5, 250));
    }
}
