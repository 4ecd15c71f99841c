//! Dependencies, unique keys, and workflows of new jobs.

use sqlx::PgConnection;
use uuid::Uuid;

use fencepost_domain::{
    dependency::{FinalState, When},
    ids::{JobId, JobKey, ProjectId},
    job::StoredState,
    limits::MAX_PARENT_RESULTS_BYTES,
    text::ErrorReport,
};

/// A job that others will wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parent {
    pub id: JobId,
    pub state: StoredState,
    /// None: it has not ended.
    pub end: Option<FinalState>,
    /// Number of jobs that wait for it already.
    pub children: i32,
}

/// The live ones of these jobs, locked until the end of the transaction, so that they cannot end
/// before their children are stored.
pub async fn lock_parents(
    conn: &mut PgConnection,
    project_id: ProjectId,
    ids: &[JobId],
) -> sqlx::Result<Vec<Parent>> {
    sqlx::query_as!(
        Parent,
        r#"
        select id "id: JobId", state "state: StoredState", children,
               case when state = 'dead_letter' then state end "end: FinalState"
        from jobs
        where project_id = $1 and id = any($2)
        order by id
        for update
        "#,
        project_id.0,
        &ids.iter().map(|it| it.0).collect::<Vec<Uuid>>(),
    )
    .fetch_all(conn)
    .await
}

/// The ended ones of these jobs.
pub async fn ended_parents(
    conn: &mut PgConnection,
    project_id: ProjectId,
    ids: &[JobId],
) -> sqlx::Result<Vec<Parent>> {
    sqlx::query_as!(
        Parent,
        r#"
        select id "id: JobId", state "state: StoredState", children,
               case when is_skipped then 'skipped' else state end "end: FinalState"
        from finished_jobs
        where project_id = $1 and id = any($2)
        for share
        "#,
        project_id.0,
        &ids.iter().map(|it| it.0).collect::<Vec<Uuid>>(),
    )
    .fetch_all(conn)
    .await
}

/// Counts new children of live jobs.
pub async fn add_children(
    conn: &mut PgConnection,
    project_id: ProjectId,
    parents: &[(JobId, i32)],
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        update jobs
        set children = jobs.children + more.children
        from unnest($2::uuid[], $3::int[]) as more(id, children)
        where jobs.project_id = $1 and jobs.id = more.id
        ",
        project_id.0,
        &parents.iter().map(|it| it.0.0).collect::<Vec<_>>(),
        &parents.iter().map(|it| it.1).collect::<Vec<_>>(),
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// A dependency: one job waits for another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Edge {
    pub parent: JobId,
    pub child: JobId,
    /// The parent's index among the child's parents.
    pub ordinal: i16,
    pub when: When,
    /// The parent has ended so before.
    pub is_met: bool,
}

/// Stores dependencies.
pub async fn insert_edges(
    conn: &mut PgConnection,
    project_id: ProjectId,
    edges: &[Edge],
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        insert into job_edges (project_id, parent_id, child_id, ordinal, condition, is_met)
        select $1, parent_id, child_id, ordinal, condition, is_met
        from unnest($2::uuid[], $3::uuid[], $4::smallint[], $5::text[], $6::bool[])
            as edge(parent_id, child_id, ordinal, condition, is_met)
        ",
        project_id.0,
        &edges.iter().map(|it| it.parent.0).collect::<Vec<_>>(),
        &edges.iter().map(|it| it.child.0).collect::<Vec<_>>(),
        &edges.iter().map(|it| it.ordinal).collect::<Vec<_>>(),
        &edges.iter().map(|it| it.when).collect::<Vec<_>>() as &[When],
        &edges.iter().map(|it| it.is_met).collect::<Vec<_>>(),
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// The live job that has a unique key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UniqueHolder {
    pub unique_key: String,
    pub id: JobId,
    pub state: StoredState,
}

/// The live jobs with these unique keys, locked until the end of the transaction.
pub async fn lock_unique(
    conn: &mut PgConnection,
    project_id: ProjectId,
    keys: &[&str],
) -> sqlx::Result<Vec<UniqueHolder>> {
    sqlx::query_as!(
        UniqueHolder,
        r#"
        select unique_key "unique_key!", id "id: JobId", state "state: StoredState"
        from jobs
        where project_id = $1 and unique_key is not null and state <> 'dead_letter'
            and unique_key = any($2)
        order by id
        for update
        "#,
        project_id.0,
        keys as &[&str],
    )
    .fetch_all(conn)
    .await
}

