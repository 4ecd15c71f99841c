//! Producers: single jobs, batches and workflows, each sent until it is accepted.

use std::time::{Duration, Instant};

use chrono::TimeDelta;
use rand::RngExt;
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::{
    adapters::Protocol,
    check::MAX_ATTEMPTS,
    clients::{Call, Client, GROUPS_QUEUE, ORDERED_QUEUE, RETRY_PAUSE, SHARED_QUEUES, TURNS_QUEUE},
    history::{Event, now, now_utc},
};

/// Longest time in which an accepted key is busy: a node that has died was silent for 15 s.
const MAX_BUSY_KEY: Duration = Duration::from_secs(25);
/// The pause between two jobs of a client that looks whether they are accepted.
const PROBE_PAUSE: Duration = Duration::from_millis(150);
/// Of a hundred things that a producer sends, batches and workflows; the others are single jobs.
const BATCH_PERCENT: u32 = 4;
const WORKFLOW_PERCENT: u32 = 4;
/// Of a hundred single jobs, those that are sent for later, and those that wait after a failure.
const LATER_PERCENT: u32 = 6;
const BACKOFF_PERCENT: u32 = 5;
/// How much later, in milliseconds.
const LATER_MS: std::ops::Range<i64> = 300..4_000;
/// Of a hundred jobs for later, those that are cancelled.
const CANCEL_PERCENT: u32 = 30;
/// States in the answer to a cancel of a job that must not run any more. One that still waits was
/// not cancelled, and will break an invariant when it runs.
const MUST_NOT_RUN: [&str; 3] = ["cancelled", "scheduled", "pending"];
/// How long jobs that wait after a failure do so.
const BACKOFF_SECONDS: i64 = 1;
/// Fields of payloads: the idempotency key, when a job may run, in milliseconds since 1970, and how
/// long it waits after a failure, in milliseconds.
pub const KEY: &str = "key";
pub const NOT_BEFORE: &str = "not_before";
pub const BACKOFF_MS: &str = "backoff_ms";
/// Further ones: the group of a job with a strict order, and its place in it.
pub const GROUP: &str = "group";
pub const PLACE: &str = "place";
/// The group of a job whose queue limits its groups.
pub const LIMITED_GROUP: &str = "limited_group";
/// How long a queue is resumed between two pauses, and how long it is paused, in milliseconds.
const RESUMED_MS: std::ops::Range<u64> = 2_000..8_000;
const PAUSED_MS: std::ops::Range<u64> = 200..1_500;
/// The pause between two jobs of a producer at full load, in milliseconds.
const PAUSE_MS: std::ops::Range<u64> = 5..60;
pub const MAX_LOAD_PERCENT: u32 = 100;
/// The same between two jobs of a limited group: about as many come as may start.
const LIMITED_PAUSE_MS: std::ops::Range<u64> = 200..700;
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
            } else if self.happens(LATER_PERCENT) {
                self.enqueue_for_later().await;
            } else if self.happens(BACKOFF_PERCENT) {
                self.enqueue_with_backoff().await;
            } else {
                self.enqueue(json!({})).await;
            }
            let pause = Duration::from_millis(self.rng.random_range(PAUSE_MS));
            sleep(pause * MAX_LOAD_PERCENT / self.world.load_percent).await;
        }
    }

    /// Sends jobs of one group, each after the answer to the one before it.
    pub async fn produce_in_order(mut self, group: String) {
        let mut place = 0;
        while !self.is_healing() {
            let mut body = self.job();
            body["queue"] = json!(ORDERED_QUEUE);
            body["payload"] = json!({"tenant": self.tenant, PLACE: place});
            body["payload"][GROUP] = json!(group);
            body["group"] = json!(group);
            self.send(body).await;
            place += 1;
            let pause = Duration::from_millis(self.rng.random_range(PAUSE_MS));
            sleep(pause * MAX_LOAD_PERCENT / self.world.load_percent).await;
        }
    }

    /// Sends jobs of one group whose queue limits how many run and start.
    pub async fn produce_in_limits(mut self, group: String) {
        while !self.is_healing() {
            let mut body = self.job();
            let queues = [GROUPS_QUEUE, TURNS_QUEUE, SHARED_QUEUES[0], SHARED_QUEUES[1]];
            body["queue"] = json!(queues[self.rng.random_range(0..queues.len())]);
            body["payload"] = json!({"tenant": self.tenant});
            body["payload"][LIMITED_GROUP] = json!(group);
            body["group"] = json!(group);
            self.send(body).await;
            let pause = Duration::from_millis(self.rng.random_range(LIMITED_PAUSE_MS));
            sleep(pause * MAX_LOAD_PERCENT / self.world.load_percent).await;
        }
    }

    fn any_queue(&mut self) -> &'static str {
        let queues = &self.world.queues;
        queues[self.rng.random_range(0..queues.len())]
    }

    /// Pauses a queue, or a group of it, now and then, and resumes it.
    pub async fn pause_now_and_then(mut self, queue: &'static str, group: Option<String>) {
        let (tenant, queue) = (self.tenant, queue.to_owned());
        let paused = group.as_ref().map(|it| format!("/groups/{it}")).unwrap_or_default();
        let path = |action: &str| format!("/v1/queues/{queue}{paused}/{action}");
        let mut unanswered_at: Option<Instant> = None;
        while !self.is_healing() {
            sleep(Duration::from_millis(self.rng.random_range(RESUMED_MS))).await;
            self.post_until_accepted(&path("pause"), &json!({})).await;
            // A node that is frozen may still run a resume that was sent again elsewhere.
            let is_sure = unanswered_at.is_none_or(|it| it.elapsed() > MAX_BUSY_KEY);
            let (queue, group) = (queue.clone(), group.clone());
            if is_sure {
                let (queue, group) = (queue.clone(), group.clone());
                self.world.history.note(Event::Paused { tenant, queue, group });
            }
            sleep(Duration::from_millis(self.rng.random_range(PAUSED_MS))).await;
            if is_sure {
                self.world.history.note(Event::Resuming { tenant, queue, group });
            }
            let (resume, key) = (path("resume"), self.uuid());
            let call = Call { path: &resume, body: &json!({}), key: Some(&key) };
            if self.post(call).await.is_none() {
                unanswered_at = Some(Instant::now());
                self.repeat_until_accepted(&resume, &json!({}), &key).await;
            }
        }
    }

    /// Sends a job that may not run yet, and cancels some of them.
    async fn enqueue_for_later(&mut self) {
        let mut body = self.job();
        let may_run = now_utc() + TimeDelta::milliseconds(self.rng.random_range(LATER_MS));
        body["run_at"] = json!(may_run);
        body["payload"][NOT_BEFORE] = json!(may_run.timestamp_millis());
        let Some(job) = self.send(body).await else { return };
        if self.happens(CANCEL_PERCENT) {
            self.world.history.note(Event::Cancelling { job: job.clone() });
            let path = format!("/v1/jobs/{job}/cancel");
            let answer = self.post(Call { path: &path, body: &json!({}), key: None }).await;
            // One that has begun meanwhile runs to its end.
            let state = answer.as_ref().and_then(|it| it.1["state"].as_str());
            if state.is_some_and(|it| MUST_NOT_RUN.contains(&it)) {
                self.world.history.note(Event::Cancelled { job });
            }
        }
    }

    async fn enqueue_with_backoff(&mut self) {
        let mut body = self.job();
        body["retry"] = json!({"strategy": "constant", "initial_seconds": BACKOFF_SECONDS,
                               "jitter_seconds": 0});
        body["payload"][BACKOFF_MS] = json!(BACKOFF_SECONDS * 1_000);
        self.send(body).await;
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
        let mut payload = Protocol::of_queue(queue).map_or_else(|| json!({}), Protocol::payload);
        payload["tenant"] = json!(self.tenant);
        json!({
            "job_type": "chaos", "queue": queue, "max_attempts": MAX_ATTEMPTS, "payload": payload,
            "retry": {"initial_seconds": 0, "jitter_seconds": 0, "max_seconds": 1},
        })
    }

    /// Sends a job with some fields of its own until it is accepted, and returns its id.
    async fn enqueue(&mut self, more: Value) -> Option<String> {
        let mut body = self.job();
        let more = more.as_object().cloned().unwrap_or_default();
        more.into_iter().for_each(|(name, value)| body[name] = value);
        self.send(body).await
    }

    async fn send(&mut self, mut body: Value) -> Option<String> {
        let key = self.uuid();
        body["payload"][KEY] = json!(key);
        let queue = body["queue"].as_str().unwrap_or_default().to_owned();
        let mut busy_since = None;
        loop {
            let call = Call { path: "/v1/jobs", body: &body, key: Some(&key) };
            let answer = self.post(call).await;
            if self.is_refused(answer.as_ref(), &mut busy_since) {
                return None;
            }
            let job = answer.and_then(|it| it.1["id"].as_str().map(str::to_owned));
            let (tenant, key, queue) = (self.tenant, key.clone(), queue.clone());
            self.world.history.note(Event::Enqueued { tenant, key, queue, job: job.clone() });
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
        self.repeat_until_accepted(path, body, &key).await
    }

    async fn repeat_until_accepted(
        &mut self,
        path: &str,
        body: &Value,
        key: &str,
    ) -> Option<Value> {
        let mut busy_since = None;
        loop {
            let answer = self.post(Call { path, body, key: Some(key) }).await;
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
