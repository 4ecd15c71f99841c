//! One claim of the pump: runs the statements for all planned queue claims and sorts the results.

use std::{
    collections::HashMap,
    panic::AssertUnwindSafe,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use fencepost_domain::{
    error::is_faulty_statement,
    ids::{LeaseId, ProjectId},
};
use fencepost_signals::{
    telemetry,
    traces::{self, Leased},
};
use fencepost_store::{
    self as store,
    claims::{LeaseRequest, LeasedJob, QueueClaim},
    connection::{
        deadline::{bounded, bounded_query},
        pools::{self, Kept, Pool},
    },
    faults,
};
use futures_util::FutureExt;
use metrics::{counter, histogram};
use rand::RngExt;
use sqlx::PgConnection;
use tokio::sync::mpsc;
use uuid::Uuid;

use super::{
    dispatched::{self, DispatchedJob, trace_of},
    lanes::{Claimed, PlannedClaim},
    limited_claim::{self, LimitedClaimed},
};

/// Time for queue claims that run one by one after their common statement failed.
const SINGLE_CLAIMS_TIME: Duration = Duration::from_secs(10);
/// See [`faults::FAIL_POINTS`].
const FAIL_POINT: &str = "claim";
/// Queues of one fallback query.
const MAX_FALLBACK_QUEUES: usize = 500;

/// A claim that is ready to run.
pub(crate) struct Claim {
    /// Each queue claim, with a lease id for each of its lease requests.
    claims: Vec<(PlannedClaim, Vec<LeaseId>)>,
    pool: Pool,
    conn: Option<pools::Connection>,
}

/// The claims that completed last, and the connection if it can be reused.
#[derive(Default)]
pub(crate) struct CompletedClaims {
    pub conn: Option<pools::Connection>,
    pub completed: Vec<CompletedClaim>,
}

/// A completed queue claim.
pub(crate) struct CompletedClaim {
    pub claim: PlannedClaim,
    pub outcome: ClaimOutcome,
}

/// The result of a queue claim.
pub(crate) enum ClaimOutcome {
    /// Jobs, each with the index of its lease request.
    Found { jobs: Vec<(usize, DispatchedJob)>, finding: Claimed },
    /// The database refused the statement: nothing was leased.
    Refused,
    /// The connection was lost: these leases may have been granted.
    InDoubt(Vec<LeaseId>),
}

impl ClaimOutcome {
    /// The findings for the lane; none if the claim failed.
    pub fn finding(&self) -> Option<Claimed> {
        match self {
            Self::Found { finding, .. } => Some(*finding),
            Self::Refused | Self::InDoubt(_) => None,
        }
    }
}

impl Claim {
    /// Uses the idle connection if there is one, and takes one from the pool otherwise.
    pub fn new(claims: Vec<PlannedClaim>, pool: Pool, conn: Option<pools::Connection>) -> Self {
        let with_leases = |claim: PlannedClaim| {
            let lease_ids = claim.slots.iter().map(|_| LeaseId(Uuid::new_v4())).collect();
            (claim, lease_ids)
        };
        Self { claims: claims.into_iter().map(with_leases).collect(), pool, conn }
    }

    /// Runs the claim. Each queue claim lands as soon as it is complete, the last ones with the
    /// result. None is left out, or its polls would wait forever.
    pub async fn run(self, landing: Landing) -> CompletedClaims {
        let started = Instant::now();
        let Self { claims, pool, conn } = self;
        let slots = claims.iter().map(|(claim, _)| claim.slots.len()).sum::<usize>();
        let left = Left { claims: Mutex::new(claims.clone()), landing };
        let claimed = bounded(claim_all(claims, &pool, conn, &left));
        let completed = match AssertUnwindSafe(claimed).catch_unwind().await {
            Ok(Ok(completed)) => completed,
            Ok(Err(overdue)) => {
                record_failure(&overdue.into(), "claim");
                left.in_doubt()
            }
            Err(_) => {
                counter!(telemetry::PANICS).increment(1);
                left.in_doubt()
            }
        };
        count_claimed(&completed.completed);
        histogram!(telemetry::BATCH_ITEMS, "kind" => "claim").record(slots as f64);
        histogram!(telemetry::BATCH_SECONDS, "kind" => "claim")
            .record(started.elapsed().as_secs_f64());
        completed
    }
}

/// Where completed queue claims go.
pub(crate) type Landing = mpsc::UnboundedSender<Vec<CompletedClaim>>;

/// Queue claims that are not complete yet.
struct Left {
    claims: Mutex<Vec<(PlannedClaim, Vec<LeaseId>)>>,
    landing: Landing,
}

impl Left {
    fn land(&self, completed: Vec<CompletedClaim>) {
        count_claimed(&completed);
        let mut claims = self.claims.lock().unwrap_or_else(PoisonError::into_inner);
        claims.retain(|(left, _)| completed.iter().all(|it| it.claim.lane != left.lane));
        // The pump outlives its claims.
        let _ = self.landing.send(completed);
    }

    fn in_doubt(&self) -> CompletedClaims {
        let mut claims = self.claims.lock().unwrap_or_else(PoisonError::into_inner);
        let completed = std::mem::take(&mut *claims).into_iter().map(in_doubt).collect();
        CompletedClaims { conn: None, completed }
    }
}

async fn claim_all(
    claims: Vec<(PlannedClaim, Vec<LeaseId>)>,
    pool: &Pool,
    conn: Option<pools::Connection>,
    left: &Left,
) -> CompletedClaims {
    let conn = match conn.and_then(Kept::reuse) {
        Some(conn) => Ok(conn),
        None => pool.acquire().await,
    };
    let mut conn = match conn {
        Ok(conn) => conn,
        Err(error) => {
            record_failure(&error, "connect");
            let refused = |(claim, _)| CompletedClaim { claim, outcome: ClaimOutcome::Refused };
            let completed = claims.into_iter().map(refused).collect();
            return CompletedClaims { conn: None, completed };
        }
    };
    let (mut constrained, ordinary, is_known) = partition_claims(&mut conn, claims).await;
    let (any_type, some_types): (Vec<_>, Vec<_>) =
        ordinary.into_iter().partition(|(claim, _)| claim.job_types.is_empty());
    let any_type = Some(any_type).filter(|it| !it.is_empty());
    let mut parts: Vec<_> = any_type.map(Part::AnyType).into_iter().collect();
    parts.extend(some_types.into_iter().map(Part::SomeTypes));
    shuffle_within_projects(&mut constrained);
    parts.extend(constrained.into_iter().map(Part::Constrained));
    let (mut is_good, mut last) = (true, Vec::new());
    let count = parts.len();
    for (number, part) in parts.into_iter().enumerate() {
        let mut completed = match part {
            Part::AnyType(claims) => claim_any_type(&mut conn, claims).await,
            Part::SomeTypes(claim) => vec![claim_some_types(&mut conn, claim).await],
            Part::Constrained(claim) => vec![claim_constrained(&mut conn, claim).await],
        };
        for it in completed.iter_mut().filter(|it| is_known && it.claim.may_have_constrained) {
            if let ClaimOutcome::Found { finding, .. } = &mut it.outcome {
                finding.has_constrained.get_or_insert(false);
            }
        }
        add_errors_and_results(&mut conn, &mut completed).await;
        is_good &= completed.iter().all(|it| it.outcome.finding().is_some());
        match number + 1 == count {
            true => last = completed,
            false => left.land(completed),
        }
    }
    CompletedClaims { conn: Some(conn).filter(|_| is_good), completed: last }
}

/// Queues that share a limit have their turn at random: what one takes, the next ones lack.
/// Projects keep their places.
fn shuffle_within_projects(claims: &mut [(PlannedClaim, Vec<LeaseId>)]) {
    let mut places: HashMap<ProjectId, Vec<usize>> = HashMap::new();
    for (place, (claim, _)) in claims.iter().enumerate() {
        places.entry(claim.project_id).or_default().push(place);
    }
    for own in places.into_values() {
        for last in (1..own.len()).rev() {
            claims.swap(own[last], own[rand::rng().random_range(..=last)]);
        }
    }
}

/// The claims of one statement or transaction.
enum Part {
    AnyType(Vec<(PlannedClaim, Vec<LeaseId>)>),
    SomeTypes((PlannedClaim, Vec<LeaseId>)),
    Constrained((PlannedClaim, Vec<LeaseId>)),
}

fn in_doubt((claim, lease_ids): (PlannedClaim, Vec<LeaseId>)) -> CompletedClaim {
    CompletedClaim { claim, outcome: ClaimOutcome::InDoubt(lease_ids) }
}

/// A statement that was refused, or cancelled by its timeout, has leased nothing.
fn failed(claim: (PlannedClaim, Vec<LeaseId>), error: &sqlx::Error) -> CompletedClaim {
    record_failure(error, "claim");
    if is_refused(error) {
        return CompletedClaim { claim: claim.0, outcome: ClaimOutcome::Refused };
    }
    in_doubt(claim)
}

fn is_refused(error: &sqlx::Error) -> bool {
    const QUERY_CANCELED: &str = "57014";
    is_faulty_statement(error)
        || matches!(error, sqlx::Error::Database(it) if it.code().as_deref() == Some(QUERY_CANCELED))
}

fn record_failure(error: &sqlx::Error, step: &str) {
    counter!(telemetry::STORE_ERRORS, "kind" => "claim").increment(1);
    let error = error as &dyn std::error::Error;
    tracing::warn!(error, step, "claim failed, will retry");
}

/// Exports the span of a lease.
pub(super) fn record_span(job: &LeasedJob) {
    let Some(trace) = trace_of(job) else { return };
    traces::lease(&Leased {
        trace,
        project: job.project_id,
        queue: &job.queue,
        job_id: job.id.to_string(),
        job_type: &job.job_type,
        attempt: job.attempt,
        ready_at: job.ready_at(),
        claimed_at: job.claimed_at,
    });
}

fn count_claimed(completed: &[CompletedClaim]) {
    let found = completed.iter().filter_map(|it| match &it.outcome {
        ClaimOutcome::Found { jobs, .. } => Some(jobs),
        ClaimOutcome::Refused | ClaimOutcome::InDoubt(_) => None,
    });
    found.flatten().for_each(|(_, it)| count(&it.job));
}

/// Counts a leased job.
pub(super) fn count(job: &LeasedJob) {
    counter!(telemetry::JOBS_CLAIMED).increment(1);
    if let Some(waited) = job.waited() {
        histogram!(telemetry::PICKUP_SECONDS).record(waited.as_seconds_f64().max(0.0));
    }
}

/// One statement for all queue claims. If the database refuses it, each runs alone: one slow queue
/// must not fail the others.
async fn claim_any_type(
    conn: &mut PgConnection,
    claims: Vec<(PlannedClaim, Vec<LeaseId>)>,
) -> Vec<CompletedClaim> {
    if claims.is_empty() {
        return Vec::new();
    }
    let statement: Vec<_> = claims.iter().map(to_queue_claim).collect();
    let found =
        faults::around_commit(FAIL_POINT, store::claims::claim_any_type(conn, &statement)).await;
    drop(statement);
    match found {
        Ok(found) => assign(claims, found),
        Err(error) if claims.len() > 1 && is_refused(&error) => {
            record_failure(&error, "claim");
            let (started, mut completed) = (Instant::now(), Vec::with_capacity(claims.len()));
            for claim in claims {
                let has_time = started.elapsed() < SINGLE_CLAIMS_TIME;
                completed.push(match has_time {
                    true => claim_one(conn, claim).await,
                    false => CompletedClaim { claim: claim.0, outcome: ClaimOutcome::Refused },
                });
            }
            completed
        }
        Err(error) => claims.into_iter().map(|claim| failed(claim, &error)).collect(),
    }
}

/// Separates claims that need the limited path (queues with constraint keys or limits, and polls
/// for commands only) from the others, and says whether the answer is reliable. The database is
/// asked only where constraint keys may exist. If that query fails, all take the ordinary path:
/// ordinary statements never see jobs with a constraint key.
async fn partition_claims(
    conn: &mut PgConnection,
    claims: Vec<(PlannedClaim, Vec<LeaseId>)>,
) -> (Vec<(PlannedClaim, Vec<LeaseId>)>, Vec<(PlannedClaim, Vec<LeaseId>)>, bool) {
    let asked: Vec<_> = claims.iter().filter(|(claim, _)| claim.may_have_constrained).collect();
    if asked.is_empty() {
        let (constrained, ordinary) =
            claims.into_iter().partition(|(claim, _)| claim.only_commands);
        return (constrained, ordinary, true);
    }
    let queues: Vec<_> = asked.iter().map(|(it, _)| (it.project_id, &*it.queue)).collect();
    let found = store::claims::limited_claims::queues_with_constraint_keys(conn, &queues).await;
    let is_known = found.is_ok();
    let numbers = found.unwrap_or_else(|error| {
        record_failure(&error, "constraint keys");
        Vec::new()
    });
    let named = numbers.into_iter().filter_map(|it| asked.get(usize::try_from(it).ok()?));
    let lanes: std::collections::HashSet<_> = named.map(|(it, _)| it.lane).collect();
    let is_constrained = |claim: &PlannedClaim| claim.only_commands || lanes.contains(&claim.lane);
    let (constrained, ordinary) = claims.into_iter().partition(|(claim, _)| is_constrained(claim));
    (constrained, ordinary, is_known)
}

async fn claim_constrained(
    conn: &mut PgConnection,
    claim: (PlannedClaim, Vec<LeaseId>),
) -> CompletedClaim {
    match faults::around_commit(FAIL_POINT, limited_claim::claim(conn, &to_queue_claim(&claim)))
        .await
    {
        Ok(LimitedClaimed { jobs, chosen, was_contended, pause_for }) => {
            let mut completed = assign_one(claim.0, jobs, Some(chosen));
            if let ClaimOutcome::Found { finding, .. } = &mut completed.outcome {
                finding.has_constrained = Some(true);
                finding.was_contended |= was_contended && finding.is_short;
                finding.is_short &= !was_contended;
                finding.pause_for = pause_for;
            }
            completed
        }
        Err(error) => failed(claim, &error),
    }
}

async fn claim_one(conn: &mut PgConnection, claim: (PlannedClaim, Vec<LeaseId>)) -> CompletedClaim {
    let found = faults::around_commit(
        FAIL_POINT,
        store::claims::claim_any_type(conn, &[to_queue_claim(&claim)]),
    )
    .await;
    match found {
        Ok(found) => assign_one(claim.0, found, None),
        Err(error) => failed(claim, &error),
    }
}

async fn claim_some_types(
    conn: &mut PgConnection,
    claim: (PlannedClaim, Vec<LeaseId>),
) -> CompletedClaim {
    let found = faults::around_commit(
        FAIL_POINT,
        store::claims::claim_some_types(conn, &to_queue_claim(&claim)),
    )
    .await;
    match found {
        Ok((found, chosen)) => assign_one(claim.0, found, Some(chosen)),
        Err(error) => failed(claim, &error),
    }
}

fn to_queue_claim((planned, lease_ids): &(PlannedClaim, Vec<LeaseId>)) -> QueueClaim<'_> {
    let slots = planned.slots.iter().zip(lease_ids);
    QueueClaim {
        project_id: planned.project_id,
        queue: &planned.queue,
        job_types: &planned.job_types,
        labels: &planned.labels,
        only_commands: planned.only_commands,
        from: planned.from,
        slots: slots
            .map(|((_, spec), lease_id)| LeaseRequest {
                worker_id: &spec.worker_id,
                lease: spec.lease,
                poll_id: spec.poll_id,
                loss_fails: spec.loss_fails,
                lease_id: *lease_id,
            })
            .collect(),
    }
}

