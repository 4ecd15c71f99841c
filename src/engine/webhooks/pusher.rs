//! Sending the jobs of queues to URLs, in place of a worker that polls. A request is an attempt:
//! its lease runs while the URL works, and its answer is the ack.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};

use chrono::{DateTime, TimeDelta, Utc};
use fencepost_domain::{
    backoff::{Jitter, RetryPolicy},
    group::RateLimitScope,
    ids::{NodeId, PUSH_WORKER, ProjectId},
    limits::{
        DEFAULT_RATE_LIMITED_SECONDS, MAX_JSON_DEPTH, MAX_RATE_LIMITED_SECONDS, MAX_RESULT_BYTES,
    },
    plan::ProjectPlans,
    push::{JobVerdict, Window, verdict},
    text::{ErrorReport, json_depth},
    webhook::signatures,
};
use fencepost_fair::requests::Turn;
use fencepost_net::outbound::{Answer, CallError, MAX_BODY_BYTES};
use fencepost_signals::telemetry;
use fencepost_store::{
    claims::LeasedJob,
    sweep::pushes::{PushOutcomes, PushedQueue, note_outcomes, pushed_queues},
};
use metrics::{gauge, histogram};
use reqwest::{
    StatusCode,
    header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue},
};
use serde_json::json;
use tokio::{
    sync::Semaphore,
    time::{sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{
    push::{headers_place, secret_place},
    sender::{InFlight, LEASE_MARGIN_SECONDS, NoTurn, Sender, Settings, Target, TargetQueue},
    targets::Targets,
};
use crate::{
    dispatch::DispatchedJob,
    settle::{Failure, RateLimited, ReportedOutcome},
};

/// Queues that one node pushes at most. Each has a parked poll, of which a node has 20,000, and
/// endpoints of webhooks use up to 15,000.
pub const MAX_PUSHED_QUEUES: i64 = 4_000;
/// How long a queue rests whose project or host has no turn for it.
const BUSY_PAUSE: Duration = Duration::from_secs(5);
/// A node records the queues of a project that it pushes at least this often, so that the project
/// sees them as polled.
const PRESENCE_PERIOD: Duration = Duration::from_secs(20);
/// The rest of a lease when a request ends at the latest: for the ack.
const ACK_TIME: Duration = Duration::from_secs(3);
/// The type of a result.
const JSON: &str = "application/json";

/// The pushed queues of one node.
pub struct Pusher {
    sender: Sender,
    node: NodeId,
    plans: Arc<ProjectPlans>,
    /// The name under which this node holds leases.
    worker_id: Arc<str>,
    queues: Targets<Pushed>,
    recorded: Mutex<HashMap<ProjectId, Recorded>>,
    /// The requests that each project may have under way.
    of_project: Mutex<HashMap<ProjectId, (usize, Weak<Semaphore>)>>,
}

/// The queues of one project that were recorded, and when.
type Recorded = (Vec<Arc<str>>, Instant);

/// A queue that this node pushes.
struct Pushed {
    it: PushedQueue,
    target_queue: TargetQueue,
    secrets: Vec<Vec<u8>>,
    /// The user's headers, besides ours.
    headers: HeaderMap,
    state: Mutex<State>,
}

#[derive(Clone)]
struct State {
    window: Window,
    /// Until then nothing is sent.
    rests_until: Option<tokio::time::Instant>,
    /// Ends the poll that is parked.
    polling: Option<CancellationToken>,
    has_succeeded: bool,
    error: Option<String>,
}

impl Pusher {
    #[must_use]
    pub fn new(sender: Sender, node: NodeId, plans: Arc<ProjectPlans>) -> Arc<Self> {
        let worker_id = format!("{PUSH_WORKER}{}", node.0.simple()).into();
        let (recorded, of_project) = (Mutex::default(), Mutex::default());
        let queues = Targets::new();
        Arc::new(Self { sender, node, plans, worker_id, queues, recorded, of_project })
    }

    /// The permits of a queue's project, as its plan has them.
    fn permits(&self, it: &PushedQueue) -> Arc<Semaphore> {
        let limits = self.plans.limits_of_loops(&it.plan, it.overrides.as_ref(), true);
        let many = usize::try_from(limits.max_push_in_flight()).unwrap_or(1);
        let mut known = self.of_project.lock().unwrap_or_else(PoisonError::into_inner);
        let before = known.get(&it.project_id).filter(|it| it.0 == many);
        if let Some(permits) = before.and_then(|it| it.1.upgrade()) {
            return permits;
        }
        known.retain(|_, it| it.1.strong_count() > 0);
        let permits = Arc::new(Semaphore::new(many));
        known.insert(it.project_id, (many, Arc::downgrade(&permits)));
        permits
    }

    /// Begins to push queues that are new or have changed, and stops pushing others.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn refresh(self: Arc<Self>) -> sqlx::Result<()> {
        let mut conn = self.sender.engine.pools.background.acquire().await?;
        let found = pushed_queues(&mut conn, self.node, MAX_PUSHED_QUEUES).await?;
        drop(conn);
        gauge!(telemetry::PUSHED_QUEUES).set(found.len() as f64);
        self.queues.adapt(&self.sender, found, |it, before| {
            let queue = it.queue.clone();
            let made = self.serve(it, before).inspect_err(|error| {
                tracing::warn!(
                    queue,
                    error = format!("{error:#}"),
                    "push target was not loaded: its queue gets no pushes"
                );
            });
            made.ok()
        });
        self.record_presence();
        Ok(())
    }

    /// Records which queues this node pushes, as those that a worker polls. One of the polls that
    /// each queue has would name that queue alone.
    fn record_presence(&self) {
        let mut pushed: BTreeMap<ProjectId, Vec<Arc<str>>> = BTreeMap::new();
        for it in self.queues.served() {
            pushed.entry(it.it.project_id).or_default().push(it.it.queue.as_str().into());
        }
        let mut recorded = self.recorded.lock().unwrap_or_else(PoisonError::into_inner);
        recorded.retain(|project_id, _| pushed.contains_key(project_id));
        for (project_id, mut queues) in pushed {
            queues.sort_unstable();
            let is_recorded = recorded
                .get(&project_id)
                .is_some_and(|(before, at)| *before == queues && at.elapsed() < PRESENCE_PERIOD);
            if !is_recorded {
                let key = (project_id, Arc::clone(&self.worker_id));
                self.sender.engine.registry.record_seen(&key, &queues, &[]);
                recorded.insert(project_id, (queues, Instant::now()));
            }
        }
    }

    fn serve(&self, it: PushedQueue, before: Option<&Pushed>) -> anyhow::Result<Pushed> {
        let stored = (&it.secret, it.old_secret.as_ref());
        let place = secret_place(it.project_id, &it.queue);
        let (to, secrets) = self.sender.open(&it.url, &place, stored)?;
        let place = headers_place(it.project_id, &it.queue);
        let headers = self.sender.open_headers(&place, it.headers.as_deref())?;
        let max_in_flight = usize::try_from(it.max_in_flight).unwrap_or(1);
        let target_queue = TargetQueue {
            project_id: it.project_id,
            jobs_of: it.project_id,
            queue: it.queue.clone(),
            worker_id: Some(self.worker_id.to_string()),
            timeout: TargetQueue::seconds(it.timeout_seconds),
            lease_seconds: Some(it.timeout_seconds + LEASE_MARGIN_SECONDS),
            to,
            slots: TargetQueue::slots(before.map(|it| &it.target_queue), max_in_flight),
            max_in_flight,
            of_project: Some(self.permits(&it)),
            ended: CancellationToken::new(),
        };
        let state = State {
            window: Window::new(u32::try_from(it.max_in_flight).unwrap_or(1)),
            rests_until: None,
            polling: None,
            has_succeeded: false,
            error: None,
        };
        // What the URL has asked for is kept, if it is the same one.
        let is_same = |before: &&Pushed| {
            (before.it.max_in_flight, &before.it.url) == (it.max_in_flight, &it.url)
        };
        let state = before.filter(is_same).map_or(state.clone(), |pushed| {
            let State { window, rests_until, .. } = *pushed.state();
            State { window, rests_until, ..state }
        });
        Ok(Pushed { it, target_queue, secrets, headers, state: Mutex::new(state) })
    }

    /// Writes what requests led to.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn write_outcomes(self: Arc<Self>) -> sqlx::Result<()> {
        let seen =
            self.queues.served().into_iter().filter_map(|it| Some((it.take_outcomes()?, it)));
        let (outcomes, served): (Vec<_>, Vec<_>) = seen.unzip();
        if outcomes.is_empty() {
            return Ok(());
        }
        let written = async {
            let mut conn = self.sender.engine.pools.background.acquire().await?;
            note_outcomes(&mut conn, &outcomes).await
        };
        let written = written.await;
        if written.is_err() {
            served.iter().zip(&outcomes).for_each(|(it, outcomes)| it.put_back(outcomes));
        }
        written
    }
}

