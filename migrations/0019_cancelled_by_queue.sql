-- no-transaction
-- Lists of a queue's cancelled jobs, which succeeded ones would hide.
create index concurrently finished_jobs_cancelled on finished_jobs (project_id, queue, id)
where state = 'cancelled';