/// Lease requests are numbered through all claims of a statement; each claim gets its own back.
fn assign(claims: Vec<(PlannedClaim, Vec<LeaseId>)>, found: Vec<LeasedJob>) -> Vec<CompletedClaim> {
    let mut by_slot: HashMap<usize, LeasedJob> =
        found.into_iter().filter_map(|it| Some((usize::try_from(it.slot?).ok()?, it))).collect();
    let mut first = 0;
    let mut completed = Vec::with_capacity(claims.len());
    for (claim, _) in claims {
        let slots = claim.slots.len();
        let of_claim = (first..first + slots).zip(0_i64..).filter_map(|(slot, number)| {
            by_slot.remove(&slot).map(|it| LeasedJob { slot: Some(number), ..it })
        });
        let of_claim = of_claim.collect();
        first += slots;
        completed.push(assign_one(claim, of_claim, None));
    }
    completed
}

/// `chosen`: how many jobs were selected, if that differs from how many were leased.
fn assign_one(claim: PlannedClaim, found: Vec<LeasedJob>, chosen: Option<usize>) -> CompletedClaim {
    let wanted = claim.slots.len();
    let available = chosen.unwrap_or(found.len());
    let finding = Claimed {
        is_short: available < wanted,
        was_contended: available >= wanted && found.len() < wanted,
        last: found.iter().map(LeasedJob::claim_key).max(),
        has_constrained: None,
        pause_for: None,
    };
    found.iter().for_each(record_span);
    let jobs = found.into_iter().filter_map(|job| {
        let slot = usize::try_from(job.slot?).ok()?;
        let worker_id = Arc::clone(&claim.slots.get(slot)?.1.worker_id);
        Some((slot, DispatchedJob::new(job, worker_id)))
    });
    let jobs: Vec<_> = jobs.collect();
    CompletedClaim { claim, outcome: ClaimOutcome::Found { jobs, finding } }
}

async fn add_errors_and_results(conn: &mut PgConnection, completed: &mut [CompletedClaim]) {
    let found = completed.iter_mut().filter_map(|it| match &mut it.outcome {
        ClaimOutcome::Found { jobs, .. } => Some(jobs),
        ClaimOutcome::Refused | ClaimOutcome::InDoubt(_) => None,
    });
    let handed = found.flatten().map(|(_, it)| it);
    dispatched::add_errors_and_results(conn, handed.collect()).await;
}

/// Which of these queues have work. Queues whose query fails are left out.
pub(crate) async fn find_queues_with_work(
    pool: Pool,
    queues: Vec<(ProjectId, Arc<str>)>,
) -> Vec<(ProjectId, Arc<str>)> {
    let mut found = Vec::new();
    for queues in queues.chunks(MAX_FALLBACK_QUEUES) {
        let claim = async {
            let mut conn = pool.acquire().await?;
            store::claims::polls::queues_with_work(&mut conn, queues).await
        };
        match bounded_query(claim).await {
            Ok(numbers) => found.extend(
                numbers.into_iter().filter_map(|it| queues.get(usize::try_from(it).ok()?).cloned()),
            ),
            Err(error) => record_failure(&error, "queues with work"),
        }
    }
    found
}
