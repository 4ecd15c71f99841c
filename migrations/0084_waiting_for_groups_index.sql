-- no-transaction
create index concurrently jobs_waiting_for_group on jobs (project_id, queue, group_key, group_place)
where waits_for_group;
