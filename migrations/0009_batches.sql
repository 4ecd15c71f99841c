-- Batches: jobs whose ends are counted, and what follows the last one.

create table batches (
    project_id integer not null,
    -- UUIDv7: lists are in the order of creation.
    id uuid not null,
    -- Display name.
    name text,
    created_at timestamptz not null default now(),
    -- JSON of the jobs that its end enqueues. Null: none.
    callbacks text,
    -- From then on it completes when all of its jobs have ended.
    sealed_at timestamptz,
    -- When all of its jobs had ended; no job can be added after it.
    completed_at timestamptz,
    -- When all of its jobs had succeeded; later than `completed_at` if some were retried.
    succeeded_at timestamptz,
    -- Its jobs, and those that have ended; to them come the rows in `job_ends`.
    jobs bigint not null default 0,
    succeeded bigint not null default 0,
    dead_letter bigint not null default 0,
    cancelled bigint not null default 0,
    -- Cancelled, because they were not needed: they do not fail it.
    skipped bigint not null default 0,
    primary key (project_id, id)
);
-- Retention, across projects.
create index batches_by_completion on batches (completed_at) where completed_at is not null;
-- How many batches of a project are open.
create index batches_open on batches (project_id) where completed_at is null;

-- What happened to jobs with callbacks, a batch or a workflow that is told, until a loop has
-- processed it. Rows are inserted in the transaction of the end, and never updated: members of a
-- batch do not wait for each other.
create table job_ends (
    project_id integer not null,
    id bigint generated always as identity,
    -- The job that has ended. Null: jobs were added to the batch.
    job_id uuid,
    -- Null: the job belongs to no batch.
    batch_id uuid,
    -- A workflow that this end may end, if its end is to be told. Null: none.
    workflow_id uuid,
    -- Copied from the job's body, which may be deleted before. Null: no callbacks.
    callbacks text,
    -- What it adds to the batch. A retry takes back the end before it.
    jobs integer not null default 0,
    succeeded smallint not null default 0,
    dead_letter smallint not null default 0,
    cancelled smallint not null default 0,
    skipped smallint not null default 0,
    primary key (project_id, id)
);
-- The rest of a batch's counts.
create index job_ends_by_batch on job_ends (project_id, batch_id) where batch_id is not null;
