-- Workers, by the names that they give themselves.

create table workers (
    project_id integer not null,
    worker_id text not null,
    -- What it registered, or else polled last.
    queues text[] not null,
    job_types text[] not null,
    -- As it registered, for people.
    hostname text,
    sdk_version text,
    concurrency integer not null,
    pid integer,
    registered_at timestamptz not null default now(),
    -- Its last call, to within some seconds.
    last_seen_at timestamptz not null default now(),
    -- Labels of polls that name none.
    labels text[] not null default '{}',
    -- As the worker reported.
    state text not null default 'running'
        check (state in ('running', 'quiet', 'terminate', 'terminated')),
    -- As people told it. Null: none.
    -- 'running' resumes a worker, until it says that it runs.
    directive text check (directive in ('running', 'quiet', 'terminate')),
    -- Its last heartbeat for all of its jobs. Null: it sends none, so its silence means nothing.
    last_beat_at timestamptz,
    -- When it timed out and its leases were ended.
    lost_at timestamptz,
    -- False: known by its polls only.
    is_registered boolean not null default true,
    -- When labels, directive or state changed: other nodes drop what they cached.
    changed_at timestamptz not null default '-infinity',
    primary key (project_id, worker_id)
);
-- Workers that can time out, across projects.
create index workers_beating on workers (last_beat_at)
where last_beat_at is not null and lost_at is null and state <> 'terminated';
-- What other nodes changed, across projects.
create index workers_changed on workers (changed_at);
-- Retention.
create index workers_by_age on workers (last_seen_at);
