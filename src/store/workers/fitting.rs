//! Workers that could take a job: those that poll its queue for its type, and have its labels.

use fencepost_domain::ids::{JobId, ProjectId};
use sqlx::PgConnection;

use super::ALIVE_SECONDS;

/// Live workers that poll a queue for a type.
#[derive(Debug, Clone, Copy)]
pub struct Fitting {
    pub all: i64,
    /// Number of further ones that were asked to take no more jobs.
    pub quiet: i64,
    /// Number of workers that have all of some labels.
    pub labelled: i64,
    /// Whether all of the latter are registered, so that their slots are known.
    pub are_registered: bool,
    /// Jobs that the latter could run at the same time.
    pub slots: i64,
    /// Jobs that they hold.
    pub slots_in_use: i64,
}

/// Whether jobs of a queue, a type and labels have a worker.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct KindWithWorkers {
    pub queue: String,
    pub job_type: String,
    pub labels: Vec<String>,
    /// Whether a live worker polls the queue for the type.
    pub is_polled: bool,
    /// Whether one of these has all of the labels.
    pub is_labelled: bool,
}

/// Queues with a type and labels that one list looks up: each is compared with every worker.
const MAX_SERVED_KINDS: i64 = 20;

/// Whether these jobs have live workers: one row for each queue, type and labels of theirs, up to
/// `MAX_SERVED_KINDS`.
pub async fn serving(
    conn: &mut PgConnection,
    project_id: ProjectId,
    jobs: &[JobId],
) -> sqlx::Result<Vec<KindWithWorkers>> {
    let ids: Vec<_> = jobs.iter().map(|it| it.0).collect();
    sqlx::query_as!(
        KindWithWorkers,
        r#"
        with wanted as materialized (
            select distinct queue, job_type, coalesce(labels, '{}') as labels
            from jobs
            where project_id = $1 and id = any($2)
            order by queue, job_type, labels
            limit $4
        )
        select queue, job_type, labels "labels!", is_polled "is_polled!", is_labelled "is_labelled!"
        from wanted
        cross join lateral (
            select count(*) > 0 as is_polled,
                   coalesce(bool_or(wanted.labels <@ workers.labels), false) as is_labelled
            from workers
            where project_id = $1 and state = 'running' and lost_at is null
                and coalesce(directive, 'running') = 'running'
                and last_seen_at > now() - make_interval(secs => greatest($3::int, 3 * beat_seconds))
                and wanted.queue = any(queues)
                and (cardinality(job_types) = 0 or wanted.job_type = any(job_types))
        ) found
        "#,
        project_id.0,
        &ids,
        ALIVE_SECONDS,
        MAX_SERVED_KINDS,
    )
    .fetch_all(conn)
    .await
}

/// Counts the live workers that poll a queue for a type.
pub async fn count(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    job_type: &str,
    labels: &[String],
) -> sqlx::Result<Fitting> {
    sqlx::query_as!(
        Fitting,
        r#"
        with fitting as materialized (
            select worker_id, concurrency, is_registered, takes, takes and $4 <@ labels as is_labelled
            from workers
            cross join lateral (
                select state = 'running' and coalesce(directive, 'running') = 'running' as takes
            ) asked
            where project_id = $1 and state <> 'terminated' and lost_at is null
                and last_seen_at > now() - make_interval(secs => greatest($5::int, 3 * beat_seconds))
                and $2 = any(queues)
                and (cardinality(job_types) = 0 or $3 = any(job_types))
        )
        select count(*) filter (where takes) "all!",
               count(*) filter (where not takes) "quiet!",
               count(*) filter (where is_labelled) "labelled!",
               coalesce(bool_and(is_registered) filter (where is_labelled), false) "are_registered!",
               coalesce(sum(concurrency) filter (where is_labelled), 0)::bigint "slots!",
               (
                   select count(*)
                   from jobs
                   where project_id = $1 and state = 'processing'
                       and worker_id in (select worker_id from fitting where is_labelled)
               ) "slots_in_use!"
        from fitting
        "#,
        project_id.0,
        queue,
        job_type,
        labels,
        ALIVE_SECONDS,
    )
    .fetch_one(conn)
    .await
}
