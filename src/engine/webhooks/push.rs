//! Push: sending the jobs of a queue to a URL, in place of a worker that polls. A request is an
//! attempt: its lease runs while the URL works, and its answer is the ack.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use chrono::{DateTime, TimeDelta, Utc};
use metrics::histogram;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use sqlx::{Acquire, PgConnection};
use tokio::{sync::Semaphore, time::sleep_until};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{
    SEALED_AT_ONCE, seal_again,
    sender::{InFlight, LEASE_MARGIN_SECONDS, Line, NoTurn, Sender, Target},
    turns::Turn,
};
use crate::{
    domain::{
        limits::{MAX_JSON_DEPTH, MAX_RESULT_BYTES},
        outbound,
        plan::Tenant,
        push::{JobVerdict, Window, verdict},
        text::{ErrorReport, json_depth},
        webhook::{SECRET_BYTES, signatures},
    },
    engine::{
        Engine,
        dispatch::LeasedDelivery,
        settle::{AttemptEnd, Failure},
    },
    error::Error,
    ids::ProjectId,
    outbound::{Answer, CallError, MAX_BODY_BYTES, Outbound},
    seal::MasterKeys,
    store::{
        pushes,
        sweep::pushes::{
            MAX_PAGE_PUSHED, PushOutcomes, PushedQueue, note_outcomes, pushed_queues,
            replace_secrets, secrets,
        },
    },
    telemetry,
};

pub use crate::store::pushes::{PushRow, PushSettings};

/// Queues that one node pushes at most. Each has a parked poll, of which a node has 20,000.
pub const MAX_PUSHED_QUEUES: usize = 2_000;
/// Queues of one project that are pushed.
pub const MAX_PROJECT_PUSHED_QUEUES: i64 = 50;
/// The type of a result.
const JSON: &str = "application/json";

/// Where a secret is stored: its row alone can decrypt it.
fn secret_place(project_id: ProjectId, queue: &str) -> String {
    format!("queue_pushes/{}/{queue}", project_id.0)
}

/// Where a queue's jobs are sent.
///
/// # Errors
/// [`Error::PushNotFound`].
pub async fn find(engine: &Engine, project_id: ProjectId, queue: &str) -> Result<PushRow, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    pushes::find(&mut conn, project_id, queue).await?.ok_or(Error::PushNotFound)
}

/// Sends a queue's jobs to a URL from now on. Returns the secret, if it is new.
///
/// # Errors
/// [`Error::QuotaExceeded`].
pub async fn put(
    engine: &Engine,
    tenant: Tenant,
    master_keys: &MasterKeys,
    queue: &str,
    settings: &PushSettings,
) -> Result<(PushRow, Option<Vec<u8>>), Error> {
    let project_id = tenant.project_id;
    let secret = rand::random::<[u8; SECRET_BYTES]>();
    let sealed = master_keys.seal(&secret_place(project_id, queue), &secret);
    let max = MAX_PROJECT_PUSHED_QUEUES;
    let mut conn = engine.pools.read_for(project_id).await?;
    let mut tx = conn.begin().await?;
    let is_known = pushes::find(&mut tx, project_id, queue).await?.is_some();
    // Requests that come together may store a few more.
    if !is_known && pushes::count(&mut tx, project_id, max).await? >= max {
        return Err(Error::QuotaExceeded { what: "queues with push", max });
    }
    let is_new = pushes::upsert(&mut tx, project_id, queue, settings, &sealed).await?;
    let row = pushes::find(&mut tx, project_id, queue).await?.ok_or(Error::PushNotFound)?;
    tx.commit().await?;
    Ok((row, is_new.then(|| secret.to_vec())))
}

/// Ends a push: the queue's jobs wait for workers.
///
/// # Errors
/// [`Error::PushNotFound`].
pub async fn delete(engine: &Engine, project_id: ProjectId, queue: &str) -> Result<(), Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    let is_gone = pushes::delete(&mut conn, project_id, queue).await?;
    if is_gone { Ok(()) } else { Err(Error::PushNotFound) }
}

