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

-- The first job of a group that is due and has not started: its place, and since when it waits. None:
-- none waits, or 200 that run or are not due are ahead of it.
create function first_waiting(of_project integer, of_queue text, of_group text)
returns table (job_id uuid, group_place bigint, since timestamptz) language sql stable as $$
    select waiting.id, waiting.group_place, waiting.since
    from (
        select id, near.group_place, greatest(run_at, created_at) as since
        from (
            select id, jobs.group_place, run_at, created_at, unfinished_parents
            from jobs
            where project_id = of_project and queue = of_queue and group_key = of_group
                and waits_for_group
            order by jobs.group_place
            limit 1
        ) near
        where unfinished_parents = 1
        union all
        (
            select id, near.group_place, greatest(run_at, created_at, ready_at)
            from (
                select id, jobs.group_place, run_at, created_at, ready_at, state
                from jobs
                where project_id = of_project and queue = of_queue and group_key = of_group
                    and group_key is not null and waits_for_group is not true
                    and completed_at is null
                order by jobs.group_place
                limit 200
            ) near
            where state = 'pending'
            order by near.group_place
            limit 1
        )
    ) waiting
    where waiting.since <= statement_timestamp()
    order by waiting.since
    limit 1
$$;

-- Until when rates let no job of a group start, those of its queue and of limits that the queue
-- shares, or a pause of such a limit. Null: they let one start.
create function group_full_until(of_project integer, of_queue text, of_group text)
returns timestamptz language sql stable as $$
    select greatest((
        select full_until
        from group_handouts
        where project_id = of_project and queue = of_queue and group_key = of_group
            and full_until > statement_timestamp()
    ), (
        select held_until
        from shared_limits_hold_until(of_project, of_queue, of_group) as held_until
        where held_until > statement_timestamp()
    ), (
        -- Limits of all jobs have one key for all groups.
        select max(greatest(known.full_until, known.paused_until))
        from queues sharing
        join shared_limit_keys known on known.project_id = of_project
            and known.limit_name = any(sharing.shared_limits) and known.group_key = ''
        where sharing.project_id = of_project and sharing.name = of_queue
            and sharing.shared_limits is not null
            and greatest(known.full_until, known.paused_until) > statement_timestamp()
    ))
$$;

-- Groups of a queue with jobs that wait for the order, a limit or the turn of their group: the first
-- job, since when it waits, and whether a limit keeps it from starting. The first so many by name;
-- of those that take turns, ten times as many are looked at, since some have no jobs. Groups that
-- are paused or that a dead letter blocks are left out.
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
    ), named as materialized (
        select found.group_key, bool_or(found.rests) as rests
        from (
            (select held.group_key, false as rests from held limit looked_at)
            union all
            (
                select near.group_key, coalesce(rest_until > statement_timestamp(), false)
                from (
                    select group_turns.group_key, rest_until, empty_since
                    from group_turns
                    where project_id = of_project and queue = of_queue
                        and group_turns.group_key > ''
                        and exists (select from setting where has_turns)
                    order by group_turns.group_key
                    limit 10 * looked_at
                ) near
                where empty_since is null
                order by near.group_key
                limit looked_at
            )
        ) found
        group by found.group_key
        order by found.group_key
        limit looked_at
    ), crowd as materialized (
        select jobs.group_key, count(*) as jobs
        from jobs
        where project_id = of_project and queue = of_queue and state = 'processing'
            and exists (select from setting where has_turns)
        group by jobs.group_key
    )
    select named.group_key, first.job_id, first.since, case
               when setting.has_turns then named.rests
               or group_full_until(of_project, of_queue, named.group_key) is not null or exists (
                   select from crowd
                   where crowd.group_key = named.group_key
                       and jobs >= coalesce((
                           select max_running
                           from group_overrides own
                           where own.project_id = of_project and own.queue = of_queue
                               and own.group_key = named.group_key
                               and (expires_at is null or expires_at > statement_timestamp())
                       ), setting.group_max_running)
               )
               else not setting.is_strict
           end
    from named
    cross join setting
    cross join lateral first_waiting(of_project, of_queue, named.group_key) first
    where not is_group_paused(of_project, of_queue, named.group_key) and not (
        setting.is_strict and setting.dead_blocks and exists (
            select
            from jobs dead
            where dead.project_id = of_project and dead.queue = of_queue
                and dead.group_key = named.group_key and dead.group_place < first.group_place
                and dead.group_place is not null and dead.completed_at is not null
        )
    )
$$;

-- Where groups take turns, jobs wait for the turn of their group: such groups are listed as waiting.
-- With all that are open they are listed anyway.
create or replace function next_listed_group(
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
    ) end, case when waiting and not open and takes_turns(of_project, of_queue) then (
        select group_key
        from group_turns
        where project_id = of_project and queue = of_queue and group_key > after_group
            and empty_since is null and has_turn_jobs(of_project, of_queue, group_key)
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
