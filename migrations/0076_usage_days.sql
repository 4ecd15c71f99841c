-- What a project used, by day (UTC). Days that are too old are added to `usage_months`.
create table usage_days (
    project_id integer not null,
    day date not null,
    enqueued bigint not null default 0,
    -- Attempts that began.
    claimed bigint not null default 0,
    succeeded bigint not null default 0,
    dead_lettered bigint not null default 0,
    -- Calls of the API.
    requests bigint not null default 0,
    -- Time that polls of workers took.
    poll_ms bigint not null default 0,
    log_bytes bigint not null default 0,
    -- Stored bytes, looked at once an hour.
    byte_hours bigint not null default 0,
    primary key (project_id, day)
) with (
    -- Room for updates that stay in their page.
    fillfactor = 70
);
-- Reports across projects, and days that are too old.
create index usage_days_by_day on usage_days (day, project_id);

-- The hour whose stored bytes nodes add to `usage_days`, a page of projects after the other.
create table usage_hour (
    is_only boolean primary key default true check (is_only),
    hour timestamptz not null,
    -- Projects up to this one have been added; none: all of them.
    after_project integer
);
insert into usage_hour (hour) values (date_trunc('hour', now()));
