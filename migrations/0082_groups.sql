-- Groups of a queue that are paused.
create table job_groups (
    project_id integer not null,
    queue text not null,
    group_key text not null,
    paused_at timestamptz not null default now(),
    -- Infinity: until it is resumed.
    paused_until timestamptz not null,
    counted_bytes integer,
    primary key (project_id, queue, group_key)
);
create index job_groups_by_end on job_groups (paused_until) where paused_until < 'infinity';

create trigger texts_counted before insert on job_groups for each row
execute function count_texts('queue', 'group_key');
create trigger bytes_added after insert on job_groups for each row
execute function note_counted_bytes();
create trigger bytes_removed after delete on job_groups for each row
when (old.counted_bytes is not null) execute function note_counted_bytes();

-- Groups to look at: a job of theirs waits, or makes room. Rows without a key, so that no
-- transaction waits for a group that many use.
create table group_notes (
    project_id integer not null,
    queue text not null,
    group_key text not null,
    -- The transaction that noted it: a bigint, because block ranges cannot index an xid8.
    made_by bigint not null default pg_current_xact_id()::text::bigint
) with (
    -- Every note is soon dead: vacuum by their number.
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0
);
-- However many notes cannot be removed yet, while a dump runs.
create index group_notes_by_transaction on group_notes using brin (made_by)
with (pages_per_range = 16, autosummarize = on);
