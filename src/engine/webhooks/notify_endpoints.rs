//! The loop that makes deliveries of events: for each event and each endpoint that wants it, a job
//! of the outbox. The event is deleted in the transaction that stores these jobs, so its deliveries
//! are made once, and none is lost.

use std::{collections::HashMap, num::NonZeroU32};

use fencepost_domain::{
    actor::ActorKind,
    alarm::summary,
    ids::{BatchId, EndpointId, JobId, KeyId, ProjectId, WorkflowId},
    job::StoredState,
    limits::MAX_ENDPOINTS,
    outbound::is_below,
    plan::{Limits, ProjectPlans},
    webhook::{
        MAX_DELIVERY_ATTEMPTS, MAX_EVENT_MESSAGE_CHARS, MAX_EVENT_TAGS_BYTES, MAX_HOPS,
        WebhookBatch, WebhookChange, WebhookData, WebhookError, WebhookEvent, WebhookIncident,
        WebhookJob, WebhookProject, WebhookWorkflow, includes, max_delivery_bytes, retry_policy,
    },
};
use fencepost_signals::{
    limiter::{Charge, Limiter, Rate},
    telemetry,
};
use fencepost_store::{
    self as store, faults,
    jobs::stored_bytes,
    outbound::{
        incidents::{self, IncidentRow},
        outbound_events::{self, Subscriber, TakenEvent},
    },
    people::actors,
    sweep::{
        set_aside::Work,
        webhooks::{self, MAX_EVENTS, MAX_EVENTS_OF_PROJECT, WaitingEvent},
    },
    workflows::{
        self,
        batches::{self, BatchRow},
    },
};
use metrics::counter;
use serde_json::value::RawValue;
use sqlx::{PgConnection, types::Json};

use super::{deliver::DELIVERY_SECONDS, payload::Payload};
use crate::{
    Engine,
    enqueue::{NewJob, NewlyStored, Start, quota::limits_of_loops, store_in},
    isolate::{self, Sweep},
};

/// The part of a plan's `stored_bytes` that deliveries may use, so that an endpoint which fails
/// does not keep jobs from being enqueued.
pub const DELIVERIES_PART: i64 = 2;
/// Minutes by which one transaction's deliveries may overdraw their rate.
const BOOKED_WINDOWS: u32 = 60;
/// Deliveries that one transaction stores at most, but for those of one event.
const MAX_STORED_DELIVERIES: i64 = 1_000;

/// One pass: projects take turns. Returns whether there may be more.
///
/// # Errors
/// When the database does not answer.
pub async fn pass(engine: &Engine, plans: &ProjectPlans, limiter: &Limiter) -> sqlx::Result<bool> {
    let mut conn = engine.pools.background.acquire().await?;
    let mut found = webhooks::find_events(&mut conn).await?;
    let mut is_full = found.len() == MAX_EVENTS;
    found.sort_by_key(|it| (it.project_id, it.id));
    let (mut taken, mut failed) = (0, None);
    for of_project in found.chunk_by(|one, other| one.project_id == other.project_id) {
        is_full |= of_project.len() == MAX_EVENTS_OF_PROJECT;
        let endpoints = of_project.first().map_or(1, |it| it.endpoints.max(1));
        let at_once = usize::try_from((MAX_STORED_DELIVERIES / endpoints).max(1)).unwrap_or(1);
        let Some(project_id) = of_project.first().map(|it| it.project_id) else { continue };
        let limits = limits_of_loops(&mut conn, plans, project_id).await?;
        let budget = budget(project_id, &limits);
        for some in of_project.chunks(at_once) {
            let is_within_rate = limiter.charge(budget.as_slice(), &[]).await.wait.is_none();
            let events = Events { limits, is_within_rate };
            let processing = isolate::process(engine, &mut conn, &events, some);
            match faults::around_commit("events", processing).await {
                Ok(done) => {
                    let mut deliveries = 0;
                    for part in done {
                        taken += part.taken;
                        deliveries += part.stored.len();
                        part.stored.publish(engine);
                    }
                    if let Some(budget) = &budget {
                        book(limiter, budget, deliveries).await;
                    }
                }
                Err(error) => failed = Some(error),
            }
        }
    }
    // What another node has taken is not found again.
    failed.map_or(Ok(is_full && taken > 0), Err)
}

