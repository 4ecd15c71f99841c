-- An alarm about jobs that lose one worker after the other: a payload may kill what runs it. The
-- third loss in a row leaves time until the fifth, which dead-letters the job.
alter table alarms
drop constraint alarms_rule_check,
add constraint alarms_rule_check check (rule in (
    'dead_letters', 'oldest_ready', 'workers_silent', 'jobs_lost', 'groups_blocked',
    'groups_waiting', 'circuit_open', 'schedule_missed', 'endpoint_disabled', 'deliveries_dropped',
    'push_failing', 'key_expiring'
));
insert into default_alarms (name, rule, threshold, for_seconds) values ('jobs_lost', 'jobs_lost', 3, 0);
