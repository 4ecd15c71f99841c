-- Recent starts of groups whose queue limits their rate. Claims change them under the lock of the
-- queue.
create table group_handouts (
    project_id integer not null,
    queue text not null,
    group_key text not null,
    -- Pairs of microseconds since 1970 and a number of jobs, oldest first.
    starts jsonb not null,
    -- Starts that were left after the last one.
    room integer not null,
    -- When the next job may start, after which all windows are empty, and when admission looks at
    -- the group.
    full_until timestamptz,
    ends_at timestamptz not null,
    look_at timestamptz not null,
    counted_bytes integer,
    primary key (project_id, queue, group_key)
) with (fillfactor = 70);
create index group_handouts_by_look on group_handouts (look_at);

create trigger texts_counted before insert on group_handouts for each row
execute function count_texts('queue', 'group_key');
create trigger bytes_added after insert on group_handouts for each row
execute function note_counted_bytes();
create trigger bytes_removed after delete on group_handouts for each row
when (old.counted_bytes is not null) execute function note_counted_bytes();
