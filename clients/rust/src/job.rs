//! A leased job, and how its handler may fail.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use ring::digest::{SHA256, digest};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::{
    checkpoint::Saved,
    client::{Client, Error, Request, now_ms},
};

/// Longest pause that a handler may choose: the server's limit.
const MAX_RETRY_PAUSE_SECONDS: u64 = 30 * 86_400;
/// The same for [`Failure::rate_limited`].
const MAX_RATE_LIMITED_SECONDS: u64 = 86_400;
/// One chunk of logs, in bytes: the server's limit is 64 KiB.
const MAX_LOG_BYTES: usize = 60 * 1024;

/// A leased job. Cheap to clone.
#[derive(Debug, Clone, Deserialize)]
pub struct Job {
    pub id: String,
    pub job_type: String,
    pub payload: Value,
    /// The fence: show it to other systems, so that they can refuse an older attempt.
    pub attempt: i32,
    pub lease_id: String,
    pub tags: HashMap<String, String>,
    pub parent_results: Vec<Value>,
    pub traceparent: Option<String>,
    /// Length of the lease, in seconds.
    pub lease_seconds: u32,
    /// How long an attempt may take, in seconds.
    pub timeout_seconds: u32,
    /// As the server sent it.
    #[serde(default)]
    pub(crate) checkpoint: Option<Value>,
    #[serde(default)]
    pub(crate) checkpoint_sequence: i64,
    #[serde(skip)]
    pub(crate) shared: Arc<Shared>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub stopped: CancellationToken,
    pub is_lost: AtomicBool,
    pub is_released: AtomicBool,
    /// Its handler has ended: an ack is on the way.
    pub is_done: AtomicBool,
    /// The worker that runs it: its client and its name.
    pub worker: OnceLock<(Client, String)>,
    /// What this attempt has stored.
    pub saved: Mutex<Option<Saved>>,
    /// Held while a checkpoint is stored: one after the other.
    pub saving: tokio::sync::Mutex<()>,
    progress: Mutex<Option<f32>>,
    sequence: AtomicU64,
    /// Number of times that this attempt has enqueued the same since a checkpoint.
    children: Mutex<HashMap<String, u32>>,
    begun: Instant,
    /// When the lease was last renewed.
    renewed: Mutex<Instant>,
}

impl Default for Shared {
    fn default() -> Self {
        Self {
            stopped: CancellationToken::new(),
            is_lost: AtomicBool::new(false),
            is_released: AtomicBool::new(false),
            is_done: AtomicBool::new(false),
            worker: OnceLock::new(),
            saved: Mutex::new(None),
            saving: tokio::sync::Mutex::default(),
            progress: Mutex::new(None),
            sequence: AtomicU64::new(0),
            children: Mutex::default(),
            begun: Instant::now(),
            renewed: Mutex::new(Instant::now()),
        }
    }
}

impl Job {
    /// Resolves when the job must stop: it was cancelled, its lease is lost, or the worker's grace
    /// period has ended. Then return [`Self::check`]'s error.
    pub async fn stopped(&self) {
        self.shared.stopped.cancelled().await;
    }

    /// Whether it may continue.
    ///
    /// # Errors
    /// When the job must stop.
    pub fn check(&self) -> Result<(), Failure> {
        if !self.shared.stopped.is_cancelled() {
            return Ok(());
        }
        if self.shared.is_released.load(Ordering::Relaxed) {
            return Err(Failure::released());
        }
        if self.is_overdue() && !self.is_lost() {
            return Err(Failure::released());
        }
        Err(Failure::new("Cancelled", "the job was cancelled, or its lease is lost"))
    }

    /// Reports how much is done, from 0 to 1.
    pub fn progress(&self, part: f32) {
        *self.shared.progress.lock().unwrap_or_else(PoisonError::into_inner) = Some(part);
    }

    /// Adds a line to the job's logs.
    ///
    /// # Errors
    /// When the lease is lost, or the server does not answer.
    pub async fn log(&self, text: &str) -> Result<(), Error> {
        let no_worker = Error::Setup("only jobs of a worker have logs");
        let (client, worker_id) = self.shared.worker.get().ok_or(no_worker)?;
        let sequence = self.shared.sequence.fetch_add(1, Ordering::Relaxed);
        let chunk = json!({
            "job_id": self.id, "attempt": self.attempt, "sequence": sequence,
            "data": format!("{}\n", cut(text)), "timestamp_ms": now_ms(),
        });
        let body = json!({"worker_id": worker_id, "chunks": [chunk]});
        client.request::<Value>(Request::post("/v1/workers/logs", body)).await.map(drop)
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.shared.is_lost.load(Ordering::Relaxed)
    }

    pub(crate) fn renew(&self, at: Instant) {
        *self.shared.renewed.lock().unwrap_or_else(PoisonError::into_inner) = at;
    }

