-- Limits that several queues of a project keep together.
create table shared_limits (
    project_id integer not null,
    name text not null,
    -- Each group has the limit for itself; else all jobs together.
    by_group boolean not null,
    max_running integer check (max_running between 1 and 100000),
    rate_counts integer[],
    rate_seconds integer[],
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    counted_bytes integer,
    primary key (project_id, name)
);

create trigger texts_counted before insert on shared_limits for each row
execute function count_texts('name');
create trigger bytes_added after insert on shared_limits for each row
execute function note_counted_bytes();
create trigger bytes_removed after delete on shared_limits for each row
when (old.counted_bytes is not null) execute function note_counted_bytes();

-- What is known of a key of a limit: of all jobs, or of one group.
create table shared_limit_keys (
    project_id integer not null,
    limit_name text not null,
    -- Empty: all jobs.
    group_key text not null,
    -- Recent starts: pairs of microseconds since 1970 and a number of jobs, oldest first; and when
    -- all windows are empty. Claims change them under the lock of the limit.
    starts jsonb,
    starts_end_at timestamptz,
    paused_until timestamptz,
    -- Numbers of its own, in place of those of the limit, and when they end. Null: as the limit
    -- says; until they are reset.
    max_running integer check (max_running between 1 and 100000),
    rate_counts integer[],
    rate_seconds integer[],
    expires_at timestamptz,
    -- The minute in which nothing is left to know. Most claims leave it as it is, and then they
    -- write no entry of an index. Null: it is kept.
    ends_at timestamptz generated always as (
        case
            when expires_at is null and (max_running is not null or rate_counts is not null)
            then null
            else date_bin('1 minute', greatest(starts_end_at, paused_until, expires_at), 'epoch')
        end
    ) stored,
    counted_bytes integer,
    primary key (project_id, limit_name, group_key)
) with (fillfactor = 70);
create index shared_limit_keys_by_end on shared_limit_keys (ends_at) where ends_at is not null;
create index shared_limit_keys_own on shared_limit_keys (project_id)
where max_running is not null or rate_counts is not null;

create trigger texts_counted before insert on shared_limit_keys for each row
execute function count_texts('limit_name', 'group_key');
create trigger bytes_added after insert on shared_limit_keys for each row
execute function note_counted_bytes();
create trigger bytes_removed after delete on shared_limit_keys for each row
when (old.counted_bytes is not null) execute function note_counted_bytes();

-- Names of the limits that its jobs count under. Null: none.
alter table queues add column shared_limits text[];
create index queues_with_shared_limits on queues (project_id, name) where shared_limits is not null;

-- Other queues of the project with a limit of this one that each group has for itself.
create function queues_sharing_groups(of_project integer, of_queue text) returns setof text
language plpgsql stable as $$
begin
    return query
        select distinct other.name
        from queues named
        join shared_limits shared on shared.project_id = of_project and shared.by_group
            and shared.name = any(named.shared_limits)
        join queues other on other.project_id = of_project and other.shared_limits is not null
            and shared.name = any(other.shared_limits)
        where named.project_id = of_project and named.name = of_queue
            and named.shared_limits is not null and other.name <> of_queue;
end
$$;
