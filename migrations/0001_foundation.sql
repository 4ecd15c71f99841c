-- Tenants, keys, and the life of a job.
--
-- `project_id` comes first in every tenant's key and index. There are no foreign keys from hot
-- tables: each check would lock a parent row that all of a tenant's writes share.

create table instance (
    only_row boolean primary key default true check (only_row),
    -- Signs list cursors: 244 random bits from two random uuids.
    cursor_key bytea not null
);
insert into instance (cursor_key)
values (decode(replace(gen_random_uuid()::text || gen_random_uuid()::text, '-', ''), 'hex'));

create table projects (
    id integer primary key generated always as identity,
    public_id uuid not null unique,
    slug text not null unique check (slug <> ''),
    name text not null,
    created_at timestamptz not null default now()
);

create table api_keys (
    project_id integer not null references projects,
    id uuid not null,
    name text not null,
    -- SHA-256 of the whole key; the key itself is kept nowhere.
    secret_hash bytea not null check (octet_length(secret_hash) = 32),
    -- What a list may show of the key.
    shown_prefix text not null,
    shown_end text not null,
    created_at timestamptz not null default now(),
    revoked_at timestamptz,
    primary key (project_id, id)
);
-- The one look-up that starts without a project: the key is what names the project.
create unique index api_keys_by_secret on api_keys (secret_hash);

-- Live jobs only: narrow, and short-lived. What never changes is in job_bodies; what has ended
-- well or was called off is in finished_jobs.
create table jobs (
    project_id integer not null,
    id uuid not null,
    queue text not null,
    job_type text not null,
    state text not null check (
        state in ('scheduled', 'backoff', 'pending', 'held', 'processing', 'dead_letter')
    ),
    -- Minus the priority, so that the order of a claim is ascending in every column.
    rank smallint not null,
    run_at timestamptz not null,
    created_at timestamptz not null default now(),
    -- Grows on each claim and never otherwise: a number is never used twice.
    attempt integer not null default 0,
    failures integer not null default 0,
    max_attempts integer not null,
    timeout_seconds integer not null,
    labels text[],
    cancel_requested boolean not null default false,
    progress real,
    unfinished_parents integer not null default 0,
    completed_at timestamptz,
    lease_id uuid,
    worker_id text,
    claimed_at timestamptz,
    lease_seconds integer,
    lease_expires_at timestamptz,
    poll_id uuid,
    primary key (project_id, id),
    -- Few and short: each is read anew by every statement that writes the table.
    check ((state = 'processing') = (lease_expires_at is not null)),
    check (num_nonnulls(lease_id, worker_id, claimed_at, lease_seconds, lease_expires_at) in (0, 5)),
    check (poll_id is null or lease_expires_at is not null),
    check ((state = 'dead_letter') = (completed_at is not null)),
    check (failures <= attempt)
) with (
    fillfactor = 90,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0,
    autovacuum_analyze_threshold = 50000
);

-- The order of a claim, and of its low-water mark.
create index jobs_claim on jobs (project_id, queue, rank, run_at, id)
where state = 'pending';
-- The same for polls that name job types: they must not walk over other types' rows.
create index jobs_claim_by_type on jobs (project_id, queue, job_type, rank, run_at, id)
where state = 'pending';
-- Swept across projects by the reaper and the promoter, whose answers carry the project.
create index jobs_expiring on jobs (lease_expires_at) where state = 'processing';
create index jobs_due on jobs (run_at)
where state in ('scheduled', 'backoff') and unfinished_parents = 0;
-- A repeated poll finds the leases of its first answer.
create index jobs_by_poll on jobs (project_id, poll_id) where poll_id is not null;

-- Insert-only: what a job is, from its enqueue to its prune.
create table job_bodies (
    project_id integer not null,
    job_id uuid not null,
    -- Opaque: the bytes that were sent.
    payload text not null,
    -- Null: the default policy.
    retry jsonb,
    -- Null: none.
    tags jsonb,
    -- The trace that the job belongs to, as its producer sent it.
    traceparent text,
    primary key (project_id, job_id)
);

-- Succeeded and cancelled jobs, with what a repeated ack reads and what a manual retry restores.
create table finished_jobs (
    project_id integer not null,
    id uuid not null,
    queue text not null,
    job_type text not null,
    state text not null check (state in ('succeeded', 'cancelled')),
    rank smallint not null,
    run_at timestamptz not null,
    created_at timestamptz not null,
    attempt integer not null,
    failures integer not null,
    max_attempts integer not null,
    timeout_seconds integer not null,
    labels text[],
    cancel_requested boolean not null,
    progress real,
    lease_id uuid,
    worker_id text,
    claimed_at timestamptz,
    completed_at timestamptz not null default now(),
    duration_ms bigint,
    -- Opaque: the bytes that were sent.
    result text,
    children_activated integer,
    primary key (project_id, id)
);

-- Attempts that did not end in plain success: a job's history, and the answer to a repeated ack.
create table attempts (
    project_id integer not null,
    job_id uuid not null,
    attempt integer not null,
    worker_id text not null,
    lease_id uuid not null,
    claimed_at timestamptz not null,
    ended_at timestamptz not null default now(),
    outcome text not null check (
        outcome in ('failed', 'timeout', 'lease_expired', 'released', 'cancelled')
    ),
    error_kind text,
    error_message text,
    error_stack_trace text,
    error_truncated boolean not null default false,
    -- When the job could run again; null when it was the end.
    retry_at timestamptz,
    duration_ms bigint,
    primary key (project_id, job_id, attempt)
);

create table workers (
    project_id integer not null,
    worker_id text not null,
    queues text[] not null,
    job_types text[] not null,
    hostname text,
    sdk_version text,
    concurrency integer not null,
    pid integer,
    registered_at timestamptz not null default now(),
    last_seen_at timestamptz not null default now(),
    primary key (project_id, worker_id)
);

-- When any node last looked for expired leases: after a gap, leases that expired in it get one
-- more lease, because their workers had nobody to send a heartbeat to.
create table reaper_state (
    only_row boolean primary key default true check (only_row),
    last_pass_at timestamptz not null default now()
);
insert into reaper_state default values;