/// Gives a push a new secret, and returns it. The present one signs as well for this many seconds.
///
/// # Errors
/// [`Error::PushNotFound`].
pub async fn rotate(
    engine: &Engine,
    master_keys: &MasterKeys,
    (project_id, queue): (ProjectId, &str),
    overlap_seconds: i32,
) -> Result<Vec<u8>, Error> {
    let secret = rand::random::<[u8; SECRET_BYTES]>();
    let sealed = master_keys.seal(&secret_place(project_id, queue), &secret);
    let mut conn = engine.pools.read_for(project_id).await?;
    let is_there =
        pushes::replace_secret(&mut conn, project_id, queue, &sealed, overlap_seconds).await?;
    if is_there { Ok(secret.to_vec()) } else { Err(Error::PushNotFound) }
}

/// Encrypts the secrets of all pushes with the first master key. Returns of how many.
pub(super) async fn seal_secrets(
    conn: &mut PgConnection,
    master_keys: &MasterKeys,
) -> anyhow::Result<usize> {
    let (mut sealed, mut after) = (0, (ProjectId(0), String::new()));
    loop {
        let page = secrets(conn, (after.0, &after.1), SEALED_AT_ONCE).await?;
        let Some(last) = page.last() else { return Ok(sealed) };
        after = (last.project_id, last.queue.clone());
        for it in page {
            let place = secret_place(it.project_id, &it.queue);
            let stored = (&it.secret, it.old_secret.as_ref());
            let Some((secret, old)) = seal_again(master_keys, &place, stored)? else { continue };
            replace_secrets(conn, &it, &secret, old.as_deref()).await?;
            sealed += 1;
        }
    }
}

type Key = (ProjectId, String);

/// The pushed queues of one node.
pub struct Pusher {
    sender: Sender,
    outbound: Outbound,
    master_keys: Arc<MasterKeys>,
    /// The name under which this node holds leases.
    worker_id: String,
    served: Mutex<HashMap<Key, Known>>,
}

/// A queue, as this node knows it.
enum Known {
    Served(Arc<Pushed>),
    /// It cannot be pushed with these settings.
    Unusable(DateTime<Utc>),
}

/// A queue that this node pushes.
struct Pushed {
    it: PushedQueue,
    line: Line,
    secrets: Vec<Vec<u8>>,
    state: Mutex<State>,
}

struct State {
    window: Window,
    /// Until then nothing is sent.
    rests_until: Option<tokio::time::Instant>,
    has_succeeded: bool,
    error: Option<String>,
}

impl Pusher {
    #[must_use]
    pub fn new(
        engine: Engine,
        outbound: Outbound,
        master_keys: Arc<MasterKeys>,
        node: Uuid,
    ) -> Arc<Self> {
        let worker_id = format!("push-{}", node.simple());
        let (sender, served) = (Sender::new(engine), Mutex::default());
        Arc::new(Self { sender, outbound, master_keys, worker_id, served })
    }

