//! Sending deliveries to endpoints: each enabled one is a target of every node. Beyond
//! [`MAX_SERVED_ENDPOINTS`], each node serves a part of them.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use chrono::{DateTime, Utc};
use fencepost_domain::{
    backoff::Jitter,
    error::chain,
    ids::{DeliveryId, EndpointId, NodeId, ProjectId},
    limits::MAX_ENDPOINT_TIMEOUT_SECONDS,
    outbound::is_below,
    push::Window,
    text::ErrorReport,
    webhook::{
        FAILING_DELIVERIES, FAILING_HOURS, HOP_HEADER, Verdict, retry_policy, signatures, verdict,
    },
};
use fencepost_fair::requests::Turn;
use fencepost_net::outbound::{Answer, MAX_KEPT_BYTES};
use fencepost_signals::telemetry;
use fencepost_store::{
    outbound::webhooks,
    people::audit::{self, Actor, NewAuditEntry},
    sweep::webhooks::{Disabled, Outcomes, ServedEndpoint, note_outcomes, served_endpoints},
};
use metrics::{gauge, histogram};
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use serde_json::json;
use sqlx::{Acquire, PgConnection};
use tokio_util::sync::CancellationToken;
use url::Url;

use super::{
    payload::{Delivered, Payload},
    secret_place,
    sender::{InFlight, LEASE_MARGIN_SECONDS, NoTurn, Sender, Settings, Target, TargetQueue},
    targets::Targets,
};
use crate::{
    Engine,
    dispatch::{DispatchedJob, LeasedJob},
    settle::{Failure, ReportedOutcome},
};
pub use fencepost_fair::requests::{
    LAST_OF_ADDRESS, LITTLE_USE, MAX_ADDRESS_IN_FLIGHT, MAX_IN_FLIGHT,
    MAX_PROJECT_ADDRESS_IN_FLIGHT, MAX_PROJECT_IN_FLIGHT, USE_COUNTED_FOR,
};

/// How often a node looks for endpoints that are new or have changed, and writes what it saw.
pub const REFRESH_PERIOD: Duration = Duration::from_secs(2);
/// Endpoints that one node serves at most. Each has a parked poll, of which a node has 20,000.
pub const MAX_SERVED_ENDPOINTS: i64 = 15_000;
/// The timeout of a delivery's job, in seconds: the timeout of its endpoint may change.
pub(super) const DELIVERY_SECONDS: i32 = MAX_ENDPOINT_TIMEOUT_SECONDS + LEASE_MARGIN_SECONDS;

/// The deliveries of one node.
pub struct Deliverer {
    sender: Sender,
    node: NodeId,
    endpoints: Targets<ActiveEndpoint>,
}

/// An endpoint that this node serves.
struct ActiveEndpoint {
    settings: ServedEndpoint,
    target_queue: TargetQueue,
    secrets: Vec<Vec<u8>>,
    outcomes: Mutex<UnsavedOutcomes>,
    /// Bounds the deliveries under way: an endpoint that hangs takes few of the turns that projects
    /// share.
    window: Mutex<Window>,
}

/// Outcomes of deliveries to one endpoint that are not written yet.
#[derive(Default, Clone, Copy, PartialEq)]
struct UnsavedOutcomes {
    has_succeeded: bool,
    failures: i32,
    is_gone: bool,
}

impl Deliverer {
    #[must_use]
    pub fn new(sender: Sender, node: NodeId) -> Arc<Self> {
        Arc::new(Self { sender, node, endpoints: Targets::new() })
    }