/// How a parent ended, and what it left.
#[derive(Debug, Clone)]
pub struct ParentResult {
    pub child_id: JobId,
    pub parent_id: JobId,
    pub workflow_key: Option<String>,
    pub job_type: String,
    /// `succeeded`, `dead_letter` or `cancelled`.
    pub state: StoredState,
    pub result: Option<String>,
    /// Of its last failed attempt, without the stack trace, unless it succeeded.
    pub error: ErrorReport,
    /// Whether the result was left out: with the earlier ones it exceeds the limit of one job.
    pub is_omitted: bool,
}

/// The results and errors of the ended parents of these jobs, in the order in which they were
/// named.
pub async fn parent_results(
    conn: &mut PgConnection,
    children: &[(ProjectId, JobId)],
) -> sqlx::Result<Vec<(ProjectId, ParentResult)>> {
    let rows = sqlx::query!(
        r#"
        select child.project_id "project_id!: ProjectId", child.id "child_id!: JobId",
               edge.parent_id "parent_id: JobId", body.workflow_key, parent.job_type "job_type!",
               parent.state "state!: StoredState",
               case when measured.bytes <= $3 then parent.result end as result,
               measured.bytes > $3 and parent.result is not null "is_omitted!",
               failed.error_kind "error_kind?", failed.error_message "error_message?",
               failed.error_truncated "error_truncated?"
        from unnest($1::int[], $2::uuid[]) as child(project_id, id)
        join job_edges edge on edge.project_id = child.project_id and edge.child_id = child.id
        cross join lateral (
            select job_type, state, result
            from finished_jobs
            where project_id = edge.project_id and id = edge.parent_id
            union all
            select job_type, state, null
            from jobs
            where project_id = edge.project_id and id = edge.parent_id and state = 'dead_letter'
        ) parent
        left join lateral (
            select error_kind, error_message, error_truncated
            from attempts
            where project_id = edge.project_id and job_id = edge.parent_id
                and coalesce(error_kind, error_message) is not null
                and (outcome = 'released' and error_kind in ('rate_limited', 'snoozed')) is not true
            order by attempt desc
            limit 1
        ) failed on parent.state <> 'succeeded'
        join job_bodies body
            on body.project_id = edge.project_id and body.job_id = edge.parent_id
        cross join lateral (
            select coalesce(sum(octet_length(earlier.result)), 0) as bytes
            from job_edges before
            join finished_jobs earlier
                on earlier.project_id = before.project_id and earlier.id = before.parent_id
            where before.project_id = edge.project_id and before.child_id = edge.child_id
                and before.ordinal <= edge.ordinal
        ) measured
        order by child.id, edge.ordinal
        "#,
        &children.iter().map(|it| it.0.0).collect::<Vec<_>>(),
        &children.iter().map(|it| it.1.0).collect::<Vec<_>>(),
        MAX_PARENT_RESULTS_BYTES,
    )
    .fetch_all(conn)
    .await?;
    let results = rows.into_iter().map(|row| {
        let result = ParentResult {
            child_id: row.child_id,
            parent_id: row.parent_id,
            workflow_key: row.workflow_key,
            job_type: row.job_type,
            state: row.state,
            result: row.result,
            error: ErrorReport {
                kind: row.error_kind,
                message: row.error_message,
                stack_trace: None,
                truncated: row.error_truncated.unwrap_or_default(),
            },
            is_omitted: row.is_omitted,
        };
        (row.project_id, result)
    });
    Ok(results.collect())
}

/// The parents of a job, ended or not.
pub async fn parents_of(
    conn: &mut PgConnection,
    project_id: ProjectId,
    child: JobId,
) -> sqlx::Result<Vec<JobId>> {
    sqlx::query_scalar!(
        r#"
        select parent_id "parent_id: JobId"
        from job_edges
        where project_id = $1 and child_id = $2
        order by ordinal
        "#,
        project_id.0,
        child.0,
    )
    .fetch_all(conn)
    .await
}

/// Removes the unique key of a live job. Its body keeps the text of the key.
pub async fn forget_unique_key(conn: &mut PgConnection, key: JobKey) -> sqlx::Result<()> {
    sqlx::query!(
        "update jobs set unique_key = null where project_id = $1 and id = $2",
        key.project_id.0,
        key.id.0,
    )
    .execute(conn)
    .await?;
    Ok(())
}
