//! Events that wait for their deliveries, and what these carry.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use fencepost_domain::{
    actor::ActorKind,
    history,
    ids::{BatchId, EndpointId, IncidentId, JobId, ProjectId, WorkflowId},
};

/// An event, by its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventKey {
    pub project_id: ProjectId,
    pub id: i64,
}

/// An event, with what the rows of its job say.
#[derive(Debug, Clone)]
pub struct TakenEvent {
    pub kind: String,
    pub at: DateTime<Utc>,
    /// Null: it is about no job, and so for the next three.
    pub job_id: Option<JobId>,
    pub queue: Option<String>,
    pub job_type: Option<String>,
    pub attempt: Option<i32>,
    pub incident_id: Option<IncidentId>,
    pub about_batch: Option<BatchId>,
    pub about_workflow: Option<WorkflowId>,
    /// The URL that is notified, and no other.
    pub callback_url: Option<String>,
    /// Null: the job was deleted.
    pub max_attempts: Option<i32>,
    pub created_at: Option<DateTime<Utc>>,
    /// JSON.
    pub tags: Option<String>,
    pub group: Option<String>,
    pub batch_id: Option<BatchId>,
    pub workflow_id: Option<WorkflowId>,
    /// How many deliveries have led to it; null: none.
    pub hop: Option<i16>,
    /// How the attempt ended; null: it succeeded, or there was none.
    pub outcome: Option<String>,
    pub error_kind: Option<String>,
    /// The beginning of its message.
    pub error_message: Option<String>,
    pub retry_at: Option<DateTime<Utc>>,
    /// The author of the cancel, and the reason; null: it was not cancelled, or none is known.
    pub actor_kind: Option<ActorKind>,
    pub actor_id: Option<String>,
    pub reason: Option<String>,
}

/// Takes events out of the table, to store their deliveries in the same transaction. Those that
/// another node has taken are left out. What is said of each is looked up by itself: statistics of
/// tables that fill and empty within seconds mislead the planner of joins.
pub async fn take(
    conn: &mut PgConnection,
    project_id: ProjectId,
    ids: &[i64],
    max_message_chars: i32,
) -> sqlx::Result<Vec<TakenEvent>> {
    sqlx::query_as!(
        TakenEvent,
        r#"
        with held as materialized (
            select locked.place
            from unnest($2::bigint[]) as asked(id)
            cross join lateral (
                select ctid as place
                from outbound_events
                where project_id = $1 and outbound_events.id = asked.id
                for update skip locked
            ) locked
        ), taken as (
            delete from outbound_events
            where ctid = any(array(select place from held))
            returning id, type, at, job_id, queue, job_type, attempt, incident_id,
                      batch_id, workflow_id, callback_url, hop
        )
        select taken.type "kind!", taken.at "at!", taken.job_id "job_id: JobId",
               taken.queue, taken.job_type, taken.attempt, taken.incident_id "incident_id: IncidentId",
               taken.batch_id "about_batch: BatchId",
               taken.workflow_id "about_workflow: WorkflowId", taken.callback_url,
               coalesce(live.max_attempts, ended.max_attempts) as max_attempts,
               coalesce(live.created_at, ended.created_at) as created_at,
               body.tags::text as tags, body.group_key as "group", body.batch_id "batch_id: BatchId",
               body.workflow_id "workflow_id: WorkflowId", coalesce(body.hop, taken.hop) as hop,
               failed.outcome "outcome?", failed.error_kind, left(failed.error_message, $3) as error_message,
               failed.retry_at, cause.actor_kind "actor_kind?: ActorKind", cause.actor_id "actor_id?",
               cause.reason "reason?"
        from taken
        left join lateral (
            select max_attempts, created_at
            from jobs
            where project_id = $1 and id = taken.job_id
            offset 0
        ) live on true
        left join lateral (
            select max_attempts, created_at
            from finished_jobs
            where project_id = $1 and id = taken.job_id
            offset 0
        ) ended on true
        left join lateral (
            select tags, group_key, batch_id, workflow_id, hop
            from job_bodies
            where project_id = $1 and job_id = taken.job_id
            offset 0
        ) body on true
        left join lateral (
            select outcome, error_kind, error_message, retry_at
            from attempts
            where project_id = $1 and job_id = taken.job_id and attempt = taken.attempt
                and taken.type in ('job.attempt_failed', 'job.dead_lettered')
            offset 0
        ) failed on true
        left join lateral (
            select actor_kind, actor_id, reason
            from job_events
            where project_id = $1 and job_id = taken.job_id and taken.type = 'job.cancelled'
                and type = any($4)
                -- The transaction that cancelled it has recorded the cause after the event.
                and at <= taken.at + interval '1 second'
            order by id desc
            limit 1
        ) cause on true
        order by taken.id
        "#,
        project_id.0,
        ids,
        max_message_chars,
        &history::CANCELLATIONS as &[&str],
    )
    .fetch_all(conn)
    .await
}

/// The endpoints of a project and the events that they want.
#[derive(Debug, Clone)]
pub struct Subscriber {
    pub id: EndpointId,
    pub outbox: ProjectId,
    pub url: String,
    pub takes_callbacks: bool,
    pub event_types: Vec<String>,
    pub queues: Vec<String>,
    pub job_types: Vec<String>,
    /// It is notified of events from then on.
    pub subscribed_at: DateTime<Utc>,
}

