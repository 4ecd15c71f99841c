-- no-transaction
-- The same for polls that name job types.
create index concurrently jobs_ready_by_type on jobs (project_id, queue, job_type, rank, run_at, id)
where state = 'pending' and gate is null;
