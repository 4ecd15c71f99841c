//! A worker while one of its polls waits: its labels, and the directive that ends the wait.

use std::{sync::Arc, time::Duration};

use fencepost_domain::{
    error::Error,
    ids::{PUSH_WORKER, ProjectId},
    worker::WorkerState,
};

use super::{Facts, WorkerKey, facts};
use crate::Engine;

/// The worker of one poll.
pub(crate) struct Presence<'a> {
    engine: &'a Engine,
    /// None: a worker without a name, which gets no directives.
    key: Option<WorkerKey>,
    facts: Option<Arc<Facts>>,
}

impl<'a> Presence<'a> {
    /// Reads the facts of the worker with this name.
    ///
    /// # Errors
    /// [`Error::Overloaded`] when too many look-ups wait; [`Error::NotReady`] and
    /// [`Error::Unavailable`] when the database does not answer.
    pub async fn of(
        engine: &'a Engine,
        project_id: ProjectId,
        name: Option<&str>,
    ) -> Result<Self, Error> {
        let key = name.map(|name| (project_id, name.into()));
        let facts = match &key {
            Some(key) => facts(engine, key).await?,
            None => None,
        };
        Ok(Self { engine, key, facts })
    }

    /// The labels that the worker registered.
    pub fn labels(&self) -> &[String] {
        self.facts.as_ref().map_or(&[], |it| &it.labels)
    }

    /// Records that the worker was heard, and that it polls these queues and types.
    pub fn record(&self, queues: &[Arc<str>], job_types: &[String]) {
        // What a node pushes is recorded with its other queues.
        let key = self.key.as_ref().filter(|it| !it.1.starts_with(PUSH_WORKER));
        if let Some(key) = key {
            self.engine.registry.record_seen(key, queues, job_types);
        }
    }

    /// The directive of the worker, if it should take no more jobs.
    ///
    /// # Errors
    /// The errors of [`Self::of`].
    pub async fn directive(&self) -> Result<Option<WorkerState>, Error> {
        match &self.key {
            Some(key) => directive(self.engine, key).await,
            None => Ok(None),
        }
    }

    /// The longest time between two calls of the worker, in seconds; none: it has not registered
    /// one.
    pub fn beat_seconds(&self) -> Option<i32> {
        self.facts.as_ref()?.beat_seconds
    }

    fn beat(&self) -> Option<Duration> {
        Some(Duration::from_secs(self.beat_seconds()?.unsigned_abs().into()))
    }

    /// Records that a poll brought the worker jobs: its silence begins now, however long the poll
    /// has waited.
    pub fn record_delivery(&self) {
        if self.beat().is_some() {
            self.record(&[], &[]);
        }
    }

    /// Resolves when the worker gets a directive to take no more jobs. If the database does not
    /// answer, it keeps waiting. A poll that waits is a call all the time.
    pub async fn until_directive(&self) {
        let Some(key) = &self.key else { return std::future::pending().await };
        let of_worker = self.engine.registry.directives.of(key.clone());
        loop {
            let changed = of_worker.notified();
            tokio::pin!(changed);
            // Subscribe before reading.
            changed.as_mut().enable();
            if self.has_directive(key).await {
                return;
            }
            match self.beat() {
                None => changed.await,
                Some(beat) => {
                    if tokio::time::timeout(beat, changed).await.is_err() {
                        self.record(&[], &[]);
                    }
                }
            }
        }
    }

    async fn has_directive(&self, key: &WorkerKey) -> bool {
        if let Some(known) = self.engine.registry.known.get(key) {
            return known.is_some_and(|it| WorkerState::halt(it.state, it.directive).is_some());
        }
        // In a task of its own: this future may be dropped at any point.
        let (engine, key) = (self.engine.clone(), key.clone());
        let read = tokio::spawn(async move { directive(&engine, &key).await }).await;
        matches!(read, Ok(Ok(Some(_))))
    }
}

async fn directive(engine: &Engine, key: &WorkerKey) -> Result<Option<WorkerState>, Error> {
    Ok(facts(engine, key).await?.and_then(|it| WorkerState::halt(it.state, it.directive)))
}
