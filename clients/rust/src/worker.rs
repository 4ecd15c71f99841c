//! A worker: polls for jobs, keeps their leases, shows their fences, and drains on SIGTERM.

mod polls;

use std::{
    collections::HashMap,
    fmt,
    future::Future,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use nix::sys::signal::Signal;
use reqwest::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{
    signal::unix::{self, SignalKind, signal},
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use uuid::Uuid;

use self::polls::{Asked, Given};
use crate::{
    client::{CURRENT_JOB, Client, Error, Request, TRACEPARENT},
    job::{Failure, Job},
};

/// How long a poll waits: shorter than the 30 s after which a silent worker counts as lost.
const POLL_WAIT: Duration = Duration::from_secs(20);
/// Between two heartbeats at most.
const BEAT_TIME: Duration = Duration::from_secs(5);
/// The longest time between two calls while jobs run, as the worker registers it, in seconds. After
/// three times that without a call its jobs return.
const MAX_CALL_SECONDS: u64 = 10;
/// The length of leases: heartbeats renew them.
const LEASE_TIME: Duration = Duration::from_secs(30);
/// Heartbeats that may fail before a lease ends.
const BEATS_A_LEASE: u32 = 3;
/// How long an ack is sent again while the server does not answer.
const ACK_RETRY_TIME: Duration = Duration::from_secs(600);
/// How long the last call may take.
const DEREGISTER_TIME: Duration = Duration::from_secs(3);
/// What handlers may still take after the grace period.
const LAST_TIME: Duration = Duration::from_secs(2);
/// Handlers that one worker runs at the same time at most.
const MAX_CONCURRENCY: usize = 100;

type Outcome = Pin<Box<dyn Future<Output = Result<Value, Failure>> + Send>>;
type Handler = Box<dyn Fn(Job) -> Outcome + Send + Sync>;

/// Runs handlers for the jobs of some queues.
pub struct Worker {
    /// The worker's name: no two processes have the same.
    pub id: String,
    /// Queues to poll. Default: `default`.
    pub queues: Vec<String>,
    /// Handlers that run at the same time. Default: 10.
    pub concurrency: usize,
    pub labels: Vec<String>,
    /// How soon the jobs of a worker that has died are run again. Default: 30 s.
    pub lease: Duration,
    /// What running jobs have to end after SIGTERM. Default: 25 s.
    pub grace: Duration,
    client: Client,
    handlers: HashMap<String, Handler>,
    active: Mutex<HashMap<String, Job>>,
    stopping: CancellationToken,
    rest: watch::Sender<Rest>,
    /// Slots without a job.
    idle: AtomicUsize,
    /// Held by the slot that polls for all of them.
    asked: tokio::sync::Mutex<Asked>,
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").field("id", &self.id).finish_non_exhaustive()
    }
}

/// The signals of a worker.
struct Signals {
    term: unix::Signal,
    int: unix::Signal,
    pause: unix::Signal,
    resume: unix::Signal,
}

impl Signals {
    fn install() -> std::io::Result<Self> {
        Ok(Self {
            term: signal(SignalKind::terminate())?,
            int: signal(SignalKind::interrupt())?,
            pause: signal(SignalKind::from_raw(Signal::SIGTSTP as i32))?,
            resume: signal(SignalKind::from_raw(Signal::SIGCONT as i32))?,
        })
    }
}

/// Why there are no polls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Rest {
    by_signal: bool,
    by_directive: bool,
}

impl Rest {
    fn is_on(self) -> bool {
        self.by_signal || self.by_directive
    }
}

impl Worker {
    /// A worker without handlers.
    #[must_use]
    pub fn new(client: Client) -> Self {
        let random = Uuid::new_v4().simple().to_string();
        Self {
            id: format!("{}-{}-{}", host(), std::process::id(), &random[..8]),
            queues: vec!["default".to_owned()],
            concurrency: 10,
            labels: Vec::new(),
            lease: LEASE_TIME,
            grace: Duration::from_secs(25),
            client,
            handlers: HashMap::new(),
            active: Mutex::default(),
            stopping: CancellationToken::new(),
            rest: watch::Sender::default(),
            idle: AtomicUsize::new(0),
            asked: tokio::sync::Mutex::default(),
        }
    }

