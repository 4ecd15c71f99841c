-- Limits that several queues of a project keep together.
create table shared_limits (
    project_id integer not null,
    name text not null,
    -- Each group has the limit for itself; else all jobs together.
    by_group boolean not null,
    max_running integer check (max_running between 1 and 100000),
    rate_counts integer[],
    rate_seconds integer[],
    -- Queues that name it. Those who change what a queue names change this as well.
    queues text[] not null default '{}',
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
    -- Until then they let nothing start. Null: they let some start.
    full_until timestamptz,
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
            else coalesce(
                date_bin('1 minute', greatest(starts_end_at, paused_until, expires_at), 'epoch'),
                'epoch'
            )
        end
    ) stored,
    counted_bytes integer,
    primary key (project_id, limit_name, group_key)
) with (fillfactor = 70);
create index shared_limit_keys_by_end on shared_limit_keys (ends_at) where ends_at is not null;
create index shared_limit_keys_by_expiry on shared_limit_keys (expires_at)
where expires_at is not null;
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

-- Other queues of the project with a limit of this one that each group has for itself.
create function queues_sharing_groups(of_project integer, of_queue text) returns setof text
language plpgsql stable as $$
begin
    return query
        select distinct other.name
        from queues named
        join shared_limits shared on shared.project_id = of_project
            and shared.name = any(named.shared_limits) and shared.by_group
        cross join lateral unnest(shared.queues) as other(name)
        where named.project_id = of_project and named.name = of_queue
            and named.shared_limits is not null and other.name <> of_queue;
end
$$;

-- Until when a pause or the rates of limits that its queue shares let nothing of a group start.
-- Null: they let some start.
create function shared_limits_hold_until(of_project integer, of_queue text, of_group text)
returns timestamptz language plpgsql stable as $$
begin
    return (
        -- By numbers of its own that have ended it is not full.
        select max(greatest(known.paused_until, case
                   when known.expires_at > statement_timestamp() or known.expires_at is null
                   then known.full_until
               end))
        from queues named
        join shared_limit_keys known on known.project_id = of_project
            and known.limit_name = any(named.shared_limits) and known.group_key = of_group
        where named.project_id = of_project and named.name = of_queue
            and named.shared_limits is not null and of_group <> ''
            and greatest(known.full_until, known.paused_until) > statement_timestamp()
    );
end
$$;

-- Notes a group of which an attempt has ended, if the rules of its queue let jobs of it wait for
-- that. Returns whether it was noted.
create or replace function note_group_with_rules(
    of_project integer, of_queue text, of_group text
) returns boolean language plpgsql as $$
begin
    if not exists (
        select from queues
        where project_id = of_project and name = of_queue and has_gate and (
            group_order = 'strict' or group_max_running is not null
            or group_rate_counts is not null or group_fair and exists (
                select from group_overrides
                where project_id = of_project and queue = of_queue and group_key = of_group
                    and (max_running is not null or rate_counts is not null)
            ) or group_fair and shared_limits is not null and exists (
                select from shared_limits shared
                where shared.project_id = of_project and shared.name = any(queues.shared_limits)
                    and shared.by_group
            ) or exists (
                select from job_groups
                where project_id = of_project and queue = of_queue and group_key = of_group
                    and paused_until > statement_timestamp()
            )
        )
    ) then
        return false;
    end if;
    insert into group_notes (project_id, queue, group_key) values (of_project, of_queue, of_group);
    return true;
end
$$;
