//! Deliveries, as their project sees them: it never sees the jobs of its outbox.

use chrono::{DateTime, Utc};
use fencepost_domain::{
    actor::ChangedBy,
    error::Error,
    ids::{DeliveryId, EndpointId, EventId, JobId, JobKey, OperationId, ProjectId},
    job::{JobState, StoredState},
    operation::{JobFilter, Kind, Which},
    plan::{Limits, Tenant},
    webhook::{TEST_EVENT, WebhookData, WebhookEvent, WebhookProject},
};
use fencepost_store as store;

use super::{
    EndpointRow, find,
    notify_endpoints::{self, DELIVERIES_PART},
    payload::{Delivered, Payload, first_hop},
};
use crate::{
    Engine,
    enqueue::{
        self, Origin,
        dependencies::{JobWithDependencies, OnConflict},
        quota,
    },
    jobs::{AttemptRow, Filter, JobRow, Order, Payloads, Place, control},
    operations::{self, NewOperation},
};

/// Deliveries of a project that may wait when a replay of all begins, with those that it makes.
pub const MAX_REPLAYED_DELIVERIES: i64 = 100_000;

/// A delivery.
#[derive(Debug)]
pub struct DeliveryRow {
    pub job: JobRow,
    pub payload: Payload,
    /// The endpoint's answer, if it accepted the delivery.
    pub delivered: Option<Delivered>,
}

fn read(job: JobRow) -> Result<DeliveryRow, Error> {
    let payload = Payload::read(&job.payload).map_err(Error::internal)?;
    let delivered = job.result.as_deref().map(serde_json::from_str).transpose();
    Ok(DeliveryRow { payload, delivered: delivered.map_err(Error::internal)?, job })
}

/// Which deliveries of an endpoint to list.
#[derive(Debug, Default)]
pub struct Wanted {
    /// Only those in one of these states; none: any.
    pub states: Vec<JobState>,
    pub event_type: Option<String>,
    /// Only those made at this time or later.
    pub since: Option<DateTime<Utc>>,
}

/// Deliveries to an endpoint, newest first, and, if there may be more, the last one examined.
///
/// # Errors
/// [`Error::EndpointNotFound`].
pub async fn deliveries(
    engine: &Engine,
    (project_id, id): (ProjectId, EndpointId),
    wanted: Wanted,
    after: Option<DeliveryId>,
    limit: u32,
) -> Result<(Vec<DeliveryRow>, Option<DeliveryId>), Error> {
    let endpoint = find(engine, project_id, id).await?;
    let filter = Filter {
        states: wanted.states,
        queue: Some(id.to_string()),
        job_type: wanted.event_type,
        created_after: wanted.since,
        ..Filter::default()
    };
    let after = after.map(|it| JobId(it.0));
    let place = Place { order: Order::Newest, after, jobs: limit };
    let mut conn = engine.pools.read_outbox(project_id, endpoint.outbox).await?;
    let (rows, next) =
        store::jobs::page(&mut conn, endpoint.outbox, &filter, place, Payloads::Shown).await?;
    let rows = rows.into_iter().map(read).collect::<Result<_, _>>()?;
    Ok((rows, next.map(|it| DeliveryId(it.0))))
}

/// One delivery, with its failed tries, oldest first.
///
/// # Errors
/// [`Error::EndpointNotFound`], [`Error::DeliveryNotFound`].
pub async fn delivery(
    engine: &Engine,
    endpoint: (ProjectId, EndpointId),
    id: DeliveryId,
) -> Result<(DeliveryRow, Vec<AttemptRow>), Error> {
    let (key, _) = job_of(engine, endpoint, id).await?;
    let mut conn = engine.pools.read_outbox(endpoint.0, key.project_id).await?;
    let job = store::jobs::find(&mut conn, key.project_id, key.id).await?;
    let attempts = store::jobs::attempts(&mut conn, key.project_id, key.id).await?;
    Ok((read(job.ok_or(Error::DeliveryNotFound)?)?, attempts))
}

/// The job of a delivery to this endpoint, and its state.
async fn job_of(
    engine: &Engine,
    (project_id, endpoint): (ProjectId, EndpointId),
    id: DeliveryId,
) -> Result<(JobKey, StoredState), Error> {
    let EndpointRow { outbox, .. } = find(engine, project_id, endpoint).await?;
    let mut conn = engine.pools.read_outbox(project_id, outbox).await?;
    let job = store::jobs::find(&mut conn, outbox, JobId(id.0)).await?;
    let job = job.filter(|it| it.queue == endpoint.to_string());
    let job = job.ok_or(Error::DeliveryNotFound)?;
    Ok((JobKey { project_id: outbox, id: job.id }, job.state))
}

