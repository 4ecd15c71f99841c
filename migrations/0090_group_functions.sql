-- A function of plain SQL with a subquery is planned again by each statement that calls it; one of
-- plpgsql is planned once in a session. Enqueues, claims and ends call these.
create or replace function has_strict_order(of_project integer, of_queue text) returns boolean
language plpgsql stable as $$
begin
    return exists (
        select from queues
        where project_id = of_project and name = of_queue and group_order = 'strict'
    );
end
$$;

-- Whether a group is paused.
create function is_group_paused(of_project integer, of_queue text, of_group text) returns boolean
language plpgsql stable as $$
begin
    return exists (
        select from job_groups
        where project_id = of_project and queue = of_queue and group_key = of_group
            and paused_until > statement_timestamp()
    );
end
$$;

create or replace function must_wait_for_group(
    of_project integer, of_queue text, of_group text
) returns boolean language plpgsql stable as $$
begin
    return exists (
        select from queues
        where project_id = of_project and name = of_queue and group_order = 'strict'
    ) or exists (
        select from job_groups
        where project_id = of_project and queue = of_queue and group_key = of_group
            and paused_until > statement_timestamp()
    );
end
$$;

create or replace function note_group_with_rules(
    of_project integer, of_queue text, of_group text
) returns boolean language plpgsql as $$
begin
    if not exists (
        select from queues
        where project_id = of_project and name = of_queue and has_gate and (
            group_order = 'strict' or exists (
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

create or replace function group_may_start(
    of_project integer, of_queue text, of_group text, waits_for_group boolean
) returns boolean language plpgsql stable as $$
begin
    return not exists (
        select from job_groups
        where project_id = of_project and queue = of_queue and group_key = of_group
            and paused_until > statement_timestamp()
    ) and (
        not exists (
            select from queues
            where project_id = of_project and name = of_queue and group_order = 'strict'
        ) or waits_for_group is false and not exists (
            select
            from jobs running
            where running.project_id = of_project and running.queue = of_queue
                and running.group_key = of_group and running.group_key is not null
                and running.waits_for_group is not true and running.completed_at is null
                and running.lease_id is not null
        )
    );
end
$$;

-- Whether a dead letter of a queue blocks its group. One that does not gives up its place, so a
-- change of the rules blocks no group later.
create function dead_letters_block(of_project integer, of_queue text) returns boolean
language plpgsql stable as $$
begin
    return exists (
        select from queues
        where project_id = of_project and name = of_queue and group_order = 'strict'
            and group_on_dead = 'block'
    );
end
$$;

-- What an advisory lock of a group locks: who has it decides which of its jobs may run.
create function group_lock(of_project integer, of_queue text, of_group text) returns bigint
language sql immutable as $$
    select hashtextextended(
        'group ' || octet_length(of_queue) || ' ' || of_queue || of_group, of_project
    )
$$;

-- Whether a job waits for a group, may run or runs, or is a dead letter that keeps its place.
-- Volatile: it sees what was committed before this call, not before the statement.
create function has_group_jobs(
    of_project integer, of_queue text, of_group text, with_dead boolean
) returns boolean language plpgsql volatile as $$
begin
    return exists (
        select from jobs
        where project_id = of_project and queue = of_queue and group_key = of_group
            and waits_for_group
    ) or exists (
        select from jobs
        where project_id = of_project and queue = of_queue and group_key = of_group
            and group_key is not null and waits_for_group is not true and completed_at is null
    ) or with_dead and exists (
        select from jobs
        where project_id = of_project and queue = of_queue and group_key = of_group
            and group_place is not null and completed_at is not null
    );
end
$$;

-- What `waits_for_group` is for a new job in a queue with a gate. Where the order is strict, a job
-- that is `alone` may run at once if its group has no other: the lock keeps everybody else from
-- deciding about the group before this transaction has ended, and a group in use is not locked.
create function wait_of_new_job(
    of_project integer, of_queue text, of_group text, alone boolean
) returns boolean language plpgsql volatile as $$
declare
    setting record;
begin
    select group_order, group_on_dead = 'block' as dead_blocks, exists (
               select from job_groups
               where project_id = of_project and queue = of_queue and group_key = of_group
                   and paused_until > statement_timestamp()
           ) as is_paused into setting
    from queues
    where project_id = of_project and name = of_queue;
    if setting.is_paused then
        return true;
    end if;
    if setting.group_order is distinct from 'strict' then
        return null;
    end if;
    return alone is not true
        or has_group_jobs(of_project, of_queue, of_group, setting.dead_blocks)
        or not pg_try_advisory_xact_lock(group_lock(of_project, of_queue, of_group))
        or has_group_jobs(of_project, of_queue, of_group, setting.dead_blocks);
end
$$;