impl Settings for PushedQueue {
    type Key = (ProjectId, String);

    fn key(&self) -> Self::Key {
        (self.project_id, self.queue.clone())
    }

    fn updated_at(&self) -> DateTime<Utc> {
        self.updated_at
    }
}

impl Target for Pushed {
    type Settings = PushedQueue;

    fn settings(&self) -> &PushedQueue {
        &self.it
    }

    fn target_queue(&self) -> &TargetQueue {
        &self.target_queue
    }

    /// A queue may use the permits of its project that it has, and those that are free.
    fn window(&self) -> usize {
        let TargetQueue { slots, max_in_flight, of_project, .. } = &self.target_queue;
        // One slot is taken for the wait.
        let own = max_in_flight.saturating_sub(slots.available_permits() + 1);
        let free = of_project.as_ref().map_or(0, |it| it.available_permits());
        (self.state().window.size() as usize).min(own + free)
    }

    async fn rested(&self) {
        while let Some(until) = self.resting() {
            sleep_until(until).await;
        }
    }

    fn polls(&self, polling: &CancellationToken) {
        let mut state = self.state();
        state.polling = Some(polling.clone());
        if state.rests_until.is_some() {
            polling.cancel();
        }
    }

    async fn send(
        &self,
        job: &mut DispatchedJob,
        turn: Result<Turn, NoTurn>,
    ) -> Option<ReportedOutcome> {
        if self.resting().is_some() {
            return Some(ReportedOutcome::Released);
        }
        let turn = match turn {
            Ok(turn) => turn,
            Err(NoTurn::Busy) => return Some(self.rests("no_turn", |_| BUSY_PAUSE)),
            Err(NoTurn::NoAddress(error @ CallError::AddressRefused)) => {
                self.failed(error.name());
                return Some(failed(error.name(), error.to_string(), true));
            }
            Err(NoTurn::NoAddress(error)) => return Some(self.slowed(None, error.name())),
        };
        let lease = Duration::from_secs(u64::try_from(job.job.lease_seconds).unwrap_or(0));
        let left = lease.saturating_sub(ACK_TIME + turn.waited);
        let _in_flight = InFlight::begin();
        let called = Instant::now();
        let within = TargetQueue::seconds(job.job.timeout_seconds).min(self.target_queue.timeout);
        let headers = self.headers(job);
        let body = std::mem::take(&mut job.job.payload);
        let answer = self.target_queue.to.post(headers, body, within, MAX_BODY_BYTES);
        // Not past the lease: another node would send the job, too.
        let answer = timeout(left, answer).await.unwrap_or(Err(CallError::Timeout));
        histogram!(telemetry::WEBHOOK_SECONDS).record(called.elapsed().as_secs_f64());
        match answer {
            Ok(answer) => match rate_limit(&answer, &job.job) {
                Some(limited) => Some(ReportedOutcome::RateLimited(limited)),
                None => self.settle(answer),
            },
            // Nothing was sent, and a deploy must not use up the attempts of a job.
            Err(error @ (CallError::NotConnected | CallError::NoAddress)) => {
                Some(self.slowed(None, error.name()))
            }
            Err(error) => {
                if error == CallError::Timeout {
                    self.state().window.slow(None);
                }
                self.failed(error.name());
                Some(failed(error.name(), error.to_string(), true))
            }
        }
    }
}

