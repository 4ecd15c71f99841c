//! Sending deliveries. Each endpoint has a task on each node that polls its queue of the outbox, as
//! a worker would, and sends what it leases. So leases, fences and retries are those of any job: a
//! node that dies loses none, and its deliveries are sent again by another.

use std::{
    collections::HashMap,
    future::pending,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use metrics::{counter, gauge, histogram};
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use sqlx::Acquire;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{
    payload::{Delivered, Payload},
    secret_place,
};
use crate::{
    domain::{
        lease::Fence,
        outbound,
        text::ErrorReport,
        webhook::{FAILING_DELIVERIES, FAILING_HOURS, SECRET_BYTES, Verdict, signatures, verdict},
    },
    engine::{
        Engine,
        dispatch::{self, Poll},
        settle::{self, Ack, AttemptEnd, Failure},
    },
    error,
    ids::{DeliveryId, EndpointId, ProjectId},
    outbound::{Destination, Outbound},
    seal::MasterKeys,
    store::{
        audit::{self, Actor, NewAuditEntry},
        claims::LeasedJob,
        deadline::bounded_query,
        shares::{Each, PerProject},
        sweep::webhooks::{ServedEndpoint, served_endpoints},
        webhooks::{self, Outcomes},
    },
    telemetry,
};

/// How often a node looks for endpoints that are new or have changed, and writes what it saw.
const REFRESH_PERIOD: Duration = Duration::from_secs(2);
/// The wait of one poll for deliveries.
const POLL_WAIT: Duration = Duration::from_secs(30);
/// The pause after a poll that failed.
const FAILURE_PAUSE: Duration = Duration::from_secs(1);
/// Requests that one node sends at a time.
pub const MAX_IN_FLIGHT: usize = 2_000;
/// The same to the endpoints of one project.
pub const MAX_PROJECT_IN_FLIGHT: usize = 200;
/// The same to one address, for all projects: nobody's host is flooded by many of them.
pub const MAX_ADDRESS_IN_FLIGHT: usize = 50;
/// How long a delivery waits for its turn among these; then it is released.
const TURN_TIMEOUT: Duration = Duration::from_secs(5);
/// Seconds by which a lease is longer than the endpoint's timeout: for turns, and for the ack.
pub(super) const LEASE_MARGIN_SECONDS: i32 = 20;
/// How long requests may still be answered when the node stops; then they are released.
const STOP_GRACE: Duration = Duration::from_secs(5);

/// The deliveries of one node.
pub struct Deliverer {
    engine: Engine,
    outbound: Outbound,
    master_keys: Arc<MasterKeys>,
    of_node: Arc<Semaphore>,
    of_project: PerProject,
    of_address: Each<IpAddr>,
}

/// An endpoint that this node serves.
struct Served {
    it: ServedEndpoint,
    to: Destination,
    secrets: Vec<Vec<u8>>,
    seen: Mutex<Outcomes>,
    /// Cancelled when it changes, or is served no more.
    ended: CancellationToken,
}

/// The right to send one request, as long as it is kept.
struct Turn {
    _of_project: OwnedSemaphorePermit,
    _of_node: OwnedSemaphorePermit,
    _of_address: OwnedSemaphorePermit,
}

type Key = (ProjectId, EndpointId);

impl Deliverer {
    #[must_use]
    pub fn new(engine: Engine, outbound: Outbound, master_keys: Arc<MasterKeys>) -> Arc<Self> {
        Arc::new(Self {
            engine,
            outbound,
            master_keys,
            of_node: Arc::new(Semaphore::new(MAX_IN_FLIGHT)),
            of_project: PerProject::new(MAX_PROJECT_IN_FLIGHT),
            of_address: Each::new(MAX_ADDRESS_IN_FLIGHT),
        })
    }

    /// Serves all enabled endpoints until the node stops.
    pub async fn run(self: Arc<Self>) {
        let stopping = self.engine.stopping.clone();
        let mut served: HashMap<Key, Arc<Served>> = HashMap::new();
        while !stopping.is_cancelled() {
            let engine = self.engine.clone();
            let found = bounded_query(async move {
                let mut conn = engine.pools.background.acquire().await?;
                served_endpoints(&mut conn).await
            });
            match found.await {
                Ok(found) => self.adapt(&mut served, found),
                Err(error) => {
                    tracing::warn!(error = error::chain(&error), "endpoints cannot be read");
                }
            }
            self.write_outcomes(&served).await;
            tokio::select! {
                () = stopping.cancelled() => (),
                () = sleep(REFRESH_PERIOD) => (),
            }
        }
        self.write_outcomes(&served).await;
    }

    /// Begins to serve what is new, and ends what is gone.
    fn adapt(self: &Arc<Self>, served: &mut HashMap<Key, Arc<Served>>, found: Vec<ServedEndpoint>) {
        let mut former = std::mem::take(served);
        for it in found {
            let key = (it.project_id, it.id);
            let same = former.remove(&key);
            if let Some(same) = same.as_ref().filter(|same| same.it == it) {
                served.insert(key, Arc::clone(same));
                continue;
            }
            if let Some(former) = &same {
                former.ended.cancel();
            }
            match self.serve(it, same.as_deref()) {
                Ok(new) => {
                    served.insert(key, Arc::clone(&new));
                    let this = Arc::clone(self);
                    self.engine.tasks.spawn(async move { this.work(new).await });
                }
                Err(error) => {
                    let endpoint = key.1.to_string();
                    tracing::warn!(
                        endpoint,
                        error = format!("{error:#}"),
                        "endpoint is not served"
                    );
                }
            }
        }
        former.values().for_each(|it| it.ended.cancel());
    }

    fn serve(&self, it: ServedEndpoint, former: Option<&Served>) -> anyhow::Result<Arc<Served>> {
        let url =
            outbound::read_url(&it.url, &self.outbound.allowed).map_err(anyhow::Error::msg)?;
        let connections = usize::try_from(it.max_in_flight).unwrap_or(1);
        let to = self.outbound.destination(url, connections)?;
        let place = secret_place(it.project_id, it.id);
        let stored = [Some(&it.secret), it.old_secret.as_ref()].into_iter().flatten();
        let secrets = stored.map(|stored| self.master_keys.open(&place, stored, SECRET_BYTES));
        let secrets = secrets.collect::<Result<Vec<_>, _>>()?;
        let seen = Mutex::new(former.map(Served::take_outcomes).unwrap_or_default());
        Ok(Arc::new(Served { it, to, secrets, seen, ended: CancellationToken::new() }))
    }

    /// Polls for an endpoint's deliveries, and sends them.
    async fn work(self: Arc<Self>, served: Arc<Served>) {
        let slots = Arc::new(Semaphore::new(usize::try_from(served.it.max_in_flight).unwrap_or(1)));
        let (stopping, ended) = (self.engine.stopping.clone(), served.ended.clone());
        let gone = stopping.child_token();
        loop {
            // One is taken for the wait, and the others that are free with it.
            let first = tokio::select! {
                () = stopping.cancelled() => return,
                () = ended.cancelled() => return,
                first = Arc::clone(&slots).acquire_owned() => first,
            };
            let Ok(first) = first else { return };
            let more = u32::try_from(slots.available_permits()).unwrap_or(0);
            let poll = Poll {
                queues: vec![served.it.id.to_string()],
                capacity: more + 1,
                lease_seconds: Some(served.it.timeout_seconds + LEASE_MARGIN_SECONDS),
                wait: POLL_WAIT,
                ..Poll::new(served.it.outbox)
            };
            let polled = tokio::select! {
                () = ended.cancelled() => return,
                polled = dispatch::poll(&self.engine, poll, &gone, pending()) => polled,
            };
            let polled = match polled {
                Ok(polled) => polled,
                Err(error) => {
                    tracing::warn!(error = error::chain(&error), "deliveries cannot be polled");
                    sleep(FAILURE_PAUSE).await;
                    continue;
                }
            };
            let mut slot = Some(first);
            for leased in polled.jobs() {
                let slot = slot.take().or_else(|| Arc::clone(&slots).try_acquire_owned().ok());
                let (this, served) = (Arc::clone(&self), Arc::clone(&served));
                let job = leased.job.clone();
                self.engine.tasks.spawn(async move {
                    this.deliver(&served, job).await;
                    drop(slot);
                });
            }
            polled.delivered();
        }
    }

    /// Sends a delivery, and settles it.
    async fn deliver(&self, served: &Served, job: LeasedJob) {
        let started = Instant::now();
        let sent = tokio::select! {
            sent = self.send(served, &job) => sent,
            () = self.stopped() => None,
        };
        let outcome = match &sent {
            None => "released",
            Some(AttemptEnd::Succeeded { .. }) => "delivered",
            Some(_) => "failed",
        };
        counter!(telemetry::WEBHOOK_DELIVERIES, "outcome" => outcome).increment(1);
        let duration_ms = i64::try_from(started.elapsed().as_millis()).ok();
        let fence =
            Fence { worker_id: None, attempt: Some(job.attempt), lease_id: Some(job.lease_id) };
        let end = sent.unwrap_or(AttemptEnd::Released);
        let ack = Ack { job_id: job.id, fence, end, duration_ms };
        if let Err(error) = settle::ack(&self.engine, served.it.outbox, ack).await {
            // Its lease ends, and it is sent again.
            let delivery = DeliveryId(job.id.0).to_string();
            tracing::warn!(delivery, error = error::chain(&error), "a delivery was not settled");
        }
    }

    async fn stopped(&self) {
        self.engine.stopping.cancelled().await;
        sleep(STOP_GRACE).await;
    }

    /// Sends a delivery; none: it could not have its turn.
    async fn send(&self, served: &Served, job: &LeasedJob) -> Option<AttemptEnd> {
        let payload = match Payload::read(&job.payload) {
            Ok(payload) => payload,
            Err(error) => return Some(failed("unreadable", error.to_string(), false, None)),
        };
        let address = match served.to.address().await {
            Ok(address) => address,
            Err(error) => {
                served.note(|it| it.failures += 1);
                return Some(failed(error.name(), error.to_string(), true, None));
            }
        };
        let _turn = timeout(TURN_TIMEOUT, self.turn(served.it.project_id, address)).await.ok()?;
        if job.attempt == 1 {
            let waited = (job.claimed_at - payload.at).to_std().unwrap_or_default();
            histogram!(telemetry::WEBHOOK_DELAY_SECONDS).record(waited.as_secs_f64());
        }
        gauge!(telemetry::WEBHOOK_IN_FLIGHT).increment(1);
        let called = Instant::now();
        let within = Duration::from_secs(u64::try_from(served.it.timeout_seconds).unwrap_or(1));
        let headers = headers(served, job, &payload);
        let answer = served.to.post(headers, payload.body.get().to_owned(), within).await;
        gauge!(telemetry::WEBHOOK_IN_FLIGHT).decrement(1);
        histogram!(telemetry::WEBHOOK_SECONDS).record(called.elapsed().as_secs_f64());
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) => {
                served.note(|it| it.failures += 1);
                return Some(failed(error.name(), error.to_string(), true, None));
            }
        };
        let kind = format!("http_{}", answer.status);
        Some(match verdict(answer.status, answer.retry_after_seconds) {
            Verdict::Delivered => {
                served.note(|it| *it = Outcomes { has_succeeded: true, ..Outcomes::default() });
                let result = Delivered { status: answer.status, text: answer.text };
                AttemptEnd::Succeeded { result: serde_json::to_string(&result).ok() }
            }
            Verdict::Failed(retry_after) => {
                served.note(|it| it.failures += 1);
                failed(&kind, answer.text, true, retry_after)
            }
            Verdict::Gone => {
                served.note(|it| it.is_gone = true);
                failed(&kind, answer.text, false, None)
            }
        })
    }

    async fn turn(&self, project_id: ProjectId, address: IpAddr) -> Turn {
        Turn {
            _of_project: self.of_project.take(project_id, 1).await,
            _of_address: self.of_address.take(address, 1).await,
            _of_node: Arc::clone(&self.of_node)
                .acquire_owned()
                .await
                .unwrap_or_else(|_| unreachable!("it is never closed")),
        }
    }

    /// Writes what deliveries led to, and disables endpoints that fail for too long.
    async fn write_outcomes(&self, served: &HashMap<Key, Arc<Served>>) {
        for ((project_id, id), it) in served {
            let outcomes = it.take_outcomes();
            if outcomes == Outcomes::default() {
                continue;
            }
            let (engine, key) = (self.engine.clone(), (*project_id, *id));
            let written = bounded_query(async move { note(&engine, key, outcomes).await }).await;
            if let Err(error) = written {
                let endpoint = id.to_string();
                tracing::warn!(endpoint, error = error::chain(&error), "outcomes are not written");
            }
        }
    }
}

