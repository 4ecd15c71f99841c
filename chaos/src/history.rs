//! What clients saw and what was done to the servers: a line of JSON each.

use std::{
    fs::File,
    io::{BufWriter, Write},
    path::Path,
    sync::{Mutex, PoisonError},
    time::Instant,
};

use serde::{Deserialize, Serialize};

/// How a call ended, as the client knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// It was accepted.
    Yes,
    /// It was refused with 409: the lease has ended.
    Stale,
    /// No answer, or one that says nothing: it may have happened.
    Unknown,
}

/// How a worker ends an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    Succeeded,
    Failed,
    Released,
}

/// One thing that happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum Event {
    /// A job was sent with this key. The id is known once it was accepted.
    Enqueued { tenant: usize, key: String, job: Option<String> },
    /// A worker got a lease. `of` is the tenant whose mark the payload has.
    Leased { tenant: usize, job: String, attempt: i64, lease: String, of: usize },
    /// A worker sent an ack.
    Acked { tenant: usize, job: String, attempt: i64, lease: String, end: End, answer: Answer },
    /// A worker sent a heartbeat.
    Beat { job: String, attempt: i64, answer: Answer },
    /// An answer that no client should get.
    Strange { call: String, status: u16, text: String },
    /// A fault, or its end.
    Fault { kind: String },
}

/// A moment and what happened then.
#[derive(Debug, Serialize)]
struct Line<'a> {
    ms: u128,
    #[serde(flatten)]
    event: &'a Event,
}

/// All events of a run, in memory and in a file.
pub struct History {
    began: Instant,
    inner: Mutex<(Vec<Event>, BufWriter<File>)>,
}

impl History {
    /// # Errors
    /// When the file cannot be written.
    pub fn new(path: &Path) -> anyhow::Result<Self> {
        let file = BufWriter::new(File::create(path)?);
        Ok(Self { began: Instant::now(), inner: Mutex::new((Vec::new(), file)) })
    }

    pub fn note(&self, event: Event) {
        let line = Line { ms: self.began.elapsed().as_millis(), event: &event };
        let text = serde_json::to_string(&line).unwrap_or_default();
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        // A full disk shows itself when the run ends.
        let _ = writeln!(inner.1, "{text}");
        inner.0.push(event);
    }

    /// All of them.
    ///
    /// # Errors
    /// When the file could not be written.
    pub fn end(&self) -> anyhow::Result<Vec<Event>> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.1.flush()?;
        Ok(inner.0.clone())
    }
}
