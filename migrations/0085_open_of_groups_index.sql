-- no-transaction
create index concurrently jobs_open_of_group on jobs (project_id, queue, group_key, group_place)
where group_key is not null and waits_for_group is not true and completed_at is null;
