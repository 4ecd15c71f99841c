-- no-transaction
-- What runs in a queue, and under a worker.
create index concurrently jobs_running on jobs (project_id, queue, worker_id)
where state = 'processing';
