//! Producers and workers: they behave badly now and then, and note what they see.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};
use uuid::Uuid;

use crate::{
    check::MAX_ATTEMPTS,
    history::{Answer, End, Event, History},
    stage::Tenant,
};

/// Length of the leases, in seconds.
const LEASE_SECONDS: u64 = 2;
/// The wait of one poll, in seconds.
const POLL_SECONDS: u64 = 2;
/// Longest call; a node that is frozen answers later than that.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
const POLL: &str = "/v1/workers/poll";
/// Longest time in which an accepted key is busy: a node that has died was silent for 15 s.
const MAX_BUSY_KEY: Duration = Duration::from_secs(25);
/// How soon a client leaves that vanishes.
const VANISH_AFTER: Duration = Duration::from_millis(15);
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// Tries of an ack; then its worker leaves it, and the lease ends.
const MAX_ACK_TRIES: usize = 60;

/// What all clients share.
pub struct World {
    pub history: History,
    pub urls: Vec<String>,
    pub tenants: Vec<Tenant>,
    pub client: reqwest::Client,
    /// No more jobs are sent, and workers succeed at once.
    pub is_healing: AtomicBool,
    /// Workers end.
    pub has_ended: AtomicBool,
}

/// A client of one tenant.
pub struct Client {
    pub world: Arc<World>,
    pub tenant: usize,
    rng: StdRng,
}

/// A lease, as a poll answers it.
struct Lease {
    job: String,
    attempt: i64,
    lease: String,
}

impl Client {
    #[must_use]
    pub fn new(world: &Arc<World>, tenant: usize, seed: u64) -> Self {
        Self { world: Arc::clone(world), tenant, rng: StdRng::seed_from_u64(seed) }
    }

    fn happens(&mut self, percent: u32) -> bool {
        self.rng.random_range(0..100) < percent
    }

    fn is_healing(&self) -> bool {
        self.world.is_healing.load(Ordering::Relaxed)
    }

    /// Calls one of the nodes. None: there is no answer, or one that says nothing.
    async fn call(&mut self, path: &str, body: &Value, key: Option<&str>) -> Option<(u16, Value)> {
        let url = &self.world.urls[self.rng.random_range(0..self.world.urls.len())];
        let request = self.world.client.post(format!("{url}{path}"));
        let mut request = request.bearer_auth(&self.world.tenants[self.tenant].key).json(body);
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        let does_vanish = !self.is_healing() && self.happens(3);
        let within = if does_vanish { VANISH_AFTER } else { CALL_TIMEOUT };
        let called = async {
            let answer = request.send().await.ok()?;
            let status = answer.status().as_u16();
            Some((status, answer.text().await.ok()?))
        };
        let (status, text) = timeout(within, called).await.ok()??;
        match status {
            200..=299 => Some((status, serde_json::from_str(&text).unwrap_or_default())),
            409 if path != POLL => Some((status, serde_json::from_str(&text).unwrap_or_default())),
            // What a client is to try again.
            503 => None,
            _ => {
                self.world.history.note(Event::Strange { call: path.to_owned(), status, text });
                None
            }
        }
    }

    /// Sends jobs, each until it is accepted.
    pub async fn produce(mut self) {
        let mut number = 0;
        while !self.is_healing() {
            number += 1;
            let key = Uuid::from_u128(self.rng.random()).to_string();
            let body = json!({
                "job_type": "chaos", "queue": format!("q{}", number % 3), "max_attempts": MAX_ATTEMPTS,
                "payload": {"tenant": self.tenant},
                "retry": {"initial_seconds": 0, "jitter_seconds": 0, "max_seconds": 1},
            });
            let mut busy_since = None;
            loop {
                let answer = self.call("/v1/jobs", &body, Some(&key)).await;
                let code = answer.as_ref().and_then(|it| it.1["error"]["code"].as_str());
                if let Some(code) = code {
                    let since: Instant = *busy_since.get_or_insert_with(Instant::now);
                    if code != "idempotency_in_progress" || since.elapsed() > MAX_BUSY_KEY {
                        let (call, text) = ("/v1/jobs".to_owned(), code.to_owned());
                        self.world.history.note(Event::Strange { call, status: 409, text });
                        break;
                    }
                }
                let job = answer.and_then(|it| it.1["id"].as_str().map(str::to_owned));
                let is_known = job.is_some();
                let (tenant, key) = (self.tenant, key.clone());
                self.world.history.note(Event::Enqueued { tenant, key, job });
                if is_known {
                    break;
                }
                sleep(RETRY_PAUSE).await;
            }
            sleep(Duration::from_millis(self.rng.random_range(5..60))).await;
        }
    }

