//! One claim of the pump: the statements that a deal of looks becomes, and what came back.

use std::{
    collections::HashMap,
    panic::AssertUnwindSafe,
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::FutureExt;
use metrics::{counter, histogram};
use sqlx::{PgConnection, Postgres, pool::PoolConnection};
use tokio::time::timeout;
use uuid::Uuid;

use super::{
    delivery::{self, Handed, trace_of},
    lanes::{DealtLook, Finding},
    limited_claim::{self, GatedFinding},
};
use crate::{
    error::is_faulty_statement,
    ids::{LeaseId, ProjectId},
    store::{
        self,
        claims::{LeasedJob, Look, Slot},
        pools::Pool,
    },
    telemetry,
    traces::{self, Leased},
};

/// A claim that has not come back by then is given up: its peer may be gone without a word.
const CLAIM_TIMEOUT: Duration = Duration::from_secs(30);
/// Time for looks that go one by one after they failed together; the rest come later.
const SINGLE_LOOKS_TIME: Duration = Duration::from_secs(10);
/// Queues of one fallback look.
const MAX_FALLBACK_QUEUES: usize = 500;

/// A claim that is ready to go.
pub(in crate::engine) struct Claim {
    /// Each look with the lease of each of its slots.
    looks: Vec<(DealtLook, Vec<LeaseId>)>,
    pool: Pool,
    conn: Option<PoolConnection<Postgres>>,
}

/// A claim that came back, and its connection if it is still good.
#[derive(Default)]
pub(in crate::engine) struct Flight {
    pub conn: Option<PoolConnection<Postgres>>,
    pub landed: Vec<Landed>,
}

/// A look that came back.
pub(in crate::engine) struct Landed {
    pub look: DealtLook,
    pub outcome: LookOutcome,
}

/// What a look came back with.
pub(in crate::engine) enum LookOutcome {
    /// Jobs, each with the number of its slot.
    Found { jobs: Vec<(usize, Handed)>, finding: Finding },
    /// The store refused the statement: nothing was leased.
    Refused,
    /// Nobody knows whether these leases were given.
    InDoubt(Vec<LeaseId>),
}

impl LookOutcome {
    /// For the lane; none when the look failed.
    pub fn finding(&self) -> Option<Finding> {
        match self {
            Self::Found { finding, .. } => Some(*finding),
            Self::Refused | Self::InDoubt(_) => None,
        }
    }
}

impl Claim {
    /// A claim over an idle connection, or over one that is still to be had.
    pub fn new(looks: Vec<DealtLook>, pool: Pool, conn: Option<PoolConnection<Postgres>>) -> Self {
        let with_leases = |look: DealtLook| {
            let lease_ids = look.slots.iter().map(|_| LeaseId(Uuid::new_v4())).collect();
            (look, lease_ids)
        };
        Self { looks: looks.into_iter().map(with_leases).collect(), pool, conn }
    }

    /// Runs it. It lands whatever happens, or its polls would wait for ever.
    pub async fn fly(self) -> Flight {
        let started = Instant::now();
        let slots = self.looks.iter().map(|(look, _)| look.slots.len()).sum::<usize>();
        let looks = self.looks.clone();
        let claimed = AssertUnwindSafe(timeout(CLAIM_TIMEOUT, self.claim())).catch_unwind().await;
        let flight = match claimed {
            Ok(Ok(flight)) => flight,
            Ok(Err(_)) => {
                note_failure(&sqlx::Error::PoolTimedOut);
                Flight { conn: None, landed: looks.into_iter().map(in_doubt).collect() }
            }
            Err(_) => {
                counter!(telemetry::PANICS).increment(1);
                Flight { conn: None, landed: looks.into_iter().map(in_doubt).collect() }
            }
        };
        histogram!(telemetry::BATCH_ITEMS, "kind" => "claim").record(slots as f64);
        histogram!(telemetry::BATCH_SECONDS, "kind" => "claim")
            .record(started.elapsed().as_secs_f64());
        count_claimed(&flight.landed);
        flight
    }

    async fn claim(self) -> Flight {
        let Self { looks, pool, conn } = self;
        let conn = match conn {
            Some(conn) => Ok(conn),
            None => pool.acquire().await,
        };
        let mut conn = match conn {
            Ok(conn) => conn,
            Err(error) => {
                note_failure(&error);
                let refused = |(look, _)| Landed { look, outcome: LookOutcome::Refused };
                return Flight { conn: None, landed: looks.into_iter().map(refused).collect() };
            }
        };
        let (gated, open, is_known) = with_gates(&mut conn, looks).await;
        let (any_type, some_types): (Vec<_>, Vec<_>) =
            open.into_iter().partition(|(look, _)| look.job_types.is_empty());
        let mut landed = claim_any_type(&mut conn, any_type).await;
        for look in some_types {
            landed.push(claim_some_types(&mut conn, look).await);
        }
        for look in gated {
            landed.push(claim_gated(&mut conn, look).await);
        }
        for it in landed.iter_mut().filter(|it| is_known && it.look.may_have_gates) {
            if let LookOutcome::Found { finding, .. } = &mut it.outcome {
                finding.has_gates.get_or_insert(false);
            }
        }
        add_background(&mut conn, &mut landed).await;
        let is_good = landed.iter().all(|it| it.outcome.finding().is_some());
        Flight { conn: Some(conn).filter(|_| is_good), landed }
    }
}

fn in_doubt((look, lease_ids): (DealtLook, Vec<LeaseId>)) -> Landed {
    Landed { look, outcome: LookOutcome::InDoubt(lease_ids) }
}

/// A statement that the store refused, or stopped for its length, has leased nothing.
fn failed(look: (DealtLook, Vec<LeaseId>), error: &sqlx::Error) -> Landed {
    note_failure(error);
    if is_refused(error) {
        return Landed { look: look.0, outcome: LookOutcome::Refused };
    }
    in_doubt(look)
}

fn is_refused(error: &sqlx::Error) -> bool {
    const QUERY_CANCELED: &str = "57014";
    is_faulty_statement(error)
        || matches!(error, sqlx::Error::Database(it) if it.code().as_deref() == Some(QUERY_CANCELED))
}

fn note_failure(error: &sqlx::Error) {
    counter!(telemetry::STORE_ERRORS, "kind" => "claim").increment(1);
    tracing::warn!(error = error as &dyn std::error::Error, "a claim failed");
}

fn tell_trace(job: &LeasedJob) {
    let Some(trace) = trace_of(job) else { return };
    traces::lease(&Leased {
        trace,
        queue: &job.queue,
        job_id: job.id.to_string(),
        job_type: &job.job_type,
        attempt: job.attempt,
        ready_at: job.ready_at(),
        claimed_at: job.claimed_at,
    });
}

fn count_claimed(landed: &[Landed]) {
    let found = landed.iter().filter_map(|it| match &it.outcome {
        LookOutcome::Found { jobs, .. } => Some(jobs),
        LookOutcome::Refused | LookOutcome::InDoubt(_) => None,
    });
    for (_, Handed { job, .. }) in found.flatten() {
        counter!(telemetry::JOBS_CLAIMED).increment(1);
        if let Some(waited) = job.waited() {
            histogram!(telemetry::PICKUP_SECONDS).record(waited.as_seconds_f64().max(0.0));
        }
    }
}

/// One statement for all looks. When the store refuses it, one for each: a look that is too slow
/// must not take the others down.
async fn claim_any_type(
    conn: &mut PgConnection,
    looks: Vec<(DealtLook, Vec<LeaseId>)>,
) -> Vec<Landed> {
    if looks.is_empty() {
        return Vec::new();
    }
    let statement: Vec<_> = looks.iter().map(to_look).collect();
    let found = store::claims::claim_any_type(conn, &statement).await;
    drop(statement);
    match found {
        Ok(found) => deal_out(looks, found),
        Err(error) if looks.len() > 1 && is_refused(&error) => {
            note_failure(&error);
            let (started, mut landed) = (Instant::now(), Vec::with_capacity(looks.len()));
            for look in looks {
                let has_time = started.elapsed() < SINGLE_LOOKS_TIME;
                landed.push(match has_time {
                    true => claim_one(conn, look).await,
                    false => Landed { look: look.0, outcome: LookOutcome::Refused },
                });
            }
            landed
        }
        Err(error) => looks.into_iter().map(|look| failed(look, &error)).collect(),
    }
}

/// Parts the looks at queues that have gates, and those for commands, from the others, and says whether the answer is known. Asked
/// only where there may be some; when the question fails, nobody passes a gate unasked: the other statements
/// do not see what is behind.
async fn with_gates(
    conn: &mut PgConnection,
    looks: Vec<(DealtLook, Vec<LeaseId>)>,
) -> (Vec<(DealtLook, Vec<LeaseId>)>, Vec<(DealtLook, Vec<LeaseId>)>, bool) {
    let asked: Vec<_> = looks.iter().filter(|(look, _)| look.may_have_gates).collect();
    if asked.is_empty() {
        let (chosen, open) = looks.into_iter().partition(|(look, _)| look.only_commands);
        return (chosen, open, true);
    }
    let queues: Vec<_> = asked.iter().map(|(it, _)| (it.project_id, &*it.queue)).collect();
    let found = store::limited_claims::queues_with_gates(conn, &queues).await;
    let is_known = found.is_ok();
    let numbers = found.unwrap_or_else(|error| {
        note_failure(&error);
        Vec::new()
    });
    let named = numbers.into_iter().filter_map(|it| asked.get(usize::try_from(it).ok()?));
    let gated: std::collections::HashSet<_> = named.map(|(it, _)| it.lane).collect();
    let is_chosen = |look: &DealtLook| look.only_commands || gated.contains(&look.lane);
    let (gated, open) = looks.into_iter().partition(|(look, _)| is_chosen(look));
    (gated, open, is_known)
}

async fn claim_gated(conn: &mut PgConnection, look: (DealtLook, Vec<LeaseId>)) -> Landed {
    match limited_claim::claim(conn, &to_look(&look)).await {
        Ok(GatedFinding { jobs, chosen, was_contended, rests_for }) => {
            let mut landed = deal_out_one(look.0, jobs, Some(chosen));
            if let LookOutcome::Found { finding, .. } = &mut landed.outcome {
                finding.has_gates = Some(true);
                finding.was_contended |= was_contended && finding.is_short;
                finding.is_short &= !was_contended;
                finding.rests_for = rests_for;
            }
            landed
        }
        Err(error) => failed(look, &error),
    }
}

async fn claim_one(conn: &mut PgConnection, look: (DealtLook, Vec<LeaseId>)) -> Landed {
    let found = store::claims::claim_any_type(conn, &[to_look(&look)]).await;
    match found {
        Ok(found) => deal_out_one(look.0, found, None),
        Err(error) => failed(look, &error),
    }
}

async fn claim_some_types(conn: &mut PgConnection, look: (DealtLook, Vec<LeaseId>)) -> Landed {
    let found = store::claims::claim_some_types(conn, &to_look(&look)).await;
    match found {
        Ok((found, chosen)) => deal_out_one(look.0, found, Some(chosen)),
        Err(error) => failed(look, &error),
    }
}

fn to_look((dealt, lease_ids): &(DealtLook, Vec<LeaseId>)) -> Look<'_> {
    let slots = dealt.slots.iter().zip(lease_ids);
    Look {
        project_id: dealt.project_id,
        queue: &dealt.queue,
        job_types: &dealt.job_types,
        labels: &dealt.labels,
        only_commands: dealt.only_commands,
        from: dealt.from,
        slots: slots
            .map(|((_, wish), lease_id)| Slot {
                worker_id: &wish.worker_id,
                lease_seconds: wish.lease_seconds,
                poll_id: wish.poll_id,
                lease_id: *lease_id,
            })
            .collect(),
    }
}