impl Pushed {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Decides what an answer means for the job, and for the number of requests.
    fn settle(&self, answer: Answer) -> Option<ReportedOutcome> {
        let kind = format!("http_{}", answer.status);
        match verdict(answer.status, answer.retry_after, answer.is_final) {
            JobVerdict::Succeeded => {
                self.succeeded();
                Some(ReportedOutcome::Succeeded { result: result(answer) })
            }
            JobVerdict::Taken => {
                self.succeeded();
                None
            }
            JobVerdict::Released(asked) => Some(self.slowed(asked, &kind)),
            JobVerdict::Failed { retryable } => {
                // What no retry can mend is about the job, and says that the URL works.
                if retryable {
                    self.failed(&kind);
                } else {
                    self.succeeded();
                }
                Some(failed(&kind, answer.first_text().to_owned(), retryable))
            }
        }
    }

    fn succeeded(&self) {
        let mut state = self.state();
        state.window.grow();
        (state.has_succeeded, state.error) = (true, None);
    }

    fn failed(&self, kind: &str) {
        self.state().error = Some(kind.to_owned());
    }

    /// Until when it rests, if it does.
    fn resting(&self) -> Option<tokio::time::Instant> {
        let mut state = self.state();
        state.rests_until = state.rests_until.filter(|it| *it > tokio::time::Instant::now());
        state.rests_until
    }

