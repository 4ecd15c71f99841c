-- Recurring schedules and their ticks.

create table recurring_schedules (
    project_id integer not null,
    -- `rjob_…`, or as the caller chose.
    id text not null,
    -- What each job gets: type, queue, policy, payload.
    job_type text not null,
    cron_expression text not null,
    -- IANA name: the expression is read in it.
    timezone text not null default 'UTC',
    queue text not null default 'default',
    max_attempts integer not null default 3,
    timeout_seconds integer not null default 1800,
    is_paused boolean not null default false,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    -- The bytes that were sent.
    payload text not null default 'null',
    -- Minus the priority, as in `jobs`.
    rank smallint not null default 0,
    -- Null: the queue's or the default policy.
    retry jsonb,
    -- What a tick does while the job of an earlier one is live.
    overlap text not null default 'allow'
        check (overlap in ('allow', 'skip', 'queue_one', 'cancel_previous')),
    -- Which missed ticks fire late.
    catch_up text not null default 'one' check (catch_up in ('none', 'one', 'all')),
    -- Each job starts up to so much later than its tick, so that not all start at once.
    spread_seconds integer not null default 0,
    -- Ticks until then are settled. Null: those before now.
    last_tick timestamptz,
    -- Null: to be computed, or the schedule is paused or never fires.
    next_tick timestamptz,
    -- A worker registered it, and it was not written by other means since: registrations may
    -- change it.
    is_registered boolean not null default false,
    -- Why it never fires again. Null: it does.
    problem text,
    primary key (project_id, id)
);
-- Due ticks, across projects.
create index recurring_schedules_due on recurring_schedules (next_tick)
where next_tick is not null;
-- Schedules whose next tick is to be computed.
create index recurring_schedules_unplanned on recurring_schedules (project_id, id)
where next_tick is null and problem is null and not is_paused;

-- The outcome of each tick. Its key makes a tick fire once on any number of nodes.
create table schedule_fires (
    project_id integer not null,
    schedule_id text not null,
    -- When it was due.
    tick timestamptz not null,
    outcome text not null check (outcome in ('fired', 'skipped_overlap', 'missed', 'manual')),
    -- Null: no job was created.
    job_id uuid,
    -- Ticks that the row stands for: many missed ones share a row.
    ticks bigint not null default 1,
    -- When it was decided.
    at timestamptz not null default now(),
    primary key (project_id, schedule_id, tick)
);
-- The last tick that fired, among many that were skipped.
create index schedule_fires_fired on schedule_fires (project_id, schedule_id, tick)
where outcome = 'fired';
-- Alarms about missed ticks.
create index schedule_fires_missed on schedule_fires (project_id, at) where outcome = 'missed';
-- Retention.
create index schedule_fires_by_age on schedule_fires (at);
