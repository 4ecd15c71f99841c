//! Registered workers.

pub mod fitting;
pub mod holders;

use std::sync::Arc;

use chrono::{DateTime, Utc};
use sqlx::{PgConnection, types::Json};

use fencepost_domain::{ids::ProjectId, worker::WorkerState};

/// A worker's registration.
#[derive(Debug, Clone)]
pub struct Registration {
    pub worker_id: String,
    pub queues: Vec<String>,
    pub job_types: Vec<String>,
    pub hostname: Option<String>,
    pub sdk_version: Option<String>,
    /// Jobs that it runs at the same time.
    pub concurrency: i32,
    pub pid: Option<i32>,
    /// Its labels, sorted.
    pub labels: Vec<String>,
    /// The longest time between two of its calls; none: it does not say.
    pub beat_seconds: Option<i32>,
    /// True if each lease that it loses counts as a failure, as in most protocols.
    pub counts_losses: bool,
}

/// Stores a worker's registration; the latest one counts. A lost or deregistered worker is live
/// again; its directive stays.
pub async fn upsert(
    conn: &mut PgConnection,
    project_id: ProjectId,
    worker: &Registration,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        insert into workers (
            project_id, worker_id, queues, job_types, hostname, sdk_version, concurrency, pid,
            labels, beat_seconds, counts_losses, last_beat_at
        )
        values (
            $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, case when $10::int is not null then now() end
        )
        on conflict (project_id, worker_id) do update
        set queues = excluded.queues,
            job_types = excluded.job_types,
            hostname = excluded.hostname,
            sdk_version = excluded.sdk_version,
            concurrency = excluded.concurrency,
            pid = excluded.pid,
            labels = excluded.labels,
            beat_seconds = excluded.beat_seconds,
            counts_losses = excluded.counts_losses,
            last_beat_at = excluded.last_beat_at,
            state = 'running', lost_at = null, is_registered = true,
            registered_at = now(), last_seen_at = now(), changed_at = now()
        ",
        project_id.0,
        worker.worker_id,
        &worker.queues,
        &worker.job_types,
        worker.hostname,
        worker.sdk_version,
        worker.concurrency,
        worker.pid,
        &worker.labels,
        worker.beat_seconds,
        worker.counts_losses,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Stores what a worker says of itself, if it is known and not registered. Returns whether it was.
pub async fn describe(
    conn: &mut PgConnection,
    project_id: ProjectId,
    worker: &Registration,
) -> sqlx::Result<bool> {
    let described = sqlx::query!(
        "
        update workers
        set queues = $3,
            hostname = $4,
            concurrency = $5,
            pid = $6,
            labels = $7,
            is_registered = true, registered_at = now(), changed_at = now()
        where project_id = $1 and worker_id = $2 and not is_registered
        ",
        project_id.0,
        worker.worker_id,
        &worker.queues,
        worker.hostname,
        worker.concurrency,
        worker.pid,
        &worker.labels,
    )
    .execute(conn)
    .await?;
    Ok(described.rows_affected() > 0)
}

/// How many workers of a project are known; counted up to `max`.
pub async fn count(conn: &mut PgConnection, project_id: ProjectId, max: i64) -> sqlx::Result<i64> {
    sqlx::query_scalar!(
        r#"
        select count(*) "count!"
        from (select from workers where project_id = $1 limit $2) known
        "#,
        project_id.0,
        max,
    )
    .fetch_one(conn)
    .await
}

/// A sign of life of a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sighting {
    pub project_id: ProjectId,
    pub worker_id: String,
    /// The queues it polls; none if it did something else.
    pub queues: Vec<String>,
    pub job_types: Vec<String>,
}