    /// Whether the lease was not renewed for its whole length: another worker may have the job.
    pub(crate) fn is_overdue(&self) -> bool {
        let renewed = *self.shared.renewed.lock().unwrap_or_else(PoisonError::into_inner);
        renewed.elapsed() > Duration::from_secs(self.lease_seconds.into())
    }

    /// Its lease is lost.
    pub(crate) fn lose(&self) {
        if !self.shared.is_done.load(Ordering::Relaxed) {
            let timeout_seconds = self.timeout_seconds;
            let limit = Duration::from_secs(timeout_seconds.into());
            let has_outlived = self.shared.begun.elapsed() >= limit;
            let why = if has_outlived { "has outlived its timeout" } else { "has lost its lease" };
            tracing::warn!(job.id = self.id, timeout_seconds, "a job {why}: its outcome is void");
        }
        self.shared.is_lost.store(true, Ordering::Relaxed);
        self.shared.stopped.cancel();
    }

    /// What proves that this is the current attempt.
    pub(crate) fn fence(&self) -> Value {
        json!({"job_id": self.id, "attempt": self.attempt, "lease_id": self.lease_id})
    }

    /// The idempotency key of what its handler enqueues next: the same in each attempt that begins
    /// at the same checkpoint.
    pub(crate) fn child_key(&self, body: &Value) -> String {
        let digest = digest(&SHA256, body.to_string().as_bytes());
        let digest = digest.as_ref().iter().take(16).map(|byte| format!("{byte:02x}"));
        let place = format!("{}:{}:{}", self.id, self.stored(), digest.collect::<String>());
        let mut children = self.shared.children.lock().unwrap_or_else(PoisonError::into_inner);
        let number = children.entry(place.clone()).and_modify(|it| *it += 1).or_insert(1);
        format!("{place}:{number}")
    }

    /// The fence and the progress.
    pub(crate) fn beat(&self) -> Value {
        let progress = *self.shared.progress.lock().unwrap_or_else(PoisonError::into_inner);
        let mut beat = self.fence();
        if let Some(progress) = progress {
            beat["progress"] = json!(progress);
        }
        beat
    }
}

/// The beginning of a text, as much as one chunk of logs may have.
fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_LOG_BYTES)]
}

/// What waits after [`Failure::rate_limited`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    /// The job's group.
    Group,
    /// The whole queue.
    Queue,
    /// What the shared limit of this name counts together with the job.
    SharedLimit(String),
}

/// How an attempt failed. Any error becomes one, and is retried.
#[derive(Debug, Clone)]
pub struct Failure(pub(crate) Value);

impl Failure {
    /// A failure that is retried with backoff.
    #[must_use]
    pub fn new(kind: &str, message: &str) -> Self {
        Self(json!({"status": "failed", "error": {"type": kind, "message": message}}))
    }

    /// The job goes back to its queue without a failure.
    #[must_use]
    pub fn released() -> Self {
        Self(json!({"status": "released"}))
    }

    /// The job is put off: it is ready again after this time. No failure is counted.
    #[must_use]
    pub fn snooze(time: Duration) -> Self {
        let seconds = time.as_secs() + u64::from(time.subsec_nanos() > 0);
        let seconds = seconds.min(MAX_RETRY_PAUSE_SECONDS);
        Self(json!({"status": "released", "delay_seconds": seconds}))
    }

    /// What the job calls asks for fewer requests: its group waits for this time, or its queue if
    /// the job has no group or the scope is that. No failure is counted.
    #[must_use]
    pub fn rate_limited(time: Duration, scope: Option<Scope>) -> Self {
        let seconds = time.as_secs() + u64::from(time.subsec_nanos() > 0);
        let seconds = seconds.clamp(1, MAX_RATE_LIMITED_SECONDS);
        let mut end = json!({"status": "rate_limited", "retry_after_seconds": seconds});
        match scope {
            Some(Scope::Group) => end["scope"] = json!("group"),
            Some(Scope::Queue) => end["scope"] = json!("queue"),
            Some(Scope::SharedLimit(name)) => end["scope"] = json!(format!("shared_limit:{name}")),
            None => (),
        }
        Self(end)
    }

    /// The job cannot succeed: it becomes a dead letter at once.
    #[must_use]
    pub fn not_retryable(mut self) -> Self {
        self.0["retryable"] = json!(false);
        self
    }

    /// The job is retried after this time.
    #[must_use]
    pub fn retry_after(mut self, time: Duration) -> Self {
        let seconds = time.as_secs() + u64::from(time.subsec_nanos() > 0);
        self.0["retry_after_seconds"] = json!(seconds.min(MAX_RETRY_PAUSE_SECONDS));
        self
    }
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::new(std::any::type_name::<E>(), &error.to_string())
    }
}