    /// Makes a function the handler of a job type. What it returns is the job's result.
    pub fn job<F, W>(&mut self, job_type: &str, handler: F)
    where
        F: Fn(Job) -> W + Send + Sync + 'static,
        W: Future<Output = Result<Value, Failure>> + Send + 'static,
    {
        self.handlers.insert(job_type.to_owned(), Box::new(move |job| Box::pin(handler(job))));
    }

    /// Cancel it to stop the worker: it takes no more jobs, and [`Self::run`] returns when those
    /// that run have ended.
    #[must_use]
    pub fn stopping(&self) -> CancellationToken {
        self.stopping.clone()
    }

    /// Works until SIGTERM, SIGINT, or [`Self::stopping`] is cancelled.
    ///
    /// # Errors
    /// When the server refuses the worker, or signals cannot be handled.
    pub async fn run(self) -> Result<(), Error> {
        self.run_with(|| ()).await
    }

    /// The same; `on_ready` is called when the worker has registered.
    ///
    /// # Errors
    /// When the server refuses the worker, or signals cannot be handled.
    pub async fn run_with(self, on_ready: impl FnOnce()) -> Result<(), Error> {
        if !(1..=MAX_CONCURRENCY).contains(&self.concurrency) {
            return Err(Error::Setup("concurrency must be between 1 and 100"));
        }
        if self.handlers.is_empty() {
            return Err(Error::Setup(
                "the worker has no handlers: it would take jobs of every type",
            ));
        }
        let worker = Arc::new(self);
        let about = worker.wanted(json!({
            "worker_id": worker.id, "hostname": host(), "pid": std::process::id(),
            "sdk_version": "fencepost-rust/0.2.0", "concurrency": worker.concurrency,
        }));
        // Before it registers: a signal that nothing handles ends or stops the process.
        let signals = Signals::install().map_err(|_| Error::Setup("signals cannot be handled"))?;
        let signals = AbortOnDropHandle::new(tokio::spawn(Arc::clone(&worker).listen(signals)));
        tokio::select! {
            registered = worker.register(about) => registered?,
            () = worker.stopping.cancelled() => return Ok(()),
        }
        let beats = tokio::spawn(Arc::clone(&worker).beat());
        let mut slots = JoinSet::new();
        for _ in 0..worker.concurrency {
            slots.spawn(Arc::clone(&worker).serve());
        }
        on_ready();
        let ended = worker.drain(&mut slots).await;
        beats.abort();
        signals.abort();
        slots.abort_all();
        // It releases what still runs.
        let body = json!({"worker_id": worker.id});
        let request = Request::post("/v1/workers/deregister", body);
        let request = Request { timeout: DEREGISTER_TIME, retry_time: DEREGISTER_TIME, ..request };
        if let Err(error) = worker.client.request::<Value>(request).await {
            // Its leases expire instead.
            tracing::warn!(%error, "the worker was not deregistered");
        }
        ended
    }

    async fn register(&self, about: Value) -> Result<(), Error> {
        const PATH: &str = "/v1/workers/register";
        let mut with_beats = about.clone();
        with_beats["beat_seconds"] = json!(MAX_CALL_SECONDS);
        let registered = self.client.request::<Value>(Request::post(PATH, with_beats)).await;
        match registered {
            // A server of version 0.2.0 or older: a lost worker's jobs wait for their leases.
            Err(error) if error.refuses("beat_seconds") => {
                self.client.request::<Value>(Request::post(PATH, about)).await.map(drop)
            }
            registered => registered.map(drop),
        }
    }