    /// Begins to serve endpoints that are new or have changed, and stops serving others.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn refresh(self: Arc<Self>) -> sqlx::Result<()> {
        let mut conn = self.sender.engine.pools.background.acquire().await?;
        let found = served_endpoints(&mut conn, self.node, MAX_SERVED_ENDPOINTS).await?;
        drop(conn);
        gauge!(telemetry::WEBHOOK_ENDPOINTS).set(found.len() as f64);
        self.endpoints.adapt(&self.sender, found, |it, before| {
            let endpoint = it.id.to_string();
            let made = self.serve(it, before).inspect_err(|error| {
                tracing::warn!(
                    endpoint,
                    error = format!("{error:#}"),
                    "webhook endpoint was not loaded: its deliveries wait"
                );
            });
            made.ok()
        });
        Ok(())
    }

    fn serve(
        &self,
        settings: ServedEndpoint,
        before: Option<&ActiveEndpoint>,
    ) -> anyhow::Result<ActiveEndpoint> {
        let stored = (&settings.secret, settings.old_secret.as_ref());
        let place = secret_place(settings.project_id, settings.id);
        let (to, secrets) = self.sender.open(&settings.url, &place, stored)?;
        let max_in_flight = usize::try_from(settings.max_in_flight).unwrap_or(1);
        let target_queue = TargetQueue {
            project_id: settings.project_id,
            jobs_of: settings.outbox,
            queue: settings.id.to_string(),
            worker_id: None,
            timeout: TargetQueue::seconds(settings.timeout_seconds),
            lease_seconds: Some(settings.timeout_seconds + LEASE_MARGIN_SECONDS),
            to,
            slots: TargetQueue::slots(before.map(|it| &it.target_queue), max_in_flight),
            max_in_flight,
            of_project: None,
            ended: CancellationToken::new(),
        };
        let new = Window::new(u32::try_from(settings.max_in_flight).unwrap_or(1));
        let is_same = |before: &&ActiveEndpoint| {
            (before.settings.max_in_flight, &before.settings.url)
                == (settings.max_in_flight, &settings.url)
        };
        let window = Mutex::new(before.filter(is_same).map_or(new, |it| *it.window_now()));
        let outcomes = Mutex::default();
        Ok(ActiveEndpoint { settings, target_queue, secrets, outcomes, window })
    }

    /// Writes what deliveries led to, and disables endpoints that fail for too long.
    ///
    /// # Errors
    /// When the database does not answer. It is written the next time.
    pub async fn write_outcomes(self: Arc<Self>) -> sqlx::Result<()> {
        let all = self.endpoints.served();
        let taken = all.iter().map(|it| (it, it.take_outcomes()));
        let taken: Vec<_> = taken.filter(|it| it.1 != UnsavedOutcomes::default()).collect();
        if taken.is_empty() {
            return Ok(());
        }
        let outcomes: Vec<_> =
            taken.iter().map(|(it, outcomes)| outcomes.of(&it.settings)).collect();
        let written = note(&self.sender.engine, &outcomes).await;
        if written.is_err() {
            taken.iter().for_each(|(it, outcomes)| it.note(|now| now.add_before(*outcomes)));
        }
        written
    }
}

/// Why a callback is not sent.
const NOT_BELOW: &str = "the endpoint takes no callbacks any more, or none below its new URL";
/// Why a delivery is tried later.
const NO_TURN: &str = "too many requests of this project, or to this host, are under way";

impl Settings for ServedEndpoint {
    type Key = (ProjectId, EndpointId);

    fn key(&self) -> Self::Key {
        (self.project_id, self.id)
    }

    fn updated_at(&self) -> DateTime<Utc> {
        self.updated_at
    }
}

impl Target for ActiveEndpoint {
    type Settings = ServedEndpoint;

    fn settings(&self) -> &ServedEndpoint {
        &self.settings
    }

    fn target_queue(&self) -> &TargetQueue {
        &self.target_queue
    }

    fn window(&self) -> usize {
        self.window_now().size() as usize
    }

    async fn send(
        &self,
        job: &mut DispatchedJob,
        turn: Result<Turn, NoTurn>,
    ) -> Option<ReportedOutcome> {
        Some(self.deliver(&job.job, turn).await)
    }
}