/// Slots are numbered through all looks of a statement; each look gets its own back.
fn deal_out(looks: Vec<(DealtLook, Vec<LeaseId>)>, found: Vec<LeasedJob>) -> Vec<Landed> {
    let mut by_slot: HashMap<usize, LeasedJob> =
        found.into_iter().filter_map(|it| Some((usize::try_from(it.slot?).ok()?, it))).collect();
    let mut first = 0;
    let mut landed = Vec::with_capacity(looks.len());
    for (look, _) in looks {
        let slots = look.slots.len();
        let of_look = (first..first + slots).zip(0_i64..).filter_map(|(slot, number)| {
            by_slot.remove(&slot).map(|it| LeasedJob { slot: Some(number), ..it })
        });
        let of_look = of_look.collect();
        first += slots;
        landed.push(deal_out_one(look, of_look, None));
    }
    landed
}

/// `chosen` is how many were there, where that is not how many were leased.
fn deal_out_one(look: DealtLook, found: Vec<LeasedJob>, chosen: Option<usize>) -> Landed {
    let wanted = look.slots.len();
    let there = chosen.unwrap_or(found.len());
    let finding = Finding {
        is_short: there < wanted,
        was_contended: there >= wanted && found.len() < wanted,
        last: found.iter().map(LeasedJob::claim_key).max(),
        has_gates: None,
        rests_for: None,
    };
    found.iter().for_each(tell_trace);
    let jobs = found.into_iter().filter_map(|job| {
        let slot = usize::try_from(job.slot?).ok()?;
        let worker_id = Arc::clone(&look.slots.get(slot)?.1.worker_id);
        Some((slot, Handed::new(job, worker_id)))
    });
    let jobs = jobs.collect();
    Landed { look, outcome: LookOutcome::Found { jobs, finding } }
}

