//! Settings of queues, and what is paused.

pub mod counts;
pub mod pushes;
pub mod queue_limits;
pub mod removal;
pub mod settings;
pub mod stats;

use chrono::{DateTime, Utc};
use fencepost_domain::ids::ProjectId;
use sqlx::PgConnection;

/// A queue that takes a bounded number of jobs.
#[derive(Debug, Clone)]
pub struct BoundedQueue {
    pub queue: String,
    /// Jobs that wait or run.
    pub jobs: i64,
    /// Its `max_waiting`.
    pub max: i64,
}

/// Queues of a project that have a `max_waiting`, by name.
pub async fn bounded(
    conn: &mut PgConnection,
    project_id: ProjectId,
    limit: i64,
) -> sqlx::Result<Vec<BoundedQueue>> {
    sqlx::query_as!(
        BoundedQueue,
        r#"
        with bounded as materialized (
            select name, max_waiting
            from queues
            where project_id = $1 and max_waiting is not null
            order by name
            limit $2
        )
        select bounded.name as queue, bounded.max_waiting::bigint "max!",
               coalesce(sum(moves.jobs), 0)::bigint "jobs!"
        from bounded
        left join (
            select queue, scheduled + active as jobs from queue_counts
            where project_id = $1 and queue = any(array(select name from bounded))
            union all
            select queue, scheduled + active from unmerged_deltas
            where project_id = $1 and queue = any(array(select name from bounded))
        ) moves on moves.queue = bounded.name
        group by bounded.name, bounded.max_waiting
        "#,
        project_id.0,
        limit,
    )
    .fetch_all(conn)
    .await
}

/// Whether a queue has settings, or the project has fewer than `max` queues that do.
pub async fn may_have_settings(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    max: i64,
) -> sqlx::Result<bool> {
    sqlx::query_scalar!(
        r#"
        select exists (select from queues where project_id = $1 and name = $2)
            or (
                select count(*) < $3
                from (select from queues where project_id = $1 limit $3) known
            ) "may!"
        "#,
        project_id.0,
        queue,
        max,
    )
    .fetch_one(conn)
    .await
}

/// The given queues that have ever had jobs, or have settings.
pub async fn existing(
    conn: &mut PgConnection,
    project_id: ProjectId,
    names: &[String],
) -> sqlx::Result<Vec<String>> {
    sqlx::query_scalar!(
        r#"
        select queue "queue!" from queue_counts where project_id = $1 and queue = any($2)
        union
        select queue from unmerged_deltas where project_id = $1 and queue = any($2)
        union
        select name from queues where project_id = $1 and name = any($2)
        "#,
        project_id.0,
        names,
    )
    .fetch_all(conn)
    .await
}

