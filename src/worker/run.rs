//! The worker's life: polls while it has free slots, sends heartbeats, obeys directives, drains.

use std::{
    collections::HashMap,
    io::{IsTerminal, Write},
    time::Duration,
};

use anyhow::{Context, bail};
use fencepost_domain::limits::MAX_POLL_CAPACITY;
use serde_json::json;
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval, sleep_until, timeout},
};

use super::{
    AtGraceEnd, WorkerArgs,
    beat::{self, Active, Heard, Status},
    job::{self, Leased},
    outcome::{CommandEnd, Wanted},
    signals::{self, SignalRequest},
};
use crate::client::{Client, Failure, Reply};

/// Pauses after a failed poll; they double up to the last.
const POLL_PAUSES_MS: [u64; 5] = [250, 500, 1_000, 2_000, 5_000];
/// Timeout of the deregistration; without it the leases expire.
const DEREGISTER_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for commands to end and be acknowledged, after the grace period.
const LAST_ACKS_TIMEOUT: Duration = Duration::from_secs(15);
/// Refresh interval of the line on a terminal.
const DRAW_PERIOD: Duration = Duration::from_millis(500);

/// Runs until it is asked to stop and has drained.
///
/// # Errors
/// When the server refuses the worker permanently, or there is no key.
pub async fn run(args: WorkerArgs) -> anyhow::Result<()> {
    let client = Client::new(&args.client)?;
    let mut asked = signals::listen()?;
    let worker_id = args.worker_id.clone().unwrap_or_else(own_name);
    register(&client, &args, &worker_id).await?;
    let (polled, mut answers) = mpsc::channel(1);
    let (beaten, mut heard) = mpsc::channel(1);
    let mut worker = Worker::new(client, args, worker_id, polled, beaten);
    worker.say(&format!("{} takes jobs from {}", worker.worker_id, worker.args.queues.join(", ")));
    let mut beats = interval(beat::MAX_PERIOD);
    beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut draws = interval(DRAW_PERIOD);
    draws.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while !worker.is_done() {
        worker.poll_if_there_is_room();
        let grace_end = worker.grace_end;
        tokio::select! {
            Some(asked) = asked.recv() => worker.obey(asked)?,
            Some(answer) = answers.recv() => worker.take(answer),
            Some(heard) = heard.recv() => worker.hear(heard),
            Some(ended) = worker.jobs.join_next() => worker.note_end(ended.ok()),
            _ = beats.tick() => {
                worker.beat();
                beats.reset_after(worker.beat_period());
            }
            _ = draws.tick() => worker.draw(),
            () = sleep_until(grace_end.unwrap_or_else(Instant::now)), if grace_end.is_some() => {
                worker.end_grace().await;
            }
        }
    }
    worker.send_deregistration().await;
    match worker.refused {
        Some(failure) => Err(failure).context("the server refuses the worker"),
        None => Ok(()),
    }
}

fn own_name() -> String {
    let host = nix::unistd::gethostname().ok().and_then(|it| it.into_string().ok());
    let letters: u32 = rand::random();
    format!("{}-{}-{letters:08x}", host.unwrap_or_else(|| "worker".to_owned()), std::process::id())
}

async fn register(client: &Client, args: &WorkerArgs, worker_id: &str) -> anyhow::Result<()> {
    let hostname = nix::unistd::gethostname().ok().and_then(|it| it.into_string().ok());
    let registration = json!({
        "worker_id": worker_id, "queues": args.queues, "job_types": args.job_types,
        "labels": args.labels, "concurrency": args.concurrency, "pid": std::process::id(),
        "hostname": hostname.filter(|it| !it.is_empty()),
        "sdk_version": concat!("fencepost-worker/", env!("CARGO_PKG_VERSION")),
    });
    let mut pauses = POLL_PAUSES_MS.iter();
    loop {
        match client.post("/v1/workers/register", &registration).await {
            Ok(_) => return Ok(()),
            Err(failure) if failure.is_transient() => {
                let Some(pause) = pauses.next() else {
                    return Err(failure).context("the worker was not registered");
                };
                tokio::time::sleep(Duration::from_millis(*pause)).await;
            }
            Err(failure) => return Err(failure).context("the worker was not registered"),
        }
    }
}

