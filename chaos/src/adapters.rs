//! Workers of the four other protocols: each takes jobs of a queue of its own, and ends them in its
//! own words. Jobs are sent natively.

use std::{sync::atomic::Ordering, time::Duration};

use fencepost_domain::ids::JobId;
use rand::RngExt;
use serde_json::{Value, json};
use tokio::time::sleep;
use uuid::Uuid;

use crate::{
    clients::{Call, Client, LEASE_SECONDS, MAX_ACK_TRIES, answer_of},
    history::{Answer, End, Event, Held, now},
    report::MIN_DURATION,
    stage::slug,
};

/// Of a hundred attempts, those that fail, those whose worker dies, and those with a heartbeat.
const FAIL_PERCENT: u32 = 15;
const DIE_PERCENT: u32 = 4;
const BEAT_PERCENT: u32 = 12;
/// Of a hundred heartbeats, those of work that takes longer than a lease.
const LONG_PERCENT: u32 = 20;
/// Heartbeats of it, two in the time of a lease.
const LONG_BEATS: u32 = 3;
/// How long work takes, in milliseconds.
const WORK_MS: std::ops::Range<u64> = 0..80;
/// The pause after a poll without a job; these polls do not wait.
const IDLE_PAUSE: Duration = Duration::from_millis(200);
/// What workers of workflow-graph run: jobs without a command are not theirs.
const COMMAND: &str = "true";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    OpenJobSpec,
    WorkflowGraph,
    Mobius,
    Orch8,
}

impl Protocol {
    pub const ALL: [Self; 4] = [Self::OpenJobSpec, Self::WorkflowGraph, Self::Mobius, Self::Orch8];

    /// Those of a run. A lease of Mobius lasts for 90 s, one of Orch8 for 60 s: jobs whose poll was
    /// lost are open for as long, which is too long for a short run.
    pub fn of_run(during: Duration) -> Vec<Self> {
        let is_long = during >= MIN_DURATION;
        Self::ALL.into_iter().filter(|it| is_long || it.has_short_leases()).collect()
    }