/// Charges what one transaction has stored, although it may overdraw the rate: the next ones pay
/// for it. One delivery was charged before.
async fn book(limiter: &Limiter, budget: &Charge, deliveries: usize) {
    let charge = Charge { overdraft_windows: BOOKED_WINDOWS, ..budget.clone() };
    let most = budget.rate.count.saturating_mul(BOOKED_WINDOWS);
    let rest = u32::try_from(deliveries.saturating_sub(1)).unwrap_or(u32::MAX).min(most);
    if let Some(rest) = NonZeroU32::new(rest) {
        limiter.charge_many(&[charge], rest).await;
    }
}

/// The rate of a project's deliveries; none: its plan has none.
fn budget(project_id: ProjectId, limits: &Limits) -> Option<Charge> {
    let rate = Rate::per_minute(limits.deliveries_per_minute?);
    let name = format!("limit:{{p{}}}:deliveries", project_id.0);
    Some(Charge { name, rate, overdraft_windows: 0 })
}

/// The result of some events.
#[derive(Default)]
struct Processed {
    taken: usize,
    stored: NewlyStored,
}

/// Making deliveries.
struct Events {
    /// Limits of their project.
    limits: Limits,
    /// False: the project's deliveries of this minute are used up.
    is_within_rate: bool,
}

impl Sweep for Events {
    type Item = WaitingEvent;
    type Done = Processed;
    const WORK: Work = Work::Events;

    fn name(item: &WaitingEvent) -> (ProjectId, String) {
        (item.project_id, item.id.to_string())
    }

    async fn process(
        &self,
        tx: &mut PgConnection,
        items: &[WaitingEvent],
    ) -> sqlx::Result<Processed> {
        let Some(project_id) = items.first().map(|it| it.project_id) else {
            return Ok(Processed::default());
        };
        let ids: Vec<_> = items.iter().map(|it| it.id).collect();
        let max_chars = i32::try_from(MAX_EVENT_MESSAGE_CHARS).unwrap_or(i32::MAX);
        let events = outbound_events::take(tx, project_id, &ids, max_chars).await?;
        let to = outbound_events::subscribers(tx, project_id, MAX_ENDPOINTS).await?;
        let project = store::people::projects::get(tx, project_id).await?;
        let names = names_of_keys(tx, project_id, &events).await?;
        let taken = events.len();
        let (Some(project), Some(outbox)) = (project, to.first().map(|it| it.outbox)) else {
            return Ok(Processed { taken, ..Processed::default() });
        };
        let room = self.room(tx, (project_id, outbox), &to).await?;
        let project = WebhookProject { id: project.public_id.to_string(), slug: project.slug };
        let (mut jobs, mut dropped) = (Vec::new(), Dropped::default());
        for event in events {
            let wanted = wanted(&to, &event, &room);
            if wanted.is_empty() && event.callback_url.is_some() {
                counter!(telemetry::EVENTS_DROPPED).increment(1);
            }
            let (is_of_work, hop) = (event.incident_id.is_none(), event.hop.unwrap_or(0));
            let mut open = Vec::new();
            for id in wanted {
                match room.max_bytes(id, is_of_work).filter(|_| hop < MAX_HOPS) {
                    Some(max) => open.push((id, max)),
                    None => dropped.add(id, is_of_work),
                }
            }
            let Some(smallest) = open.iter().map(|it| it.1).min() else { continue };
            let (kind, url) = (event.kind.clone(), event.callback_url.clone());
            let event = describe(tx, project_id, event, (project.clone(), &names)).await?;
            let payloads = Payload::long_and_short(event, hop + 1, url, smallest)?;
            for (id, max) in open {
                match payloads.iter().flatten().find(|it| it.len() <= max) {
                    Some(payload) => jobs.push(delivery(outbox, id, &kind, payload)),
                    None => dropped.add(id, is_of_work),
                }
            }
        }
        dropped.note(tx, project_id).await?;
        Ok(Processed { taken, stored: store_in(tx, jobs).await? })
    }
}

/// The room that is left for deliveries to the endpoints of a project.
struct Room {
    /// Deliveries that wait for each.
    waiting: HashMap<String, i64>,
    /// True if events of work may be sent: the plan's bytes and rate are not used up.
    is_open: bool,
}

impl Room {
    /// The largest delivery that this endpoint can get; none: it can get no more. Events of
    /// incidents are few, and what an alarm has found may be what takes the room.
    fn max_bytes(&self, id: EndpointId, is_of_work: bool) -> Option<usize> {
        let waiting = self.waiting.get(&id.to_string()).copied().unwrap_or(0);
        let max = max_delivery_bytes(waiting);
        if is_of_work { max.filter(|_| self.is_open) } else { max.map(|_| usize::MAX) }
    }
}