struct Worker {
    client: Client,
    args: WorkerArgs,
    worker_id: String,
    polled: mpsc::Sender<Result<Reply, Failure>>,
    beaten: mpsc::Sender<Heard>,
    /// The parked poll; dropping it closes its connection.
    poll: Option<JoinSet<()>>,
    /// The poll's id: repeating it after a lost answer returns the same jobs.
    poll_id: uuid::Uuid,
    poll_failures: usize,
    jobs: JoinSet<(String, CommandEnd)>,
    running: HashMap<String, (Active, u64, watch::Sender<Wanted>)>,
    /// Quieted by a signal.
    is_quiet: bool,
    has_quiet_directive: bool,
    grace_end: Option<Instant>,
    is_draining: bool,
    /// Why it drains, if the server refuses it.
    refused: Option<Failure>,
    succeeded: u64,
    failed: u64,
    is_terminal: bool,
}

impl Worker {
    fn new(
        client: Client,
        args: WorkerArgs,
        worker_id: String,
        polled: mpsc::Sender<Result<Reply, Failure>>,
        beaten: mpsc::Sender<Heard>,
    ) -> Self {
        Self {
            client,
            args,
            worker_id,
            polled,
            beaten,
            poll: None,
            poll_id: uuid::Uuid::now_v7(),
            poll_failures: 0,
            jobs: JoinSet::new(),
            running: HashMap::new(),
            is_quiet: false,
            has_quiet_directive: false,
            grace_end: None,
            is_draining: false,
            refused: None,
            succeeded: 0,
            failed: 0,
            is_terminal: std::io::stderr().is_terminal(),
        }
    }

    fn is_done(&self) -> bool {
        self.is_draining && self.jobs.is_empty()
    }

    /// One poll at a time, for at most the free slots.
    fn poll_if_there_is_room(&mut self) {
        let free = (self.args.concurrency as usize).saturating_sub(self.running.len());
        if self.is_draining {
            // Jobs in the answer of a dropped poll are released by the deregistration.
            self.poll = None;
            return;
        }
        if self.is_quiet || self.has_quiet_directive || free == 0 || self.poll.is_some() {
            return;
        }
        let poll = self.poll_request(free);
        let pause = self.poll_pause();
        let (client, polled) = (self.client.clone(), self.polled.clone());
        let mut task = JoinSet::new();
        task.spawn(async move {
            tokio::time::sleep(pause).await;
            let _ = polled.send(client.post("/v1/workers/poll", &poll).await).await;
        });
        self.poll = Some(task);
    }

    /// Ends the parked poll. It is repeated without a wait, once the server knows that this worker
    /// is quiet: then it returns the jobs of the first answer, and no new ones.
    fn end_poll(&mut self) {
        if self.poll.take().is_none() {
            return;
        }
        let free = (self.args.concurrency as usize).saturating_sub(self.running.len());
        let mut poll = self.poll_request(free.max(1));
        poll["wait_seconds"] = json!(0);
        let (client, polled) = (self.client.clone(), self.polled.clone());
        let (worker_id, active) = (self.worker_id.clone(), self.active());
        let mut task = JoinSet::new();
        task.spawn(async move {
            // Otherwise the repeated poll would take new jobs, which is no worse than what it
            // avoids.
            let _ = beat::send(&client, &worker_id, "quiet", &active).await;
            let _ = polled.send(client.post("/v1/workers/poll", &poll).await).await;
        });
        self.poll = Some(task);
    }

    fn active(&self) -> Vec<Active> {
        self.running.values().map(|it| it.0.clone()).collect()
    }

    fn poll_request(&self, free: usize) -> serde_json::Value {
        let mut poll = json!({
            "worker_id": self.worker_id, "queues": self.args.queues, "poll_id": self.poll_id,
            "capacity": free.min(MAX_POLL_CAPACITY as usize), "labels": self.args.labels,
        });
        if !self.args.job_types.is_empty() {
            poll["job_types"] = json!(self.args.job_types);
        }
        poll
    }