    /// The one whose workers take jobs of this queue.
    pub fn of_queue(queue: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|it| it.name() == queue)
    }

    const fn has_short_leases(self) -> bool {
        self.lease_seconds() == LEASE_SECONDS
    }

    /// Length of its leases.
    pub const fn lease_seconds(self) -> u64 {
        match self {
            Self::OpenJobSpec | Self::WorkflowGraph => LEASE_SECONDS,
            Self::Mobius => 90,
            Self::Orch8 => 60,
        }
    }

    /// The queue of its workers, and how their names begin.
    pub const fn name(self) -> &'static str {
        match self {
            Self::OpenJobSpec => "open-job-spec",
            Self::WorkflowGraph => "workflow-graph",
            Self::Mobius => "mobius",
            Self::Orch8 => "orch8",
        }
    }

    /// What its jobs have that others have not.
    pub fn payload(self) -> Value {
        match self {
            Self::WorkflowGraph => json!({"command": COMMAND}),
            _ => json!({}),
        }
    }

    fn poll(self, tenant: usize, worker: &str) -> (String, Value) {
        let queue = self.name();
        match self {
            Self::OpenJobSpec => (
                "/ojs/v1/workers/fetch".to_owned(),
                json!({"queues": [queue], "count": 1, "worker_id": worker,
                       "visibility_timeout_ms": LEASE_SECONDS * 1_000}),
            ),
            Self::WorkflowGraph => (
                "/workflow-graph/api/jobs/claim".to_owned(),
                json!({"worker_id": worker, "labels": [queue], "lease_ttl_secs": LEASE_SECONDS}),
            ),
            Self::Mobius => (
                format!("/mobius/v1/projects/{}/jobs/claim", slug(tenant)),
                json!({"worker_id": worker, "queues": [queue]}),
            ),
            Self::Orch8 => (
                "/orch8/workers/tasks/poll/queue".to_owned(),
                json!({"queue_name": queue, "handler_name": "chaos", "worker_id": worker,
                       "limit": 1}),
            ),
        }
    }

    /// What a poll was answered, if it is a job.
    fn task(self, answer: &Value) -> Option<Task> {
        let text = |it: &Value| it.as_str().map(str::to_owned);
        match self {
            Self::OpenJobSpec => {
                let job = &answer["jobs"][0];
                let id = text(&job["id"])?;
                let native = JobId(Uuid::parse_str(&id).ok()?).to_string();
                let args = &job["args"];
                let payload = if args.is_array() { &args[0] } else { args };
                // It does not count leases that were released: see `Client::attempt_of`.
                Task::of(native, 0, id, &payload["tenant"])
            }
            Self::WorkflowGraph => {
                // It names job, attempt and lease; `job_id` is the key of a workflow's job.
                let lease = text(&answer["lease"]["lease_id"])?;
                let mut parts = lease.split('.');
                let (job, attempt) = (parts.next()?.to_owned(), parts.next()?.parse().ok()?);
                // Its workers see the command alone.
                Task::of(job, attempt, lease, &Value::Null)
            }
            Self::Mobius => {
                let id = text(&answer["job_id"])?;
                let native = id.rsplit_once('-')?.0.to_owned();
                let tenant = &answer["parameters"]["tenant"];
                Task::of(native, answer["attempt"].as_i64()?, id, tenant)
            }
            Self::Orch8 => {
                let task = &answer[0];
                let id = text(&task["id"])?;
                let native = id.rsplit_once('-')?.0.replace("task_", "job_");
                let attempt = task["claim_epoch"].as_i64()?;
                Task::of(native, attempt, id, &task["params"]["tenant"])
            }
        }
    }

    /// The call that renews a lease.
    fn beat(self, tenant: usize, task: &Task, worker: &str) -> (String, Value) {
        let (id, attempt) = (&task.id, task.attempt);
        match self {
            Self::OpenJobSpec => (
                "/ojs/v1/workers/heartbeat".to_owned(),
                json!({"worker_id": worker, "active_jobs": [id]}),
            ),
            Self::WorkflowGraph => (format!("/workflow-graph/api/jobs/{id}/heartbeat"), json!({})),
            Self::Mobius => (
                format!("/mobius/v1/projects/{}/jobs/{id}/heartbeat", slug(tenant)),
                json!({"worker_id": worker, "attempt": attempt}),
            ),
            Self::Orch8 => (
                format!("/orch8/workers/tasks/{id}/heartbeat"),
                json!({"worker_id": worker, "claim_epoch": attempt}),
            ),
        }
    }

    /// What a heartbeat of this job was answered: Open Job Spec lists the jobs that it has renewed.
    pub fn heartbeat_answer(self, id: &str, answered: Option<&(u16, Value)>) -> Answer {
        match (self, answered) {
            (Self::OpenJobSpec, Some((200, body))) => {
                let renewed = body["jobs_extended"].as_array();
                let is_renewed = renewed.is_some_and(|it| it.contains(&json!(id)));
                if is_renewed { Answer::Yes } else { Answer::Stale }
            }
            _ => answer_of(answered),
        }
    }

    /// Whether an ack may be sent again: it must name its attempt.
    const fn has_attempts(self) -> bool {
        !matches!(self, Self::OpenJobSpec)
    }

    /// The call that ends an attempt.
    fn ack(self, tenant: usize, task: &Task, worker: &str, end: End) -> (String, Value) {
        let (id, attempt, is_success) = (&task.id, task.attempt, end == End::Succeeded);
        let error = "as planned";
        match self {
            Self::OpenJobSpec => {
                let mut body = json!({"job_id": id, "worker_id": worker});
                if !is_success {
                    body["error"] = json!({"code": "planned", "message": error});
                }
                let what = if is_success { "ack" } else { "nack" };
                (format!("/ojs/v1/workers/{what}"), body)
            }
            Self::WorkflowGraph => {
                let what = if is_success { "complete" } else { "fail" };
                let body = match is_success {
                    true => json!({"outputs": {}}),
                    false => json!({"error": error, "retryable": true}),
                };
                (format!("/workflow-graph/api/jobs/{id}/{what}"), body)
            }
            Self::Mobius => {
                let status = if is_success { "completed" } else { "failed" };
                let body = json!({"worker_id": worker, "attempt": attempt, "status": status});
                (format!("/mobius/v1/projects/{}/jobs/{id}/complete", slug(tenant)), body)
            }
            Self::Orch8 => {
                let what = if is_success { "complete" } else { "fail" };
                let mut body = json!({"claim_epoch": attempt, "worker_id": worker});
                match is_success {
                    true => body["output"] = json!({}),
                    false => {
                        body["message"] = json!(error);
                        body["retryable"] = json!(true);
                    }
                }
                (format!("/orch8/workers/tasks/{id}/{what}"), body)
            }
        }
    }
}

