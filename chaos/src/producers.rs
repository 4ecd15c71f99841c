//! Producers: single jobs, batches and workflows, each sent until it is accepted.

use std::time::{Duration, Instant};

use rand::RngExt;
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::{
    adapters::Protocol,
    check::MAX_ATTEMPTS,
    clients::{Call, Client, RETRY_PAUSE},
    history::{Event, now},
};

/// Longest time in which an accepted key is busy: a node that has died was silent for 15 s.
const MAX_BUSY_KEY: Duration = Duration::from_secs(25);
/// The pause between two jobs of a client that looks whether they are accepted.
const PROBE_PAUSE: Duration = Duration::from_millis(150);
/// Of a hundred things that a producer sends, batches and workflows; the others are single jobs.
const BATCH_PERCENT: u32 = 4;
const WORKFLOW_PERCENT: u32 = 4;
/// The pause between two of them, in milliseconds.
const PAUSE_MS: std::ops::Range<u64> = 5..60;
/// Jobs of a batch, at most.
const MAX_BATCH_JOBS: usize = 4;

impl Client {
    /// Sends jobs until nothing is broken any more.
    pub async fn produce(mut self) {
        while !self.is_healing() {
            if self.happens(BATCH_PERCENT) {
                self.make_batch().await;
            } else if self.happens(WORKFLOW_PERCENT) {
                self.make_workflow().await;
            } else {
                self.enqueue(json!({})).await;
            }
            sleep(Duration::from_millis(self.rng.random_range(PAUSE_MS))).await;
        }
    }

    fn any_queue(&mut self) -> &'static str {
        let queues = &self.world.queues;
        queues[self.rng.random_range(0..queues.len())]
    }

    /// Sends a job now and then, to see how long none is accepted.
    pub async fn probe(mut self) {
        while !self.is_healing() {
            self.enqueue(json!({})).await;
            sleep(PROBE_PAUSE).await;
        }
    }

    /// What every job has.
    fn job(&mut self) -> Value {
        let queue = self.any_queue();
        let protocol = Protocol::ALL.into_iter().find(|it| it.name() == queue);
        let mut payload = protocol.map_or_else(|| json!({}), Protocol::payload);
        payload["tenant"] = json!(self.tenant);
        json!({
            "job_type": "chaos", "queue": queue, "max_attempts": MAX_ATTEMPTS, "payload": payload,
            "retry": {"initial_seconds": 0, "jitter_seconds": 0, "max_seconds": 1},
        })
    }

    /// Sends a job until it is accepted, and returns its id.
    async fn enqueue(&mut self, more: Value) -> Option<String> {
        let mut body = self.job();
        let more = more.as_object().cloned().unwrap_or_default();
        more.into_iter().for_each(|(name, value)| body[name] = value);
        let key = self.uuid();
        let mut busy_since = None;
        loop {
            let call = Call { path: "/v1/jobs", body: &body, key: Some(&key) };
            let answer = self.post(call).await;
            if self.is_refused(answer.as_ref(), &mut busy_since) {
                return None;
            }
            let job = answer.and_then(|it| it.1["id"].as_str().map(str::to_owned));
            let (tenant, key) = (self.tenant, key.clone());
            self.world.history.note(Event::Enqueued { tenant, key, job: job.clone() });
            if job.is_some() {
                return job;
            }
            sleep(RETRY_PAUSE).await;
        }
    }

    /// Whether a request was refused for good, which none should be.
    fn is_refused(&self, answer: Option<&(u16, Value)>, busy_since: &mut Option<Instant>) -> bool {
        let Some(code) = answer.and_then(|it| it.1["error"]["code"].as_str()) else {
            // Its run may have begun anew since.
            *busy_since = None;
            return false;
        };
        let since = *busy_since.get_or_insert_with(Instant::now);
        if code == "idempotency_in_progress" && since.elapsed() < MAX_BUSY_KEY {
            return false;
        }
        let (call, text) = ("a request with a key".to_owned(), code.to_owned());
        self.world.history.note(Event::Strange { call, status: 409, text });
        true
    }

    /// Posts until it is accepted.
    async fn post_until_accepted(&mut self, path: &str, body: &Value) -> Option<Value> {
        let key = self.uuid();
        let mut busy_since = None;
        loop {
            let answer = self.post(Call { path, body, key: Some(&key) }).await;
            if self.is_refused(answer.as_ref(), &mut busy_since) {
                return None;
            }
            if let Some((200..=299, answer)) = answer {
                return Some(answer);
            }
            sleep(RETRY_PAUSE).await;
        }
    }

    async fn make_batch(&mut self) {
        let mark = format!("{}-{}", now(), self.uuid());
        let mut callback = self.job();
        callback["queue"] = json!("q0");
        callback["job_type"] = json!(BATCH_END);
        callback["payload"] = json!({"tenant": self.tenant, "mark": mark});
        let body = json!({"on_complete": callback});
        let Some(made) = self.post_until_accepted("/v1/batches", &body).await else { return };
        let id = made["id"].clone();
        let mut jobs = Vec::new();
        for _ in 0..self.rng.random_range(1..=MAX_BATCH_JOBS) {
            jobs.extend(self.enqueue(json!({"batch_id": id})).await);
        }
        let seal = format!("/v1/batches/{}/seal", id.as_str().unwrap_or_default());
        if self.post_until_accepted(&seal, &json!({})).await.is_some() {
            self.world.history.note(Event::Batch { tenant: self.tenant, mark, jobs });
        }
    }

    async fn make_workflow(&mut self) {
        let mut jobs = ["first", "then", "otherwise"].map(|key| {
            let mut job = self.job();
            job["key"] = json!(key);
            job
        });
        jobs[1]["depends_on"] = json!(["first"]);
        jobs[2]["depends_on"] = json!([{"key": "first", "when": "failed"}]);
        let body = json!({"jobs": jobs});
        let Some(made) = self.post_until_accepted("/v1/workflows", &body).await else { return };
        let jobs = made["jobs"].as_array().cloned().unwrap_or_default();
        let id = |key: &str| {
            let job = jobs.iter().find(|it| it["key"] == key);
            job.and_then(|it| it["id"].as_str().map(str::to_owned)).unwrap_or_default()
        };
        let (first, then, otherwise) = (id("first"), id("then"), id("otherwise"));
        self.world.history.note(Event::Workflow { tenant: self.tenant, first, then, otherwise });
    }
}

/// The type of the jobs that ends of batches enqueue.
pub const BATCH_END: &str = "batch-end";