impl Events {
    async fn room(
        &self,
        tx: &mut PgConnection,
        (project_id, outbox): (ProjectId, ProjectId),
        to: &[Subscriber],
    ) -> sqlx::Result<Room> {
        let queues: Vec<_> = to.iter().map(|it| it.id.to_string()).collect();
        let waiting = outbound_events::waiting_deliveries(tx, outbox, &queues).await?;
        let waiting = waiting.into_iter().collect();
        let has_bytes = has_bytes(tx, &self.limits, project_id, outbox).await?;
        Ok(Room { waiting, is_open: has_bytes && self.is_within_rate })
    }
}

/// Checks that the plan leaves room for more deliveries.
async fn has_bytes(
    tx: &mut PgConnection,
    limits: &Limits,
    project_id: ProjectId,
    outbox: ProjectId,
) -> sqlx::Result<bool> {
    let Some(max) = limits.stored_bytes else { return Ok(true) };
    let of_jobs = stored_bytes::of_project(tx, project_id).await?.bytes;
    let of_deliveries = stored_bytes::of_project(tx, outbox).await?.bytes;
    Ok(of_jobs + of_deliveries < max && of_deliveries < max / DELIVERIES_PART)
}

/// Events that endpoints missed: how many, and how many of them are not about incidents.
#[derive(Default)]
struct Dropped(HashMap<EndpointId, (i64, i64)>);

impl Dropped {
    fn add(&mut self, id: EndpointId, is_of_work: bool) {
        let (events, of_work) = self.0.entry(id).or_default();
        *events += 1;
        *of_work += i64::from(is_of_work);
    }

    async fn note(self, tx: &mut PgConnection, project_id: ProjectId) -> sqlx::Result<()> {
        if self.0.is_empty() {
            return Ok(());
        }
        let dropped: Vec<_> = self.0.into_iter().map(|(id, it)| (id, it.0, it.1)).collect();
        outbound_events::note_dropped(tx, project_id, &dropped).await?;
        let events: i64 = dropped.iter().map(|it| it.1).sum();
        counter!(telemetry::EVENTS_DROPPED).increment(events.unsigned_abs());
        Ok(())
    }
}

/// The endpoints that want an event. Of several that take a callback, it is the one with room whose
/// URL is nearest.
fn wanted(to: &[Subscriber], event: &TakenEvent, room: &Room) -> Vec<EndpointId> {
    let wanted: Vec<_> = match &event.callback_url {
        Some(url) => to
            .iter()
            .filter(|it| takes(it, url))
            .max_by_key(|it| (room.max_bytes(it.id, true).is_some(), it.url.len()))
            .into_iter()
            .collect(),
        None => to.iter().filter(|it| wants(it, event)).collect(),
    };
    wanted.into_iter().map(|it| it.id).collect()
}

/// Whether an endpoint takes a callback.
fn takes(it: &Subscriber, url: &str) -> bool {
    it.takes_callbacks && is_below(url, &it.url)
}

fn wants(it: &Subscriber, event: &TakenEvent) -> bool {
    // What is about no job is about no queue and type.
    let fits = |names: &[String], name: &Option<String>| {
        name.as_ref().is_none_or(|it| includes(names, it))
    };
    it.event_types.contains(&event.kind)
        && event.at >= it.subscribed_at
        && fits(&it.queues, &event.queue)
        && fits(&it.job_types, &event.job_type)
}

/// A delivery, as the job of an outbox.
pub(super) fn delivery(
    outbox: ProjectId,
    endpoint: EndpointId,
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
        timeout_seconds: DELIVERY_SECONDS,
        payload: payload.to_owned(),
        retry: Some(Json(retry_policy())),
        tags: None,
        extras: None,
    }
}

