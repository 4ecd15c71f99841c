//! The claim pump: one task per node that claims for all parked polls.
//!
//! It alone owns what is known of the queues ([`Lanes`]) and answers every parked poll. So a poll
//! that ends while a claim for it is in flight is answered by that claim. If a poll is gone when
//! its jobs arrive, they are released at once.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use fencepost_domain::{
    history,
    ids::{JobKey, LeaseId, ProjectId},
    lease::ends_before_next_look,
};
use fencepost_signals::{
    events_feed::JobEvent,
    telemetry,
    wakeups::{BackgroundTask, Hint, Hints},
};
use fencepost_store::connection::pools::{Connection, Pool, Pools};
use metrics::counter;
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
    time::MissedTickBehavior,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    answered::{Answer, Answered, NewestPolls, RecentAnswers},
    claim::{Claim, ClaimOutcome, CompletedClaim, CompletedClaims, Landing, find_queues_with_work},
    dispatched::{DispatchedJob, Releasing},
    lanes::{Lanes, PlannedClaim, WaiterId},
    lost_claims,
    request::PollSpec,
};
use crate::{
    group_commit::Coalescer,
    notify::Notifier,
    settle::{self, Failures},
    sync_match::{self, Matcher},
};

/// Claims in flight at most, when the backlog is deep.
const MAX_CLAIMS_IN_FLIGHT: usize = 3;
/// How often queues believed empty are queried anyway: another node may have stored jobs.
const FALLBACK_PERIOD: Duration = Duration::from_secs(2);
/// Messages and hints that are read before the next claim.
const MAX_DRAINED: usize = 1_000;

/// Messages from polls to the pump.
pub(crate) enum Message {
    /// A poll parks.
    Park {
        id: WaiterId,
        spec: Box<PollSpec>,
        patience: Patience,
        /// Time at which the poll asked the database for the jobs of an earlier one with its id.
        asked_at: Instant,
        answer: Answer,
    },
    /// A poll wants its answer now, with or without jobs.
    Leave(WaiterId),
    /// These jobs were not delivered: release them.
    Release(Vec<DispatchedJob>),
    /// The node stops: complete the claims in flight, release undelivered jobs, and confirm.
    Finish(oneshot::Sender<()>),
}

/// How long a poll stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Patience {
    /// Until there are jobs.
    Waits,
    /// Until its queues were claimed from.
    LooksOnce,
    /// Until those of its queues were claimed from that are not known to be empty.
    FillsUp,
}

pub(super) struct Pump {
    pool: Pool,
    background: Pool,
    failures: Coalescer<Failures>,
    releasing: Releasing,
    /// Tasks that must complete before the node stops.
    tasks: TaskTracker,
    stopping: CancellationToken,
    notifier: Notifier,
    pub(super) lanes: Lanes,
    answers: HashMap<WaiterId, Answer>,
    without_wait: BTreeSet<WaiterId>,
    newest: NewestPolls,
    answered: RecentAnswers,
    /// Polls in flight that were replaced by a newer poll with the same poll id.
    successors: HashMap<WaiterId, WaiterId>,
    /// The specifications of newer polls, until the claim in flight completes.
    specs: HashMap<WaiterId, PollSpec>,
    /// Polls in flight that want their answer as soon as the claim completes.
    leaving: BTreeSet<WaiterId>,
    /// When the first backoff ends.
    next_backoff_end: Option<Instant>,
    /// Connections of recently completed claims.
    idle: Vec<Connection>,
    /// Questions about jobs that are about to be stored, and what became of them.
    pub(super) match_messages: Vec<sync_match::Message>,
    /// Leases that are reserved for such jobs.
    pub(super) reserved: usize,
    pub(super) matcher: Matcher,
    /// Confirms the stop once every claim has completed; then no more are planned.
    pub(super) finished: Option<oneshot::Sender<()>>,
}

