//! Polls: one asks for all idle slots of a worker.

use std::{sync::atomic::Ordering, time::Duration};

use serde::Deserialize;
use serde_json::{Value, json};
use uuid::Uuid;

use super::{POLL_WAIT, Worker};
use crate::{
    client::{Error, Request},
    job::Job,
};

/// Jobs that one poll asks for at most: the server's limit.
const MAX_CAPACITY: usize = 50;

/// The answer to a poll.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Given {
    pub jobs: Vec<Job>,
    pub state: Option<String>,
}

/// What the slots of a worker share.
#[derive(Debug, Default)]
pub(super) struct Asked {
    /// Jobs that no slot has taken, the first one last.
    given: Vec<Job>,
    unanswered: Option<Value>,
}

impl Worker {
    /// Ids in the order of time keep the server's index small.
    pub(super) fn poll(&self, wait: Duration) -> Value {
        let mut poll = self.wanted(json!({"poll_id": Uuid::now_v7()}));
        poll["wait_seconds"] = json!(wait.as_secs());
        poll["lease_seconds"] = json!(self.lease.as_secs());
        poll
    }

    /// The next job of a slot; none: the worker stops. One poll asks for all idle slots.
    pub(super) async fn next(&self) -> Result<Option<Job>, Error> {
        self.idle.fetch_add(1, Ordering::Relaxed);
        let mut asked = self.asked.lock().await;
        let next = self.next_of_all(&mut asked).await;
        // Before the next slot asks, for itself and the others.
        self.idle.fetch_sub(1, Ordering::Relaxed);
        next
    }

    async fn next_of_all(&self, asked: &mut Asked) -> Result<Option<Job>, Error> {
        loop {
            if let Some(job) = asked.given.pop() {
                return Ok(Some(job));
            }
            if self.stopping.is_cancelled() {
                return Ok(None);
            }
            if !self.may_poll() {
                let mut rest = self.rest.subscribe();
                tokio::select! {
                    () = self.stopping.cancelled() => (),
                    _ = rest.wait_for(|it| !it.is_on()) => (),
                }
                continue;
            }
            self.ask(asked).await?;
        }
    }

    async fn ask(&self, asked: &mut Asked) -> Result<(), Error> {
        // A poll without an answer is repeated with its id: it gets the same jobs.
        let body = asked.unanswered.get_or_insert_with(|| {
            let mut poll = self.poll(POLL_WAIT);
            poll["worker_id"] = json!(self.id);
            poll["capacity"] = json!(self.idle.load(Ordering::Relaxed).min(MAX_CAPACITY));
            poll
        });
        let request = Request::post("/v1/workers/poll", body.clone());
        let request = Request { wait: POLL_WAIT, ..request };
        let answered = tokio::select! {
            answered = self.client.request::<Given>(request) => answered,
            () = self.parked_too_long() => return Ok(()),
        };
        match answered {
            Ok(given) => {
                asked.unanswered = None;
                asked.given = given.jobs;
                // The first is taken first.
                asked.given.reverse();
                self.obey(given.state.as_deref());
                Ok(())
            }
            Err(error) if error.is_retryable() => {
                tracing::warn!(%error, "a poll failed");
                Ok(())
            }
            Err(error) => Err(error),
        }
    }
}
