-- no-transaction
create index concurrently jobs_admitted_of_group on jobs (project_id, queue, group_key)
where waits_for_group is false and state = 'pending';
