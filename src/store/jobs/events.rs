//! Events of jobs, and what workers report about their attempts.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use fencepost_domain::{
    actor::{ActorKind, ChangedBy},
    ids::{EventId, JobId, JobKey, LeaseId, ProjectId},
    lease::Fence,
};

/// An event of a job.
#[derive(Debug, Clone)]
pub struct NewEvent {
    pub key: JobKey,
    pub kind: String,
    /// The attempt, if the event belongs to one.
    pub attempt: Option<i32>,
    /// The worker that reported it, if one did.
    pub worker_id: Option<String>,
    /// JSON.
    pub payload: Option<String>,
    /// The author of the change; none: a worker reported the event.
    pub by: Option<ChangedBy>,
}

impl NewEvent {
    /// An event of an attempt, reported without its worker.
    #[must_use]
    pub fn reported(key: JobKey, kind: &str, attempt: i32, payload: String) -> Self {
        Self {
            key,
            kind: kind.to_owned(),
            attempt: Some(attempt),
            worker_id: None,
            payload: Some(payload),
            by: None,
        }
    }

    /// A change that the server records.
    #[must_use]
    pub fn change(key: JobKey, kind: &str, by: &ChangedBy) -> Self {
        Self {
            key,
            kind: kind.to_owned(),
            attempt: None,
            worker_id: None,
            payload: None,
            by: Some(by.clone()),
        }
    }
}

/// Stores events.
pub async fn insert(conn: &mut PgConnection, events: &[NewEvent]) -> sqlx::Result<Vec<EventId>> {
    let ids: Vec<_> = events.iter().map(|_| EventId::generate()).collect();
    let by: Vec<Option<&ChangedBy>> = events.iter().map(|it| it.by.as_ref()).collect();
    sqlx::query!(
        "
        insert into job_events (
            project_id, job_id, id, type, at, attempt, worker_id, payload, actor_kind, actor_id,
            reason
        )
        select project_id, job_id, id, type, statement_timestamp(), attempt, worker_id, payload,
               actor_kind, actor_id, reason
        from unnest(
            $1::int[], $2::uuid[], $3::uuid[], $4::text[], $5::int[], $6::text[], $7::text[],
            $8::text[], $9::text[], $10::text[]
        ) as event(
            project_id, job_id, id, type, attempt, worker_id, payload, actor_kind, actor_id, reason
        )
        ",
        &events.iter().map(|it| it.key.project_id.0).collect::<Vec<_>>(),
        &events.iter().map(|it| it.key.id.0).collect::<Vec<_>>(),
        &ids.iter().map(|it| it.0).collect::<Vec<_>>(),
        &events.iter().map(|it| it.kind.as_str()).collect::<Vec<_>>() as &[&str],
        &events.iter().map(|it| it.attempt).collect::<Vec<_>>() as &[Option<i32>],
        &events.iter().map(|it| it.worker_id.as_deref()).collect::<Vec<_>>() as &[Option<&str>],
        &events.iter().map(|it| it.payload.as_deref()).collect::<Vec<_>>() as &[Option<&str>],
        &by.iter().map(|it| it.map(|it| it.kind.as_str())).collect::<Vec<_>>() as &[Option<&str>],
        &by.iter().map(|it| it.and_then(|it| it.id.as_deref())).collect::<Vec<_>>()
            as &[Option<&str>],
        &by.iter().map(|it| it.and_then(|it| it.reason.as_deref())).collect::<Vec<_>>()
            as &[Option<&str>],
    )
    .execute(conn)
    .await?;
    Ok(ids)
}

/// Number of events of a job, counted up to `limit`.
pub async fn count(conn: &mut PgConnection, key: JobKey, limit: i64) -> sqlx::Result<i64> {
    sqlx::query_scalar!(
        r#"
        select count(*) "count!"
        from (
            select from job_events where project_id = $1 and job_id = $2 limit $3
        ) counted
        "#,
        key.project_id.0,
        key.id.0,
        limit,
    )
    .fetch_one(conn)
    .await
}

/// The payload of a job's latest event of this type. A job has at most
/// [`MAX_JOB_EVENTS`](fencepost_domain::limits::MAX_JOB_EVENTS).
pub async fn last_of_kind(
    conn: &mut PgConnection,
    key: JobKey,
    kind: &str,
) -> sqlx::Result<Option<String>> {
    let found = sqlx::query_scalar!(
        "
        select payload
        from job_events
        where project_id = $1 and job_id = $2 and type = $3
        order by id desc
        limit 1
        ",
        key.project_id.0,
        key.id.0,
        kind,
    )
    .fetch_optional(conn)
    .await?;
    Ok(found.flatten())
}