impl ActiveEndpoint {
    async fn deliver(&self, job: &LeasedJob, turn: Result<Turn, NoTurn>) -> ReportedOutcome {
        let payload = match Payload::read(&job.payload) {
            Ok(payload) => payload,
            Err(error) => return failed(job, "unreadable", error.to_string(), false, None),
        };
        let _turn = match turn {
            Ok(turn) => turn,
            Err(NoTurn::Busy) => {
                return failed(job, "no_turn", NO_TURN.to_owned(), true, None);
            }
            Err(NoTurn::NoAddress(error)) => {
                self.note(|it| it.failures += 1);
                return failed(job, error.name(), error.to_string(), true, None);
            }
        };
        let _in_flight = InFlight::begin();
        if job.attempt == 1 {
            let waited = (job.claimed_at - payload.at).to_std().unwrap_or_default();
            histogram!(telemetry::WEBHOOK_DELAY_SECONDS).record(waited.as_secs_f64());
        }
        let called = Instant::now();
        let is_callback = payload.url.is_some();
        let within = self.target_queue.timeout;
        let headers = headers(&self.secrets, job, &payload);
        let body = payload.body.get().to_owned();
        let to = &self.target_queue.to;
        let answer = match payload.url.as_deref().map(Url::parse) {
            None => to.post(headers, body, within, MAX_KEPT_BYTES).await,
            Some(Ok(url))
                if self.settings.takes_callbacks && is_below(url.as_str(), &self.settings.url) =>
            {
                to.post_to(url, headers, body, within, MAX_KEPT_BYTES).await
            }
            Some(_) => return failed(job, "callback_refused", NOT_BELOW.to_owned(), false, None),
        };
        histogram!(telemetry::WEBHOOK_SECONDS).record(called.elapsed().as_secs_f64());
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) => {
                self.window_now().narrow();
                self.note_of(is_callback, |it| it.failures += 1);
                return failed(job, error.name(), error.to_string(), true, None);
            }
        };
        self.window_now().grow();
        self.settle(job, answer, is_callback)
    }

    /// Decides what an answer means for the delivery, and for the endpoint.
    fn settle(&self, job: &LeasedJob, answer: Answer, is_callback: bool) -> ReportedOutcome {
        let kind = format!("http_{}", answer.status);
        match verdict(answer.status, answer.retry_after) {
            Verdict::Delivered => {
                self.note_of(is_callback, |outcomes| {
                    *outcomes = UnsavedOutcomes {
                        has_succeeded: true,
                        failures: 0,
                        is_gone: outcomes.is_gone,
                    };
                });
                let result = Delivered { status: answer.status, text: answer.text };
                ReportedOutcome::Succeeded { result: serde_json::to_string(&result).ok() }
            }
            Verdict::Failed(retry_after) => {
                self.note_of(is_callback, |it| it.failures += 1);
                failed(job, &kind, answer.text, true, retry_after)
            }
            Verdict::Gone => {
                self.note_of(is_callback, |outcomes| {
                    outcomes.failures += 1;
                    outcomes.is_gone = true;
                });
                failed(job, &kind, answer.text, false, None)
            }
        }
    }

    fn window_now(&self) -> MutexGuard<'_, Window> {
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The outcome of a callback says nothing about the endpoint: its producer has chosen the URL.
    fn note_of(&self, is_callback: bool, change: impl FnOnce(&mut UnsavedOutcomes)) {
        if !is_callback {
            self.note(change);
        }
    }

    fn note(&self, change: impl FnOnce(&mut UnsavedOutcomes)) {
        change(&mut self.outcomes.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn take_outcomes(&self) -> UnsavedOutcomes {
        std::mem::take(&mut self.outcomes.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl UnsavedOutcomes {
    /// Adds earlier outcomes that could not be written.
    fn add_before(&mut self, earlier: Self) {
        if !self.has_succeeded {
            self.failures += earlier.failures;
        }
        self.has_succeeded |= earlier.has_succeeded;
        self.is_gone |= earlier.is_gone;
    }

    fn of(self, it: &ServedEndpoint) -> Outcomes {
        Outcomes {
            project_id: it.project_id,
            id: it.id,
            updated_at: it.updated_at,
            has_succeeded: self.has_succeeded,
            failures: self.failures,
            is_gone: self.is_gone,
        }
    }
}

async fn note(engine: &Engine, outcomes: &[Outcomes]) -> sqlx::Result<()> {
    let mut conn = engine.pools.background.acquire().await?;
    let bounds = (FAILING_HOURS, FAILING_DELIVERIES);
    for disabled in note_outcomes(&mut conn, outcomes, bounds).await? {
        // The outcomes are written: an error here must not have them written again.
        if let Err(error) = note_disabled(&mut conn, &disabled).await {
            tracing::error!(
                endpoint.id = %disabled.id,
                error = chain(&error),
                "subscriptions of a disabled endpoint were not ended"
            );
        }
    }
    Ok(())
}

/// Ends the subscriptions of an endpoint that was disabled.
async fn note_disabled(conn: &mut PgConnection, it: &Disabled) -> sqlx::Result<()> {
    let mut tx = conn.begin().await?;
    webhooks::lock(&mut tx, it.project_id).await?;
    webhooks::write_subscriptions(&mut tx, it.project_id).await?;
    let entry = NewAuditEntry {
        after: Some(json!({"reason": it.reason}).to_string()),
        ..NewAuditEntry::to("endpoint.disabled", it.id.to_string())
    };
    audit::insert(&mut tx, it.project_id, &Actor::SYSTEM, &entry).await?;
    tx.commit().await
}

/// A try that failed. What the endpoint asks for can only lengthen the pause: short ones would use
/// up the tries.
fn failed(
    job: &LeasedJob,
    kind: &str,
    message: String,
    retryable: bool,
    asked_seconds: Option<u32>,
) -> ReportedOutcome {
    let error = ErrorReport::bounded(Some(kind), Some(&message), None);
    let usual = retry_policy().delay(job.failures + 1, Jitter::new(rand::random()));
    let usual = u32::try_from(usual.as_secs()).unwrap_or(u32::MAX);
    let retry_after_seconds = asked_seconds.map(|it| it.max(usual));
    ReportedOutcome::Failed(Failure { error, retryable, retry_after_seconds })
}

/// The headers of a request. The time is that of the lease, by the database's clock.
fn headers(secrets: &[Vec<u8>], job: &LeasedJob, payload: &Payload) -> HeaderMap {
    let (id, timestamp) = (&payload.event_id, job.claimed_at.timestamp());
    let values = [
        (CONTENT_TYPE, "application/json".to_owned()),
        (HeaderName::from_static("webhook-id"), id.clone()),
        (HeaderName::from_static("webhook-timestamp"), timestamp.to_string()),
        (
            HeaderName::from_static("webhook-signature"),
            signatures(secrets, id, timestamp, payload.body.get()),
        ),
        (HeaderName::from_static("fencepost-delivery"), DeliveryId(job.id.0).to_string()),
        (HeaderName::from_static("fencepost-attempt"), job.attempt.to_string()),
        (HeaderName::from_static(HOP_HEADER), payload.hop.to_string()),
    ];
    let read =
        |(name, value): (HeaderName, String)| Some((name, HeaderValue::try_from(value).ok()?));
    values.into_iter().filter_map(read).collect()
}