    fn known(&self) -> MutexGuard<'_, HashMap<Key, Known>> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to push queues that are new or have changed, and ends to push others.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn refresh(self: Arc<Self>) -> sqlx::Result<()> {
        let mut conn = self.sender.engine.pools.background.acquire().await?;
        let (mut found, mut after) = (Vec::new(), (ProjectId(0), String::new()));
        loop {
            let page = pushed_queues(&mut conn, (after.0, &after.1)).await?;
            let is_full = page.len() == MAX_PAGE_PUSHED;
            found.extend(page);
            match found.last() {
                Some(last) if is_full && found.len() < MAX_PUSHED_QUEUES => {
                    after = (last.project_id, last.queue.clone());
                }
                _ => break,
            }
        }
        drop(conn);
        let mut known = self.known();
        let mut former = std::mem::take(&mut *known);
        for it in found {
            let key = (it.project_id, it.queue.clone());
            let new = match former.remove(&key) {
                Some(Known::Unusable(since)) if since == it.updated_at => Known::Unusable(since),
                Some(Known::Served(same)) if same.it == it => Known::Served(same),
                changed => self.begin(it, changed),
            };
            known.insert(key, new);
        }
        former.into_values().for_each(Known::end);
        Ok(())
    }

    /// Begins to push a queue in place of what it was before.
    fn begin(&self, it: PushedQueue, former: Option<Known>) -> Known {
        let (queue, updated_at) = (it.queue.clone(), it.updated_at);
        let slots = match &former {
            Some(Known::Served(former)) if former.it.max_in_flight == it.max_in_flight => {
                Some(Arc::clone(&former.line.slots))
            }
            _ => None,
        };
        former.into_iter().for_each(Known::end);
        match self.serve(it, slots) {
            Ok(new) => {
                self.sender.begin(Arc::clone(&new));
                Known::Served(new)
            }
            Err(error) => {
                tracing::warn!(queue, error = format!("{error:#}"), "a queue is not pushed");
                Known::Unusable(updated_at)
            }
        }
    }

    fn serve(&self, it: PushedQueue, slots: Option<Arc<Semaphore>>) -> anyhow::Result<Arc<Pushed>> {
        let url =
            outbound::read_url(&it.url, &self.outbound.allowed).map_err(anyhow::Error::msg)?;
        let to = self.outbound.destination(url)?;
        let place = secret_place(it.project_id, &it.queue);
        let stored = [Some(&it.secret), it.old_secret.as_ref()].into_iter().flatten();
        let secrets = stored.map(|stored| self.master_keys.open(&place, stored, SECRET_BYTES));
        let secrets = secrets.collect::<Result<Vec<_>, _>>()?;
        let max_in_flight = usize::try_from(it.max_in_flight).unwrap_or(1);
        let new = Arc::new(Semaphore::new(max_in_flight));
        let line = Line {
            project_id: it.project_id,
            jobs_of: it.project_id,
            queue: it.queue.clone(),
            worker_id: Some(self.worker_id.clone()),
            lease_seconds: Some(it.timeout_seconds + LEASE_MARGIN_SECONDS),
            to,
            slots: slots.unwrap_or(new),
            max_in_flight,
            ended: CancellationToken::new(),
        };
        let window = Window::new(u32::try_from(it.max_in_flight).unwrap_or(1));
        let state = State { window, rests_until: None, has_succeeded: false, error: None };
        Ok(Arc::new(Pushed { it, line, secrets, state: Mutex::new(state) }))
    }

    /// Writes what requests led to.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn write_outcomes(self: Arc<Self>) -> sqlx::Result<()> {
        let served: Vec<_> = self.known().values().filter_map(Known::served).collect();
        let outcomes: Vec<_> = served.iter().filter_map(|it| it.take_outcomes()).collect();
        if outcomes.is_empty() {
            return Ok(());
        }
        let mut conn = self.sender.engine.pools.background.acquire().await?;
        note_outcomes(&mut conn, &outcomes).await
    }
}

impl Known {
    fn served(&self) -> Option<Arc<Pushed>> {
        match self {
            Self::Served(it) => Some(Arc::clone(it)),
            Self::Unusable(_) => None,
        }
    }

    fn end(self) {
        if let Self::Served(it) = self {
            it.line.ended.cancel();
        }
    }
}

impl Target for Pushed {
    fn line(&self) -> &Line {
        &self.line
    }

    fn window(&self) -> usize {
        self.state().window.size() as usize
    }

    async fn rested(&self) {
        let until = self.state().rests_until.take();
        if let Some(until) = until {
            sleep_until(until).await;
        }
    }

