-- All that a schedule can say of its jobs, and when it fires next.
alter table recurring_schedules
    -- Opaque: the bytes that were sent.
    add column payload text not null default 'null',
    -- Minus the priority, as in jobs.
    add column rank smallint not null default 0,
    add column retry jsonb,
    add column overlap text not null default 'allow'
        check (overlap in ('allow', 'skip', 'queue_one', 'cancel_previous')),
    add column catch_up text not null default 'one' check (catch_up in ('none', 'one', 'all')),
    -- Each job starts up to so much later than its tick, so that not all schedules start at once.
    add column spread_seconds integer not null default 0,
    -- Ticks until then are dealt with; the next comes after it. Null: as of now.
    add column last_tick timestamptz,
    -- The next tick; null: to be found out, or the schedule is paused.
    add column next_tick timestamptz,
    -- Why it will never fire again; null: it will.
    add column problem text;
