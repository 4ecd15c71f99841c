//! What all clients share, and workers: they behave badly now and then, and note what they see.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use rand::{RngExt, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};
use uuid::Uuid;

use crate::{
    history::{Answer, End, Event, Held, History, now},
    stage::Tenant,
};

/// Length of the leases, in seconds.
pub const LEASE_SECONDS: u64 = 2;
/// The queues of the workers here; others are those of workers in other languages.
pub const QUEUES: [&str; 3] = ["q0", "q1", "q2"];
/// The queue whose running jobs are limited, and the one that is paused now and then.
pub const LIMITED_QUEUE: &str = "q1";
pub const PAUSED_QUEUE: &str = "q2";
/// The queue whose groups have a strict order.
pub const ORDERED_QUEUE: &str = "q-ordered";
/// The one of its groups that is paused now and then.
pub const PAUSED_GROUP: &str = "group-0";
/// Jobs of a limited queue that may run at once.
pub const MAX_CONCURRENCY: usize = 3;
/// The queues whose groups are limited: in the second one they take turns, too.
pub const GROUPS_QUEUE: &str = "q-groups";
pub const TURNS_QUEUE: &str = "q-turns";
/// Queues that share two limits: one of all their jobs, and one that each group has.
pub const SHARED_QUEUES: [&str; 2] = ["q-shared", "q-shared-too"];
/// Jobs of these queues together that may run at once.
pub const MAX_SHARED: usize = 3;
/// Jobs of a limited group that may run at once, and that may start in any window.
pub const MAX_OF_GROUP: usize = 2;
pub const STARTS_OF_GROUP: usize = 6;
pub const WINDOW_SECONDS: i64 = 2;
/// The wait of one poll, in seconds.
const POLL_SECONDS: u64 = 2;
/// Longest call; a node that is frozen answers later than that.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// The same of a client that shows which nodes answer.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
const POLL: &str = "/v1/workers/poll";
/// How soon a client leaves that vanishes.
const VANISH_AFTER: Duration = Duration::from_millis(15);
pub const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// Of a hundred calls, those whose client vanishes.
const VANISH_PERCENT: u32 = 3;
/// Tries of a poll; then its worker begins a new one.
const MAX_POLL_TRIES: usize = 3;
/// Of a hundred polls with jobs, those whose worker is started again in that moment.
const RESTART_PERCENT: u32 = 3;
/// Of a hundred acks, those that are repeated, and those that are followed by another outcome or by
/// a heartbeat.
const REPEAT_PERCENT: u32 = 5;
const CONTRADICT_PERCENT: u32 = 3;
const LATE_BEAT_PERCENT: u32 = 2;
/// Of a hundred workers that were frozen, those that send a heartbeat then.
const FROZEN_BEAT_PERCENT: u32 = 50;
/// How long a frozen worker sleeps beyond its lease.
const FROZEN_AFTER: Duration = Duration::from_millis(1_500);
/// When a worker sends its heartbeat, and how long quick work takes, in milliseconds.
const BEAT_MS: std::ops::Range<u64> = 200..900;
const QUICK_MS: std::ops::Range<u64> = 0..40;
/// Heartbeats of work that takes longer than a lease.
const LONG_BEATS: u32 = 3;

/// How a worker treats a job.
#[derive(Debug, Clone, Copy)]
enum Manner {
    /// It dies.
    Dies,
    /// It freezes until its lease has ended, and continues.
    Freezes,
    /// It sends a heartbeat.
    Beats,
    /// It works for longer than a lease lasts, and sends heartbeats.
    TakesLong,
    Quick,
}

/// Each with its part of a hundred.
const MANNERS: [(Manner, u32); 5] = [
    (Manner::Dies, 5),
    (Manner::Freezes, 3),
    (Manner::Beats, 12),
    (Manner::TakesLong, 3),
    (Manner::Quick, 77),
];
const ENDS: [(End, u32); 3] = [(End::Failed, 18), (End::Released, 6), (End::Succeeded, 76)];

/// Tries of an ack; then its worker leaves it, and the lease ends.
pub const MAX_ACK_TRIES: usize = 60;

/// What all clients share.
pub struct World {
    pub history: History,
    pub urls: Vec<String>,
    /// Where jobs go.
    pub queues: Vec<&'static str>,
    pub tenants: Vec<Tenant>,
    pub client: reqwest::Client,
    /// All nodes know losses and checkpoints.
    pub has_checkpoints: bool,
    /// How many jobs producers send, in percent of the full load.
    pub load_percent: u32,
    /// No more jobs are sent, and workers succeed at once.
    pub is_healing: AtomicBool,
    /// Workers end.
    pub has_ended: AtomicBool,
}

/// A client of one tenant.
pub struct Client {
    pub world: Arc<World>,
    pub tenant: usize,
    pub rng: StdRng,
    /// The node that it calls; none: any.
    node: Option<usize>,
    timeout: Duration,
}

/// What follows an ack, though nothing should.
pub struct AfterAck {
    pub repeats: bool,
    pub contradicts: Option<End>,
    pub beats: bool,
}

