-- no-transaction
create index concurrently jobs_waiting_by_rank on jobs (project_id, queue, group_key, rank, group_place)
where waits_for_group;
