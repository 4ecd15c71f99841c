-- no-transaction
-- What the end of one job has called off.
create index concurrently finished_jobs_by_canceller on finished_jobs (project_id, cancelled_by)
where cancelled_by is not null;
