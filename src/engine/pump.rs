//! The claim pump: one task a node that claims for all parked polls.
//!
//! It alone owns what is known of the queues ([`Lanes`]) and answers every parked poll, so a poll
//! that ends while a claim for it is under way is answered by that claim. A poll that is gone when
//! its jobs arrive gives them back at once.

use std::{
    collections::{BTreeSet, HashMap},
    panic::AssertUnwindSafe,
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::FutureExt;
use metrics::{counter, histogram};
use sqlx::{PgConnection, PgPool, Postgres, pool::PoolConnection};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinSet,
    time::MissedTickBehavior,
};
use uuid::Uuid;

use super::{
    coalesce::Coalescer,
    lanes::{DealtLook, Lanes, WaiterId, Wish},
    settle::{EndRequest, Endings},
};
use crate::{
    domain::{lease::Fence, text::ErrorReport},
    ids::ProjectId,
    store::{
        self,
        acks::JobKey,
        claims::{ClaimKey, LeasedJob, Look, Slot},
    },
    telemetry,
    wake::{Arrivals, Hint},
};

/// Claims under way at the most, when the backlog is deep.
const MAX_FLIGHTS: usize = 3;
/// How often queues that are believed empty are looked at all the same: another node may have
/// stored something.
const FALLBACK_PERIOD: Duration = Duration::from_secs(2);
/// Queues of one fallback look.
const MAX_FALLBACK_QUEUES: usize = 500;
/// Messages and hints that are heard before the next claim.
const MAX_DRAINED: usize = 1_000;
/// After a failed claim the pump rests, so that a dead store is not hammered.
const FAILURE_PAUSE: Duration = Duration::from_millis(500);

/// A job as a worker is given it.
#[derive(Debug, Clone)]
pub struct Handed {
    /// The job and its lease.
    pub job: LeasedJob,
    /// Who got it.
    pub worker_id: Arc<str>,
    /// What its last failed attempt reported.
    pub last_error: Option<ErrorReport>,
}

/// What polls tell the pump.
pub(super) enum Message {
    /// A poll parks. One that is not `patient` wants one look and no wait.
    Park { id: WaiterId, wish: Box<Wish>, is_patient: bool, answer: oneshot::Sender<Vec<Handed>> },
    /// A poll wants its answer now, whatever it is.
    Leave(WaiterId),
    /// These were handed to somebody who never got them.
    GiveBack(Vec<Handed>),
}

type PollKey = (ProjectId, Arc<str>, Uuid);

struct Pump {
    pool: PgPool,
    endings: Coalescer<Endings>,
    lanes: Lanes,
    answers: HashMap<WaiterId, oneshot::Sender<Vec<Handed>>>,
    impatient: BTreeSet<WaiterId>,
    by_poll_id: HashMap<PollKey, WaiterId>,
    /// Polls in flight whose successor with the same poll id has come.
    successors: HashMap<WaiterId, WaiterId>,
    /// Polls in flight that want their answer when the flight is over.
    leaving: BTreeSet<WaiterId>,
    resting_until: Option<Instant>,
    /// Connections of claims that landed a moment ago.
    idle: Vec<PoolConnection<Postgres>>,
}

