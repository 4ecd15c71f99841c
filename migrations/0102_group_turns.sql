-- Whether groups of the queue take turns, where their jobs have no order; and after which job the
-- walk over its jobs goes on that follows a change of that. Null: none is under way.
alter table queues
add column group_fair boolean not null default false,
add column group_walk_job uuid;

-- Whether claims find it by its group. Null: as other jobs.
alter table jobs add column takes_turns boolean;

-- Groups of queues in which groups take turns. Claims change them under the lock of the queue.
create table group_turns (
    project_id integer not null,
    queue text not null,
    -- Empty: the jobs without a group.
    group_key text not null,
    -- Its turn comes before those that have more: it grows by 1 / weight with each job that starts.
    turn double precision not null default 0,
    -- It has come into line since it started a job last.
    is_new boolean not null default true,
    -- Null: it is in line. Else claims do not look at it before.
    rest_until timestamptz,
    -- It has had no job to start since then.
    empty_since timestamptz,
    counted_bytes integer,
    primary key (project_id, queue, group_key)
) with (fillfactor = 70);
create index group_turns_in_line on group_turns (project_id, queue, turn, group_key)
where rest_until is null;
create index group_turns_by_rest on group_turns (rest_until) where rest_until is not null;

create trigger texts_counted before insert on group_turns for each row
execute function count_texts('queue', 'group_key');
create trigger bytes_added after insert on group_turns for each row
execute function note_counted_bytes();
create trigger bytes_removed after delete on group_turns for each row
when (old.counted_bytes is not null) execute function note_counted_bytes();

-- Rules of one group, in place of those of its queue.
create table group_overrides (
    project_id integer not null,
    queue text not null,
    group_key text not null,
    weight smallint not null check (weight between 1 and 100),
    -- Null: as the queue says.
    max_running integer check (max_running between 1 and 100000),
    rate_counts integer[],
    rate_seconds integer[],
    -- Null: until it is reset.
    expires_at timestamptz,
    updated_at timestamptz not null default now(),
    counted_bytes integer,
    primary key (project_id, queue, group_key)
);
create index group_overrides_by_end on group_overrides (expires_at) where expires_at is not null;

create trigger texts_counted before insert on group_overrides for each row
execute function count_texts('queue', 'group_key');
create trigger bytes_added after insert on group_overrides for each row
execute function note_counted_bytes();
create trigger bytes_removed after delete on group_overrides for each row
when (old.counted_bytes is not null) execute function note_counted_bytes();