/// Pauses or resumes a queue. A paused queue keeps the time of its first pause.
pub async fn set_paused(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    is_paused: bool,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        insert into queues (project_id, name, paused_at)
        values ($1, $2, case when $3 then now() end)
        on conflict (project_id, name) do update
        set paused_at = case when $3 then coalesce(queues.paused_at, now()) end,
            resumed_at = case
                when not $3 and queues.paused_at is not null then now()
                else queues.resumed_at
            end,
            -- What a worker has asked for ends as well.
            rate_limited_until = case
                when $3 or queues.rate_limited_until is null then queues.rate_limited_until
                else least(queues.rate_limited_until, now())
            end,
            updated_at = now()
        ",
        project_id.0,
        queue,
        is_paused,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Pauses or resumes a job type of a queue. Resuming ends its streak of dead letters.
/// [`keep_paused_types`] must follow in the same transaction.
pub async fn set_type_paused(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    job_type: &str,
    is_paused: bool,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        insert into queue_types (project_id, queue, job_type, paused_at, paused_by)
        values ($1, $2, $3, case when $4 then now() end, case when $4 then 'operator' end)
        on conflict (project_id, queue, job_type) do update
        set streak = case when $4 then queue_types.streak else 0 end,
            paused_at = case when $4 then coalesce(queue_types.paused_at, now()) end,
            paused_by = case when $4 then coalesce(queue_types.paused_by, 'operator') end,
            resumed_at = case
                when not $4 and queue_types.paused_at is not null then now()
                else queue_types.resumed_at
            end
        ",
        project_id.0,
        queue,
        job_type,
        is_paused,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Locks the settings of a queue, and creates them if they are missing: changes of pauses are
/// serialized.
pub async fn lock_settings(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        insert into queues (project_id, name)
        values ($1, $2)
        on conflict (project_id, name) do update set updated_at = now()
        ",
        project_id.0,
        queue,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Stores the list of paused types with the queue, where claims see it. The settings must be locked
/// by an earlier statement of this transaction, so that this one sees all pauses.
pub async fn keep_paused_types(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        update queues
        set paused_types = array(
            select job_type
            from queue_types
            where project_id = $1 and queue = $2 and paused_at is not null
            order by job_type
        )
        where project_id = $1 and name = $2
        ",
        project_id.0,
        queue,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// A job type that is paused in a queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TypeRow {
    pub queue: String,
    pub job_type: String,
    /// Dead letters since its last success, counted while the queue has a circuit breaker.
    pub streak: i32,
    pub paused_at: Option<DateTime<Utc>>,
    /// `operator` or `brake`.
    pub paused_by: Option<String>,
}

/// The paused types of these queues.
pub async fn paused_types(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queues: &[&str],
) -> sqlx::Result<Vec<TypeRow>> {
    sqlx::query_as!(
        TypeRow,
        r#"
        select kind.queue, kind.job_type, kind.streak, kind.paused_at, kind.paused_by
        from queues setting
        cross join lateral unnest(setting.paused_types) as paused(job_type)
        join queue_types kind
            on kind.project_id = $1 and kind.queue = setting.name and kind.job_type = paused.job_type
        where setting.project_id = $1 and setting.name = any($2) and kind.paused_at is not null
        order by kind.queue, kind.job_type
        "#,
        project_id.0,
        queues as &[&str],
    )
    .fetch_all(conn)
    .await
}

/// Number of paused job types of a queue.
pub async fn count_paused_types(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
) -> sqlx::Result<i64> {
    sqlx::query_scalar!(
        r#"
        select coalesce(cardinality(max(paused_types)), 0)::bigint "paused!"
        from queues
        where project_id = $1 and name = $2
        "#,
        project_id.0,
        queue,
    )
    .fetch_one(conn)
    .await
}

/// Settings and recent starts of a queue, as far as a waiting job depends on them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueState {
    pub max_concurrency: Option<i32>,
    pub rate_limit_count: Option<i32>,
    pub rate_limit_per_seconds: Option<i32>,
    /// A worker has met a rate limit: nothing starts before.
    pub rate_limited_until: Option<DateTime<Utc>>,
    /// Whether groups take turns.
    pub has_turns: bool,
    /// Names of limits that it shares with other queues.
    pub shared_limits: Option<Vec<String>>,
    pub paused_at: Option<DateTime<Utc>>,
    pub type_paused_at: Option<DateTime<Utc>>,
    /// `operator` or `brake`.
    pub type_paused_by: Option<String>,
    /// Dead letters of the type since its last success.
    pub streak: Option<i32>,
    /// Recent starts, and how many jobs each.
    pub handed_out_at: Option<Vec<DateTime<Utc>>>,
    pub handed_out_jobs: Option<Vec<i32>>,
}

/// The state of a queue with settings, for a job of this type.
pub async fn find_state(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    job_type: &str,
) -> sqlx::Result<Option<QueueState>> {
    sqlx::query_as!(
        QueueState,
        r#"
        select setting.max_concurrency, setting.rate_limit_count, setting.rate_limit_per_seconds,
               setting.rate_limited_until,
               setting.group_fair and setting.group_order <> 'strict' "has_turns!",
               setting.shared_limits, setting.paused_at, kind.paused_at "type_paused_at?", kind.paused_by "type_paused_by?",
               kind.streak "streak?", past.at "handed_out_at?", past.jobs "handed_out_jobs?"
        from queues setting
        left join queue_types kind
            on kind.project_id = $1 and kind.queue = setting.name and kind.job_type = $3
        left join queue_handouts past on past.project_id = $1 and past.queue = setting.name
        where setting.project_id = $1 and setting.name = $2
        "#,
        project_id.0,
        queue,
        job_type,
    )
    .fetch_optional(conn)
    .await
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Crowds {
    /// Running jobs with a concurrency key.
    pub under_key: i64,
    /// Running jobs of a queue.
    pub in_queue: i64,
    /// The database's clock.
    pub now: DateTime<Utc>,
}

/// Running jobs with a concurrency key, and of a queue; counted up to `limit`.
pub async fn count_running(
    conn: &mut PgConnection,
    project_id: ProjectId,
    concurrency_key: Option<&str>,
    queue: &str,
    limit: i64,
) -> sqlx::Result<Crowds> {
    sqlx::query_as!(
        Crowds,
        r#"
        select (
            select count(*) from (
                select from jobs
                where project_id = $1 and concurrency_key = $2 and state = 'processing'
                limit $4
            ) under_key
        ) "under_key!", (
            select count(*) from (
                select from jobs
                where project_id = $1 and queue = $3 and state = 'processing'
                limit $4
            ) in_queue
        ) "in_queue!", statement_timestamp() "now!"
        "#,
        project_id.0,
        concurrency_key,
        queue,
        limit,
    )
    .fetch_one(conn)
    .await
}

/// Claimable jobs without a constraint key before a position in a queue, counted up to `limit`.
pub async fn count_ahead(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    rank: i16,
    run_at: DateTime<Utc>,
    limit: i64,
) -> sqlx::Result<i64> {
    sqlx::query_scalar!(
        r#"
        select count(*) "ahead!"
        from (
            select from jobs
            where project_id = $1 and queue = $2 and state = 'pending' and constraint_key is null
                and (rank, run_at) < ($3::smallint, $4)
            limit $5
        ) before
        "#,
        project_id.0,
        queue,
        rank,
        run_at,
        limit,
    )
    .fetch_one(conn)
    .await
}