/// Runs until every sender of messages is gone.
pub(super) async fn run(
    pool: PgPool,
    endings: Coalescer<Endings>,
    mut messages: mpsc::UnboundedReceiver<Message>,
    mut arrivals: Arrivals,
) {
    let mut pump = Pump {
        pool,
        endings,
        lanes: Lanes::default(),
        answers: HashMap::new(),
        impatient: BTreeSet::new(),
        by_poll_id: HashMap::new(),
        successors: HashMap::new(),
        leaving: BTreeSet::new(),
        resting_until: None,
        idle: Vec::new(),
    };
    let mut flights: JoinSet<Flight> = JoinSet::new();
    let mut fallbacks: JoinSet<Vec<(ProjectId, Arc<str>)>> = JoinSet::new();
    let mut fallback_tick = tokio::time::interval(FALLBACK_PERIOD);
    fallback_tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let rest = pump.resting_until.map(tokio::time::Instant::from_std);
        tokio::select! {
            message = messages.recv() => match message {
                Some(message) => pump.receive(message),
                None => return,
            },
            Some(hint) = arrivals.next() => pump.hear(&hint),
            Some(flight) = flights.join_next() => pump.land(flight.unwrap_or_default()),
            Some(found) = fallbacks.join_next() => {
                for queue in found.unwrap_or_default() {
                    pump.lanes.distrust(Some(&queue));
                }
            }
            _ = fallback_tick.tick() => if fallbacks.is_empty() {
                pump.lanes.prune(Instant::now());
                pump.idle.clear();
                let queues = pump.lanes.believed_empty();
                if !queues.is_empty() {
                    fallbacks.spawn(look_for_work(pump.pool.clone(), queues));
                }
            },
            () = async { tokio::time::sleep_until(rest.unwrap_or_else(tokio::time::Instant::now)).await },
                if rest.is_some() => pump.resting_until = None,
        }
        // Whoever else is there already shares the next claim.
        for _ in 0..MAX_DRAINED {
            let (message, hint) = (messages.try_recv().ok(), arrivals.try_next());
            if message.is_none() && hint.is_none() {
                break;
            }
            message.into_iter().for_each(|it| pump.receive(it));
            hint.into_iter().for_each(|it| pump.hear(&it));
        }
        pump.take_off(&mut flights);
        pump.answer_the_impatient();
    }
}

impl Pump {
    fn receive(&mut self, message: Message) {
        match message {
            Message::Park { id, wish, is_patient, answer } => {
                self.park(id, *wish, is_patient, answer)
            }
            Message::Leave(id) if self.lanes.is_in_flight(id) => {
                self.leaving.insert(id);
            }
            Message::Leave(id) => self.answer(id, Vec::new()),
            Message::GiveBack(jobs) => self.give_back(jobs),
        }
    }

    fn hear(&mut self, hint: &Hint) {
        match hint {
            Hint::Arrived(arrived) => self.lanes.arrived(arrived),
            Hint::Everywhere => self.lanes.distrust(None),
        }
    }

    fn park(
        &mut self,
        id: WaiterId,
        wish: Wish,
        is_patient: bool,
        answer: oneshot::Sender<Vec<Handed>>,
    ) {
        let poll_key = poll_key(&wish);
        let earlier = poll_key.as_ref().and_then(|it| self.by_poll_id.insert(it.clone(), id));
        match earlier {
            Some(earlier) if self.lanes.is_in_flight(earlier) => {
                if let Some(replaced) = self.answers.remove(&earlier) {
                    let _ = replaced.send(Vec::new());
                }
                self.leaving.remove(&earlier);
                self.lanes.rename(earlier, id);
                self.successors.insert(earlier, id);
            }
            Some(earlier) => {
                self.answer(earlier, Vec::new());
                self.by_poll_id.extend(poll_key.map(|it| (it, id)));
                self.lanes.park(id, wish, !is_patient, Instant::now());
            }
            None => self.lanes.park(id, wish, !is_patient, Instant::now()),
        }
        self.answers.insert(id, answer);
        if !is_patient {
            self.impatient.insert(id);
        }
    }

    /// Ends a poll. When it is gone, its jobs go back.
    fn answer(&mut self, id: WaiterId, jobs: Vec<Handed>) {
        if let Some(poll_key) = self.lanes.wish(id).and_then(poll_key) {
            self.by_poll_id.remove(&poll_key);
        }
        self.lanes.leave(id);
        self.impatient.remove(&id);
        self.leaving.remove(&id);
        let undelivered = match self.answers.remove(&id) {
            Some(answer) => answer.send(jobs).err().unwrap_or_default(),
            None => jobs,
        };
        self.give_back(undelivered);
    }

    fn give_back(&self, jobs: Vec<Handed>) {
        for Handed { job, worker_id, .. } in jobs {
            let request = EndRequest {
                key: JobKey { project_id: job.project_id, id: job.id },
                fence: Fence {
                    worker_id: worker_id.to_string(),
                    attempt: Some(job.attempt),
                    lease_id: Some(job.lease_id),
                },
                failure: None,
                duration_ms: None,
            };
            let endings = self.endings.clone();
            counter!(telemetry::JOBS_GIVEN_BACK).increment(1);
            tokio::spawn(async move {
                if let Err(error) = endings.submit(request).await {
                    tracing::warn!(job.id = %job.id, %error, "a job was not given back: its lease will expire");
                }
            });
        }
    }