/// The payload of an event.
async fn describe(
    tx: &mut PgConnection,
    project_id: ProjectId,
    event: TakenEvent,
    (project, names): (WebhookProject, &HashMap<String, String>),
) -> sqlx::Result<WebhookEvent> {
    let (kind, timestamp) = (event.kind.clone(), event.at);
    let incident = match event.incident_id {
        Some(id) => incidents::find(tx, project_id, id).await?.map(describe_incident),
        None => None,
    };
    let batch = match event.about_batch {
        Some(id) => Some(describe_batch(id, batches::find(tx, project_id, id).await?)),
        None => None,
    };
    let workflow = match event.about_workflow {
        Some(id) => Some(describe_workflow(tx, project_id, id).await?),
        None => None,
    };
    let error = event.outcome.clone().map(|outcome| WebhookError {
        outcome,
        kind: event.error_kind.clone(),
        message: event.error_message.clone(),
        retry_at: event.retry_at,
    });
    let cancelled_by = describe_cause(&event, names);
    let job = describe_job(event)?;
    let data = WebhookData { project, job, error, cancelled_by, batch, workflow, incident };
    Ok(WebhookEvent { kind, timestamp, data })
}

/// The author and the reason of a cancel; `names` are those of keys.
fn describe_cause(event: &TakenEvent, names: &HashMap<String, String>) -> Option<WebhookChange> {
    let (id, reason) = (event.actor_id.clone(), event.reason.clone());
    let name = id.as_ref().and_then(|it| names.get(it)).cloned();
    Some(WebhookChange { kind: event.actor_kind?, id, name, reason })
}

/// The names of the keys that cancelled the jobs of these events.
async fn names_of_keys(
    tx: &mut PgConnection,
    project_id: ProjectId,
    events: &[TakenEvent],
) -> sqlx::Result<HashMap<String, String>> {
    let by_keys = events.iter().filter(|it| it.actor_kind == Some(ActorKind::Key));
    let mut keys: Vec<KeyId> =
        by_keys.filter_map(|it| it.actor_id.as_deref()?.parse().ok()).collect();
    keys.sort();
    keys.dedup();
    match keys.is_empty() {
        true => Ok(HashMap::new()),
        false => actors::names_of_keys(tx, project_id, &keys).await,
    }
}

async fn describe_workflow(
    tx: &mut PgConnection,
    project_id: ProjectId,
    id: WorkflowId,
) -> sqlx::Result<WebhookWorkflow> {
    let row = workflows::find_workflow(tx, project_id, id).await?;
    let counts = workflows::count_states(tx, project_id, &[id]).await?;
    let succeeded = counts.iter().filter(|it| it.state == Some(StoredState::Succeeded));
    Ok(WebhookWorkflow {
        id: id.to_string(),
        name: row.and_then(|it| it.name),
        succeeded_jobs: succeeded.map(|it| it.jobs).sum(),
        total_jobs: counts.iter().map(|it| it.jobs).sum(),
    })
}

fn describe_batch(id: BatchId, row: Option<BatchRow>) -> WebhookBatch {
    WebhookBatch {
        id: id.to_string(),
        name: row.as_ref().and_then(|it| it.name.clone()),
        total_jobs: row.as_ref().map(|it| it.jobs),
        succeeded_jobs: row.as_ref().map(|it| it.succeeded),
        dead_letter_jobs: row.as_ref().map(|it| it.dead_letter),
        cancelled_jobs: row.as_ref().map(|it| it.cancelled),
        skipped_jobs: row.as_ref().map(|it| it.skipped),
    }
}

fn describe_job(event: TakenEvent) -> sqlx::Result<Option<WebhookJob>> {
    let Some(id) = event.job_id else { return Ok(None) };
    let undecodable = |error: serde_json::Error| sqlx::Error::Decode(error.into());
    let (tags, tags_cut) = match event.tags {
        Some(tags) if tags.len() > MAX_EVENT_TAGS_BYTES => (None, true),
        tags => (tags.map(RawValue::from_string).transpose().map_err(undecodable)?, false),
    };
    Ok(Some(WebhookJob {
        id: id.to_string(),
        queue: event.queue.unwrap_or_default(),
        job_type: event.job_type.unwrap_or_default(),
        group: event.group,
        attempt: event.attempt.unwrap_or_default(),
        max_attempts: event.max_attempts,
        created_at: event.created_at,
        tags,
        tags_cut,
        batch_id: event.batch_id.map(|it| it.to_string()),
        workflow_id: event.workflow_id.map(|it| it.to_string()),
    }))
}

fn describe_incident(row: IncidentRow) -> WebhookIncident {
    let (rule, details) = row.read();
    WebhookIncident {
        id: row.id.to_string(),
        alarm: row.alarm,
        rule,
        subject: row.subject,
        summary: summary(rule, &details),
        details,
        began_at: row.began_at,
        resolved_at: row.resolved_at,
    }
}
