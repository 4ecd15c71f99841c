-- no-transaction
-- For lists and resuming many at once.
create index concurrently jobs_paused on jobs (project_id, id) where paused_at is not null;