/// The enabled endpoints of a project, locked: none is deleted before what is made for it.
pub async fn subscribers(
    conn: &mut PgConnection,
    project_id: ProjectId,
    limit: i64,
) -> sqlx::Result<Vec<Subscriber>> {
    sqlx::query_as!(
        Subscriber,
        r#"
        select it.id "id: EndpointId", outboxes.outbox_id "outbox: ProjectId", it.url,
               it.takes_callbacks, it.event_types,
               it.queues, it.job_types, it.subscribed_at
        from webhook_endpoints it
        join outboxes using (project_id)
        where it.project_id = $1 and it.disabled_at is null and it.deleted_at is null
        order by it.id
        limit $2
        for share of it
        "#,
        project_id.0,
        limit,
    )
    .fetch_all(conn)
    .await
}

/// Stores an event for the URL which a job has named, about its end. Returns whether it is: not if
/// the job was deleted.
pub async fn call_back(
    conn: &mut PgConnection,
    (project_id, job_id): (ProjectId, JobId),
    kind: &str,
    url: &str,
) -> sqlx::Result<bool> {
    let done = sqlx::query!(
        "
        insert into outbound_events (
            project_id, type, job_id, queue, job_type, attempt, callback_url
        )
        select $1, $3, $2, job.queue, job.job_type, job.attempt, $4
        from (
            select queue, job_type, attempt
            from finished_jobs
            where project_id = $1 and id = $2
            union all
            select queue, job_type, attempt
            from jobs
            where project_id = $1 and id = $2
            limit 1
        ) job
        ",
        project_id.0,
        job_id.0,
        kind,
        url,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() > 0)
}

/// Subject of an event that is about no job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum About {
    Batch(BatchId),
    Workflow(WorkflowId),
    Incident(IncidentId),
}

/// An event that is about no job.
#[derive(Debug, Clone, Copy)]
pub struct NewEvent<'a> {
    pub kind: &'a str,
    /// Its subjects, each of which gets an event.
    pub about: &'a [About],
    /// The `callback_url` that they have named, which is notified of ends alone.
    pub url: Option<&'a str>,
    /// How many deliveries have led to them.
    pub hop: Option<i16>,
}

/// Stores events, if an endpoint asked for their type, and one for each `callback_url`. Returns
/// whether there is one. Events about jobs are written by triggers.
pub async fn store(
    conn: &mut PgConnection,
    project_id: ProjectId,
    event: NewEvent<'_>,
) -> sqlx::Result<bool> {
    let NewEvent { kind, about, url, hop } = event;
    let batches = about.iter().map(|it| if let About::Batch(id) = it { Some(id.0) } else { None });
    let workflows =
        about.iter().map(|it| if let About::Workflow(id) = it { Some(id.0) } else { None });
    let incidents =
        about.iter().map(|it| if let About::Incident(id) = it { Some(id.0) } else { None });
    let stored = sqlx::query!(
        "
        insert into outbound_events (
            project_id, type, batch_id, workflow_id, incident_id, callback_url, hop
        )
        select $1, $2, about.batch_id, about.workflow_id, about.incident_id, notified.url, $7
        from unnest($3::uuid[], $4::uuid[], $5::uuid[])
            as about(batch_id, workflow_id, incident_id)
        cross join (
            select null as url
            from event_subscriptions
            where project_id = $1 and type = $2
            union all
            select $6::text where $6::text is not null
        ) notified
        ",
        project_id.0,
        kind,
        &batches.collect::<Vec<_>>() as &[Option<Uuid>],
        &workflows.collect::<Vec<_>>() as &[Option<Uuid>],
        &incidents.collect::<Vec<_>>() as &[Option<Uuid>],
        url,
        hop,
    )
    .execute(conn)
    .await?;
    Ok(stored.rows_affected() > 0)
}

/// The number of deliveries that wait in each of these queues, as far as they are counted.
/// Queues in which none waits may be missing.
pub async fn waiting_deliveries(
    conn: &mut PgConnection,
    outbox: ProjectId,
    queues: &[String],
) -> sqlx::Result<Vec<(String, i64)>> {
    let counted = sqlx::query!(
        "select queue, active from queue_counts where project_id = $1 and queue = any($2)",
        outbox.0,
        queues,
    )
    .fetch_all(conn)
    .await?;
    Ok(counted.into_iter().map(|it| (it.queue, it.active)).collect())
}

/// Notes how many events these endpoints missed, and how many of them are not about incidents: an
/// alarm reports those.
pub async fn note_dropped(
    conn: &mut PgConnection,
    project_id: ProjectId,
    dropped: &[(EndpointId, i64, i64)],
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        update webhook_endpoints it
        set dropped_events = dropped_events + dropped.events,
            dropped_at = case when dropped.of_work > 0 then now() else it.dropped_at end
        from unnest($2::uuid[], $3::bigint[], $4::bigint[]) as dropped(id, events, of_work)
        where it.project_id = $1 and it.id = dropped.id
        ",
        project_id.0,
        &dropped.iter().map(|it| it.0.0).collect::<Vec<_>>(),
        &dropped.iter().map(|it| it.1).collect::<Vec<_>>(),
        &dropped.iter().map(|it| it.2).collect::<Vec<_>>(),
    )
    .execute(conn)
    .await?;
    Ok(())
}
