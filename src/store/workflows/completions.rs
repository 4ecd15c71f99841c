//! Ends of jobs with callbacks or a batch, or of a workflow with an endpoint, until the loop has
//! processed them.

use sqlx::PgConnection;

use fencepost_domain::ids::{BatchId, JobId, ProjectId, WorkflowId};

/// Something that happened to a job or a batch.
#[derive(Debug, Clone)]
pub struct Completion {
    pub project_id: ProjectId,
    /// The job that has ended; none: jobs were added to the batch.
    pub job_id: Option<JobId>,
    pub batch_id: Option<BatchId>,
    /// A workflow that it may complete, if an endpoint is to be notified.
    pub workflow_id: Option<WorkflowId>,
    /// JSON of the jobs that it enqueues.
    pub callbacks: Option<String>,
    /// Number of jobs that it adds to the batch.
    pub jobs: i32,
    pub succeeded: i16,
    pub dead_letter: i16,
    pub cancelled: i16,
    pub skipped: i16,
    /// How many deliveries have led to the job.
    pub hop: Option<i16>,
}

/// Lets the statements of this transaction wait for a locked row only for a moment.
pub async fn limit_waits(conn: &mut PgConnection) -> sqlx::Result<()> {
    sqlx::query!("set local lock_timeout = '200ms'").execute(conn).await?;
    Ok(())
}

/// Takes these ends. Those that another node has taken are left out.
pub async fn take(
    conn: &mut PgConnection,
    project_id: ProjectId,
    ids: &[i64],
) -> sqlx::Result<Vec<Completion>> {
    sqlx::query_as!(
        Completion,
        r#"
        with taken as materialized (
            select id
            from job_ends
            where project_id = $1 and id = any($2)
            order by id
            for update skip locked
        ), ends as (
            delete from job_ends
            using taken
            where job_ends.project_id = $1 and job_ends.id = taken.id
            returning project_id, job_id, batch_id, workflow_id, callbacks, jobs, succeeded,
                      dead_letter, cancelled, skipped
        )
        select ends.project_id "project_id: ProjectId", ends.job_id "job_id: JobId",
               ends.batch_id "batch_id: BatchId", ends.workflow_id "workflow_id: WorkflowId",
               ends.callbacks, ends.jobs, ends.succeeded, ends.dead_letter, ends.cancelled,
               ends.skipped, (
                   select hop from job_bodies where project_id = $1 and job_id = ends.job_id
               ) as hop
        from ends
        "#,
        project_id.0,
        ids,
    )
    .fetch_all(conn)
    .await
}

/// Returns whether `expires_at` cancelled a job, and no caller and no end of a parent.
pub async fn has_expired(
    conn: &mut PgConnection,
    project_id: ProjectId,
    job_id: JobId,
) -> sqlx::Result<bool> {
    sqlx::query_scalar!(
        r#"
        select exists (
            select from finished_jobs
            where project_id = $1 and id = $2 and state = 'cancelled'
                and not cancel_requested and cancelled_by is null
        ) "has_expired!"
        "#,
        project_id.0,
        job_id.0,
    )
    .fetch_one(conn)
    .await
}

/// Counts an end of a job, and returns how many it has had. None: the job was deleted.
pub async fn count_end(
    conn: &mut PgConnection,
    project_id: ProjectId,
    job_id: JobId,
) -> sqlx::Result<Option<i32>> {
    sqlx::query_scalar!(
        r#"
        update job_bodies
        set ends = coalesce(ends, 0) + 1
        where project_id = $1 and job_id = $2
        returning ends "ends!"
        "#,
        project_id.0,
        job_id.0,
    )
    .fetch_optional(conn)
    .await
}
