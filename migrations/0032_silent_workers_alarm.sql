-- An alarm about running jobs that are held by workers which make no calls. A worker that holds its
-- jobs without heartbeats is silent, too: ten minutes are longer than the beats of known clients.
alter table alarms
drop constraint alarms_rule_check,
add constraint alarms_rule_check check (rule in (
    'dead_letters', 'oldest_ready', 'workers_silent', 'circuit_open', 'schedule_missed',
    'endpoint_disabled', 'deliveries_dropped', 'push_failing', 'key_expiring'
));
insert into default_alarms (name, rule, threshold, for_seconds)
values ('workers_silent', 'workers_silent', 1, 600);

-- Queues of a project in which the alarms of a rule look: those that have jobs and that an alarm
-- names, and the largest.
create function alarmed_queues(of_project integer, of_rule text)
returns table (queue text) language sql stable as $$
    select queue_counts.queue
    from queue_counts
    where queue_counts.project_id = of_project and queue_counts.active > 0
        and (
            queue_counts.queue in (
                select unnest(alarm.queues)
                from effective_alarms alarm
                where alarm.project_id = of_project and alarm.rule = of_rule
            )
            or queue_counts.queue in (
                select largest.queue
                from queue_counts largest
                where largest.project_id = of_project and largest.active > 0
                order by largest.active desc, largest.queue
                limit 100
            )
        )
$$;