/// Sends a delivery again that is a dead letter or was cancelled, or now one that waits.
///
/// # Errors
/// [`Error::EndpointNotFound`], [`Error::DeliveryNotFound`]; [`Error::InvalidState`] when it is
/// none of them.
pub async fn retry(
    engine: &Engine,
    endpoint: (ProjectId, EndpointId),
    id: DeliveryId,
    by: &ChangedBy,
) -> Result<(), Error> {
    let (key, state) = job_of(engine, endpoint, id).await?;
    // It is due, and has its place before others.
    if state == StoredState::Pending {
        return Ok(());
    }
    let now = control::Timing::After(chrono::TimeDelta::zero());
    // What its owner has stored does not matter here: calls are counted.
    let outbox = Tenant { project_id: key.project_id, limits: Limits::default() };
    let what = (now, control::Change::default());
    match control::change(engine, outbox, key.id, what, by).await {
        Err(Error::InvalidState(_)) => {
            control::retry(engine, key, control::OldCheckpoint::Kept, by).await
        }
        changed => changed,
    }
}

/// Sends an event to an endpoint that shows that it works. Returns the delivery.
///
/// # Errors
/// [`Error::EndpointNotFound`].
pub async fn send_test(
    engine: &Engine,
    project_id: ProjectId,
    id: EndpointId,
    project: WebhookProject,
) -> Result<DeliveryId, Error> {
    let endpoint = find(engine, project_id, id).await?;
    let event = WebhookEvent {
        kind: TEST_EVENT.to_owned(),
        timestamp: engine.now().await?,
        data: WebhookData {
            project,
            job: None,
            error: None,
            cancelled_by: None,
            batch: None,
            workflow: None,
            incident: None,
        },
    };
    let payload = Payload::of(EventId::generate(), &event, first_hop(), None)?;
    let job = notify_endpoints::delivery(endpoint.outbox, id, TEST_EVENT, &payload);
    let delivery = DeliveryId(job.id.0);
    // What its owner has stored does not matter here: calls are counted.
    let outbox = Tenant { project_id: endpoint.outbox, limits: Limits::default() };
    let entry = JobWithDependencies::new(job, OnConflict::Reject);
    enqueue::store(engine, outbox, Origin::server(), vec![entry]).await?;
    Ok(delivery)
}

/// Which deliveries to send again.
#[derive(Debug, Clone, Copy)]
pub struct ReplayRequest {
    /// Only those made at this time or later.
    pub since: DateTime<Utc>,
    /// Only those made before this time.
    pub until: Option<DateTime<Utc>>,
    /// Also those that were accepted.
    pub is_of_all: bool,
    pub rate_per_second: Option<i32>,
    /// Only count them.
    pub is_dry_run: bool,
}

/// Sends deliveries again, in the background. Returns how many; none: more than were counted.
///
/// # Errors
/// [`Error::EndpointNotFound`]. [`Error::QuotaExceeded`] while too many such operations run, or
/// when all are to be sent, and deliveries have no room for that. [`Error::Invalid`] when they are
/// too many.
pub async fn replay(
    engine: &Engine,
    Tenant { project_id, limits }: Tenant,
    id: EndpointId,
    wanted: &ReplayRequest,
) -> Result<Option<i64>, Error> {
    let endpoint = find(engine, project_id, id).await?;
    let kind = if wanted.is_of_all { Kind::JobsReplay } else { Kind::JobsRetry };
    let filter = JobFilter {
        queue: Some(id.to_string()),
        created_after: Some(wanted.since),
        created_before: wanted.until,
        ..JobFilter::default()
    };
    let now = engine.now().await?;
    let which = Filter::of(kind, &filter, now).map_err(|it| Error::invalid("which", it))?;
    let (count, has_more) = {
        let mut conn = engine.pools.read_outbox(project_id, endpoint.outbox).await?;
        store::jobs::count(&mut conn, endpoint.outbox, &which).await?
    };
    let matching = (!has_more).then_some(count);
    if wanted.is_dry_run {
        return Ok(matching);
    }
    if wanted.is_of_all && has_more {
        return Err(Error::invalid("since", "must be later: more than 100,000 deliveries match"));
    }
    if wanted.is_of_all {
        check_room(engine, (project_id, endpoint.outbox), limits, count).await?;
    }
    let new = NewOperation {
        id: OperationId::generate(),
        kind,
        filter: Which::Jobs(filter),
        expected: matching,
        max_jobs: None,
        rate_per_second: wanted.rate_per_second,
    };
    let outbox = Tenant { project_id: endpoint.outbox, limits: Limits::default() };
    operations::begin(engine, outbox, &new).await?;
    Ok(matching)
}

/// Checks that this many deliveries can be made anew.
async fn check_room(
    engine: &Engine,
    (project_id, outbox): (ProjectId, ProjectId),
    limits: Limits,
    count: i64,
) -> Result<(), Error> {
    let max = MAX_REPLAYED_DELIVERIES;
    let waiting = {
        let mut conn = engine.pools.read_outbox(project_id, outbox).await?;
        // What a running one will store is not counted yet.
        if store::operations::count_running(&mut conn, outbox).await? > 0 {
            return Err(Error::QuotaExceeded { what: "running replays", max: 1 });
        }
        store::queues::counts::waiting(&mut conn, outbox).await?
    };
    if waiting + count > max {
        return Err(Error::QuotaExceeded { what: "waiting deliveries", max });
    }
    match limits.stored_bytes.map(|it| it / DELIVERIES_PART) {
        Some(max) if quota::delivered_bytes(engine, project_id, outbox).await? >= max => {
            Err(Error::QuotaExceeded { what: "stored bytes of deliveries", max })
        }
        _ => Ok(()),
    }
}
