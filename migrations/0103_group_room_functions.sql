-- Whether a due job of a group waits for room in it, in a queue that limits how many run or start.
-- Fewer than that are pending beside those that run: claims count exactly, so a job too many does
-- no harm. A job that is `alone` is the only one of its group in its statement. Null: no limit.
create function waits_for_room(
    of_project integer, of_queue text, of_group text, alone boolean
) returns boolean language plpgsql stable as $$
declare
    most integer;
begin
    select least(group_max_running, case when group_rate_counts is not null then coalesce((
               select room
               from group_handouts
               where project_id = of_project and queue = of_queue and group_key = of_group
           ), (select min(count) from unnest(group_rate_counts) as count)) end) into most
    from queues
    where project_id = of_project and name = of_queue and group_order <> 'strict'
        and not group_fair;
    if most is null then
        return null;
    end if;
    return alone is not true or exists (
        select from jobs
        where project_id = of_project and queue = of_queue and group_key = of_group
            and waits_for_group
    ) or most <= (
        select count(*)
        from (
            select from jobs
            where project_id = of_project and queue = of_queue and group_key = of_group
                and waits_for_group is false and state = 'pending'
            limit most
        ) admitted
    );
end
$$;

-- What `waits_for_group` is for a new job in a queue with a gate. Where the order is strict, a job
-- that is `alone` may run at once if its group has no other: the lock keeps everybody else from
-- deciding about the group before this transaction has ended, and a group in use is not locked.
-- Where its queue limits its groups, a job that is not due waits for no room: it has to when it
-- is due. Where groups take turns, no job waits: claims choose among their groups.
create function wait_of_new_job(
    of_project integer, of_queue text, of_group text, alone boolean, is_due boolean
) returns boolean language plpgsql volatile as $$
declare
    setting record;
begin
    select group_order, group_on_dead = 'block' as dead_blocks, group_fair,
           group_max_running is not null or group_rate_counts is not null as is_limited, exists (
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
        return case when setting.is_limited and is_due and not setting.group_fair
            then waits_for_room(of_project, of_queue, of_group, alone)
        end;
    end if;
    return alone is not true
        or has_group_jobs(of_project, of_queue, of_group, setting.dead_blocks)
        or not pg_try_advisory_xact_lock(group_lock(of_project, of_queue, of_group))
        or has_group_jobs(of_project, of_queue, of_group, setting.dead_blocks);
end
$$;
drop function wait_of_new_job(integer, text, text, boolean);

create or replace function must_wait_for_group(
    of_project integer, of_queue text, of_group text
) returns boolean language plpgsql stable as $$
begin
    return exists (
        select from queues
        where project_id = of_project and name = of_queue and (
            group_order = 'strict' or not group_fair and (
                group_max_running is not null or group_rate_counts is not null
            )
        )
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
            group_order = 'strict' or group_max_running is not null
            or group_rate_counts is not null or group_fair and exists (
                select from group_overrides
                where project_id = of_project and queue = of_queue and group_key = of_group
                    and (max_running is not null or rate_counts is not null)
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