    fn answer_the_impatient(&mut self) {
        let hopeless: Vec<_> =
            self.impatient.iter().copied().filter(|it| self.lanes.is_hopeless(*it)).collect();
        for id in hopeless {
            self.answer(id, Vec::new());
        }
    }

    fn take_off(&mut self, flights: &mut JoinSet<Flight>) {
        while self.resting_until.is_none() && flights.len() < MAX_FLIGHTS {
            let looks = self.lanes.deal(!flights.is_empty(), Instant::now());
            if looks.is_empty() {
                return;
            }
            let failed: Vec<_> =
                looks.iter().map(|it| Landed { look: it.clone(), found: None }).collect();
            let claim = claim(self.pool.clone(), self.idle.pop(), looks);
            flights.spawn(async move {
                // A claim that panics must land all the same, or its polls would wait for ever.
                AssertUnwindSafe(claim).catch_unwind().await.unwrap_or_else(|_| {
                    counter!(telemetry::PANICS).increment(1);
                    Flight { conn: None, landed: failed }
                })
            });
        }
    }

    fn land(&mut self, Flight { conn, landed }: Flight) {
        self.idle.extend(conn);
        let now = Instant::now();
        let mut jobs_of: HashMap<WaiterId, Vec<Handed>> = HashMap::new();
        for Landed { look, found } in landed {
            let summary = found.as_ref().map(|it| {
                let last = it.iter().map(|(_, it)| key_of(&it.job)).max();
                (it.len(), last)
            });
            if summary.is_none() {
                self.resting_until = Some(now + FAILURE_PAUSE);
            }
            let look = self.follow(look);
            self.lanes.landed(&look, summary, now);
            for id in look.slots.iter().map(|(id, _)| *id) {
                jobs_of.entry(id).or_default();
            }
            for (slot, handed) in found.unwrap_or_default() {
                match look.slots.get(slot) {
                    Some((id, _)) => jobs_of.entry(*id).or_default().push(handed),
                    None => self.give_back(vec![handed]),
                }
            }
        }
        for (id, mut jobs) in jobs_of {
            if !jobs.is_empty() || self.leaving.contains(&id) {
                jobs.sort_by_key(|it| (key_of(&it.job), it.job.id));
                self.answer(id, jobs);
            }
        }
    }

    /// Replaces polls by their successors.
    fn follow(&mut self, mut look: DealtLook) -> DealtLook {
        for (id, _) in &mut look.slots {
            if let Some(successor) = self.successors.get(id) {
                *id = *successor;
            }
        }
        let in_flight = &self.lanes;
        self.successors.retain(|_, it| in_flight.is_in_flight(*it));
        look
    }
}

fn poll_key(wish: &Wish) -> Option<PollKey> {
    Some((wish.project_id, Arc::clone(&wish.worker_id), wish.poll_id?))
}

fn key_of(job: &LeasedJob) -> ClaimKey {
    ClaimKey { rank: job.rank, run_at: job.run_at }
}

/// A look that came back: what was found, with the slot it is for. None: the claim failed.
struct Landed {
    look: DealtLook,
    found: Option<Vec<(usize, Handed)>>,
}

/// A claim that came back, and its connection if it is still good.
#[derive(Default)]
struct Flight {
    conn: Option<PoolConnection<Postgres>>,
    landed: Vec<Landed>,
}

async fn claim(
    pool: PgPool,
    idle: Option<PoolConnection<Postgres>>,
    looks: Vec<DealtLook>,
) -> Flight {
    let started = Instant::now();
    let slots = looks.iter().map(|it| it.slots.len()).sum::<usize>();
    let (any_type, some_types): (Vec<_>, Vec<_>) =
        looks.into_iter().partition(|it| it.job_types.is_empty());
    let mut landed = Vec::new();
    let conn = match idle {
        Some(conn) => Ok(conn),
        None => pool.acquire().await,
    };
    let conn = match conn {
        Ok(mut conn) => {
            claim_all(&mut conn, any_type, some_types, &mut landed).await;
            add_last_errors(&mut conn, &mut landed).await;
            Some(conn).filter(|_| landed.iter().all(|it| it.found.is_some()))
        }
        Err(error) => {
            note_failure(&error);
            let looks = any_type.into_iter().chain(some_types);
            landed.extend(looks.map(|look| Landed { look, found: None }));
            None
        }
    };
    histogram!(telemetry::BATCH_ITEMS, "kind" => "claim").record(slots as f64);
    histogram!(telemetry::BATCH_SECONDS, "kind" => "claim").record(started.elapsed().as_secs_f64());
    count_claimed(&landed);
    Flight { conn, landed }
}

