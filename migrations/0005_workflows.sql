-- Workflows: named graphs of jobs. Their edges are in `job_edges`.

create table workflows (
    project_id integer not null,
    id uuid not null,
    name text,
    created_at timestamptz not null default now(),
    -- JSON that its templates name. Null: none.
    input text,
    -- Told of its end. Null: none.
    callback_url text,
    -- The end that was told last. Null: none.
    told_state text check (told_state in ('succeeded', 'failed', 'cancelled')),
    -- Its state is computed from its jobs; only a cancellation is stored.
    cancelled_at timestamptz,
    -- Its first jobs wait until it is started.
    is_held boolean not null default false,
    -- The latest run of this workflow. Null: this is it.
    successor_id uuid,
    -- The workflow that this one runs again. Null: it is the first.
    original_id uuid,
    primary key (project_id, id)
);
-- The runs of a workflow that is pruned.
create index workflows_by_successor on workflows (project_id, successor_id)
where successor_id is not null;

create table workflow_jobs (
    project_id integer not null,
    workflow_id uuid not null,
    -- The job's index in the request.
    ordinal smallint not null,
    -- Its name in the workflow.
    key text not null,
    job_id uuid not null,
    primary key (project_id, workflow_id, ordinal)
);

-- Whether a job that waited for a failure has succeeded: for the failure of this job, or of one that
-- was cancelled because of it.
create function is_failure_handled(of_project integer, of_workflow uuid, failed_job uuid)
returns boolean
language sql
stable
as $$
    with recursive failed as (
        select failed_job as id
        union
        select child.id
        from failed
        join job_edges edge on edge.project_id = of_project and edge.parent_id = failed.id
        join finished_jobs child on child.project_id = of_project and child.id = edge.child_id
        join job_bodies body on body.project_id = of_project and body.job_id = child.id
        where body.workflow_id = of_workflow and child.state = 'cancelled' and child.cancelled_by is not null
            and child.is_skipped is null
    )
    select exists (
        select
        from failed
        join job_edges edge on edge.project_id = of_project and edge.parent_id = failed.id
        join finished_jobs handler on handler.project_id = of_project and handler.id = edge.child_id
        where edge.condition = 'failed' and handler.state = 'succeeded'
    )
$$;