/// Runs until [`Message::Finish`], or until all senders are gone. Claims in flight complete first.
pub(crate) async fn run(
    pools: Pools,
    (failures, releasing): (Coalescer<Failures>, Releasing),
    (tasks, stopping): (TaskTracker, CancellationToken),
    notifier: Notifier,
    mut messages: mpsc::UnboundedReceiver<Message>,
    (matcher, mut matches): (Matcher, mpsc::UnboundedReceiver<sync_match::Message>),
    mut arrivals: Hints,
) {
    let mut pump = Pump::new(pools, (failures, releasing), (tasks, stopping), notifier, matcher);
    let mut in_flight: JoinSet<CompletedClaims> = JoinSet::new();
    // Bounded by the claims in flight.
    let (landing, mut landed) = mpsc::unbounded_channel();
    let mut fallbacks: JoinSet<Vec<(ProjectId, Arc<str>)>> = JoinSet::new();
    let mut fallback_tick = tokio::time::interval(FALLBACK_PERIOD);
    fallback_tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while pump.finished.is_none() {
        let rest = pump.next_backoff_end.map(tokio::time::Instant::from_std);
        tokio::select! {
            message = messages.recv() => match message {
                Some(message) => pump.receive(message),
                None => break,
            },
            Some(hint) = arrivals.next() => pump.hear(hint),
            Some(message) = matches.recv() => pump.match_messages.push(message),
            Some(completed) = landed.recv() => pump.complete(completed),
            Some(claims) = in_flight.join_next() => pump.end_flight(claims.unwrap_or_default()),
            Some(found) = fallbacks.join_next() => {
                for queue in found.unwrap_or_default() {
                    pump.lanes.mark_stale(Some(&queue));
                }
            }
            _ = fallback_tick.tick() => if fallbacks.is_empty() {
                pump.lanes.prune(Instant::now());
                pump.answered.prune(Instant::now());
                pump.idle.clear();
                let queues = pump.lanes.believed_empty();
                if !queues.is_empty() {
                    fallbacks.spawn(find_queues_with_work(pump.pool.clone(), queues));
                }
            },
            () = async { tokio::time::sleep_until(rest.unwrap_or_else(tokio::time::Instant::now)).await },
                if rest.is_some() => {
                pump.lanes.end_backoffs(Instant::now());
                pump.next_backoff_end = pump.lanes.backoff_ends_at();
            }
        }
        // Everything that is already waiting shares the next claim.
        let mut is_drained = false;
        for _ in 0..MAX_DRAINED {
            let (message, hint) = (messages.try_recv().ok(), arrivals.try_next());
            if message.is_none() && hint.is_none() {
                is_drained = true;
                break;
            }
            message.into_iter().for_each(|it| pump.receive(it));
            hint.into_iter().for_each(|it| pump.hear(it));
        }
        while let Ok(completed) = landed.try_recv() {
            pump.complete(completed);
        }
        // After the hints: jobs that were stored before come first.
        let more = std::iter::from_fn(|| matches.try_recv().ok()).take(MAX_DRAINED);
        pump.match_messages.extend(more);
        if is_drained {
            pump.answer_matches();
        }
        pump.start_claims(&mut in_flight, &landing);
        pump.answer_without_wait();
    }
    // Other nodes may claim what this one does not.
    while let Some(hint) = arrivals.try_next() {
        if matches!(hint, Hint::Arrived(_)) {
            pump.notifier.wake.hint_others(hint);
        }
    }
    drop(arrivals);
    while let Some(claims) = in_flight.join_next().await {
        pump.end_flight(claims.unwrap_or_default());
    }
    pump.answer_matches();
    while pump.reserved > 0
        && let Some(message) = matches.recv().await
    {
        pump.match_messages.push(message);
        pump.answer_matches();
    }
    while let Ok(completed) = landed.try_recv() {
        pump.complete(completed);
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
        (failures, releasing): (Coalescer<Failures>, Releasing),
        (tasks, stopping): (TaskTracker, CancellationToken),
        notifier: Notifier,
        matcher: Matcher,
    ) -> Self {
        Self {
            pool: pools.claim,
            background: pools.background,
            failures,
            releasing,
            tasks,
            stopping,
            notifier,
            lanes: Lanes::default(),
            answers: HashMap::new(),
            without_wait: BTreeSet::new(),
            newest: NewestPolls::default(),
            answered: RecentAnswers::default(),
            successors: HashMap::new(),
            specs: HashMap::new(),
            leaving: BTreeSet::new(),
            next_backoff_end: None,
            idle: Vec::new(),
            match_messages: Vec::new(),
            reserved: 0,
            matcher,
            finished: None,
        }
    }

    fn receive(&mut self, message: Message) {
        match message {
            Message::Park { spec, asked_at, answer, .. } if self.is_repeat(&spec, asked_at) => {
                let _ = answer.send(Answered::Repeated);
            }
            Message::Park { id, spec, patience, answer, .. } => {
                self.park(id, *spec, patience, answer);
            }
            Message::Leave(id) if self.lanes.is_in_flight(id) => {
                self.leaving.insert(id);
            }
            Message::Leave(id) => self.answer(id, Answered::NOTHING),
            Message::Release(jobs) => self.release(jobs),
            Message::Finish(finished) => self.finished = Some(finished),
        }
    }

    fn hear(&mut self, hint: Hint) {
        match hint {
            Hint::Arrived(arrived) => {
                self.notifier.backlog_waits.arrived(&arrived);
                self.lanes.arrived(&arrived);
                let for_others = self.lanes.beyond_polls(arrived);
                if !for_others.is_empty() {
                    self.notifier.wake.hint_others(Hint::Arrived(for_others));
                }
            }
            Hint::ArrivedElsewhere(arrived) => {
                self.notifier.backlog_waits.arrived(&arrived);
                self.lanes.arrived(&arrived);
            }
            Hint::SlotsFreed(projects) => {
                projects.into_iter().for_each(|it| self.lanes.slots_freed(it));
            }
            Hint::QueueChanged(project_id, queue) => {
                self.notifier.backlog_waits.changed(project_id, &queue);
                self.lanes.mark_stale(Some(&(project_id, queue)));
            }
            Hint::TargetsChanged => self.notifier.wake.look_at_targets(),
            Hint::Everywhere => {
                self.notifier.backlog_waits.everywhere();
                self.lanes.mark_stale(None);
            }
        }
    }

    /// True if an earlier poll with this id may have got jobs since this one asked for them.
    fn is_repeat(&self, spec: &PollSpec, asked_at: Instant) -> bool {
        let poll_key = spec.poll_key();
        poll_key.is_some_and(|it| self.answered.has_since(&it, asked_at, Instant::now()))
    }

    fn park(&mut self, id: WaiterId, spec: PollSpec, patience: Patience, answer: Answer) {
        let must_look = patience == Patience::LooksOnce;
        match spec.poll_key().and_then(|it| self.newest.replace(it, id)) {
            Some((earlier, answered)) if self.lanes.is_in_flight(earlier) => {
                self.succeed(earlier, id, answered);
                self.specs.insert(id, spec);
            }
            Some((earlier, answered)) => {
                self.answer(earlier, Answered::Replaced(answered));
                self.lanes.park(id, spec, must_look, Instant::now());
            }
            None => self.lanes.park(id, spec, must_look, Instant::now()),
        }
        self.answers.insert(id, answer);
        if patience != Patience::Waits {
            self.without_wait.insert(id);
        }
    }

    /// A poll replaces an earlier one that is in flight, which may itself have replaced another.
    fn succeed(&mut self, earlier: WaiterId, id: WaiterId, answered: watch::Receiver<()>) {
        if let Some(replaced) = self.answers.remove(&earlier) {
            let _ = replaced.send(Answered::Replaced(answered));
        }
        self.leaving.remove(&earlier);
        self.without_wait.remove(&earlier);
        self.specs.remove(&earlier);
        self.lanes.rename(earlier, id);
        for successor in self.successors.values_mut().filter(|it| **it == earlier) {
            *successor = id;
        }
        self.successors.insert(earlier, id);
    }

    /// Ends a poll. If it is gone, its jobs are released.
    fn answer(&mut self, id: WaiterId, answered: Answered) {
        if let Some(poll_key) = self.lanes.spec(id).and_then(PollSpec::poll_key) {
            self.newest.remove(&poll_key, id);
            if matches!(&answered, Answered::Jobs(jobs) if !jobs.is_empty()) {
                self.answered.note(poll_key, Instant::now());
            }
        }
        self.lanes.leave(id);
        self.without_wait.remove(&id);
        self.leaving.remove(&id);
        self.specs.remove(&id);
        let undelivered = match self.answers.remove(&id) {
            Some(answer) => answer.send(answered).err(),
            None => Some(answered),
        };
        self.release(undelivered.map(Answered::into_jobs).unwrap_or_default());
    }

    fn release(&self, jobs: Vec<DispatchedJob>) {
        self.releasing.begin(&jobs);
        for DispatchedJob { job, worker_id, .. } in jobs {
            counter!(telemetry::JOBS_RELEASED).increment(1);
            let key = JobKey { project_id: job.project_id, id: job.id };
            let released = settle::release(&self.failures, key, &worker_id, job.lease_id);
            let releasing = self.releasing.clone();
            self.tasks.spawn(async move {
                released.await;
                releasing.end(job.lease_id);
            });
        }
    }

    /// Releases leases that may have been given. No repeated poll gets their jobs meanwhile.
    pub(super) fn release_lost(&self, lease_ids: Vec<LeaseId>) {
        self.releasing.begin_leases(lease_ids.iter().copied());
        let (pool, failures) = (self.background.clone(), self.failures.clone());
        let (releasing, stopping) = (self.releasing.clone(), self.stopping.clone());
        self.tasks.spawn(async move {
            lost_claims::release(pool, failures, lease_ids.clone(), stopping).await;
            lease_ids.into_iter().for_each(|it| releasing.end(it));
        });
    }

    fn answer_without_wait(&mut self) {
        let unmatched: Vec<_> = self
            .without_wait
            .iter()
            .copied()
            .filter(|it| self.lanes.has_no_match_now(*it))
            .collect();
        for id in unmatched {
            self.answer(id, Answered::NOTHING);
        }
    }

    fn start_claims(&mut self, in_flight: &mut JoinSet<CompletedClaims>, landing: &Landing) {
        while in_flight.len() < MAX_CLAIMS_IN_FLIGHT && self.finished.is_none() {
            let claims = self.lanes.plan(Instant::now());
            if claims.is_empty() {
                return;
            }
            let claim = Claim::new(claims, self.pool.clone(), self.idle.pop());
            in_flight.spawn(claim.run(landing.clone()));
        }
    }

    fn end_flight(&mut self, CompletedClaims { conn, completed }: CompletedClaims) {
        self.idle.extend(conn);
        self.complete(completed);
    }

    fn complete(&mut self, completed: Vec<CompletedClaim>) {
        let (now, mut begins_backoff) = (Instant::now(), false);
        let mut jobs_of: HashMap<WaiterId, Vec<DispatchedJob>> = HashMap::new();
        for CompletedClaim { claim, outcome } in completed {
            let claim = self.follow(claim);
            begins_backoff |=
                outcome.finding().is_none_or(|it| it.was_contended || it.pause_for.is_some());
            self.lanes.complete(&claim, outcome.finding(), now);
            let found = match outcome {
                ClaimOutcome::Found { jobs, .. } => jobs,
                ClaimOutcome::Refused => self.answer_failure(&claim),
                ClaimOutcome::InDoubt(lease_ids) => {
                    self.release_lost(lease_ids);
                    self.answer_failure(&claim)
                }
            };
            for id in claim.slots.iter().map(|(id, _)| *id) {
                jobs_of.entry(id).or_default();
            }
            self.publish_claimed(found.iter().map(|(_, it)| it));
            for (slot, handed) in found {
                match claim.slots.get(slot).filter(|_| handed.is_complete) {
                    Some((id, _)) => jobs_of.entry(*id).or_default().push(handed),
                    None => self.release(vec![handed]),
                }
            }
        }
        if begins_backoff {
            self.next_backoff_end = self.lanes.backoff_ends_at();
        }
        self.deliver(jobs_of, now);
    }

    /// Answers polls that were in flight. One without jobs stays, unless it wants its answer.
    pub(super) fn deliver(&mut self, jobs_of: HashMap<WaiterId, Vec<DispatchedJob>>, now: Instant) {
        let lanes = &self.lanes;
        self.successors.retain(|_, it| lanes.is_in_flight(*it));
        for (id, mut jobs) in jobs_of {
            if !jobs.is_empty() || self.leaving.contains(&id) {
                jobs.sort_by_key(|it| (it.job.claim_key(), it.job.id));
                self.answer(id, Answered::Jobs(jobs));
            } else if let Some(spec) = self.specs.remove(&id) {
                self.lanes.leave(id);
                self.lanes.park(id, spec, self.without_wait.contains(&id), now);
            }
        }
    }

    pub(super) fn publish_claimed<'a>(
        &self,
        found: impl Iterator<Item = &'a DispatchedJob> + Clone,
    ) {
        self.notifier.tally.claimed(found.clone().map(|it| &it.job));
        if found.clone().any(|it| ends_before_next_look(it.job.lease_seconds)) {
            self.notifier.wake.ask(BackgroundTask::Reap);
        }
        self.notifier.feed.publish(|| {
            let event = |it: &DispatchedJob| JobEvent {
                attempt: Some(it.job.attempt),
                worker_id: Some(it.worker_id.to_string()),
                ..JobEvent::new(it.job.project_id, it.job.id, history::CLAIMED)
            };
            found.map(event).collect()
        });
    }

    /// After a failed claim, polls without a wait get an error.
    fn answer_failure(&mut self, claim: &PlannedClaim) -> Vec<(usize, DispatchedJob)> {
        for (id, _) in &claim.slots {
            if self.without_wait.contains(id) {
                self.answer(*id, Answered::Failed);
            }
        }
        Vec::new()
    }

    /// Replaces polls by their successors.
    fn follow(&mut self, mut claim: PlannedClaim) -> PlannedClaim {
        for (id, _) in &mut claim.slots {
            *id = self.successor_of(*id);
        }
        claim
    }

    pub(super) fn successor_of(&self, id: WaiterId) -> WaiterId {
        self.successors.get(&id).copied().unwrap_or(id)
    }
}
