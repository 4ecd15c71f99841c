//! Workflows: building their graph, reading, starting, re-running and cancelling them.

use fencepost_domain::{
    actor::ChangedBy,
    dependency::Dependency,
    error::Error,
    ids::{JobId, JobKey, ProjectId, WorkflowId},
    job::StoredState,
    plan::Tenant,
    workflow::{self, Member, WorkflowState},
};
use fencepost_store::{
    jobs::JobRow,
    workflows::{self, batches::NewBatch, definitions::WorkflowStart},
};
use sqlx::Acquire;

use crate::{
    Engine, cancel,
    enqueue::{
        self, Origin,
        callback_url::check_callback_urls,
        dependencies::{Edge, JobWithDependencies, OnConflict},
    },
    jobs::{self, replay},
};

use fencepost_store::workflows::{NewWorkflow, Rerun};
pub use fencepost_store::workflows::{StateCount, WorkflowJobRow, WorkflowRow};

/// A workflow to store.
#[derive(Debug)]
pub struct JobGraph {
    pub name: Option<String>,
    /// JSON of which the templates of its jobs take parts.
    pub input: Option<String>,
    /// URL that is notified when the workflow has completed.
    pub callback_url: Option<String>,
    /// Whether its jobs wait until it is started.
    pub is_held: bool,
    /// Its jobs, each with its key in the extras.
    pub jobs: Vec<JobWithDependencies>,
    /// The parents of each job, as indexes of jobs.
    pub parents: Vec<Vec<Dependency<usize>>>,
    /// The batch of its jobs, if their ends enqueue others.
    pub batch: Option<NewBatch>,
    /// The stored definition of which it is a run; none: its jobs were sent.
    pub start: Option<WorkflowStart>,
}

/// Stores a workflow with its jobs, all or none, if the project's quota permits.
///
/// # Errors
/// [`Error::Invalid`] when no endpoint takes its `callback_url`, and the errors of
/// [`enqueue::store_workflow`]. Nothing is stored then.
pub async fn create(
    engine: &Engine,
    tenant: Tenant,
    origin: Origin,
    id: WorkflowId,
    graph: JobGraph,
) -> Result<(), Error> {
    let urls = graph.callback_url.iter().map(|it| (String::new(), it.clone())).collect();
    check_callback_urls(engine, tenant.project_id, urls).await?;
    store(engine, tenant, origin, id, (graph, None)).await
}

async fn store(
    engine: &Engine,
    tenant: Tenant,
    origin: Origin,
    id: WorkflowId,
    (graph, rerun): (JobGraph, Option<Rerun>),
) -> Result<(), Error> {
    let JobGraph { name, input, callback_url, is_held, mut jobs, parents, batch, start } = graph;
    let edges = tie(id, is_held, &mut jobs, &parents);
    let workflow =
        NewWorkflow { id, name, input, callback_url, edges, is_held, batch, start, rerun };
    enqueue::store_workflow(engine, tenant, origin, &workflow, jobs).await
}

/// Turns parents, given as indexes of jobs, into dependencies.
fn tie(
    id: WorkflowId,
    is_held: bool,
    jobs: &mut [JobWithDependencies],
    parents: &[Vec<Dependency<usize>>],
) -> Vec<Edge> {
    let mut edges = Vec::new();
    for (child, of_child) in parents.iter().enumerate() {
        for (ordinal, Dependency { parent, when }) in (0_i16..).zip(of_child.iter().copied()) {
            let (parent, child) = (jobs[parent].job.id, jobs[child].job.id);
            edges.push(Edge { parent, child, ordinal, when, is_met: false });
        }
        let extras = jobs[child].job.extras.get_or_insert_default();
        extras.workflow_id = Some(id);
        extras.has_parents = !of_child.is_empty();
        // In a held workflow the first jobs also wait for its start.
        let awaited = of_child.len().max(usize::from(is_held));
        extras.unfinished_parents = awaited.try_into().unwrap_or(i32::MAX);
        for Dependency { parent, .. } in of_child {
            jobs[*parent].job.extras.get_or_insert_default().children += 1;
        }
    }
    edges
}