/// Updates `last_seen_at`; a lost worker becomes live again. Only polls insert a worker: a refused
/// ack proves nothing about its sender.
///
/// No worker may appear twice in `sightings`.
pub async fn record_seen(conn: &mut PgConnection, sightings: &[Sighting]) -> sqlx::Result<()> {
    sqlx::query!(
        "
        insert into workers (
            project_id, worker_id, queues, job_types, concurrency, is_registered
        )
        select project_id, worker_id, array(select jsonb_array_elements_text(queues)),
               array(select jsonb_array_elements_text(job_types)), 1, false
        from unnest($1::int[], $2::text[], $3::jsonb[], $4::jsonb[])
            as seen(project_id, worker_id, queues, job_types)
        where jsonb_array_length(seen.queues) > 0 or exists (
            select from workers known
            where known.project_id = seen.project_id and known.worker_id = seen.worker_id
        )
        order by project_id, worker_id
        on conflict (project_id, worker_id) do update
        set last_seen_at = now(),
            lost_at = null,
            queues = case
                when workers.is_registered or excluded.queues = '{}' then workers.queues
                else excluded.queues
            end,
            job_types = case
                when workers.is_registered or excluded.queues = '{}' then workers.job_types
                else excluded.job_types
            end
        ",
        &sightings.iter().map(|it| it.project_id.0).collect::<Vec<_>>(),
        &sightings.iter().map(|it| it.worker_id.as_str()).collect::<Vec<_>>() as &[&str],
        &sightings.iter().map(|it| Json(&it.queues)).collect::<Vec<_>>() as &[Json<&Vec<String>>],
        &sightings.iter().map(|it| Json(&it.job_types)).collect::<Vec<_>>()
            as &[Json<&Vec<String>>],
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// The facts of a worker that its polls need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// Its labels, sorted.
    pub labels: Vec<String>,
    pub state: WorkerState,
    pub directive: Option<WorkerState>,
    /// As in [`Registration`].
    pub beat_seconds: Option<i32>,
}

/// Facts of these workers, each with its index.
pub async fn facts(
    conn: &mut PgConnection,
    workers: &[(ProjectId, &str)],
) -> sqlx::Result<Vec<(i64, Facts)>> {
    let rows = sqlx::query!(
        r#"
        select asked.number - 1 "number!", worker.labels, worker.state "state: WorkerState",
               worker.directive "directive: WorkerState", worker.beat_seconds
        from unnest($1::int[], $2::text[]) with ordinality as asked(project_id, worker_id, number)
        join workers worker
            on worker.project_id = asked.project_id and worker.worker_id = asked.worker_id
        "#,
        &workers.iter().map(|it| it.0.0).collect::<Vec<_>>(),
        &workers.iter().map(|it| it.1).collect::<Vec<_>>() as &[&str],
    )
    .fetch_all(conn)
    .await?;
    let facts = rows.into_iter().map(|row| {
        let facts = Facts {
            labels: row.labels,
            state: row.state,
            directive: row.directive,
            beat_seconds: row.beat_seconds,
        };
        (row.number, facts)
    });
    Ok(facts.collect())
}

/// Sets the directive of a worker; `running` resumes it. Returns its new facts; none if the project
/// has no such worker.
pub async fn direct(
    conn: &mut PgConnection,
    project_id: ProjectId,
    worker_id: &str,
    directive: WorkerState,
) -> sqlx::Result<Option<Facts>> {
    sqlx::query_as!(
        Facts,
        r#"
        update workers set directive = $3, changed_at = now()
        where project_id = $1 and worker_id = $2
        returning labels, state "state: WorkerState", directive "directive: WorkerState",
                  beat_seconds
        "#,
        project_id.0,
        worker_id,
        directive as WorkerState,
    )
    .fetch_optional(conn)
    .await
}

/// A worker's heartbeat for all of its jobs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerBeat {
    pub project_id: ProjectId,
    pub worker_id: Arc<str>,
    pub state: WorkerState,
    /// As in [`Registration`].
    pub counts_losses: bool,
}

/// Records heartbeats of workers, and returns their facts. A deregistered worker stays so. A worker
/// that runs needs not be resumed any more.
///
/// No worker may appear twice in `beats`.
pub async fn beat(
    conn: &mut PgConnection,
    beats: &[WorkerBeat],
) -> sqlx::Result<Vec<(ProjectId, String, Facts)>> {
    let rows = sqlx::query!(
        r#"
        insert into workers (
            project_id, worker_id, queues, job_types, concurrency, is_registered, state,
            last_beat_at, counts_losses
        )
        select project_id, worker_id, '{}', '{}', 1, false, state, now(), counts_losses
        from unnest($1::int[], $2::text[], $3::text[], $4::bool[])
            as beat(project_id, worker_id, state, counts_losses)
        order by project_id, worker_id
        on conflict (project_id, worker_id) do update
        set last_seen_at = now(),
            last_beat_at = now(),
            lost_at = null,
            counts_losses = excluded.counts_losses,
            state = case when workers.state = 'terminated' then workers.state else excluded.state end,
            directive = case
                when workers.directive <> 'running' or excluded.state <> 'running'
                    then workers.directive
            end,
            changed_at = case
                when workers.state in ('terminated', excluded.state) then workers.changed_at
                else now()
            end
        returning project_id "project_id: ProjectId", worker_id, labels,
                  state "state: WorkerState", directive "directive: WorkerState", beat_seconds
        "#,
        &beats.iter().map(|it| it.project_id.0).collect::<Vec<_>>(),
        &beats.iter().map(|it| &*it.worker_id).collect::<Vec<_>>() as &[&str],
        &beats.iter().map(|it| it.state).collect::<Vec<_>>() as &[WorkerState],
        &beats.iter().map(|it| it.counts_losses).collect::<Vec<_>>(),
    )
    .fetch_all(conn)
    .await?;
    let facts = rows.into_iter().map(|row| {
        let facts = Facts {
            labels: row.labels,
            state: row.state,
            directive: row.directive,
            beat_seconds: row.beat_seconds,
        };
        (row.project_id, row.worker_id, facts)
    });
    Ok(facts.collect())
}

