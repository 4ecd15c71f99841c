-- Queues: their settings, limits and counts. A queue exists by its jobs; it needs no row here.

-- Settings, for queues that differ from the defaults. Null: the default, or no limit.
create table queues (
    project_id integer not null,
    name text not null,
    -- Jobs that run at a time.
    max_concurrency integer check (max_concurrency between 0 and 100000),
    -- Other nodes find what changed.
    updated_at timestamptz not null default now(),
    -- At most this many claims in that many seconds.
    rate_limit_count integer check (rate_limit_count between 1 and 100000),
    rate_limit_per_seconds integer check (rate_limit_per_seconds between 1 and 86400),
    -- Length of leases for polls that name none.
    default_lease_seconds integer check (default_lease_seconds between 1 and 86400),
    -- Finished jobs are deleted after this time.
    retention_days integer check (retention_days between 1 and 3650),
    -- For jobs that name none.
    default_max_attempts integer check (default_max_attempts between 1 and 100),
    default_retry jsonb,
    -- Consecutive dead letters of a job type after which the circuit breaker pauses it.
    brake_after integer check (brake_after between 1 and 10000),
    -- Enqueues are refused while this many jobs of the queue wait or run.
    max_waiting integer check (max_waiting between 1 and 10000000),
    -- The whole queue is paused since then.
    paused_at timestamptz,
    -- Paused job types, as in `queue_types`: claims read one row.
    paused_types text[] not null default '{}',
    -- Ordinary claims find nothing here: jobs of this queue are claimed under its limits.
    has_rules boolean not null generated always as (
        max_concurrency is not null or rate_limit_count is not null
        or default_lease_seconds is not null or paused_at is not null or paused_types <> '{}'
    ) stored,
    primary key (project_id, name),
    constraint queues_rate_limit_is_whole
        check ((rate_limit_count is null) = (rate_limit_per_seconds is null))
);
-- The probe: what other nodes changed, across projects.
create index queues_changed on queues (updated_at);
-- The probe: projects with a circuit breaker.
create index queues_with_breaker on queues (project_id) where brake_after is not null;
-- Admission of enqueues.
create index queues_with_bound on queues (project_id, name) where max_waiting is not null;

-- Job types that are paused in a queue, or have consecutive dead letters.
create table queue_types (
    project_id integer not null,
    queue text not null,
    job_type text not null,
    -- Dead letters since the last success.
    streak integer not null default 0,
    -- Null: not paused.
    paused_at timestamptz,
    -- Who paused it: `brake` is the circuit breaker.
    paused_by text check (paused_by in ('operator', 'brake')),
    primary key (project_id, queue, job_type),
    check ((paused_at is null) = (paused_by is null))
);

-- Alarms about circuit breakers.
create index queue_types_braked on queue_types (project_id) where paused_by = 'brake';

-- Recent claims of a queue with a rate limit: times and numbers of jobs.
create table queue_handouts (
    project_id integer not null,
    queue text not null,
    at timestamptz[] not null,
    jobs integer[] not null,
    primary key (project_id, queue),
    check (cardinality(at) = cardinality(jobs))
);

-- Jobs of a queue by state. `active` is pending, backoff and processing together, so that a claim
-- changes no count.
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

-- Changes that are not in `queue_counts` yet. Insert-only, so that writers do not wait for each
-- other: a loop merges all rows, and a reader of counts adds the rest.
create table queue_deltas (
    project_id integer not null,
    queue text not null,
    -- The transaction that made the change: a bigint, because block ranges cannot index an xid8.
    made_by bigint not null default pg_current_xact_id()::text::bigint,
    at timestamptz not null default now(),
    scheduled bigint not null default 0,
    active bigint not null default 0,
    backoff bigint not null default 0,
    dead_letter bigint not null default 0,
    succeeded bigint not null default 0,
    cancelled bigint not null default 0,
    -- Not a state: for `queue_rates`.
    enqueued bigint not null default 0,
    failed bigint not null default 0
) with (
    -- Every merged row is dead: vacuum by their number.
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0
);

-- The rest is found by it, however many merged rows cannot be removed yet: while a dump runs, these
-- are all rows since its begin. Block ranges cost a writer nothing, and every vacuum adds new ones.
create index queue_deltas_by_transaction on queue_deltas using brin (made_by)
with (pages_per_range = 16, autosummarize = on);

-- All changes made by transactions before this one are merged.
create table merged_deltas (
    only_one boolean primary key default true check (only_one),
    merged_before bigint not null
);
insert into merged_deltas (merged_before) values (0);

-- The changes that are not merged yet. A database that was restored from a dump counts transactions
-- anew: then `merged_before` may be in its future, and means nothing. The upper bound excludes
-- nothing: with two bounds the planner expects few rows, and uses the index.
create view unmerged_deltas with (security_invoker = true) as
select queue_deltas.*
from queue_deltas
where made_by >= (
    select case
        when merged_before <= pg_snapshot_xmin(pg_current_snapshot())::text::bigint
        then merged_before
        else 0
    end
    from merged_deltas
) and made_by < 9223372036854775807;

-- Jobs per minute, for the last hours.
create table queue_rates (
    project_id integer not null,
    queue text not null,
    -- Its beginning.
    minute timestamptz not null,
    enqueued bigint not null default 0,
    succeeded bigint not null default 0,
    -- Attempts, not jobs.
    failed bigint not null default 0,
    primary key (project_id, queue, minute)
);
-- Retention.
create index queue_rates_by_age on queue_rates (minute);
