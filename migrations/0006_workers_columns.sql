-- A worker's life: what it says of itself, what it was told, and when it was last heard.
alter table workers
    add column labels text[] not null default '{}',
    -- As the worker says: running, quiet, terminate, terminated.
    add column state text not null default 'running'
        check (state in ('running', 'quiet', 'terminate', 'terminated')),
    -- What somebody told it; null: go on.
    add column directive text check (directive in ('quiet', 'terminate')),
    -- Its last heartbeat for all of its jobs; null: it sends none, and its silence means nothing.
    add column last_beat_at timestamptz,
    -- When its silence was noticed and its leases ended.
    add column lost_at timestamptz,
    -- Whether it has introduced itself; otherwise it is known by its polls.
    add column is_registered boolean not null default true,
    -- When its labels, its directive or its life last changed: other nodes look for it.
    add column changed_at timestamptz not null default '-infinity';
