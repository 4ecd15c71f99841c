-- What a background loop could not process.

-- One row that fails must not stop the rows of other tenants: it is set aside here, and tried again
-- later. A success deletes it.
create table set_aside (
    project_id integer not null,
    -- The work that failed: `tick`, `plan`, `promote`, `reap`, `cascade`, `expire`, `lost_worker`,
    -- `retention`, `counts`, `callbacks`, `events` or `alarms`.
    work text not null,
    -- What failed: the id of a schedule, job, worker or event, the name of a queue, or `all`.
    item text not null,
    -- The database's message.
    problem text not null,
    tries integer not null default 1,
    first_failed_at timestamptz not null default now(),
    -- The loops skip the item until then.
    next_try_at timestamptz not null,
    primary key (project_id, work, item)
);
-- Deletes what is not tried any more, because the item itself is gone; across projects.
create index set_aside_by_time on set_aside (next_try_at);
