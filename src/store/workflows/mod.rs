//! Workflows: their rows, and starting them.

pub mod batches;
pub mod cascade;
pub mod completions;
pub mod definitions;
pub mod dependencies;
pub mod workflow_events;

use chrono::{DateTime, Utc};
use fencepost_domain::{
    dependency::{Dependency, When},
    ids::{JobId, ProjectId, WorkflowId},
    job::StoredState,
    workflow::Member,
};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::{
    settle::settle_success::WaitingJob,
    workflows::{batches::NewBatch, definitions::WorkflowStart, dependencies::Edge},
};

/// A workflow to store with its jobs.
#[derive(Debug, Clone)]
pub struct NewWorkflow {
    /// Made before the insert.
    pub id: WorkflowId,
    pub name: Option<String>,
    /// JSON that its templates name.
    pub input: Option<String>,
    /// URL that is notified when it has completed.
    pub callback_url: Option<String>,
    /// The dependencies among its jobs.
    pub edges: Vec<Edge>,
    /// Whether its first jobs wait until it is started.
    pub is_held: bool,
    /// The batch of its jobs, to be stored with it.
    pub batch: Option<NewBatch>,
    /// The definition that it is started from.
    pub start: Option<WorkflowStart>,
    pub rerun: Option<Rerun>,
}

/// Which workflow is run again.
#[derive(Debug, Clone, Copy)]
pub struct Rerun {
    /// The workflow that was stored first.
    pub original: WorkflowId,
    /// The run that was the latest until now.
    pub replaced: Option<WorkflowId>,
}

