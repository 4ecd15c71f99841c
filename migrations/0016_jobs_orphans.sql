-- no-transaction
-- Swept across projects: dead letters whose children must be called off.
create index concurrently jobs_orphans on jobs (project_id, id) where has_orphans;