    /// Leases jobs and ends them, until the run has ended.
    pub async fn work(mut self, name: String) {
        while !self.world.has_ended.load(Ordering::Relaxed) {
            let poll_id = Uuid::from_u128(self.rng.random()).to_string();
            let body = json!({
                "worker_id": name, "queues": ["q0", "q1", "q2"], "poll_id": poll_id,
                "wait_seconds": POLL_SECONDS, "capacity": self.rng.random_range(1..=3),
                "lease_seconds": LEASE_SECONDS,
            });
            let mut answer = None;
            for _ in 0..3 {
                answer = self.call(POLL, &body, None).await;
                if answer.is_some() {
                    break;
                }
                sleep(RETRY_PAUSE).await;
            }
            let Some((_, reply)) = answer else { continue };
            for job in reply["jobs"].as_array().cloned().unwrap_or_default() {
                let Some(lease) = self.leased(&job) else { continue };
                self.run(&name, lease).await;
            }
        }
    }

    fn leased(&self, job: &Value) -> Option<Lease> {
        let text = |name: &str| job[name].as_str().map(str::to_owned);
        let lease =
            Lease { job: text("id")?, attempt: job["attempt"].as_i64()?, lease: text("lease_id")? };
        let of = job["payload"]["tenant"].as_u64().map_or(usize::MAX, |it| it as usize);
        self.world.history.note(Event::Leased {
            tenant: self.tenant,
            job: lease.job.clone(),
            attempt: lease.attempt,
            lease: lease.lease.clone(),
            of,
        });
        Some(lease)
    }

    /// Runs a job: well, too long, or not at all.
    async fn run(&mut self, name: &str, lease: Lease) {
        if self.is_healing() {
            self.ack(name, &lease, End::Succeeded).await;
            return;
        }
        match self.rng.random_range(0..100) {
            // It dies.
            0..5 => return,
            // It freezes until its lease has ended, and continues.
            5..8 => sleep(Duration::from_millis(LEASE_SECONDS * 1_000 + 1_500)).await,
            8..20 => {
                sleep(Duration::from_millis(self.rng.random_range(200..900))).await;
                self.beat(name, &lease).await;
            }
            _ => sleep(Duration::from_millis(self.rng.random_range(0..40))).await,
        }
        let end = match self.rng.random_range(0..100) {
            0..18 => End::Failed,
            18..24 => End::Released,
            _ => End::Succeeded,
        };
        self.ack(name, &lease, end).await;
        if self.happens(5) {
            self.ack(name, &lease, end).await;
        }
        if self.happens(3) {
            let other = if end == End::Succeeded { End::Failed } else { End::Succeeded };
            self.ack(name, &lease, other).await;
        }
    }

    async fn beat(&mut self, name: &str, lease: &Lease) {
        let body = json!({"worker_id": name, "job_id": lease.job, "attempt": lease.attempt,
                          "lease_id": lease.lease});
        let answer = match self.call("/v1/workers/heartbeat", &body, None).await {
            Some((200..=299, _)) => Answer::Yes,
            Some(_) => Answer::Stale,
            None => Answer::Unknown,
        };
        let (job, attempt) = (lease.job.clone(), lease.attempt);
        self.world.history.note(Event::Beat { job, attempt, answer });
    }

    /// Sends an ack until it is answered.
    async fn ack(&mut self, name: &str, lease: &Lease, end: End) {
        let body = json!({"worker_id": name, "job_id": lease.job, "attempt": lease.attempt,
                          "lease_id": lease.lease, "status": end});
        for _ in 0..MAX_ACK_TRIES {
            let answer = match self.call("/v1/workers/ack", &body, None).await {
                Some((200..=299, _)) => Answer::Yes,
                Some(_) => Answer::Stale,
                None => Answer::Unknown,
            };
            self.world.history.note(Event::Acked {
                tenant: self.tenant,
                job: lease.job.clone(),
                attempt: lease.attempt,
                lease: lease.lease.clone(),
                end,
                answer,
            });
            if answer != Answer::Unknown || self.world.has_ended.load(Ordering::Relaxed) {
                return;
            }
            sleep(RETRY_PAUSE).await;
        }
    }
}