/// A call of the API.
#[derive(Clone, Copy)]
pub struct Call<'a> {
    pub path: &'a str,
    pub body: &'a Value,
    /// Its idempotency key.
    pub key: Option<&'a str>,
}

impl Client {
    #[must_use]
    pub fn new(world: &Arc<World>, tenant: usize, seed: u64) -> Self {
        let (world, rng) = (Arc::clone(world), StdRng::seed_from_u64(seed));
        Self { world, tenant, rng, node: None, timeout: CALL_TIMEOUT }
    }

    /// One that calls a single node, and does not wait for it: while another node is frozen, it
    /// shows that this one answers.
    #[must_use]
    pub fn of_node(world: &Arc<World>, node: usize, seed: u64) -> Self {
        Self { node: Some(node), timeout: PROBE_TIMEOUT, ..Self::new(world, 0, seed) }
    }

    pub fn happens(&mut self, percent: u32) -> bool {
        self.rng.random_range(0..100) < percent
    }

    pub fn is_healing(&self) -> bool {
        self.world.is_healing.load(Ordering::Relaxed)
    }

    pub fn uuid(&mut self) -> String {
        Uuid::from_u128(self.rng.random()).to_string()
    }

    /// Posts to one of the nodes. None: there is no answer, or one that says nothing.
    pub async fn post(&mut self, call: Call<'_>) -> Option<(u16, Value)> {
        let any = self.rng.random_range(0..self.world.urls.len());
        let url = &self.world.urls[self.node.unwrap_or(any)];
        let request = self.world.client.post(format!("{url}{}", call.path));
        let key = &self.world.tenants[self.tenant].key;
        let mut request = request.bearer_auth(key).json(call.body);
        if let Some(key) = call.key {
            request = request.header("idempotency-key", key);
        }
        let does_vanish = !self.is_healing() && self.happens(VANISH_PERCENT);
        let within = if does_vanish { VANISH_AFTER } else { self.timeout };
        self.answered(call.path, request, within).await
    }

    /// Reads from one of the nodes. None: there is no answer.
    pub async fn get(&mut self, path: &str) -> Option<Value> {
        let url = &self.world.urls[self.rng.random_range(0..self.world.urls.len())];
        let request = self.world.client.get(format!("{url}{path}"));
        let request = request.bearer_auth(&self.world.tenants[self.tenant].key);
        Some(self.answered(path, request, self.timeout).await?.1)
    }

    /// Sends a request, and notes an answer that refuses it or that none should get.
    async fn answered(
        &self,
        path: &str,
        request: reqwest::RequestBuilder,
        within: Duration,
    ) -> Option<(u16, Value)> {
        let called = async {
            let answer = request.send().await.ok()?;
            let may_retry = answer.headers().contains_key("retry-after");
            Some((answer.status().as_u16(), may_retry, answer.text().await.ok()?))
        };
        let (status, may_retry, text) = timeout(within, called).await.ok()??;
        let body: Value = serde_json::from_str(&text).unwrap_or_default();
        let code = || body["error"]["code"].as_str().unwrap_or_default().to_owned();
        match status {
            200..=299 => Some((status, body)),
            409 if path != POLL => {
                self.world.history.note(Event::Refused { status, code: code() });
                Some((status, body))
            }
            // What a client is to try again.
            503 if may_retry => {
                self.world.history.note(Event::Refused { status, code: code() });
                None
            }
            _ => {
                self.world.history.note(Event::Strange { call: path.to_owned(), status, text });
                None
            }
        }
    }

    /// Leases jobs and ends them, until the run has ended.
    pub async fn work(mut self, name: String) {
        let queues: Vec<_> = QUEUES
            .into_iter()
            .chain([ORDERED_QUEUE, GROUPS_QUEUE, TURNS_QUEUE])
            .chain(SHARED_QUEUES)
            .collect();
        while !self.world.has_ended.load(Ordering::Relaxed) {
            let poll_id = self.uuid();
            let body = json!({
                "worker_id": name, "queues": queues, "poll_id": poll_id,
                "wait_seconds": POLL_SECONDS, "capacity": self.rng.random_range(1..=3),
                "lease_seconds": LEASE_SECONDS,
            });
            let call = Call { path: POLL, body: &body, key: None };
            let mut answer = None;
            let mut tries = 0;
            while tries < MAX_POLL_TRIES {
                tries += 1;
                answer = self.post(call).await;
                if answer.is_some() {
                    break;
                }
                sleep(RETRY_PAUSE).await;
            }
            let mut leases = self.leases(answer.as_ref(), &name, tries == 1);
            if !leases.is_empty() && self.happens(RESTART_PERCENT) {
                // Its program is started again in this moment, and knows of the poll alone.
                let again = self.post(call).await;
                leases = self.leases(again.as_ref(), &name, false);
            }
            for held in leases {
                self.run(&held).await;
            }
        }
    }

    /// The leases that a poll was answered.
    fn leases(&self, answer: Option<&(u16, Value)>, worker: &str, is_first: bool) -> Vec<Held> {
        let jobs = answer.and_then(|it| it.1["jobs"].as_array());
        jobs.into_iter().flatten().filter_map(|it| self.leased(it, worker, is_first)).collect()
    }