    fn poll_pause(&self) -> Duration {
        match self.poll_failures {
            0 => Duration::ZERO,
            failures => {
                let pause = POLL_PAUSES_MS.get(failures - 1).or(POLL_PAUSES_MS.last());
                // Jitter: workers that failed together should not return together.
                Duration::from_millis(pause.copied().unwrap_or_default())
                    .mul_f64(0.5 + rand::random::<f64>())
            }
        }
    }

    /// A poll was answered.
    fn take(&mut self, answer: Result<Reply, Failure>) {
        if self.poll.take().is_none() {
            // The poll was dropped meanwhile: its jobs are released.
            if let Ok(reply) = answer {
                leased(&reply).0.iter().for_each(|it| self.release(it));
            }
            return;
        }
        match answer {
            Ok(reply) => {
                self.poll_failures = 0;
                self.poll_id = uuid::Uuid::now_v7();
                let (jobs, has_quiet_directive) = leased(&reply);
                self.has_quiet_directive = has_quiet_directive && !self.is_quiet;
                jobs.into_iter().for_each(|it| self.start(it));
            }
            Err(failure) if failure.is_transient() => {
                self.poll_failures += 1;
                tracing::warn!(
                    error = &failure as &dyn std::error::Error,
                    "poll failed, will retry"
                );
            }
            Err(failure) => {
                self.say(&format!("the server refuses the worker: {failure}"));
                self.refused = Some(failure);
                self.drain();
            }
        }
    }

    fn release(&self, job: &Leased) {
        let ack = json!({
            "job_id": job.id, "worker_id": self.worker_id, "attempt": job.attempt,
            "lease_id": job.lease_id, "status": "released",
        });
        let client = self.client.clone();
        // The deregistration releases what this could not.
        tokio::spawn(async move { client.post("/v1/workers/ack", &ack).await });
    }

    fn start(&mut self, job: Leased) {
        // A repeated poll may return jobs that are running
        if self.running.contains_key(&job.id) {
            return;
        }
        let (want, wanted) = watch::channel(Wanted::Run);
        let active =
            Active { job_id: job.id.clone(), attempt: job.attempt, lease_id: job.lease_id.clone() };
        let period = job.heartbeat_interval_seconds;
        self.running.insert(job.id.clone(), (active, period, want));
        let (client, args) = (self.client.clone(), self.args.clone());
        let (worker_id, id) = (self.worker_id.clone(), job.id.clone());
        self.jobs.spawn(async move {
            let end = job::run(client, args, worker_id, job, wanted).await;
            (id, end)
        });
    }

    fn note_end(&mut self, ended: Option<(String, CommandEnd)>) {
        let Some((id, end)) = ended else { return };
        self.running.remove(&id);
        match end {
            CommandEnd::Succeeded(_) => self.succeeded += 1,
            CommandEnd::Failed { .. } => self.failed += 1,
            CommandEnd::Released | CommandEnd::Abandoned => (),
        }
        self.say(&format!("{id} {}", end.word()));
    }

    /// Often enough for the shortest lease.
    fn beat_period(&self) -> Duration {
        let shortest = self.running.values().map(|it| Duration::from_secs(it.1)).min();
        shortest.map_or(beat::MAX_PERIOD, |it| it.min(beat::MAX_PERIOD))
    }

    fn beat(&self) {
        let state = match (self.is_draining, self.is_quiet) {
            (true, _) => "terminate",
            (false, true) => "quiet",
            (false, false) => "running",
        };
        let active = self.active();
        let (client, worker_id) = (self.client.clone(), self.worker_id.clone());
        let beaten = self.beaten.clone();
        tokio::spawn(async move {
            match beat::send(&client, &worker_id, state, &active).await {
                Ok(heard) => drop(beaten.send(heard).await),
                Err(failure) => {
                    tracing::warn!(
                        error = &failure as &dyn std::error::Error,
                        "heartbeat failed, will retry"
                    );
                }
            }
        });
    }

