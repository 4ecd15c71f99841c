//! The claim pump: one task a node that claims for all parked polls.
//!
//! It alone owns what is known of the queues ([`Lanes`]) and answers every parked poll, so a poll
//! that ends while a claim for it is under way is answered by that claim. A poll that is gone when
//! its jobs arrive gives them back at once.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use metrics::counter;
use sqlx::{Postgres, pool::PoolConnection};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinSet,
    time::MissedTickBehavior,
};
use tokio_util::task::TaskTracker;

use super::{
    claim::{Claim, Flight, Landed, LookOutcome, look_for_work},
    delivery::Handed,
    lanes::{DealtLook, Lanes, WaiterId},
    lost_claims,
    request::Wish,
};
use crate::{
    domain::history,
    engine::{
        batch::Coalescer,
        notify::Tidings,
        settle::{self, Endings},
    },
    events_feed::Happening,
    ids::{JobKey, ProjectId},
    store::{
        polls::PollKey,
        pools::{Pool, Pools},
    },
    telemetry,
    wakeups::{Arrivals, Hint},
};

/// Claims under way at the most, when the backlog is deep.
const MAX_FLIGHTS: usize = 3;
/// How often queues that are believed empty are looked at all the same: another node may have
/// stored something.
const FALLBACK_PERIOD: Duration = Duration::from_secs(2);
/// Messages and hints that are heard before the next claim.
const MAX_DRAINED: usize = 1_000;

/// What polls tell the pump.
pub(in crate::engine) enum Message {
    /// A poll parks. One that is not `patient` wants one look and no wait.
    Park { id: WaiterId, wish: Box<Wish>, is_patient: bool, answer: Answer },
    /// A poll wants its answer now, whatever it is.
    Leave(WaiterId),
    /// These were handed to somebody who never got them.
    GiveBack(Vec<Handed>),
    /// The node ends: land what flies, take back what comes back, and say so.
    Finish(oneshot::Sender<()>),
}

/// How a parked poll is answered; none: the look that it asked for failed.
pub(in crate::engine) type Answer = oneshot::Sender<Option<Vec<Handed>>>;

struct Pump {
    pool: Pool,
    background: Pool,
    endings: Coalescer<Endings>,
    /// What must be done before the node ends.
    tasks: TaskTracker,
    tidings: Tidings,
    lanes: Lanes,
    answers: HashMap<WaiterId, Answer>,
    impatient: BTreeSet<WaiterId>,
    by_poll_id: HashMap<PollKey, WaiterId>,
    /// Polls in flight whose successor with the same poll id has come.
    successors: HashMap<WaiterId, WaiterId>,
    /// What successors ask for, until the flight that they took over has landed.
    wishes: HashMap<WaiterId, Wish>,
    /// Polls in flight that want their answer when the flight is over.
    leaving: BTreeSet<WaiterId>,
    /// When the first of the lanes that rest may go on.
    wake_rested_at: Option<Instant>,
    /// Connections of claims that landed a moment ago.
    idle: Vec<PoolConnection<Postgres>>,
    /// Whom to tell when everything has landed; then nothing more is dealt.
    finished: Option<oneshot::Sender<()>>,
}

