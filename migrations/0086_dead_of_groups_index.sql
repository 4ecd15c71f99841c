-- no-transaction
create index concurrently jobs_dead_of_group on jobs (project_id, queue, group_key, group_place)
where group_place is not null and completed_at is not null;
