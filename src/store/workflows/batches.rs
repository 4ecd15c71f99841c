//! Batches: jobs whose ends are counted.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use fencepost_domain::ids::{BatchId, ProjectId};

/// A batch to store.
#[derive(Debug, Clone)]
pub struct NewBatch {
    /// Made before the insert.
    pub id: BatchId,
    pub name: Option<String>,
    /// JSON of the jobs that its end enqueues.
    pub callbacks: Option<String>,
    /// Whether it has all of its jobs.
    pub is_sealed: bool,
    /// How many deliveries have led to it.
    pub hop: Option<i16>,
}

/// A batch, with exact counts.
#[derive(Debug, Clone)]
pub struct BatchRow {
    pub id: BatchId,
    pub name: Option<String>,
    pub created_at: DateTime<Utc>,
    pub callbacks: Option<String>,
    pub sealed_at: Option<DateTime<Utc>>,
    /// When all of its jobs had ended.
    pub completed_at: Option<DateTime<Utc>>,
    /// When all of its jobs had succeeded.
    pub succeeded_at: Option<DateTime<Utc>>,
    pub jobs: i64,
    pub succeeded: i64,
    pub dead_letter: i64,
    pub cancelled: i64,
    pub skipped: i64,
    /// How many deliveries have led to it, or to one of its jobs that have ended.
    pub hop: Option<i16>,
}

/// Stores a batch. Returns false if its id exists already.
pub async fn insert(
    conn: &mut PgConnection,
    project_id: ProjectId,
    batch: &NewBatch,
) -> sqlx::Result<bool> {
    let stored = sqlx::query!(
        "
        insert into batches (project_id, id, name, callbacks, sealed_at, hop)
        values ($1, $2, $3, $4, case when $5 then statement_timestamp() end, $6)
        on conflict do nothing
        ",
        project_id.0,
        batch.id.0,
        batch.name,
        batch.callbacks,
        batch.is_sealed,
        batch.hop,
    )
    .execute(conn)
    .await?;
    Ok(stored.rows_affected() > 0)
}

/// How many batches of a project are open, counted to at most `max`.
pub async fn count_open(
    conn: &mut PgConnection,
    project_id: ProjectId,
    max: i64,
) -> sqlx::Result<i64> {
    sqlx::query_scalar!(
        r#"
        select count(*) "count!"
        from (
            select from batches where project_id = $1 and completed_at is null limit $2
        ) open
        "#,
        project_id.0,
        max,
    )
    .fetch_one(conn)
    .await
}

/// A batch; none if the project has no such batch. To what is merged it adds what is not, in one
/// snapshot.
pub async fn find(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: BatchId,
) -> sqlx::Result<Option<BatchRow>> {
    sqlx::query_as!(
        BatchRow,
        r#"
        select id "id: BatchId", name, created_at, callbacks, sealed_at, completed_at, succeeded_at,
               (batches.jobs + rest.jobs) "jobs!",
               (batches.succeeded + rest.succeeded) "succeeded!",
               (batches.dead_letter + rest.dead_letter) "dead_letter!",
               (batches.cancelled + rest.cancelled) "cancelled!",
               (batches.skipped + rest.skipped) "skipped!", batches.hop
        from batches
        cross join lateral (
            select coalesce(sum(jobs), 0)::bigint as jobs,
                   coalesce(sum(succeeded), 0)::bigint as succeeded,
                   coalesce(sum(dead_letter), 0)::bigint as dead_letter,
                   coalesce(sum(cancelled), 0)::bigint as cancelled,
                   coalesce(sum(skipped), 0)::bigint as skipped
            from job_ends
            where project_id = $1 and batch_id = batches.id
        ) rest
        where project_id = $1 and id = $2
        "#,
        project_id.0,
        id.0,
    )
    .fetch_optional(conn)
    .await
}

/// The batches below an id, newest first.
pub async fn list(
    conn: &mut PgConnection,
    project_id: ProjectId,
    before: Option<BatchId>,
    limit: i64,
) -> sqlx::Result<Vec<BatchRow>> {
    sqlx::query_as!(
        BatchRow,
        r#"
        select id "id: BatchId", name, created_at, null as callbacks, sealed_at, completed_at,
               succeeded_at,
               (batches.jobs + rest.jobs) "jobs!",
               (batches.succeeded + rest.succeeded) "succeeded!",
               (batches.dead_letter + rest.dead_letter) "dead_letter!",
               (batches.cancelled + rest.cancelled) "cancelled!",
               (batches.skipped + rest.skipped) "skipped!", batches.hop
        from batches
        cross join lateral (
            select coalesce(sum(jobs), 0)::bigint as jobs,
                   coalesce(sum(succeeded), 0)::bigint as succeeded,
                   coalesce(sum(dead_letter), 0)::bigint as dead_letter,
                   coalesce(sum(cancelled), 0)::bigint as cancelled,
                   coalesce(sum(skipped), 0)::bigint as skipped
            from job_ends
            where project_id = $1 and batch_id = batches.id
        ) rest
        where project_id = $1 and id < $2
        order by id desc
        limit $3
        "#,
        project_id.0,
        before.map_or(Uuid::max(), |it| it.0),
        limit,
    )
    .fetch_all(conn)
    .await
}

