-- True: it waits for its group, which counts as one of its parents. False: its group let it run.
-- Null: it never had to wait.
alter table jobs add column waits_for_group boolean;
-- Whether jobs of a group run in their order in this queue.
create function has_strict_order(of_project integer, of_queue text) returns boolean
language sql stable as $$
    select exists (
        select from queues
        where project_id = of_project and name = of_queue and group_order = 'strict'
    )
$$;

-- Notes a group. A function, because each insert of a statement costs it, also if there is nothing
-- to insert.
create function note_group(of_project integer, of_queue text, of_group text) returns boolean
language plpgsql as $$
begin
    insert into group_notes (project_id, queue, group_key) values (of_project, of_queue, of_group);
    return true;
end
$$;

-- Notes a group whose jobs must wait for it, as one of them has ended or waits again. Returns whether
-- it is noted.
create function note_group_with_rules(
    of_project integer, of_queue text, of_group text
) returns boolean language plpgsql as $$
begin
    if not exists (
        select from queues where project_id = of_project and name = of_queue and has_gate
    ) or not must_wait_for_group(of_project, of_queue, of_group) then
        return false;
    end if;
    return note_group(of_project, of_queue, of_group);
end
$$;

-- Whether claims may take a job of a group: not while the group is paused, and in a queue with
-- strict order only a job that its group let run, while no other runs: the group may have let it
-- run before its queue had no order for a while.
create function group_may_start(
    of_project integer, of_queue text, of_group text, waits_for_group boolean
) returns boolean language sql stable as $$
    select (
        not has_strict_order(of_project, of_queue) or waits_for_group is false and not exists (
            select
            from jobs running
            where running.project_id = of_project and running.queue = of_queue
                and running.group_key = of_group and running.group_key is not null
                and running.waits_for_group is not true and running.completed_at is null
                and running.lease_id is not null
        )
    ) and not exists (
        select from job_groups
        where project_id = of_project and queue = of_queue and group_key = of_group
            and paused_until > statement_timestamp()
    )
$$;

-- Whether a job of a group that is stored in a queue with a gate waits for it.
create function must_wait_for_group(
    of_project integer, of_queue text, of_group text
) returns boolean language sql stable as $$
    select has_strict_order(of_project, of_queue) or exists (
        select from job_groups
        where project_id = of_project and queue = of_queue and group_key = of_group
            and paused_until > statement_timestamp()
    )
$$;

-- The next group of a queue: with jobs that wait for it, with others that have not ended, that is
-- paused, or that a dead letter blocks.
create function next_listed_group(
    of_project integer, of_queue text, after_group text, waiting boolean, open boolean,
    paused boolean, blocked boolean
) returns text language sql stable as $$
    select least(case when waiting then (
        select group_key
        from jobs
        where project_id = of_project and queue = of_queue and group_key > after_group
            and waits_for_group
        order by group_key
        limit 1
    ) end, case when open then (
        select group_key
        from jobs
        where project_id = of_project and queue = of_queue and group_key > after_group
            and group_key is not null and waits_for_group is not true and completed_at is null
        order by group_key
        limit 1
    ) end, case when paused then (
        select group_key
        from job_groups
        where project_id = of_project and queue = of_queue and group_key > after_group
            and paused_until > statement_timestamp()
        order by group_key
        limit 1
    ) end, case when blocked and exists (
        select from queues
        where project_id = of_project and name = of_queue and group_order = 'strict'
            and group_on_dead = 'block'
    ) then (
        select group_key
        from jobs
        where project_id = of_project and queue = of_queue and group_key > after_group
            and group_place is not null and completed_at is not null
        order by group_key
        limit 1
    ) end)
$$;
