-- no-transaction
-- Swept across projects: cancelled jobs whose children must be called off.
create index concurrently finished_jobs_orphans on finished_jobs (project_id, id)
where has_orphans;