/// Batches among these that take more jobs, locked until the end of the transaction, so that
/// none completes before the jobs are stored. Jobs of other requests may be added meanwhile.
pub async fn lock_open(
    conn: &mut PgConnection,
    project_id: ProjectId,
    ids: &[BatchId],
) -> sqlx::Result<Vec<(BatchId, bool)>> {
    let found = sqlx::query!(
        r#"
        select id "id: BatchId", completed_at is null "is_open!"
        from batches
        where project_id = $1 and id = any($2)
        order by id
        for key share
        "#,
        project_id.0,
        &ids.iter().map(|it| it.0).collect::<Vec<_>>(),
    )
    .fetch_all(conn)
    .await?;
    Ok(found.into_iter().map(|it| (it.id, it.is_open)).collect())
}

/// Counts new jobs of batches.
pub async fn add_jobs(
    conn: &mut PgConnection,
    project_id: ProjectId,
    added: &[(BatchId, i32)],
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        insert into job_ends (project_id, batch_id, jobs)
        select $1, batch_id, jobs
        from unnest($2::uuid[], $3::int[]) as added(batch_id, jobs)
        ",
        project_id.0,
        &added.iter().map(|it| it.0.0).collect::<Vec<_>>(),
        &added.iter().map(|it| it.1).collect::<Vec<_>>(),
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Counts that ends add to a batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Delta {
    pub jobs: i64,
    pub succeeded: i64,
    pub dead_letter: i64,
    pub cancelled: i64,
    pub skipped: i64,
    /// The most deliveries that have led to one of the jobs.
    pub hop: Option<i16>,
}

/// Merges what was taken from `job_ends` into a batch. Returns whether it may be complete, as far
/// as is merged; false if it was deleted.
pub async fn merge(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: BatchId,
    delta: &Delta,
) -> sqlx::Result<bool> {
    let may_be_complete = sqlx::query_scalar!(
        r#"
        update batches
        set jobs = jobs + $3, succeeded = succeeded + $4, dead_letter = dead_letter + $5,
            cancelled = cancelled + $6, skipped = skipped + $7, hop = greatest(hop, $8),
            -- Rarely: it is indexed.
            joined_at = case
                when $3 > 0 and joined_at < now() - interval '1 day' then now()
                else joined_at
            end
        where project_id = $1 and id = $2
        returning sealed_at is not null and succeeded_at is null
            and succeeded + dead_letter + cancelled + skipped >= jobs "may_be_complete!"
        "#,
        project_id.0,
        id.0,
        delta.jobs,
        delta.succeeded,
        delta.dead_letter,
        delta.cancelled,
        delta.skipped,
        delta.hop,
    )
    .fetch_optional(conn)
    .await?;
    Ok(may_be_complete.unwrap_or_default())
}

/// Locks a batch until the end of the transaction: no job is added to it meanwhile. Returns whether
/// it exists.
pub async fn lock(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: BatchId,
) -> sqlx::Result<bool> {
    let found = sqlx::query!(
        "select from batches where project_id = $1 and id = $2 for update",
        project_id.0,
        id.0,
    )
    .fetch_optional(conn)
    .await?;
    Ok(found.is_some())
}

/// Seals a locked batch: it completes when all of its jobs have ended.
pub async fn seal(conn: &mut PgConnection, project_id: ProjectId, id: BatchId) -> sqlx::Result<()> {
    sqlx::query!(
        "
        update batches set sealed_at = coalesce(sealed_at, statement_timestamp())
        where project_id = $1 and id = $2
        ",
        project_id.0,
        id.0,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Records that a locked batch is complete, and whether all of its jobs have succeeded.
pub async fn complete(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: BatchId,
    has_succeeded: bool,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        update batches
        set completed_at = coalesce(completed_at, statement_timestamp()),
            succeeded_at = case when $3 then statement_timestamp() end
        where project_id = $1 and id = $2
        ",
        project_id.0,
        id.0,
        has_succeeded,
    )
    .execute(conn)
    .await?;
    Ok(())
}
