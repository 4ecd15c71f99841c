-- An alarm about groups whose jobs wait behind a dead letter. Five minutes are time for a person
-- who is at it, or for a rule that retries.
alter table alarms
drop constraint alarms_rule_check,
add constraint alarms_rule_check check (rule in (
    'dead_letters', 'oldest_ready', 'workers_silent', 'groups_blocked', 'circuit_open',
    'schedule_missed', 'endpoint_disabled', 'deliveries_dropped', 'push_failing', 'key_expiring'
));
insert into default_alarms (name, rule, threshold, for_seconds)
values ('groups_blocked', 'groups_blocked', 1, 300);

-- Groups of a queue in which jobs wait behind a dead letter, by name, and the dead letter: of the
-- first groups with dead letters, as many as are to be looked at.
create function blocked_groups(of_project integer, of_queue text, looked_at integer)
returns table (group_key text, job_id uuid) language sql stable as $$
    with recursive dead(group_key, id, group_place) as (
        (
            select jobs.group_key, jobs.id, jobs.group_place
            from jobs
            where project_id = of_project and queue = of_queue and jobs.group_place is not null
                and completed_at is not null and exists (
                    select from queues
                    where project_id = of_project and name = of_queue
                        and group_order = 'strict' and group_on_dead = 'block'
                )
            order by jobs.group_key, jobs.group_place
            limit 1
        )
        union all
        select next.group_key, next.id, next.group_place
        from dead
        cross join lateral (
            select jobs.group_key, jobs.id, jobs.group_place
            from jobs
            where project_id = of_project and queue = of_queue
                and jobs.group_key > dead.group_key and jobs.group_place is not null
                and completed_at is not null
            order by jobs.group_key, jobs.group_place
            limit 1
        ) next
    )
    select first.group_key, first.id
    from (select * from dead limit looked_at) first
    where first.group_place < (
        select jobs.group_place
        from jobs
        where project_id = of_project and queue = of_queue and jobs.group_key = first.group_key
            and waits_for_group
        order by jobs.group_place
        limit 1
    )
$$;
