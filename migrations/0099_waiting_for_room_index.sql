-- no-transaction
create index concurrently jobs_waiting_for_room
on jobs (project_id, queue, group_key, rank, group_place) where waits_for_group;
