-- What jobs have beside themselves: parents, workflows, history, logs; what queues are set to; what
-- workers bring along; and answers that are given again.

-- A child runs when all of its parents have succeeded.
create table job_edges (
    project_id integer not null,
    parent_id uuid not null,
    child_id uuid not null,
    -- The place of the parent in the child's `depends_on`.
    ordinal smallint not null,
    primary key (project_id, child_id, parent_id)
);
create index job_edges_by_parent on job_edges (project_id, parent_id, child_id);

create table workflows (
    project_id integer not null,
    id uuid not null,
    name text,
    created_at timestamptz not null default now(),
    cancelled_at timestamptz,
    primary key (project_id, id)
);

create table workflow_jobs (
    project_id integer not null,
    workflow_id uuid not null,
    -- The place of the job in the request.
    ordinal smallint not null,
    key text not null,
    job_id uuid not null,
    primary key (project_id, workflow_id, ordinal)
);

-- Rare transitions, and what workers say of their attempts. Everything else of a job's history is
-- read from its own rows.
create table job_events (
    project_id integer not null,
    job_id uuid not null,
    id uuid not null,
    type text not null,
    at timestamptz not null default now(),
    attempt integer,
    worker_id text,
    -- Opaque: the bytes that were sent, or what changed.
    payload text,
    primary key (project_id, job_id, id)
);

create table job_logs (
    project_id integer not null,
    job_id uuid not null,
    attempt integer not null,
    stream text not null check (stream in ('stdout', 'stderr', 'system')),
    sequence bigint not null,
    data text not null,
    -- The worker's clock, in milliseconds since 1970.
    timestamp_ms bigint not null,
    primary key (project_id, job_id, attempt, stream, sequence)
);

-- What is kept of an attempt's logs is bounded.
create table job_log_totals (
    project_id integer not null,
    job_id uuid not null,
    attempt integer not null,
    kept_bytes bigint not null default 0,
    kept_chunks integer not null default 0,
    is_truncated boolean not null default false,
    primary key (project_id, job_id, attempt)
);

-- Queues whose settings somebody has changed; all others have the defaults.
create table queues (
    project_id integer not null,
    name text not null,
    -- Null: no limit.
    max_concurrency integer check (max_concurrency between 0 and 100000),
    updated_at timestamptz not null default now(),
    primary key (project_id, name)
);

create table recurring_schedules (
    project_id integer not null,
    -- `rjob_…`, unique in its project.
    id text not null,
    job_type text not null,
    cron_expression text not null,
    timezone text not null default 'UTC',
    queue text not null default 'default',
    max_attempts integer not null default 3,
    timeout_seconds integer not null default 1800,
    is_paused boolean not null default false,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    primary key (project_id, id)
);

-- The first answer to a request that may be repeated.
create table idempotency_keys (
    project_id integer not null,
    key text not null,
    -- SHA-256 of route and body.
    fingerprint bytea not null check (octet_length(fingerprint) = 32),
    -- The ids of what the request makes come from this: running it twice makes it once.
    seed uuid not null,
    created_at timestamptz not null default now(),
    -- Since when somebody runs it.
    locked_at timestamptz not null default now(),
    -- Null while it runs.
    status smallint,
    location text,
    body text,
    primary key (project_id, key)
);
-- Pruned by age, across projects.
create index idempotency_keys_by_age on idempotency_keys (created_at);
