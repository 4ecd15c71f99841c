-- no-transaction
-- What runs under a concurrency key.
create index concurrently jobs_running_by_key on jobs (project_id, concurrency_key)
where state = 'processing' and concurrency_key is not null;
