-- The queues that were counted before their trigger was there.
insert into retention_dues (project_id, queue)
select project_id, queue from queue_counts
on conflict (project_id, queue) do nothing;