    async fn send(&self, job: &LeasedDelivery, turn: Result<Turn, NoTurn>) -> Option<AttemptEnd> {
        let _turn = match turn {
            Ok(turn) => turn,
            Err(NoTurn::Busy) => return Some(self.slowed(None, "no_turn")),
            Err(NoTurn::NoAddress(error)) => return Some(self.slowed(None, error.name())),
        };
        let _in_flight = InFlight::begin();
        let called = Instant::now();
        let seconds = self.it.timeout_seconds.min(job.job.timeout_seconds);
        let within = Duration::from_secs(u64::try_from(seconds).unwrap_or(1));
        let body = job.job.payload.clone();
        let answer = self.line.to.post(self.headers(job), body, within, MAX_BODY_BYTES).await;
        histogram!(telemetry::WEBHOOK_SECONDS).record(called.elapsed().as_secs_f64());
        match answer {
            Ok(answer) => self.settle(answer),
            // Nothing was sent, and a deploy must not use up the attempts of a job.
            Err(error @ (CallError::NotConnected | CallError::NoAddress)) => {
                Some(self.slowed(None, error.name()))
            }
            Err(error) => {
                if error == CallError::Timeout {
                    self.state().window.slow(None);
                }
                self.failed(error.name());
                Some(failed(error.name(), error.to_string(), error != CallError::AddressRefused))
            }
        }
    }
}

impl Pushed {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What an answer means for the job, and for how many are sent.
    fn settle(&self, answer: Answer) -> Option<AttemptEnd> {
        let kind = format!("http_{}", answer.status);
        match verdict(answer.status, answer.retry_after_seconds, answer.is_final) {
            JobVerdict::Succeeded => {
                self.succeeded();
                Some(AttemptEnd::Succeeded { result: result(answer) })
            }
            JobVerdict::Taken => {
                self.succeeded();
                None
            }
            JobVerdict::Released(asked) => Some(self.slowed(asked, &kind)),
            JobVerdict::Failed { retryable } => {
                self.failed(&kind);
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

    /// The job goes back, and the queue rests.
    fn slowed(&self, asked_seconds: Option<u32>, kind: &str) -> AttemptEnd {
        let mut state = self.state();
        // Answers to what was sent together count once.
        if state.rests_until.is_none() {
            let pause = state.window.slow(asked_seconds);
            let until = tokio::time::Instant::now() + Duration::from_secs(pause.into());
            state.rests_until = Some(until);
        }
        state.error = Some(kind.to_owned());
        AttemptEnd::Released
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

    /// The headers of a request. Its id is that of the lease: a new attempt is no repetition.
    fn headers(&self, job: &LeasedDelivery) -> HeaderMap {
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
        let read = |(name, value): (HeaderName, String)| {
            // Names of queues and types may have characters that a header cannot carry as they are.
            let value = percent_encoding::utf8_percent_encode(&value, UNSAFE).to_string();
            Some((name, HeaderValue::try_from(value).ok()?))
        };
        values.into_iter().filter_map(read).collect()
    }
}

/// What a header's value cannot carry, and the percent sign, which stands for it.
const UNSAFE: &percent_encoding::AsciiSet = &percent_encoding::CONTROLS.add(b'%');

/// The result of a job: the answer, if it is JSON that a worker could send.
fn result(answer: Answer) -> Option<String> {
    let is_json = answer.content_type.as_deref().is_some_and(|it| {
        let essence = it.split(';').next().unwrap_or_default().trim();
        essence.eq_ignore_ascii_case(JSON)
    });
    let text = answer.text;
    let fits = is_json
        && !answer.is_cut
        && text.len() <= MAX_RESULT_BYTES
        && json_depth(&text) <= MAX_JSON_DEPTH
        && serde_json::from_str::<&serde_json::value::RawValue>(&text).is_ok();
    fits.then_some(text)
}

fn failed(kind: &str, message: String, retryable: bool) -> AttemptEnd {
    let error = ErrorReport::bounded(Some(kind), Some(&message), None);
    AttemptEnd::Failed(Failure { error, retryable, retry_after_seconds: None })
}