/// A stored event.
#[derive(Debug, Clone)]
pub struct EventRow {
    pub id: EventId,
    pub kind: String,
    pub at: DateTime<Utc>,
    pub attempt: Option<i32>,
    pub worker_id: Option<String>,
    pub payload: Option<String>,
    pub actor_kind: Option<ActorKind>,
    pub actor_id: Option<String>,
    pub reason: Option<String>,
}

/// The newest events of one job, oldest first.
pub async fn of_job(
    conn: &mut PgConnection,
    project_id: ProjectId,
    job_id: JobId,
    limit: i64,
) -> sqlx::Result<Vec<EventRow>> {
    sqlx::query_as!(
        EventRow,
        r#"
        select id "id: EventId", type as kind, at, attempt, worker_id, payload,
               actor_kind "actor_kind: ActorKind", actor_id, reason
        from (
            select id, type, at, attempt, worker_id, payload, actor_kind, actor_id, reason
            from job_events
            where project_id = $1 and job_id = $2
            order by id desc
            limit $3
        ) newest
        order by id
        "#,
        project_id.0,
        job_id.0,
        limit,
    )
    .fetch_all(conn)
    .await
}

/// A change of a job.
#[derive(Debug, Clone)]
pub struct LastChange {
    pub kind: String,
    pub at: DateTime<Utc>,
    pub by: ChangedBy,
}

/// The latest change of each of these jobs, of those whose cause is known.
pub async fn last_changes(
    conn: &mut PgConnection,
    project_id: ProjectId,
    ids: &[JobId],
) -> sqlx::Result<HashMap<JobId, LastChange>> {
    let rows = sqlx::query!(
        r#"
        select sought.id "id!: JobId", event.type as kind, event.at,
               event.actor_kind "actor_kind!: ActorKind", event.actor_id, event.reason
        from unnest($2::uuid[]) as sought(id)
        cross join lateral (
            select type, at, actor_kind, actor_id, reason
            from job_events
            where project_id = $1 and job_id = sought.id and actor_kind is not null
            order by id desc
            limit 1
        ) event
        "#,
        project_id.0,
        &ids.iter().map(|it| it.0).collect::<Vec<_>>(),
    )
    .fetch_all(conn)
    .await?;
    let change = rows.into_iter().map(|row| {
        let by = ChangedBy { kind: row.actor_kind, id: row.actor_id, reason: row.reason };
        (row.id, LastChange { kind: row.kind, at: row.at, by })
    });
    Ok(change.collect())
}

/// A fence shown with logs or events.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ShownFence {
    pub job_id: JobId,
    pub attempt: i32,
    /// Its worker; none: any.
    pub worker_id: Option<String>,
    /// Its lease; none: any.
    pub lease_id: Option<LeaseId>,
}

impl ShownFence {
    /// The fence of a worker that names its attempt; attempt 0, which does not exist, if it does
    /// not.
    #[must_use]
    pub fn of(job_id: JobId, fence: &Fence) -> Self {
        let Fence { worker_id, attempt, lease_id } = fence.clone();
        Self { job_id, attempt: attempt.unwrap_or_default(), worker_id, lease_id }
    }

    #[must_use]
    pub fn fence(&self) -> Fence {
        let Self { attempt, worker_id, lease_id, .. } = self.clone();
        Fence { worker_id, attempt: Some(attempt), lease_id }
    }
}

/// Which of these attempts are running, locked until the end of the transaction. Returns their
/// indexes.
pub async fn lock_running(
    conn: &mut PgConnection,
    project_id: ProjectId,
    shown: &[ShownFence],
) -> sqlx::Result<Vec<i64>> {
    sqlx::query_scalar!(
        r#"
        with held as materialized (
            select shown.number
            from unnest($2::uuid[], $3::text[], $4::int[], $5::uuid[]) with ordinality
                as shown(job_id, worker_id, attempt, lease_id, number)
            join jobs job on job.project_id = $1 and job.id = shown.job_id
            where job.worker_id = coalesce(shown.worker_id, job.worker_id)
                and job.attempt = shown.attempt
                and (shown.lease_id is null or job.lease_id = shown.lease_id)
            order by job.id
            limit 500
            for key share of job
        )
        select number - 1 "number!" from held
        "#,
        project_id.0,
        &shown.iter().map(|it| it.job_id.0).collect::<Vec<_>>(),
        &shown.iter().map(|it| it.worker_id.as_deref()).collect::<Vec<_>>() as &[Option<&str>],
        &shown.iter().map(|it| it.attempt).collect::<Vec<_>>(),
        &shown.iter().map(|it| it.lease_id.map(|it| it.0)).collect::<Vec<_>>() as &[Option<Uuid>],
    )
    .fetch_all(conn)
    .await
}