/// Runs until it is told to finish, or every sender of messages is gone. What flies then is landed first.
pub(in crate::engine) async fn run(
    pools: Pools,
    endings: Coalescer<Endings>,
    tasks: TaskTracker,
    tidings: Tidings,
    mut messages: mpsc::UnboundedReceiver<Message>,
    mut arrivals: Arrivals,
) {
    let mut pump = Pump::new(pools, endings, tasks, tidings);
    let mut flights: JoinSet<Flight> = JoinSet::new();
    let mut fallbacks: JoinSet<Vec<(ProjectId, Arc<str>)>> = JoinSet::new();
    let mut fallback_tick = tokio::time::interval(FALLBACK_PERIOD);
    fallback_tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while pump.finished.is_none() {
        let rest = pump.wake_rested_at.map(tokio::time::Instant::from_std);
        tokio::select! {
            message = messages.recv() => match message {
                Some(message) => pump.receive(message),
                None => break,
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
                if rest.is_some() => {
                pump.lanes.wake_rested(Instant::now());
                pump.wake_rested_at = pump.lanes.rest_ends_at();
            }
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
    while let Some(flight) = flights.join_next().await {
        pump.land(flight.unwrap_or_default());
    }
    while let Ok(message) = messages.try_recv() {
        pump.receive(message);
    }
    if let Some(finished) = pump.finished {
        let _ = finished.send(());
    }
}

impl Pump {
    fn new(
        pools: Pools,
        endings: Coalescer<Endings>,
        tasks: TaskTracker,
        tidings: Tidings,
    ) -> Self {
        Self {
            pool: pools.claim,
            background: pools.background,
            endings,
            tasks,
            tidings,
            lanes: Lanes::default(),
            answers: HashMap::new(),
            impatient: BTreeSet::new(),
            by_poll_id: HashMap::new(),
            successors: HashMap::new(),
            wishes: HashMap::new(),
            leaving: BTreeSet::new(),
            wake_rested_at: None,
            idle: Vec::new(),
            finished: None,
        }
    }

    fn receive(&mut self, message: Message) {
        match message {
            Message::Park { id, wish, is_patient, answer } => {
                self.park(id, *wish, is_patient, answer)
            }
            Message::Leave(id) if self.lanes.is_in_flight(id) => {
                self.leaving.insert(id);
            }
            Message::Leave(id) => self.answer(id, Some(Vec::new())),
            Message::GiveBack(jobs) => self.give_back(jobs),
            Message::Finish(finished) => self.finished = Some(finished),
        }
    }

    fn hear(&mut self, hint: &Hint) {
        match hint {
            Hint::Arrived(arrived) => self.lanes.arrived(arrived),
            Hint::SlotsFreed(projects) => {
                projects.iter().for_each(|it| self.lanes.slots_freed(*it));
            }
            Hint::QueueChanged(project_id, queue) => {
                self.lanes.distrust(Some(&(*project_id, Arc::clone(queue))));
            }
            Hint::Everywhere => self.lanes.distrust(None),
        }
    }

    fn park(&mut self, id: WaiterId, wish: Wish, is_patient: bool, answer: Answer) {
        let poll_key = wish.poll_key();
        let earlier = poll_key.as_ref().and_then(|it| self.by_poll_id.insert(it.clone(), id));
        match earlier {
            Some(earlier) if self.lanes.is_in_flight(earlier) => {
                self.succeed(earlier, id);
                self.wishes.insert(id, wish);
            }
            Some(earlier) => {
                self.answer(earlier, Some(Vec::new()));
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

    /// A poll takes the place of an earlier one that is in flight, which may itself have taken
    /// another's.
    fn succeed(&mut self, earlier: WaiterId, id: WaiterId) {
        if let Some(replaced) = self.answers.remove(&earlier) {
            let _ = replaced.send(Some(Vec::new()));
        }
        self.leaving.remove(&earlier);
        self.impatient.remove(&earlier);
        self.wishes.remove(&earlier);
        self.lanes.rename(earlier, id);
        for successor in self.successors.values_mut().filter(|it| **it == earlier) {
            *successor = id;
        }
        self.successors.insert(earlier, id);
    }

    /// Ends a poll. When it is gone, its jobs go back.
    fn answer(&mut self, id: WaiterId, jobs: Option<Vec<Handed>>) {
        if let Some(poll_key) = self.lanes.wish(id).and_then(Wish::poll_key) {
            self.by_poll_id.remove(&poll_key);
        }
        self.lanes.leave(id);
        self.impatient.remove(&id);
        self.leaving.remove(&id);
        self.wishes.remove(&id);
        let undelivered = match self.answers.remove(&id) {
            Some(answer) => answer.send(jobs).err().flatten(),
            None => jobs,
        };
        self.give_back(undelivered.unwrap_or_default());
    }

    fn give_back(&self, jobs: Vec<Handed>) {
        for Handed { job, worker_id, .. } in jobs {
            counter!(telemetry::JOBS_GIVEN_BACK).increment(1);
            let key = JobKey { project_id: job.project_id, id: job.id };
            let released = settle::give_back(&self.endings, key, &worker_id, job.lease_id);
            self.tasks.spawn(released);
        }
    }

    fn answer_the_impatient(&mut self) {
        let hopeless: Vec<_> =
            self.impatient.iter().copied().filter(|it| self.lanes.is_hopeless(*it)).collect();
        for id in hopeless {
            self.answer(id, Some(Vec::new()));
        }
    }

    fn take_off(&mut self, flights: &mut JoinSet<Flight>) {
        while flights.len() < MAX_FLIGHTS && self.finished.is_none() {
            let looks = self.lanes.deal(Instant::now());
            if looks.is_empty() {
                return;
            }
            let claim = Claim::new(looks, self.pool.clone(), self.idle.pop());
            flights.spawn(claim.fly());
        }
    }

    fn land(&mut self, Flight { conn, landed }: Flight) {
        self.idle.extend(conn);
        let (now, mut begins_rest) = (Instant::now(), false);
        let mut jobs_of: HashMap<WaiterId, Vec<Handed>> = HashMap::new();
        for Landed { look, outcome } in landed {
            let look = self.follow(look);
            begins_rest |=
                outcome.finding().is_none_or(|it| it.was_contended || it.rests_for.is_some());
            self.lanes.landed(&look, outcome.finding(), now);
            let found = match outcome {
                LookOutcome::Found { jobs, .. } => jobs,
                LookOutcome::Refused => self.tell_failure(&look),
                LookOutcome::InDoubt(lease_ids) => {
                    self.tasks.spawn(lost_claims::give_back(
                        self.background.clone(),
                        self.endings.clone(),
                        lease_ids,
                    ));
                    self.tell_failure(&look)
                }
            };
            for id in look.slots.iter().map(|(id, _)| *id) {
                jobs_of.entry(id).or_default();
            }
            self.tell_claimed(&found);
            for (slot, handed) in found {
                match look.slots.get(slot).filter(|_| handed.is_complete) {
                    Some((id, _)) => jobs_of.entry(*id).or_default().push(handed),
                    None => self.give_back(vec![handed]),
                }
            }
        }
        if begins_rest {
            self.wake_rested_at = self.lanes.rest_ends_at();
        }
        let lanes = &self.lanes;
        self.successors.retain(|_, it| lanes.is_in_flight(*it));
        for (id, mut jobs) in jobs_of {
            if !jobs.is_empty() || self.leaving.contains(&id) {
                jobs.sort_by_key(|it| (it.job.claim_key(), it.job.id));
                self.answer(id, Some(jobs));
            } else if let Some(wish) = self.wishes.remove(&id) {
                self.lanes.leave(id);
                self.lanes.park(id, wish, self.impatient.contains(&id), now);
            }
        }
    }

    fn tell_claimed(&self, found: &[(usize, Handed)]) {
        self.tidings.tally.claimed(found.iter().map(|(_, it)| &it.job));
        self.tidings.news.tell(|| {
            let told = |(_, it): &(usize, Handed)| Happening {
                attempt: Some(it.job.attempt),
                worker_id: Some(it.worker_id.to_string()),
                ..Happening::new(it.job.project_id, it.job.id, history::CLAIMED)
            };
            found.iter().map(told).collect()
        });
    }

    /// After a failed look, polls that wanted just one look are told.
    fn tell_failure(&mut self, look: &DealtLook) -> Vec<(usize, Handed)> {
        for (id, _) in &look.slots {
            if self.impatient.contains(id) {
                self.answer(*id, None);
            }
        }
        Vec::new()
    }

    /// Replaces polls by their successors.
    fn follow(&mut self, mut look: DealtLook) -> DealtLook {
        for (id, _) in &mut look.slots {
            if let Some(successor) = self.successors.get(id) {
                *id = *successor;
            }
        }
        look
    }
}
