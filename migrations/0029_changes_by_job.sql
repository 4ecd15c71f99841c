-- no-transaction
-- The latest change of a job, past what its workers have reported.
create index concurrently job_changes on job_events (project_id, job_id, id)
where actor_kind is not null;