    /// Waits for the slots: while the worker works, then for the grace period, then a little more.
    async fn drain(&self, slots: &mut JoinSet<Result<(), Error>>) -> Result<(), Error> {
        let mut first = Ok(());
        let mut all = async |first: &mut Result<(), Error>| {
            while let Some(ended) = slots.join_next().await {
                if let Ok(Err(error)) = ended {
                    self.stopping.cancel();
                    *first = Err(error);
                }
            }
        };
        tokio::select! {
            () = all(&mut first) => return first,
            () = self.stopping.cancelled() => (),
        }
        if timeout(self.grace, all(&mut first)).await.is_err() {
            for job in self.active().values() {
                job.shared.is_released.store(true, Ordering::Relaxed);
                job.shared.stopped.cancel();
            }
            let _ = timeout(LAST_TIME, all(&mut first)).await;
        }
        first
    }

    async fn listen(self: Arc<Self>, mut signals: Signals) {
        loop {
            tokio::select! {
                _ = signals.term.recv() => self.stop_or_exit(),
                _ = signals.int.recv() => self.stop_or_exit(),
                _ = signals.pause.recv() => self.rest.send_modify(|it| it.by_signal = true),
                _ = signals.resume.recv() => self.rest.send_modify(|it| it.by_signal = false),
            }
        }
    }

    fn stop_or_exit(&self) {
        if self.stopping.is_cancelled() {
            std::process::exit(1);
        }
        self.stopping.cancel();
    }

    fn active(&self) -> MutexGuard<'_, HashMap<String, Job>> {
        self.active.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn obey(&self, state: Option<&str>) {
        match state {
            Some("terminate") => self.stopping.cancel(),
            Some(state) if !self.rest.borrow().by_signal => {
                self.rest.send_modify(|it| it.by_directive = state == "quiet");
            }
            _ => (),
        }
    }

    /// Resolves when there must be no polls.
    async fn parked_too_long(&self) {
        let mut rest = self.rest.subscribe();
        tokio::select! {
            () = self.stopping.cancelled() => (),
            _ = rest.wait_for(|it| it.is_on()) => (),
        }
    }

    fn may_poll(&self) -> bool {
        !self.stopping.is_cancelled() && !self.rest.borrow().is_on()
    }

    async fn beat(self: Arc<Self>) {
        let pause = BEAT_TIME.min(self.lease / BEATS_A_LEASE);
        loop {
            sleep(pause).await;
            let mut jobs: HashMap<_, _> = self.active().clone();
            jobs.retain(|_, it| !it.is_lost());
            // While it polls, the polls show that it lives.
            if jobs.is_empty() && self.may_poll() {
                continue;
            }
            let state = if self.rest.borrow().by_signal { "quiet" } else { "running" };
            let active: Vec<_> = jobs.values().map(Job::beat).collect();
            let body = json!({"worker_id": self.id, "state": state, "active_jobs": active});
            let request = Request::post("/v1/workers/heartbeat", body);
            // One that hangs must not take the time of the next ones.
            let request = Request { timeout: pause, retry_time: Duration::ZERO, ..request };
            let begun = Instant::now();
            let answer = self.client.request::<Value>(request).await.unwrap_or_else(|error| {
                tracing::warn!(%error, "a heartbeat failed");
                Value::Null
            });
            for it in answer["jobs"].as_array().into_iter().flatten() {
                let Some(job) = it["job_id"].as_str().and_then(|it| jobs.get(it)) else { continue };
                job.renew(begun);
                match it["status"].as_str() {
                    Some("lost") => job.lose(),
                    Some("cancel") => job.shared.stopped.cancel(),
                    _ => (),
                }
            }
            for job in jobs.values().filter(|it| it.is_overdue()) {
                job.shared.stopped.cancel();
            }
            self.obey(answer["state"].as_str());
        }
    }

    /// Adds what jobs the worker takes.
    fn wanted(&self, mut fields: Value) -> Value {
        fields["queues"] = json!(self.queues);
        fields["job_types"] = json!(self.handlers.keys().collect::<Vec<_>>());
        if !self.labels.is_empty() {
            fields["labels"] = json!(self.labels);
        }
        fields
    }

