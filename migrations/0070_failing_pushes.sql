-- no-transaction
-- Projects with pushes that fail, for alarms.
create index concurrently queue_pushes_failing on queue_pushes (project_id)
where failing_since is not null and paused_at is null;