async fn add_background(conn: &mut PgConnection, landed: &mut [Landed]) {
    let found = landed.iter_mut().filter_map(|it| match &mut it.outcome {
        LookOutcome::Found { jobs, .. } => Some(jobs),
        LookOutcome::Refused | LookOutcome::InDoubt(_) => None,
    });
    let handed = found.flatten().map(|(_, it)| it);
    delivery::add_background(conn, handed.collect()).await;
}

/// Which of these queues hold work, as far as the store answers.
pub(in crate::engine) async fn look_for_work(
    pool: Pool,
    queues: Vec<(ProjectId, Arc<str>)>,
) -> Vec<(ProjectId, Arc<str>)> {
    let mut found = Vec::new();
    for queues in queues.chunks(MAX_FALLBACK_QUEUES) {
        let look = async {
            let mut conn = pool.acquire().await?;
            store::polls::queues_with_work(&mut conn, queues).await
        };
        match timeout(CLAIM_TIMEOUT, look).await.unwrap_or(Err(sqlx::Error::PoolTimedOut)) {
            Ok(numbers) => found.extend(
                numbers.into_iter().filter_map(|it| queues.get(usize::try_from(it).ok()?).cloned()),
            ),
            Err(error) => note_failure(&error),
        }
    }
    found
}
