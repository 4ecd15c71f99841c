-- An alarm about groups whose jobs wait for their group or its turn: by default a day, since limits
-- and an order are meant to let jobs wait.
alter table alarms
drop constraint alarms_rule_check,
add constraint alarms_rule_check check (rule in (
    'dead_letters', 'oldest_ready', 'workers_silent', 'groups_blocked', 'groups_waiting',
    'circuit_open', 'schedule_missed', 'endpoint_disabled', 'deliveries_dropped', 'push_failing',
    'key_expiring'
));
insert into default_alarms (name, rule, threshold, for_seconds)
values ('groups_waiting', 'groups_waiting', 86400, 300);

-- Groups of a queue whose first job is due and waits for its group, or for the turn of its group,
-- by name: since when the job waits, and whether a limit keeps it from starting. As many groups are
-- looked at. Those that are paused or that a dead letter blocks are left out.
create function waiting_groups(of_project integer, of_queue text, looked_at integer)
returns table (group_key text, job_id uuid, since timestamptz, is_limited boolean)
language sql stable as $$
    with recursive setting as materialized (
        select group_order = 'strict' as is_strict, group_on_dead = 'block' as dead_blocks,
               group_fair and group_order <> 'strict' as has_turns, group_max_running
        from queues
        where project_id = of_project and name = of_queue and has_gate
    ), held(group_key) as (
        (
            select jobs.group_key
            from jobs
            where project_id = of_project and queue = of_queue and waits_for_group
                and exists (select from setting)
            order by jobs.group_key
            limit 1
        )
        union all
        select next.group_key
        from held
        cross join lateral (
            select jobs.group_key
            from jobs
            where project_id = of_project and queue = of_queue
                and jobs.group_key > held.group_key and waits_for_group
            order by jobs.group_key
            limit 1
        ) next
    ), of_groups as materialized (
        select first.group_key, job.id, greatest(job.run_at, job.created_at) as since,
               not setting.is_strict as is_limited
        from (select held.group_key from held limit looked_at) first
        cross join setting
        cross join lateral (
            select jobs.id, run_at, created_at, unfinished_parents, group_place
            from jobs
            where project_id = of_project and queue = of_queue
                and jobs.group_key = first.group_key and waits_for_group
            order by group_place
            limit 1
        ) job
        where job.unfinished_parents = 1 and not (
            setting.is_strict and setting.dead_blocks and exists (
                select
                from jobs dead
                where dead.project_id = of_project and dead.queue = of_queue
                    and dead.group_key = first.group_key and dead.group_place < job.group_place
                    and dead.group_place is not null and dead.completed_at is not null
            )
        )
    ), crowd as materialized (
        select jobs.group_key, count(*) as jobs
        from jobs
        where project_id = of_project and queue = of_queue and state = 'processing'
            and exists (select from setting where has_turns)
        group by jobs.group_key
    ), in_line as materialized (
        select first.group_key, job.id, greatest(job.run_at, job.created_at, job.ready_at) as since,
               coalesce(first.rest_until > statement_timestamp(), false) or exists (
                   select from crowd
                   where crowd.group_key = first.group_key
                       and jobs >= coalesce((
                           select max_running
                           from group_overrides own
                           where own.project_id = of_project and own.queue = of_queue
                               and own.group_key = first.group_key
                               and (expires_at is null or expires_at > statement_timestamp())
                       ), setting.group_max_running)
               ) as is_limited
        from setting
        cross join (
            select group_turns.group_key, rest_until
            from group_turns
            where project_id = of_project and queue = of_queue and group_turns.group_key > ''
                and empty_since is null
            order by group_turns.group_key
            limit looked_at
        ) first
        cross join lateral (
            select jobs.id, run_at, created_at, ready_at
            from jobs
            where project_id = of_project and queue = of_queue
                and coalesce(jobs.group_key, '') = first.group_key and takes_turns
                and state = 'pending'
            order by coalesce(jobs.group_key, ''), constraint_key, rank, run_at, jobs.id
            limit 1
        ) job
        where setting.has_turns
    )
    select waiting.group_key, waiting.id, waiting.since, waiting.is_limited
    from (
        select * from of_groups
        union all
        select * from in_line
    ) waiting
    where waiting.since <= statement_timestamp()
        and not is_group_paused(of_project, of_queue, waiting.group_key)
$$;

-- Since when the first job of a group waits that is due; null: none waits, or 1,000 that run or are
-- not due are ahead of it.
create function group_waits_since(of_project integer, of_queue text, of_group text)
returns timestamptz language plpgsql stable as $$
begin
    return (
        select min(since)
        from (
            (
                select greatest(run_at, created_at) as since
                from jobs
                where project_id = of_project and queue = of_queue and group_key = of_group
                    and waits_for_group
                order by group_place
                limit 1
            )
            union all
            (
                select greatest(run_at, created_at, ready_at)
                from (
                    select run_at, created_at, ready_at, state, group_place
                    from jobs
                    where project_id = of_project and queue = of_queue and group_key = of_group
                        and group_key is not null and waits_for_group is not true
                        and completed_at is null
                    order by group_place
                    limit 1000
                ) near
                where state = 'pending'
                order by group_place
                limit 1
            )
        ) waiting
        where since <= statement_timestamp()
    );
end
$$;
