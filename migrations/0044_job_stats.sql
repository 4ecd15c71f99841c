-- How many jobs of a type came and went, how long they waited and how long they ran: by minute, by hour, and
-- since the beginning. Nodes add what they have seen every few seconds; a node that is killed in between leaves
-- that much out. Jobs are never counted from here.
create table job_stats (
    project_id integer not null,
    -- minute, hour, total.
    resolution text not null check (resolution in ('minute', 'hour', 'total')),
    -- When the minute or the hour began; of a total: the epoch.
    at timestamptz not null,
    queue text not null,
    job_type text not null,
    enqueued bigint not null default 0,
    claimed bigint not null default 0,
    succeeded bigint not null default 0,
    -- Attempts, not jobs: these four.
    failed bigint not null default 0,
    timed_out bigint not null default 0,
    lease_expired bigint not null default 0,
    released bigint not null default 0,
    dead_lettered bigint not null default 0,
    cancelled bigint not null default 0,
    -- From when a job could first run to its first lease.
    wait_ms bigint not null default 0,
    wait_buckets bigint[] not null,
    -- From lease to end, of attempts that were acknowledged.
    run_ms bigint not null default 0,
    run_buckets bigint[] not null,
    since timestamptz not null default now(),
    -- To the hour.
    updated_at timestamptz not null default now(),
    primary key (project_id, resolution, at, queue, job_type)
) with (fillfactor = 70);
-- Pruned by age, across projects.
create index job_stats_by_age on job_stats (resolution, updated_at);