/// Deregisters a worker. Returns whether the project has such a worker.
pub async fn terminate(
    conn: &mut PgConnection,
    project_id: ProjectId,
    worker_id: &str,
) -> sqlx::Result<bool> {
    let done = sqlx::query!(
        "
        update workers set state = 'terminated', last_seen_at = now(), changed_at = now()
        where project_id = $1 and worker_id = $2
        ",
        project_id.0,
        worker_id,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Whether a worker is still silent; it cannot be heard again before the end of the transaction.
pub async fn lock_silent(
    conn: &mut PgConnection,
    project_id: ProjectId,
    worker_id: &str,
    silence_seconds: i32,
) -> sqlx::Result<bool> {
    let silent = sqlx::query_scalar!(
        "
        select worker_id from workers
        where project_id = $1 and worker_id = $2 and lost_at is null
            and last_beat_at <= now() - make_interval(secs => $3::int)
            and last_seen_at <= now() - make_interval(secs => $3::int)
        for update
        ",
        project_id.0,
        worker_id,
        silence_seconds,
    )
    .fetch_optional(conn)
    .await?;
    Ok(silent.is_some())
}

/// Marks a worker as lost, unless it was heard again; returns whether it is. One that got or
/// renewed a lease since is not silent: that it was heard is written a little later.
pub async fn mark_lost(
    conn: &mut PgConnection,
    project_id: ProjectId,
    worker_id: &str,
    silence_seconds: i32,
) -> sqlx::Result<bool> {
    let done = sqlx::query!(
        "
        update workers set lost_at = now()
        where project_id = $1 and worker_id = $2 and lost_at is null
            and last_beat_at <= now() - make_interval(secs => $3::int)
            and last_seen_at <= now() - make_interval(secs => $3::int)
            and not exists (
                select from jobs
                where project_id = $1 and state = 'processing' and worker_id = $2 and greatest(
                    claimed_at, lease_expires_at - make_interval(secs => lease_seconds)
                ) > now() - make_interval(secs => $3::int)
            )
        ",
        project_id.0,
        worker_id,
        silence_seconds,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// A stored worker.
#[derive(Debug, Clone)]
pub struct WorkerRow {
    pub worker_id: String,
    /// A lost worker is terminated.
    pub state: WorkerState,
    /// None also for a worker that is resumed.
    pub directive: Option<WorkerState>,
    /// Heard within the last [`ALIVE_SECONDS`], and neither lost nor deregistered.
    pub is_alive: bool,
    pub queues: Vec<String>,
    pub job_types: Vec<String>,
    pub labels: Vec<String>,
    pub hostname: Option<String>,
    pub sdk_version: Option<String>,
    pub pid: Option<i32>,
    pub concurrency: i32,
    pub beat_seconds: Option<i32>,
    pub registered_at: DateTime<Utc>,
    pub last_seen_at: DateTime<Utc>,
    /// Jobs that it holds leases of.
    pub slots_in_use: i64,
    /// By the database's clock.
    pub now: DateTime<Utc>,
}

/// A worker counts as alive for this many seconds after it was heard: longer than a poll waits. One
/// that has registered `beat_seconds` does for as long as it may be silent. Statements carry the
/// number of beats it may miss as a literal.
pub const ALIVE_SECONDS: i32 = 60;

/// A page of workers, by name: those after `after`, optionally with this label and of this queue.
pub async fn page(
    conn: &mut PgConnection,
    project_id: ProjectId,
    label: Option<&str>,
    queue: Option<&str>,
    after: &str,
    limit: i64,
) -> sqlx::Result<Vec<WorkerRow>> {
    sqlx::query_as!(
        WorkerRow,
        r#"
        with shown as materialized (
            select *
            from workers
            where project_id = $1 and worker_id > $3 and ($2::text is null or $2 = any(labels))
                and ($6::text is null or $6 = any(queues))
            order by worker_id
            limit $4
        )
        select worker_id,
               case when lost_at is null then state else 'terminated' end "state!: WorkerState",
               nullif(directive, 'running') "directive: WorkerState",
               state <> 'terminated' and lost_at is null
                   and last_seen_at > now() - make_interval(secs => greatest($5::int, 3 * beat_seconds)) "is_alive!",
               queues, job_types, labels, hostname, sdk_version, pid, concurrency, beat_seconds,
               registered_at,
               last_seen_at, coalesce(used.slots, 0) "slots_in_use!", now() "now!"
        from shown
        left join (
            select jobs.worker_id as holder, count(*) as slots
            from jobs
            where jobs.project_id = $1 and jobs.state = 'processing'
                and jobs.worker_id in (select worker_id from shown)
            group by jobs.worker_id
        ) used on used.holder = shown.worker_id
        order by worker_id
        "#,
        project_id.0,
        label,
        after,
        limit,
        ALIVE_SECONDS,
        queue,
    )
    .fetch_all(conn)
    .await
}