/// A job, as a worker of another protocol has it.
struct Task {
    job: String,
    attempt: i64,
    /// How its protocol names it.
    id: String,
    /// Whose it is; none: its protocol does not show it.
    tenant: Option<usize>,
}

impl Task {
    fn of(job: String, attempt: i64, id: String, tenant: &Value) -> Option<Self> {
        let tenant = tenant.as_u64().and_then(|it| usize::try_from(it).ok());
        Some(Self { job, attempt, id, tenant })
    }

    /// These protocols show no lease: its attempt stands for it.
    fn held(&self, worker: &str) -> Held {
        Held {
            job: self.job.clone(),
            attempt: self.attempt,
            lease: format!("{} {}", self.job, self.attempt),
            worker: worker.to_owned(),
        }
    }
}

impl Client {
    /// Takes jobs over another protocol and ends them, until the run has ended.
    pub async fn work_over(mut self, protocol: Protocol) {
        while !self.world.has_ended.load(Ordering::Relaxed) {
            // An ack of Open Job Spec names no attempt: a new name with each poll is its fence.
            let worker = format!("{}-{}", protocol.name(), self.uuid());
            let (path, body) = protocol.poll(self.tenant, &worker);
            let answer = self.post(Call { path: &path, body: &body, key: None }).await;
            let Some(mut task) = answer.and_then(|it| protocol.task(&it.1)) else {
                sleep(IDLE_PAUSE).await;
                continue;
            };
            if !protocol.has_attempts() {
                let Some(attempt) = self.attempt_of(&task.job, &worker).await else { continue };
                task.attempt = attempt;
            }
            let (tenant, held) = (self.tenant, task.held(&worker));
            let is_shown = protocol != Protocol::WorkflowGraph;
            let owner = task.tenant.unwrap_or(if is_shown { usize::MAX } else { tenant });
            self.world.history.note(Event::Leased {
                tenant,
                held: held.clone(),
                owner,
                is_first: true,
            });
            self.run_task(protocol, &task, &held).await;
        }
    }

    /// Runs a job, and ends its attempt unless the worker dies.
    async fn run_task(&mut self, protocol: Protocol, task: &Task, held: &Held) {
        sleep(Duration::from_millis(self.rng.random_range(WORK_MS))).await;
        if self.is_healing() {
            self.send_end(protocol, task, held, End::Succeeded).await;
            return;
        }
        if protocol.has_short_leases() && self.happens(DIE_PERCENT) {
            return;
        }
        if self.happens(BEAT_PERCENT) {
            self.send_heartbeat(protocol, task, held).await;
            if protocol.has_short_leases() && self.happens(LONG_PERCENT) {
                for _ in 0..LONG_BEATS {
                    sleep(Duration::from_secs(protocol.lease_seconds()) / 2).await;
                    self.send_heartbeat(protocol, task, held).await;
                }
            }
        }
        let end = if self.happens(FAIL_PERCENT) { End::Failed } else { End::Succeeded };
        self.send_end(protocol, task, held, end).await;
        let after = self.after_ack(end);
        if after.repeats && protocol.has_attempts() {
            self.send_end(protocol, task, held, end).await;
        }
        if let Some(other) = after.contradicts {
            self.send_end(protocol, task, held, other).await;
        }
        if after.beats {
            self.send_heartbeat(protocol, task, held).await;
        }
    }

    async fn send_heartbeat(&mut self, protocol: Protocol, task: &Task, held: &Held) {
        let (path, body) = protocol.beat(self.tenant, task, &held.worker);
        let sent = now();
        let answered = self.post(Call { path: &path, body: &body, key: None }).await;
        let answer = protocol.heartbeat_answer(&task.id, answered.as_ref());
        self.world.history.note(Event::Beat { held: held.clone(), answer, sent });
    }

    async fn send_end(&mut self, protocol: Protocol, task: &Task, held: &Held, end: End) {
        let (path, body) = protocol.ack(self.tenant, task, &held.worker, end);
        let call = Call { path: &path, body: &body, key: None };
        let tries = if protocol.has_attempts() { MAX_ACK_TRIES } else { 1 };
        self.send_ack(call, held, end, tries).await;
    }

    /// The attempt that this worker has of a job, as the native API says. None: it has none any
    /// more, or it is not known.
    async fn attempt_of(&mut self, job: &str, worker: &str) -> Option<i64> {
        let shown = self.get(&format!("/v1/jobs/{job}")).await?;
        let is_its = shown["state"] == "processing" && shown["worker_id"] == worker;
        is_its.then(|| shown["attempt"].as_i64()).flatten()
    }
}