/// A workflow with its jobs.
///
/// # Errors
/// [`Error::WorkflowNotFound`].
pub async fn find(
    engine: &Engine,
    project_id: ProjectId,
    id: WorkflowId,
) -> Result<(WorkflowRow, Vec<WorkflowJobRow>), Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    let found = workflows::find_workflow(&mut conn, project_id, id).await?;
    let found = found.ok_or(Error::WorkflowNotFound)?;
    let jobs = workflows::workflow_jobs(&mut conn, project_id, id).await?;
    Ok((found, jobs))
}

/// A page of workflows below an id, newest first, each with its number of jobs by state.
pub async fn list(
    engine: &Engine,
    project_id: ProjectId,
    before: Option<WorkflowId>,
    limit: i64,
) -> Result<Vec<(WorkflowRow, Vec<StateCount>)>, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    let rows = workflows::list(&mut conn, project_id, before, limit).await?;
    let ids: Vec<_> = rows.iter().map(|it| it.id).collect();
    let counts = workflows::count_states(&mut conn, project_id, &ids).await?;
    let with_counts = |row: WorkflowRow| {
        let own = counts.iter().filter(|it| it.workflow_id == row.id);
        let own = own.copied().collect();
        (row, own)
    };
    Ok(rows.into_iter().map(with_counts).collect())
}

/// The name of a workflow; none if it has no name or does not exist.
pub async fn name(
    engine: &Engine,
    project_id: ProjectId,
    id: WorkflowId,
) -> Result<Option<String>, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    let found = workflows::find_workflow(&mut conn, project_id, id).await?;
    Ok(found.and_then(|it| it.name))
}

/// The inputs of these workflows, as JSON. Those without one are left out.
pub async fn inputs(
    engine: &Engine,
    project_id: ProjectId,
    workflows: &[WorkflowId],
) -> Result<Vec<(WorkflowId, String)>, Error> {
    if workflows.is_empty() {
        return Ok(Vec::new());
    }
    let named: Vec<_> = workflows.iter().map(|it| (project_id, *it)).collect();
    let mut conn = engine.pools.read_for(project_id).await?;
    let found = workflows::inputs(&mut conn, &named).await?;
    Ok(found.into_iter().map(|it| (it.1, it.2)).collect())
}

/// The latest run of a workflow: the same as [`find`], unless it was run again.
///
/// # Errors
/// [`Error::WorkflowNotFound`].
pub async fn find_latest(
    engine: &Engine,
    project_id: ProjectId,
    id: WorkflowId,
) -> Result<(WorkflowRow, Vec<WorkflowJobRow>), Error> {
    let (row, jobs) = find(engine, project_id, id).await?;
    let Some(successor) = row.successor_id else { return Ok((row, jobs)) };
    match find(engine, project_id, successor).await {
        // A run with a dead letter is kept, so its successor may be pruned before it.
        Err(Error::WorkflowNotFound) => Ok((row, jobs)),
        found => found,
    }
}

/// The workflows of a project, newest first, without re-runs.
pub async fn page(
    engine: &Engine,
    project_id: ProjectId,
    limit: i64,
    offset: i64,
) -> Result<Vec<WorkflowRow>, Error> {
    let mut conn = engine.pools.read_for(project_id).await?;
    Ok(workflows::page(&mut conn, project_id, limit, offset).await?)
}

/// The state of a workflow.
#[must_use]
pub fn state(row: &WorkflowRow, jobs: &[WorkflowJobRow]) -> WorkflowState {
    let member =
        |it: &WorkflowJobRow| Some(Member { state: it.state?.public(), is_excused: it.is_excused });
    let members: Vec<_> = jobs.iter().filter_map(member).collect();
    workflow::state(&members, row.cancelled_at.is_some())
}

