-- Whether groups of a queue take turns.
create function takes_turns(of_project integer, of_queue text) returns boolean
language plpgsql stable as $$
begin
    return exists (
        select from queues
        where project_id = of_project and name = of_queue and group_fair
            and group_order <> 'strict'
    );
end
$$;

-- Notes a group with a job that may start, if its queue takes turns and the group is not in line.
-- Null: the jobs without a group. One that rests because of a limit or a pause comes back with its
-- end. Returns whether it was noted.
create function note_turn(of_project integer, of_queue text, of_group text) returns boolean
language plpgsql as $$
begin
    if takes_turns(of_project, of_queue) and not exists (
        select from group_turns
        where project_id = of_project and queue = of_queue
            and group_key = coalesce(of_group, '') and empty_since is null
    ) then
        insert into group_notes (project_id, queue, group_key)
        values (of_project, of_queue, coalesce(of_group, ''));
        return true;
    end if;
    return false;
end
$$;

-- Whether a group has a job that may start, in a queue that takes turns. Empty: the jobs without a
-- group.
create function has_turn_jobs(of_project integer, of_queue text, of_group text) returns boolean
language plpgsql stable as $$
begin
    return exists (
        select from jobs
        where project_id = of_project and queue = of_queue
            and coalesce(group_key, '') = of_group and takes_turns and state = 'pending'
    );
end
$$;

-- A job that a claim may take.
create type job_in_turn as (
    id uuid, rank smallint, run_at timestamptz, concurrency_key text, concurrency_limit integer
);

-- The best jobs of a group that a claim may take, `wanted` without a constraint key and as many of
-- each of some keys: the first after `after_key`, and from the least one on. No more than
-- `examined` others are passed over: they have another type, or have expired. Of all types: `types`
-- is empty. An empty group: the jobs without a group.
create function jobs_in_turn_of(
    of_project integer, of_queue text, of_group text, wanted bigint, examined bigint,
    types text[], paused text[], of_labels text[], after_key uuid, keys bigint
) returns setof job_in_turn language plpgsql stable as $$
declare
    key uuid := after_key;
    found integer := 0;
    has_turned boolean := false;
begin
    return query
        select near.id, near.rank, near.run_at, null::text, null::integer
        from (
            select jobs.*
            from jobs
            where project_id = of_project and queue = of_queue
                and coalesce(group_key, '') = of_group and constraint_key is null
                and takes_turns and state = 'pending'
            order by coalesce(group_key, ''), constraint_key, rank, run_at, id
            limit wanted + examined
        ) near
        where (cardinality(types) = 0 or job_type = any(types)) and job_type <> all(paused)
            and (expires_at is null or expires_at > statement_timestamp())
        limit wanted;
    while found < keys loop
        select constraint_key into key
        from jobs
        where project_id = of_project and queue = of_queue
            and coalesce(group_key, '') = of_group and constraint_key > key
            and takes_turns and state = 'pending'
        order by coalesce(group_key, ''), constraint_key
        limit 1;
        exit when has_turned and (key is null or key > after_key);
        if key is null then
            -- Past the last one: from the first one on.
            key := '00000000-0000-0000-0000-000000000000';
            has_turned := true;
            continue;
        end if;
        found := found + 1;
        return query
            select jobs.id, jobs.rank, jobs.run_at, jobs.concurrency_key, jobs.concurrency_limit
            from jobs
            where project_id = of_project and queue = of_queue
                and coalesce(group_key, '') = of_group and jobs.constraint_key = key
                and takes_turns and state = 'pending'
                and (cardinality(types) = 0 or job_type = any(types))
                and job_type <> all(paused) and (labels is null or labels <@ of_labels)
                and (expires_at is null or expires_at > statement_timestamp())
            order by coalesce(jobs.group_key, ''), jobs.constraint_key, jobs.rank, jobs.run_at,
                     jobs.id
            limit wanted;
    end loop;
end
$$;