    /// The job goes back, and the queue rests and is sent less.
    fn slowed(&self, asked_seconds: Option<u32>, kind: &str) -> ReportedOutcome {
        self.rests(kind, |state| {
            let asked = asked_seconds.unwrap_or_default();
            // Answers to what was sent together count once.
            let seconds = match state.rests_until {
                Some(_) => asked,
                None => state.window.slow(asked_seconds),
            };
            Duration::from_secs(seconds.into())
        })
    }

    fn rests(&self, kind: &str, pause: impl FnOnce(&mut State) -> Duration) -> ReportedOutcome {
        let mut state = self.state();
        let until = tokio::time::Instant::now() + pause(&mut state);
        state.rests_until = state.rests_until.max(Some(until));
        state.error = Some(kind.to_owned());
        if let Some(polling) = state.polling.take() {
            polling.cancel();
        }
        ReportedOutcome::Released
    }

    fn take_outcomes(&self) -> Option<PushOutcomes> {
        let mut state = self.state();
        let (has_succeeded, error) = (state.has_succeeded, state.error.take());
        state.has_succeeded = false;
        let PushedQueue { project_id, updated_at, ref queue, .. } = self.it;
        let outcomes =
            PushOutcomes { project_id, queue: queue.clone(), updated_at, has_succeeded, error };
        (outcomes.has_succeeded || outcomes.error.is_some()).then_some(outcomes)
    }

    /// Outcomes that could not be written: what came later counts.
    fn put_back(&self, before: &PushOutcomes) {
        let mut state = self.state();
        if !state.has_succeeded && state.error.is_none() {
            state.error.clone_from(&before.error);
        }
        state.has_succeeded |= before.has_succeeded;
    }

