//! The loop that makes deliveries of events: for each event and each endpoint that wants it, a job
//! of the outbox. The event is deleted in the transaction that stores these jobs, so each is
//! delivered at least once, and made once.

use serde_json::value::RawValue;
use sqlx::{PgConnection, types::Json};

use crate::{
    domain::{
        limits::MAX_ENDPOINTS,
        webhook::{
            MAX_DELIVERY_ATTEMPTS, MAX_EVENT_MESSAGE_CHARS, WebhookData, WebhookError,
            WebhookEvent, WebhookJob, WebhookProject, includes, retry_policy,
        },
    },
    engine::{
        Engine,
        enqueue::{NewJob, NewlyStored, Start, store_in},
        isolate::{self, Sweep},
    },
    ids::{EndpointId, EventId, JobId, ProjectId},
    store::{
        self,
        outbound_events::{self, EventKey, Subscriber, TakenEvent},
        sweep::{self, set_aside::Work},
    },
};

use super::{deliver::LEASE_MARGIN_SECONDS, payload::Payload};

/// Deliveries of one outbox that may wait. While there are more, events stay where they are.
pub const MAX_WAITING_DELIVERIES: i64 = 50_000;

/// One pass: projects take turns. Returns whether there may be more.
///
/// # Errors
/// When the database does not answer.
pub async fn pass(engine: &Engine) -> sqlx::Result<bool> {
    let mut conn = engine.pools.background.acquire().await?;
    let found = sweep::webhooks::find_events(&mut conn, MAX_WAITING_DELIVERIES).await?;
    let mut is_full = found.len() == sweep::webhooks::MAX_EVENTS;
    let mut failed = None;
    for of_project in found.chunk_by(|one, other| one.project_id == other.project_id) {
        is_full |= of_project.len() == sweep::webhooks::MAX_EVENTS_OF_PROJECT;
        match isolate::process(engine, &mut conn, &Events, of_project).await {
            Ok(done) => done.iter().for_each(|it| it.tell(engine)),
            Err(error) => failed = Some(error),
        }
    }
    failed.map_or(Ok(is_full), Err)
}

/// Making deliveries.
struct Events;

impl Sweep for Events {
    type Item = EventKey;
    type Done = NewlyStored;
    const WORK: Work = Work::Events;

    fn name(item: &EventKey) -> (ProjectId, String) {
        (item.project_id, item.id.to_string())
    }

    async fn process(
        &self,
        tx: &mut PgConnection,
        items: &[EventKey],
    ) -> sqlx::Result<NewlyStored> {
        let Some(project_id) = items.first().map(|it| it.project_id) else {
            return Ok(NewlyStored::default());
        };
        let ids: Vec<_> = items.iter().map(|it| it.id).collect();
        let max_chars = i32::try_from(MAX_EVENT_MESSAGE_CHARS).unwrap_or(i32::MAX);
        let events = outbound_events::take(tx, project_id, &ids, max_chars).await?;
        let to = outbound_events::subscribers(tx, project_id, MAX_ENDPOINTS).await?;
        let project = store::projects::get(tx, project_id).await?;
        let (Some(project), Some(outbox)) = (project, to.first().map(|it| it.outbox)) else {
            return Ok(NewlyStored::default());
        };
        let project =
            WebhookProject { id: project.public_id.to_string(), slug: project.slug.clone() };
        let mut jobs = Vec::new();
        for event in events {
            let wants = |it: &&Subscriber| {
                it.event_types.contains(&event.kind)
                    && includes(&it.queues, &event.queue)
                    && includes(&it.job_types, &event.job_type)
            };
            let to: Vec<_> = to.iter().filter(wants).collect();
            if to.is_empty() {
                continue;
            }
            let (id, kind) = (EventId::generate(), event.kind.clone());
            let payload = Payload::of(id, &describe(event, project.clone())?)?;
            let job = |it: &Subscriber| {
                let timeout = it.timeout_seconds + LEASE_MARGIN_SECONDS;
                delivery(outbox, (it.id, timeout), &kind, &payload)
            };
            jobs.extend(to.into_iter().map(job));
        }
        store_in(tx, jobs).await
    }
}

/// A delivery, as the job of an outbox.
pub(super) fn delivery(
    outbox: ProjectId,
    (endpoint, timeout_seconds): (EndpointId, i32),
    kind: &str,
    payload: &str,
) -> NewJob {
    NewJob {
        project_id: outbox,
        id: JobId::generate(),
        queue: endpoint.to_string(),
        job_type: kind.to_owned(),
        rank: 0,
        start: Start::After(0),
        max_attempts: Some(MAX_DELIVERY_ATTEMPTS),
        timeout_seconds,
        payload: payload.to_owned(),
        retry: Some(Json(retry_policy())),
        tags: None,
        extras: None,
    }
}

/// What is told of an event.
fn describe(event: TakenEvent, project: WebhookProject) -> sqlx::Result<WebhookEvent> {
    let undecodable = |error: serde_json::Error| sqlx::Error::Decode(error.into());
    let tags = event.tags.map(RawValue::from_string).transpose().map_err(undecodable)?;
    let error = event.outcome.map(|outcome| WebhookError {
        outcome,
        kind: event.error_kind,
        message: event.error_message,
        retry_at: event.retry_at,
    });
    let job = WebhookJob {
        id: event.job_id.to_string(),
        queue: event.queue,
        job_type: event.job_type,
        attempt: event.attempt,
        max_attempts: event.max_attempts,
        created_at: event.created_at,
        tags,
        batch_id: event.batch_id.map(|it| it.to_string()),
        workflow_id: event.workflow_id.map(|it| it.to_string()),
    };
    let data = WebhookData { project, job: Some(job), error };
    Ok(WebhookEvent { kind: event.kind, timestamp: event.at, data })
}