/// Starts a held workflow, or re-runs an ended one with new jobs. A running workflow is left alone.
///
/// # Errors
/// [`Error::WorkflowNotFound`], also when jobs that would run again were pruned.
/// [`Error::QuotaExceeded`] when the project may not have that many more jobs.
pub async fn run(
    engine: &Engine,
    tenant: Tenant,
    origin: Origin,
    id: WorkflowId,
) -> Result<(), Error> {
    let project_id = tenant.project_id;
    let replaced = find(engine, project_id, id).await?.0.successor_id;
    let (latest, jobs) = find_latest(engine, project_id, id).await?;
    if latest.is_held && latest.cancelled_at.is_none() {
        return start(engine, project_id, latest.id).await;
    }
    if state(&latest, &jobs) == WorkflowState::Running {
        return Ok(());
    }
    let ids: Vec<_> = jobs.iter().map(|it| it.id).collect();
    let rows = jobs::find_all(engine, project_id, &ids).await?;
    let mut again = Vec::with_capacity(jobs.len());
    for id in &ids {
        let row = rows.iter().find(|it| it.id == *id).ok_or(Error::WorkflowNotFound)?;
        again.push(anew(project_id, row));
    }
    let place = |key: &str| jobs.iter().position(|it| it.key == key);
    let dependency =
        |it: Dependency<&str>| Some(Dependency { parent: place(it.parent)?, when: it.when });
    let parents =
        jobs.iter().map(|it| it.dependencies().filter_map(dependency).collect()).collect();
    let input = inputs(engine, project_id, &[latest.id]).await?.pop().map(|it| it.1);
    let graph = JobGraph {
        name: latest.name,
        input,
        callback_url: None,
        is_held: false,
        jobs: again,
        parents,
        batch: None,
        start: None,
    };
    let rerun = Some(Rerun { original: id, replaced });
    match store(engine, tenant, origin, WorkflowId::generate(), (graph, rerun)).await {
        Err(Error::Overloaded) => {
            // If another request has re-run it at the same moment, one run is enough.
            let is_rerun = find(engine, project_id, id).await?.0.successor_id != replaced;
            if is_rerun { Ok(()) } else { Err(Error::Overloaded) }
        }
        stored => stored,
    }
}

async fn start(engine: &Engine, project_id: ProjectId, id: WorkflowId) -> Result<(), Error> {
    let mut conn = engine.pools.enqueue.acquire_for(project_id).await?;
    let mut tx = conn.begin().await?;
    if !workflows::unhold(&mut tx, project_id, id).await? {
        return Ok(());
    }
    let freed = workflows::free_roots(&mut tx, project_id, id).await?;
    tx.commit().await?;
    engine.notifier.waiting(freed.iter());
    Ok(())
}

/// A copy of the job, to run again.
fn anew(project_id: ProjectId, row: &JobRow) -> JobWithDependencies {
    let mut job = replay::copy(project_id, JobId::generate(), row);
    let extras = job.extras.get_or_insert_default();
    extras.workflow_key.clone_from(&row.workflow_key);
    extras.is_template = row.is_template;
    JobWithDependencies::new(job, OnConflict::Reject)
}

/// Cancels every job of a workflow that has not ended, in one transaction: it has at most
/// [`MAX_WORKFLOW_JOBS`](fencepost_domain::limits::MAX_WORKFLOW_JOBS).
///
/// # Errors
/// [`Error::WorkflowNotFound`].
pub async fn cancel(
    engine: &Engine,
    project_id: ProjectId,
    id: WorkflowId,
    by: &ChangedBy,
) -> Result<(), Error> {
    let (_, jobs) = find(engine, project_id, id).await?;
    let has_not_ended = |it: &&WorkflowJobRow| {
        it.state.is_some_and(|it| it.is_waiting() || it == StoredState::Processing)
    };
    let mut keys: Vec<_> =
        jobs.iter().filter(has_not_ended).map(|it| JobKey { project_id, id: it.id }).collect();
    keys.sort_by_key(|it| it.id);
    let mut conn = engine.pools.read_for(project_id).await?;
    let mut tx = conn.begin().await?;
    workflows::cancel_workflow(&mut tx, project_id, id).await?;
    let cancelled = cancel::cancel_all(&mut tx, &keys, by).await?;
    tx.commit().await?;
    cancelled.publish(engine);
    Ok(())
}