fn note_failure(error: &sqlx::Error) {
    counter!(telemetry::STORE_ERRORS, "kind" => "claim").increment(1);
    tracing::warn!(error = error as &dyn std::error::Error, "a claim failed");
}

fn count_claimed(landed: &[Landed]) {
    let found = || landed.iter().filter_map(|it| it.found.as_ref()).flatten();
    counter!(telemetry::JOBS_CLAIMED).increment(found().count() as u64);
    for (_, Handed { job, .. }) in found() {
        let ready_at = job.run_at.max(job.created_at);
        let waited_ms =
            (job.claimed_at - ready_at).num_microseconds().unwrap_or(i64::MAX) as f64 / 1e6;
        histogram!(telemetry::PICKUP_SECONDS).record(waited_ms.max(0.0));
    }
}

async fn claim_all(
    conn: &mut PgConnection,
    any_type: Vec<DealtLook>,
    some_types: Vec<DealtLook>,
    landed: &mut Vec<Landed>,
) {
    if !any_type.is_empty() {
        let looks: Vec<_> = any_type.iter().map(to_look).collect();
        let found = store::claims::claim_any_type(conn, &looks).await;
        drop(looks);
        deal_out(any_type, found, landed);
    }
    for look in some_types {
        let found = store::claims::claim_some_types(conn, &to_look(&look)).await;
        deal_out(vec![look], found, landed);
    }
}

fn to_look(dealt: &DealtLook) -> Look<'_> {
    Look {
        project_id: dealt.project_id,
        queue: &dealt.queue,
        job_types: &dealt.job_types,
        from: dealt.from,
        slots: dealt
            .slots
            .iter()
            .map(|(_, wish)| Slot {
                worker_id: &wish.worker_id,
                lease_seconds: wish.lease_seconds,
                poll_id: wish.poll_id,
            })
            .collect(),
    }
}

/// Slots are numbered through all looks of a statement; each look gets its own back.
fn deal_out(looks: Vec<DealtLook>, found: sqlx::Result<Vec<LeasedJob>>, landed: &mut Vec<Landed>) {
    let found = match found {
        Ok(found) => found,
        Err(error) => {
            note_failure(&error);
            landed.extend(looks.into_iter().map(|look| Landed { look, found: None }));
            return;
        }
    };
    let mut by_slot: HashMap<usize, LeasedJob> =
        found.into_iter().filter_map(|it| Some((usize::try_from(it.slot?).ok()?, it))).collect();
    let mut first = 0;
    for look in looks {
        let jobs = (0..look.slots.len()).filter_map(|slot| {
            let job = by_slot.remove(&(first + slot))?;
            let worker_id = Arc::clone(&look.slots[slot].1.worker_id);
            Some((slot, Handed { job, worker_id, last_error: None }))
        });
        let found = jobs.collect();
        first += look.slots.len();
        landed.push(Landed { look, found: Some(found) });
    }
}

async fn add_last_errors(conn: &mut PgConnection, landed: &mut [Landed]) {
    let handed = landed.iter_mut().filter_map(|it| it.found.as_mut()).flatten();
    let mut retried: Vec<_> = handed.map(|(_, it)| it).filter(|it| it.job.failures > 0).collect();
    super::dispatch::add_last_errors(conn, &mut retried).await;
}

async fn look_for_work(
    pool: PgPool,
    queues: Vec<(ProjectId, Arc<str>)>,
) -> Vec<(ProjectId, Arc<str>)> {
    let mut found = Vec::new();
    for queues in queues.chunks(MAX_FALLBACK_QUEUES) {
        let looked = match pool.acquire().await {
            Ok(mut conn) => store::claims::queues_with_work(&mut conn, queues).await,
            Err(error) => Err(error),
        };
        match looked {
            Ok(numbers) => found.extend(
                numbers.into_iter().filter_map(|it| queues.get(usize::try_from(it).ok()?).cloned()),
            ),
            Err(error) => note_failure(&error),
        }
    }
    found
}