    fn hear(&mut self, heard: Heard) {
        for (named, status) in heard.jobs {
            // A newer lease of the same job is another one.
            let Some((_, _, want)) = self.running.get(&named.job_id).filter(|it| it.0 == named)
            else {
                continue;
            };
            let wanted = match status {
                Status::Ok => continue,
                Status::Cancel => Wanted::Cancel,
                Status::Lost => Wanted::Abandon,
            };
            want.send_if_modified(|current| {
                let is_news = *current == Wanted::Run || wanted == Wanted::Abandon;
                if is_news {
                    *current = wanted;
                }
                is_news
            });
        }
        self.has_quiet_directive = heard.state == "quiet";
        if heard.state == "terminate" && !self.is_draining {
            self.say("directive: terminate");
            self.drain();
        }
    }

    fn obey(&mut self, asked: SignalRequest) -> anyhow::Result<()> {
        match asked {
            SignalRequest::Stop if self.is_draining => {
                self.jobs.abort_all();
                bail!(
                    "stopped immediately; running jobs are retried elsewhere when their leases expire"
                );
            }
            SignalRequest::Stop => self.drain(),
            SignalRequest::Quiet => {
                self.is_quiet = true;
                self.end_poll();
                self.say("quiet: claims no more jobs");
            }
            SignalRequest::Resume => {
                self.is_quiet = false;
                // The server must know before the next poll.
                self.has_quiet_directive = true;
                self.poll = None;
                self.beat();
                self.say("claims jobs again");
            }
        }
        Ok(())
    }

    fn drain(&mut self) {
        self.is_draining = true;
        self.grace_end = Some(Instant::now() + Duration::from_secs(self.args.grace_seconds));
        self.say(&format!("draining {} jobs", self.running.len()));
    }

    /// Stops running jobs, and releases or fails them.
    async fn end_grace(&mut self) {
        self.grace_end = None;
        let wanted = match self.args.at_grace_end {
            AtGraceEnd::Release => Wanted::Release,
            AtGraceEnd::Fail => Wanted::Fail,
        };
        for (.., want) in self.running.values() {
            want.send_replace(wanted);
        }
        let ending = async {
            while let Some(ended) = self.jobs.join_next().await {
                if let Ok((id, _)) = ended {
                    self.running.remove(&id);
                }
            }
        };
        let _ = timeout(LAST_ACKS_TIMEOUT, ending).await;
        self.jobs.abort_all();
    }

    async fn send_deregistration(&mut self) {
        let request = json!({"worker_id": self.worker_id});
        let said = self.client.post("/v1/workers/deregister", &request);
        let _ = timeout(DEREGISTER_TIMEOUT, said).await;
        self.say(&format!("ended: {} succeeded, {} failed", self.succeeded, self.failed));
    }

    /// One line for people.
    fn say(&self, text: &str) {
        let clear = if self.is_terminal { "\r\x1b[K" } else { "" };
        let _ = writeln!(std::io::stderr(), "{clear}{text}");
    }

    /// The progress, on a terminal.
    fn draw(&self) {
        if self.is_terminal {
            let (running, places) = (self.running.len(), self.args.concurrency);
            let (succeeded, failed) = (self.succeeded, self.failed);
            let line =
                format!("running {running}/{places} · {succeeded} succeeded · {failed} failed");
            let _ = write!(std::io::stderr(), "\r\x1b[K{line}");
        }
    }
}

/// Each job is read from the bytes that came, because a payload must reach the command unchanged.
/// Also returns whether there is a directive to take no more jobs.
fn leased(reply: &Reply) -> (Vec<Leased>, bool) {
    #[derive(serde::Deserialize)]
    struct Polled<'a> {
        #[serde(borrow)]
        jobs: Vec<&'a serde_json::value::RawValue>,
        state: Option<String>,
    }
    let Ok(Polled { jobs, state }) = serde_json::from_str(&reply.text) else {
        tracing::warn!("the answer to a poll is invalid");
        return (Vec::new(), false);
    };
    (jobs.into_iter().filter_map(|it| Leased::of(it.get())).collect(), state.is_some())
}