/// Stores a workflow, without its jobs.
///
/// # Errors
/// A unique violation when its id exists already.
pub async fn insert_workflow(
    conn: &mut PgConnection,
    project_id: ProjectId,
    workflow: &NewWorkflow,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        insert into workflows (project_id, id, name, is_held, original_id, input, callback_url)
        values ($1, $2, $3, $4, $5, $6, $7)
        ",
        project_id.0,
        workflow.id.0,
        workflow.name,
        workflow.is_held,
        workflow.rerun.map(|it| it.original.0),
        workflow.input,
        workflow.callback_url,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Stores the jobs of a workflow, in their order.
pub async fn insert_workflow_jobs(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: WorkflowId,
    jobs: &[(&str, JobId)],
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        insert into workflow_jobs (project_id, workflow_id, ordinal, key, job_id)
        select $1, $2, ordinal - 1, key, job_id
        from unnest($3::text[], $4::uuid[]) with ordinality as job(key, job_id, ordinal)
        ",
        project_id.0,
        id.0,
        &jobs.iter().map(|it| it.0).collect::<Vec<_>>() as &[&str],
        &jobs.iter().map(|it| it.1.0).collect::<Vec<_>>(),
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Jobs among these whose payloads are templates, each with the input of its workflow.
pub async fn templates(
    conn: &mut PgConnection,
    jobs: &[(ProjectId, JobId)],
) -> sqlx::Result<Vec<(ProjectId, JobId, Option<String>)>> {
    let found = sqlx::query!(
        r#"
        select body.project_id "project_id: ProjectId", body.job_id "job_id: JobId",
               workflows.input "input?"
        from unnest($1::int[], $2::uuid[]) as named(project_id, id)
        join job_bodies body on body.project_id = named.project_id and body.job_id = named.id
        left join workflows
            on workflows.project_id = body.project_id and workflows.id = body.workflow_id
        where body.is_template
        "#,
        &jobs.iter().map(|it| it.0.0).collect::<Vec<_>>(),
        &jobs.iter().map(|it| it.1.0).collect::<Vec<_>>(),
    )
    .fetch_all(conn)
    .await?;
    Ok(found.into_iter().map(|it| (it.project_id, it.job_id, it.input)).collect())
}

/// The inputs of these workflows, as JSON. Those without one are left out.
pub async fn inputs(
    conn: &mut PgConnection,
    workflows: &[(ProjectId, WorkflowId)],
) -> sqlx::Result<Vec<(ProjectId, WorkflowId, String)>> {
    let found = sqlx::query!(
        r#"
        select workflows.project_id "project_id: ProjectId", workflows.id "id: WorkflowId",
               workflows.input "input!"
        from unnest($1::int[], $2::uuid[]) as named(project_id, id)
        join workflows on workflows.project_id = named.project_id and workflows.id = named.id
        where workflows.input is not null
        "#,
        &workflows.iter().map(|it| it.0.0).collect::<Vec<_>>(),
        &workflows.iter().map(|it| it.1.0).collect::<Vec<_>>(),
    )
    .fetch_all(conn)
    .await?;
    Ok(found.into_iter().map(|it| (it.project_id, it.id, it.input)).collect())
}

/// A workflow, without its jobs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkflowRow {
    pub id: WorkflowId,
    pub name: Option<String>,
    pub created_at: DateTime<Utc>,
    pub cancelled_at: Option<DateTime<Utc>>,
    /// Whether its first jobs wait until it is started.
    pub is_held: bool,
    /// The latest run, if it was run again.
    pub successor_id: Option<WorkflowId>,
}

pub async fn find_workflow(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: WorkflowId,
) -> sqlx::Result<Option<WorkflowRow>> {
    sqlx::query_as!(
        WorkflowRow,
        r#"
        select id "id: WorkflowId", name, created_at, cancelled_at, is_held,
               successor_id "successor_id: WorkflowId"
        from workflows
        where project_id = $1 and id = $2
        "#,
        project_id.0,
        id.0,
    )
    .fetch_optional(conn)
    .await
}

#[derive(Debug, Clone)]
pub struct WorkflowJobRow {
    pub key: String,
    pub id: JobId,
    pub state: Option<StoredState>,
    pub job_type: Option<String>,
    pub attempt: Option<i32>,
    pub completed_at: Option<DateTime<Utc>>,
    /// Whether it ended without success, and does not fail the workflow.
    pub is_excused: bool,
    /// The keys of its parents.
    pub depends_on: Vec<String>,
    /// The end that it waits for, of each of them.
    pub conditions: Vec<When>,
}

impl WorkflowJobRow {
    /// Its parents by their keys, and what it waits for.
    pub fn dependencies(&self) -> impl Iterator<Item = Dependency<&str>> {
        let conditions = self.conditions.iter().copied().chain(std::iter::repeat(When::default()));
        let parents = self.depends_on.iter().zip(conditions);
        parents.map(|(parent, when)| Dependency { parent: parent.as_str(), when })
    }
}

/// The jobs of a workflow in their order, with their states. A pruned job has none.
pub async fn workflow_jobs(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: WorkflowId,
) -> sqlx::Result<Vec<WorkflowJobRow>> {
    sqlx::query_as!(
        WorkflowJobRow,
        r#"
        select part.key, part.job_id "id: JobId",
               coalesce(live.state, ended.state) "state?: StoredState",
               coalesce(live.job_type, ended.job_type) "job_type?",
               coalesce(live.attempt, ended.attempt) "attempt?",
               coalesce(live.completed_at, ended.completed_at) "completed_at?",
               case
                   when ended.is_skipped then true
                   -- The parent counts itself, while it is there.
                   when ended.cancelled_by is not null and exists (
                       select from jobs where project_id = $1 and id = ended.cancelled_by
                       union all
                       select from finished_jobs where project_id = $1 and id = ended.cancelled_by
                   ) then true
                   when (live.state = 'dead_letter' or ended.state = 'cancelled')
                       and coalesce(live.children, ended.children) > 0
                   then was_failure_handled($1, part.workflow_id, part.job_id)
                   else false
               end "is_excused!",
               coalesce(parents.keys, '{}') "depends_on!",
               coalesce(parents.conditions, '{}') "conditions!: Vec<When>"
        from workflow_jobs part
        left join jobs live on live.project_id = $1 and live.id = part.job_id
        left join finished_jobs ended on ended.project_id = $1 and ended.id = part.job_id
        cross join lateral (
            select array_agg(body.workflow_key order by edge.ordinal) as keys,
                   array_agg(edge.condition order by edge.ordinal) as conditions
            from job_edges edge
            join job_bodies body on body.project_id = $1 and body.job_id = edge.parent_id
            where edge.project_id = $1 and edge.child_id = part.job_id
                and body.workflow_key is not null
        ) parents
        where part.project_id = $1 and part.workflow_id = $2
        order by part.ordinal
        "#,
        project_id.0,
        id.0,
    )
    .fetch_all(conn)
    .await
}

/// Records that a workflow was cancelled.
pub async fn cancel_workflow(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: WorkflowId,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        update workflows set cancelled_at = coalesce(cancelled_at, statement_timestamp())
        where project_id = $1 and id = $2
        ",
        project_id.0,
        id.0,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// The workflows below an id, newest first.
pub async fn list(
    conn: &mut PgConnection,
    project_id: ProjectId,
    before: Option<WorkflowId>,
    limit: i64,
) -> sqlx::Result<Vec<WorkflowRow>> {
    sqlx::query_as!(
        WorkflowRow,
        r#"
        select id "id: WorkflowId", name, created_at, cancelled_at, is_held,
               successor_id "successor_id: WorkflowId"
        from workflows
        where project_id = $1 and id < $2 and original_id is null
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

/// Number of jobs of a workflow in a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateCount {
    pub workflow_id: WorkflowId,
    /// The state; none: they were pruned.
    pub state: Option<StoredState>,
    /// Whether they ended without success, and do not fail the workflow.
    pub is_excused: bool,
    pub jobs: i64,
}

impl StateCount {
    /// As it counts for the workflow's state; none: the jobs were pruned.
    #[must_use]
    pub fn member(&self) -> Option<Member> {
        Some(Member { state: self.state?.public(), is_excused: self.is_excused })
    }
}

/// Number of jobs of each of these workflows by state. A workflow has a bounded number of jobs, so
/// a page of workflows can be counted. Each job is looked up by itself: statistics of tables that
/// fill and empty within seconds mislead the planner of joins.
pub async fn count_states(
    conn: &mut PgConnection,
    project_id: ProjectId,
    workflows: &[WorkflowId],
) -> sqlx::Result<Vec<StateCount>> {
    let workflows: Vec<_> = workflows.iter().map(|it| it.0).collect();
    sqlx::query_as!(
        StateCount,
        r#"
        select part.workflow_id "workflow_id: WorkflowId",
               coalesce(live.state, ended.state) "state?: StoredState",
               case
                   when ended.is_skipped then true
                   -- The parent counts itself, while it is there.
                   when ended.cancelled_by is not null and exists (
                       select from jobs where project_id = $1 and id = ended.cancelled_by
                       union all
                       select from finished_jobs where project_id = $1 and id = ended.cancelled_by
                   ) then true
                   when (live.state = 'dead_letter' or ended.state = 'cancelled')
                       and coalesce(live.children, ended.children) > 0
                   then was_failure_handled($1, part.workflow_id, part.job_id)
                   else false
               end "is_excused!",
               count(*) "jobs!"
        from workflow_jobs part
        left join lateral (
            select state, children
            from jobs
            where project_id = $1 and id = part.job_id
            offset 0
        ) live on true
        left join lateral (
            select state, children, is_skipped, cancelled_by
            from finished_jobs
            where project_id = $1 and id = part.job_id
            offset 0
        ) ended on true
        where part.project_id = $1 and part.workflow_id = any($2)
        group by 1, 2, 3
        "#,
        project_id.0,
        &workflows,
    )
    .fetch_all(conn)
    .await
}

/// The workflows of a project without re-runs, newest first.
pub async fn page(
    conn: &mut PgConnection,
    project_id: ProjectId,
    limit: i64,
    offset: i64,
) -> sqlx::Result<Vec<WorkflowRow>> {
    sqlx::query_as!(
        WorkflowRow,
        r#"
        select id "id: WorkflowId", name, created_at, cancelled_at, is_held,
               successor_id "successor_id: WorkflowId"
        from workflows
        where project_id = $1 and original_id is null
        order by id desc
        limit $2 offset $3
        "#,
        project_id.0,
        limit,
        offset,
    )
    .fetch_all(conn)
    .await
}

/// Records that a workflow is no longer held. Returns whether it was.
pub async fn unhold(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: WorkflowId,
) -> sqlx::Result<bool> {
    let started = sqlx::query!(
        "update workflows set is_held = false where project_id = $1 and id = $2 and is_held",
        project_id.0,
        id.0,
    )
    .execute(conn)
    .await?;
    Ok(started.rows_affected() > 0)
}

/// Releases the jobs of a held workflow that wait for no other job, and returns them.
pub async fn free_roots(
    conn: &mut PgConnection,
    project_id: ProjectId,
    id: WorkflowId,
) -> sqlx::Result<Vec<WaitingJob>> {
    sqlx::query_as!(
        WaitingJob,
        r#"
        with root as materialized (
            select job.id
            from workflow_jobs part
            join jobs job on job.project_id = $1 and job.id = part.job_id
            where part.project_id = $1 and part.workflow_id = $2 and job.state = 'scheduled'
                and not exists (
                    select from job_edges where project_id = $1 and child_id = part.job_id
                )
            order by job.id
            for no key update of job
        ), freed as (
            update jobs
            set unfinished_parents = other_holds(jobs.waits_for_group, jobs.paused_at),
                state = case
                    when other_holds(jobs.waits_for_group, jobs.paused_at) = 0
                        and jobs.run_at <= statement_timestamp()
                    then 'pending'
                    else jobs.state
                end,
                ready_at = case
                    when other_holds(jobs.waits_for_group, jobs.paused_at) = 0
                        and jobs.run_at <= statement_timestamp()
                    then statement_timestamp()
                end
            from root
            where jobs.project_id = $1 and jobs.id = root.id
            returning jobs.project_id, jobs.id, jobs.queue, jobs.job_type, jobs.rank, jobs.run_at,
                      jobs.state, jobs.constraint_key, case
                          when jobs.takes_turns and jobs.state = 'pending'
                          then note_turn(jobs.project_id, jobs.queue, jobs.group_key)
                      end as turn
        ), counted as (
            insert into queue_deltas (project_id, queue, scheduled, active)
            select $1, queue, -count(*), count(*)
            from freed
            where state = 'pending'
            group by queue
        )
        select project_id "project_id!: ProjectId", id "id!: JobId", queue "queue!", job_type "job_type!",
               rank "rank!", run_at "run_at!", state "state!: StoredState",
               constraint_key is not null "is_constrained!",
               turn is true "has_noted_turn!"
        from freed
        "#,
        project_id.0,
        id.0,
    )
    .fetch_all(conn)
    .await
}

/// Makes a workflow the latest run of an earlier one, in place of `replaced`. Returns whether that
/// was still the latest.
pub async fn succeed(
    conn: &mut PgConnection,
    project_id: ProjectId,
    original: WorkflowId,
    replaced: Option<WorkflowId>,
    successor: WorkflowId,
) -> sqlx::Result<bool> {
    let changed = sqlx::query!(
        "
        update workflows
        set successor_id = $4
        where project_id = $1 and id = $2 and successor_id is not distinct from $3
        ",
        project_id.0,
        original.0,
        replaced.map(|it| it.0),
        successor.0,
    )
    .execute(conn)
    .await?;
    Ok(changed.rows_affected() > 0)
}