    /// The headers of a request. Its id is that of the lease: a new attempt is no repetition. Those
    /// that describe the job have a signature of their own, as one over a body of JSON, which
    /// libraries of Standard Webhooks can check.
    fn headers(&self, job: &DispatchedJob) -> HeaderMap {
        let (worker, job) = (&job.worker_id, &job.job);
        let (lease, timestamp) = (job.lease_id.0.to_string(), job.claimed_at.timestamp());
        let ends_at = job.claimed_at + TimeDelta::seconds(job.lease_seconds.into());
        let name = HeaderName::from_static;
        let mut values = vec![
            (CONTENT_TYPE, JSON.to_owned()),
            (name("webhook-signature"), signatures(&self.secrets, &lease, timestamp, &job.payload)),
            (name("webhook-id"), lease.clone()),
            (name("webhook-timestamp"), timestamp.to_string()),
            (name("fencepost-job-id"), job.id.to_string()),
            (name("fencepost-job-type"), job.job_type.clone()),
            (name("fencepost-queue"), job.queue.clone()),
            (name("fencepost-attempt"), job.attempt.to_string()),
            (name("fencepost-max-attempts"), job.max_attempts.to_string()),
            (name("fencepost-lease-id"), lease),
            (name("fencepost-lease-expires-at"), ends_at.to_rfc3339()),
            (name("fencepost-worker-id"), worker.to_string()),
        ];
        values.extend(job.traceparent.clone().map(|it| (name("traceparent"), it)));
        for (_, value) in &mut values {
            // Names of queues and types may have characters that a header cannot carry as they are.
            *value = percent_encoding::utf8_percent_encode(value, UNSAFE).to_string();
        }
        let signed: BTreeMap<_, _> = values
            .iter()
            .filter(|it| it.0.as_str().starts_with("fencepost-"))
            .map(|it| (it.0.as_str(), &it.1))
            .collect();
        let signed = json!(signed).to_string();
        // Another id than that of the body: neither text can stand for the other.
        let id = format!("{}.headers", job.lease_id.0);
        let signature = signatures(&self.secrets, &id, timestamp, &signed);
        values.push((name("fencepost-signature"), signature));
        let read =
            |(name, value): (HeaderName, String)| Some((name, HeaderValue::try_from(value).ok()?));
        let mut headers = self.headers.clone();
        headers.extend(values.into_iter().filter_map(read));
        headers
    }
}

/// Characters that a header's value cannot carry, and the percent sign, which stands for them.
const UNSAFE: &percent_encoding::AsciiSet = &percent_encoding::CONTROLS.add(b'%');

/// The result of a job: the answer, if it is JSON that a worker could send.
fn result(answer: Answer) -> Option<String> {
    let is_json = answer.content_type.as_deref().is_some_and(|content_type| {
        let essence = content_type.split(';').next().unwrap_or_default().trim();
        essence.eq_ignore_ascii_case(JSON)
    });
    let text = answer.text;
    let fits = is_json
        && answer.is_utf8
        && !answer.is_cut
        && text.len() <= MAX_RESULT_BYTES
        && json_depth(&text) <= MAX_JSON_DEPTH
        && serde_json::from_str::<&serde_json::value::RawValue>(&text).is_ok();
    fits.then_some(text)
}

/// A rate limit of the job's group: the other jobs of the queue continue.
fn rate_limit(answer: &Answer, job: &LeasedJob) -> Option<RateLimited> {
    if answer.status != StatusCode::TOO_MANY_REQUESTS.as_u16()
        || answer.is_about_queue
        || job.group.is_none()
    {
        return None;
    }
    let asked = answer.retry_after.asked_seconds().map(u64::from);
    let backoff =
        || RetryPolicy::stored(job.retry.as_ref()).delay(job.failures + 1, Jitter::NONE).as_secs();
    let seconds = asked.unwrap_or_else(backoff).clamp(1, MAX_RATE_LIMITED_SECONDS as u64);
    let retry_after_seconds = u32::try_from(seconds).unwrap_or(DEFAULT_RATE_LIMITED_SECONDS);
    Some(RateLimited { retry_after_seconds, scope: Some(RateLimitScope::Group) })
}

fn failed(kind: &str, message: String, retryable: bool) -> ReportedOutcome {
    let error = ErrorReport::bounded(Some(kind), Some(&message), None);
    ReportedOutcome::Failed(Failure { error, retryable, retry_after_seconds: None })
}