impl Served {
    fn note(&self, change: impl FnOnce(&mut Outcomes)) {
        change(&mut self.seen.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn take_outcomes(&self) -> Outcomes {
        std::mem::take(&mut self.seen.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

async fn note(engine: &Engine, (project_id, id): Key, outcomes: Outcomes) -> sqlx::Result<()> {
    let mut conn = engine.pools.background.acquire().await?;
    let mut tx = conn.begin().await?;
    webhooks::lock(&mut tx, project_id).await?;
    let bounds = (FAILING_HOURS, FAILING_DELIVERIES);
    if webhooks::note_outcomes(&mut tx, project_id, id, outcomes, bounds).await? {
        webhooks::write_subscriptions(&mut tx, project_id).await?;
        let entry = NewAuditEntry::to("endpoint.disabled", id.to_string());
        audit::insert(&mut tx, project_id, &Actor::SYSTEM, &entry).await?;
    }
    tx.commit().await
}

fn failed(kind: &str, message: String, retryable: bool, retry_after: Option<u32>) -> AttemptEnd {
    let error = ErrorReport::bounded(Some(kind), Some(&message), None);
    AttemptEnd::Failed(Failure { error, retryable, retry_after_seconds: retry_after })
}

/// The headers of a request. The time is that of the lease, by the database's clock.
fn headers(served: &Served, job: &LeasedJob, payload: &Payload) -> HeaderMap {
    let (id, timestamp) = (&payload.event_id, job.claimed_at.timestamp());
    let values = [
        (CONTENT_TYPE, "application/json".to_owned()),
        (HeaderName::from_static("webhook-id"), id.clone()),
        (HeaderName::from_static("webhook-timestamp"), timestamp.to_string()),
        (
            HeaderName::from_static("webhook-signature"),
            signatures(&served.secrets, id, timestamp, payload.body.get()),
        ),
        (HeaderName::from_static("fencepost-delivery"), DeliveryId(job.id.0).to_string()),
        (HeaderName::from_static("fencepost-attempt"), job.attempt.to_string()),
    ];
    let read =
        |(name, value): (HeaderName, String)| Some((name, HeaderValue::try_from(value).ok()?));
    values.into_iter().filter_map(read).collect()
}