    async fn serve(self: Arc<Self>) -> Result<(), Error> {
        while let Some(job) = self.next().await? {
            let mut jobs = vec![job];
            while let Some(job) = jobs.pop() {
                jobs.extend(self.work(job).await);
            }
        }
        Ok(())
    }

    /// Works on a job. Returns those that come with the answer to its ack.
    async fn work(&self, job: Job) -> Vec<Job> {
        let _ = job.shared.worker.set((self.client.clone(), self.id.clone()));
        let earlier = self.active().insert(job.id.clone(), job.clone());
        // This lease proves that the other one has ended.
        earlier.into_iter().for_each(|it| it.lose());
        let begun = Instant::now();
        let mut end = match self.handlers.get(&job.job_type) {
            Some(handler) => {
                // A task of its own: its panic is a failure and no end of the worker.
                let handled = TRACEPARENT.scope(job.traceparent.clone(), handler(job.clone()));
                match tokio::spawn(CURRENT_JOB.scope(job.clone(), handled)).await {
                    Ok(Ok(result)) => json!({"status": "succeeded", "result": result}),
                    Ok(Err(Failure(end))) => end,
                    Err(panicked) => Failure::new("Panic", &panicked.to_string()).0,
                }
            }
            None => Failure::released().0,
        };
        job.shared.is_done.store(true, Ordering::Relaxed);
        end["duration_ms"] = json!(begun.elapsed().as_millis());
        let next = match job.is_lost() {
            true => Ok(Vec::new()),
            false => self.ack(&job, end).await,
        };
        let mut active = self.active();
        if active.get(&job.id).is_some_and(|it| it.lease_id == job.lease_id) {
            active.remove(&job.id);
        }
        drop(active);
        next.unwrap_or_else(|error| {
            // 409: another attempt decides.
            tracing::warn!(job.id, %error, "the outcome of a job was not taken");
            Vec::new()
        })
    }

    async fn ack(&self, job: &Job, mut end: Value) -> Result<Vec<Job>, Error> {
        let body = |end: &Value| {
            let mut body = job.fence();
            body["worker_id"] = json!(self.id);
            for (name, value) in end.as_object().into_iter().flatten() {
                body[name] = value.clone();
            }
            body
        };
        #[derive(Deserialize)]
        struct Answer {
            #[serde(default)]
            poll: Given,
        }
        if self.may_poll() {
            let mut then = body(&end);
            // Another slot polls for those that have no job.
            let wait = if self.concurrency == 1 { POLL_WAIT } else { Duration::ZERO };
            then["then_poll"] = self.poll(wait);
            let request = Request::post("/v1/workers/ack", then);
            let request = Request { wait, retry_time: ACK_RETRY_TIME, ..request };
            let answered = tokio::select! {
                answered = self.client.request::<Answer>(request) => Some(answered),
                // It may have been recorded: an ack that shows its fence may be repeated.
                () = self.parked_too_long() => None,
            };
            let refused = [Some(StatusCode::BAD_REQUEST), Some(StatusCode::PAYLOAD_TOO_LARGE)];
            match answered {
                None => (),
                Some(Ok(answer)) => {
                    self.obey(answer.poll.state.as_deref());
                    return Ok(answer.poll.jobs);
                }
                Some(Err(error)) if refused.contains(&error.status()) => {
                    // A handler that has done its work would not make its result smaller.
                    let is_final = end["status"] == "succeeded" || end["retryable"] == false;
                    let refused = Failure::new("ResultRefused", &error.to_string());
                    end = if is_final { refused.not_retryable().0 } else { refused.0 };
                }
                Some(Err(error)) => return Err(error),
            }
        }
        let request = Request::post("/v1/workers/ack", body(&end));
        let is_stopping = self.stopping.is_cancelled();
        let retry_time = if is_stopping { self.grace } else { ACK_RETRY_TIME };
        let request = Request { retry_time, ..request };
        self.client.request::<Value>(request).await.map(|_| Vec::new())
    }
}

fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "host".to_owned() } else { name.to_owned() }
}