    fn leased(&self, job: &Value, worker: &str, is_first: bool) -> Option<Held> {
        let text = |name: &str| job[name].as_str().map(str::to_owned);
        let held = Held {
            job: text("id")?,
            attempt: job["attempt"].as_i64()?,
            lease: text("lease_id")?,
            worker: worker.to_owned(),
        };
        let owner = owner_of(&job["payload"]);
        let (tenant, held_too) = (self.tenant, held.clone());
        self.world.history.note(Event::Leased { tenant, held: held_too, owner, is_first });
        let sequence = job["checkpoint_sequence"].as_i64();
        let (job, attempt) = (held.job.clone(), held.attempt);
        self.world.history.note(Event::Resumed { job, attempt, sequence });
        Some(held)
    }

    /// Runs a job: well, too long, or not at all.
    async fn run(&mut self, held: &Held) {
        if self.is_healing() {
            self.ack(held, End::Succeeded).await;
            return;
        }
        let lease = Duration::from_secs(LEASE_SECONDS);
        match MANNERS.choose_weighted(&mut self.rng, |it| it.1).map_or(Manner::Quick, |it| it.0) {
            Manner::Dies => return,
            Manner::Freezes => {
                sleep(lease + FROZEN_AFTER).await;
                if self.happens(FROZEN_BEAT_PERCENT) {
                    self.beat(held).await;
                }
            }
            Manner::Beats => {
                sleep(Duration::from_millis(self.rng.random_range(BEAT_MS))).await;
                self.beat(held).await;
            }
            Manner::TakesLong => {
                for _ in 0..LONG_BEATS {
                    sleep(lease / 2).await;
                    self.beat(held).await;
                }
            }
            Manner::Quick => {
                sleep(Duration::from_millis(self.rng.random_range(QUICK_MS))).await;
            }
        }
        let end = ENDS.choose_weighted(&mut self.rng, |it| it.1);
        let end = end.map_or(End::Succeeded, |it| it.0);
        self.ack(held, end).await;
        let after = self.after_ack(end);
        if after.repeats {
            self.ack(held, end).await;
        }
        if let Some(other) = after.contradicts {
            self.ack(held, other).await;
        }
        if after.beats {
            self.beat(held).await;
        }
    }

    /// What a worker does after an ack.
    pub fn after_ack(&mut self, end: End) -> AfterAck {
        let other = if end == End::Succeeded { End::Failed } else { End::Succeeded };
        AfterAck {
            repeats: self.happens(REPEAT_PERCENT),
            contradicts: self.happens(CONTRADICT_PERCENT).then_some(other),
            beats: self.happens(LATE_BEAT_PERCENT),
        }
    }

    /// Sends a heartbeat, with the time as the checkpoint.
    pub async fn beat(&mut self, held: &Held) {
        let mut body = json!({"worker_id": held.worker, "job_id": held.job,
                              "attempt": held.attempt, "lease_id": held.lease});
        let sent = now();
        if self.world.has_checkpoints {
            body["checkpoint"] = json!({"attempt": held.attempt, "at": sent});
            body["checkpoint_sequence"] = json!(sent);
        }
        let call = Call { path: "/v1/workers/heartbeat", body: &body, key: None };
        let answered = self.post(call).await;
        let answer = answer_of(answered.as_ref());
        self.world.history.note(Event::Beat { held: held.clone(), answer, sent });
        if answered.is_some_and(|it| it.1["checkpoint"] == "stored") {
            let (job, attempt) = (held.job.clone(), held.attempt);
            self.world.history.note(Event::Saved { job, attempt, sequence: sent });
        }
    }

    pub async fn ack(&mut self, held: &Held, end: End) {
        let body = json!({"worker_id": held.worker, "job_id": held.job, "attempt": held.attempt,
                          "lease_id": held.lease, "status": end});
        let call = Call { path: "/v1/workers/ack", body: &body, key: None };
        self.send_ack(call, held, end, MAX_ACK_TRIES).await;
    }

    /// Sends an ack until it is answered, but not more often than this.
    pub async fn send_ack(&mut self, call: Call<'_>, held: &Held, end: End, tries: usize) {
        for _ in 0..tries {
            let sent = now();
            let answer = answer_of(self.post(call).await.as_ref());
            let (tenant, held) = (self.tenant, held.clone());
            self.world.history.note(Event::Acked { tenant, held, end, answer, sent });
            if answer != Answer::Unknown || self.world.has_ended.load(Ordering::Relaxed) {
                return;
            }
            sleep(RETRY_PAUSE).await;
        }
    }
}

/// What an answer to an ack or a heartbeat says.
pub fn answer_of(answered: Option<&(u16, Value)>) -> Answer {
    match answered {
        Some((200..=299, _)) => Answer::Yes,
        Some(_) => Answer::Stale,
        None => Answer::Unknown,
    }
}

/// The tenant whose mark a payload has; without one, a number that no tenant has.
pub fn owner_of(payload: &Value) -> usize {
    payload["tenant"].as_u64().map_or(usize::MAX, |it| it as usize)
}
