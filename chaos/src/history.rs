//! What clients saw and what was done to the servers: a line of JSON each.

use std::{
    fs::File,
    io::{BufWriter, Write},
    path::Path,
    sync::{Mutex, PoisonError},
};

use anyhow::Context;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::nemesis::Fault;

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

impl End {
    /// What the API calls it.
    #[must_use]
    pub const fn outcome(self) -> &'static str {
        match self {
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::Released => "released",
        }
    }
}

/// A lease as its worker has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    pub job: String,
    pub attempt: i64,
    pub lease: String,
    pub worker: String,
}

/// One thing that happened. `sent` is when its call began, in milliseconds since 1970.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum Event {
    /// A job was sent to a queue with this key, which is in its payload, too. The id is known once
    /// it was accepted.
    Enqueued { tenant: usize, key: String, queue: String, job: Option<String> },
    /// A workflow was accepted: `then` waits for the success of `first`, `otherwise` for its
    /// failure.
    Workflow { tenant: usize, first: String, then: String, otherwise: String },
    /// A batch was sealed. Its callback has the same mark in its payload.
    Batch { tenant: usize, mark: String, jobs: Vec<String> },
    /// A worker got a lease. `owner` is the tenant whose mark the payload has. `is_first`: the
    /// first try of its poll was answered with it.
    Leased { tenant: usize, held: Held, owner: usize, is_first: bool },
    /// A worker sent an ack. Those of a URL or a library are
    /// noted before they are sent, and their answers are not known.
    Acked { tenant: usize, held: Held, end: End, answer: Answer, sent: i64 },
    /// A worker sent a heartbeat.
    Beat { held: Held, answer: Answer, sent: i64 },
    /// A checkpoint with this number was stored.
    Saved { job: String, attempt: i64, sequence: i64 },
    /// A lease brought the checkpoint with this number; none: it brought none.
    Resumed { job: String, attempt: i64, sequence: Option<i64> },
    /// A client is about to cancel a job.
    Cancelling { job: String },
    /// A cancel of a job that waited was accepted.
    Cancelled { job: String },
    /// A queue was paused, or a group of it.
    Paused {
        tenant: usize,
        queue: String,
        #[serde(default)]
        group: Option<String>,
    },
    /// It will be resumed.
    Resuming {
        tenant: usize,
        queue: String,
        #[serde(default)]
        group: Option<String>,
    },
    /// An endpoint was notified of the end of a job. `is_taken`: it answered 200.
    Delivered { tenant: usize, event: String, kind: String, job: String, is_taken: bool },
    /// A node refused a call for a while.
    Refused { status: u16, code: String },
    /// An answer that no client should get.
    Strange { call: String, status: u16, text: String },
    /// A fault has begun.
    Fault { fault: Fault },
    /// It has ended.
    Healed { fault: Fault },
}

/// A moment, in milliseconds since 1970, and what happened then.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    pub at: i64,
    #[serde(flatten)]
    pub event: Event,
}

/// All events of a run, in memory and in a file.
pub struct History(Mutex<(Vec<Line>, BufWriter<File>)>);

impl History {
    /// # Errors
    /// When the file cannot be written.
    pub fn new(path: &Path) -> anyhow::Result<Self> {
        Ok(Self(Mutex::new((Vec::new(), BufWriter::new(File::create(path)?)))))
    }

    pub fn note(&self, event: Event) {
        let line = Line { at: now(), event };
        let text = serde_json::to_string(&line).unwrap_or_default();
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A full disk shows itself when the run ends.
        let _ = writeln!(inner.1, "{text}");
        inner.0.push(line);
    }

    /// All of them.
    ///
    /// # Errors
    /// When the file could not be written.
    pub fn end(&self) -> anyhow::Result<Vec<Line>> {
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        inner.1.flush()?;
        Ok(inner.0.clone())
    }
}

/// The history of a run that has ended.
///
/// # Errors
/// When it cannot be read.
pub fn read(path: &Path) -> anyhow::Result<Vec<Line>> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    text.lines().map(|it| Ok(serde_json::from_str(it)?)).collect()
}

/// Milliseconds since 1970, by the clock that PostgreSQL has as well.
#[must_use]
pub fn now() -> i64 {
    now_utc().timestamp_millis()
}

/// The same as a date.
#[must_use]
#[allow(clippy::disallowed_methods, reason = "clients have clocks of their own")]
pub fn now_utc() -> DateTime<Utc> {
    Utc::now()
}
