-- Statistics of a project: by queue and job type, for minutes, hours, and in total.

-- Nodes add what they counted in memory every few seconds; a killed node loses that much. Depths
-- never come from here.
create table job_stats (
    project_id integer not null,
    resolution text not null check (resolution in ('minute', 'hour', 'total')),
    -- The beginning of the minute or hour; of a total: the epoch.
    at timestamptz not null,
    queue text not null,
    job_type text not null,
    enqueued bigint not null default 0,
    claimed bigint not null default 0,
    succeeded bigint not null default 0,
    -- These four count attempts, not jobs.
    failed bigint not null default 0,
    timed_out bigint not null default 0,
    lease_expired bigint not null default 0,
    released bigint not null default 0,
    dead_lettered bigint not null default 0,
    cancelled bigint not null default 0,
    -- From when jobs could first run to their first lease: sum and histogram.
    wait_ms bigint not null default 0,
    wait_buckets bigint[] not null,
    -- From lease to end, of attempts that were acknowledged: sum and histogram.
    run_ms bigint not null default 0,
    run_buckets bigint[] not null,
    -- When the row was created: a total counts from then.
    since timestamptz not null default now(),
    -- To the hour, so that most updates change no index.
    updated_at timestamptz not null default now(),
    primary key (project_id, resolution, at, queue, job_type)
) with (
    -- Room for updates that stay in their page.
    fillfactor = 70
);
-- Retention.
create index job_stats_by_age on job_stats (resolution, updated_at);

-- What a project used, by month (UTC). Statistics of hours are not kept for as long.
create table usage_months (
    project_id integer not null,
    -- Its first day.
    month date not null,
    enqueued bigint not null default 0,
    -- Attempts that began.
    claimed bigint not null default 0,
    succeeded bigint not null default 0,
    dead_lettered bigint not null default 0,
    primary key (project_id, month)
);
