-- no-transaction
-- What a queue has kept long enough.
create index concurrently finished_jobs_by_age on finished_jobs (project_id, queue, completed_at);
