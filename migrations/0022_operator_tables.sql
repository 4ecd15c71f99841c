-- What an operator looks at and works with: how many jobs are where, what was given up and why, what
-- is under way in bulk, and what was fired when.

-- How many jobs of a queue are in which state. `active` are those that are pending, in backoff or
-- processing: a claim changes nothing here.
create table queue_counts (
    project_id integer not null,
    queue text not null,
    scheduled bigint not null default 0,
    active bigint not null default 0,
    backoff bigint not null default 0,
    dead_letter bigint not null default 0,
    succeeded bigint not null default 0,
    cancelled bigint not null default 0,
    updated_at timestamptz not null default now(),
    primary key (project_id, queue)
);

-- What statements have changed and nobody has added up yet. Insert-only, and without any index: whoever
-- adds up takes all, and whoever reads counts adds what is left.
create table queue_deltas (
    project_id integer not null,
    queue text not null,
    at timestamptz not null default now(),
    scheduled bigint not null default 0,
    active bigint not null default 0,
    backoff bigint not null default 0,
    dead_letter bigint not null default 0,
    succeeded bigint not null default 0,
    cancelled bigint not null default 0,
    enqueued bigint not null default 0,
    failed bigint not null default 0
) with (
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0
);

-- What happened in each minute of the last hours.
create table queue_rates (
    project_id integer not null,
    queue text not null,
    minute timestamptz not null,
    enqueued bigint not null default 0,
    succeeded bigint not null default 0,
    -- Attempts, not jobs.
    failed bigint not null default 0,
    primary key (project_id, queue, minute)
);
-- Pruned by age, across projects.
create index queue_rates_by_age on queue_rates (minute);

-- When jobs of a queue with a rate limit were last handed out: enough to say when the next may be.
create table queue_handouts (
    project_id integer not null,
    queue text not null,
    at timestamptz[] not null,
    jobs integer[] not null,
    primary key (project_id, queue),
    check (cardinality(at) = cardinality(jobs))
);

-- Types of jobs that are paused in a queue, and those that are about to be.
create table queue_types (
    project_id integer not null,
    queue text not null,
    job_type text not null,
    -- Dead letters since the last success.
    streak integer not null default 0,
    paused_at timestamptz,
    -- operator, brake; null: not paused.
    paused_by text check (paused_by in ('operator', 'brake')),
    primary key (project_id, queue, job_type),
    check ((paused_at is null) = (paused_by is null))
);

-- Jobs that were given up: what they are found and grouped by. The jobs themselves stay in `jobs`.
create table dead_letters (
    project_id integer not null,
    job_id uuid not null,
    -- What they have in common that failed alike: type of job, type of error, message without numbers.
    fingerprint uuid not null,
    queue text not null,
    job_type text not null,
    died_at timestamptz not null default now(),
    primary key (project_id, job_id)
);
create index dead_letters_by_age on dead_letters (project_id, died_at, job_id);
create index dead_letters_by_fingerprint on dead_letters (project_id, fingerprint, died_at, job_id);

create table dead_letter_groups (
    project_id integer not null,
    fingerprint uuid not null,
    job_type text not null,
    error_type text,
    -- The first that was seen, as it was sent.
    sample_message text,
    sample_job_id uuid not null,
    jobs bigint not null default 0,
    first_seen_at timestamptz not null default now(),
    last_seen_at timestamptz not null default now(),
    primary key (project_id, fingerprint)
);
create index dead_letter_groups_by_age on dead_letter_groups (project_id, last_seen_at, fingerprint);

-- Work on many jobs that goes on in the background.
create table operations (
    project_id integer not null,
    id uuid not null,
    kind text not null,
    state text not null default 'running'
        check (state in ('running', 'succeeded', 'failed', 'aborted')),
    -- Which jobs, as the request said.
    filter jsonb not null,
    -- Jobs there seemed to be at the beginning; null: more than were counted.
    expected bigint,
    done bigint not null default 0,
    skipped bigint not null default 0,
    -- No more than this; null: all.
    max_jobs bigint,
    rate_per_second integer,
    -- Where the next step begins.
    after_at timestamptz,
    after_id uuid,
    -- Steps that failed in a row, and how the last one did.
    failed_steps integer not null default 0,
    last_error text,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    ended_at timestamptz,
    -- When the next step is due; null when it has ended.
    next_step_at timestamptz default now(),
    primary key (project_id, id),
    check ((state = 'running') = (next_step_at is not null))
);
-- Swept across projects: what is due.
create index operations_due on operations (next_step_at) where next_step_at is not null;
-- Pruned by age, across projects.
create index operations_by_age on operations (ended_at) where ended_at is not null;

-- What became of each tick of a schedule.
create table schedule_fires (
    project_id integer not null,
    schedule_id text not null,
    -- When it was due.
    tick timestamptz not null,
    outcome text not null check (outcome in ('fired', 'skipped_overlap', 'missed', 'manual')),
    job_id uuid,
    -- Ticks that it stands for: itself and, where many were missed, those before it that have no row.
    ticks bigint not null default 1,
    -- When it was dealt with.
    at timestamptz not null default now(),
    primary key (project_id, schedule_id, tick)
);
-- A schedule's last fires, among many ticks that were skipped.
create index schedule_fires_fired on schedule_fires (project_id, schedule_id, tick)
where outcome = 'fired';
-- Pruned by age, across projects.
create index schedule_fires_by_age on schedule_fires (at);
