-- no-transaction
-- The job of a queue that has been ready for longest, among those with a time of their own.
create index concurrently jobs_ready_again on jobs (project_id, queue, ready_at)
where state = 'pending' and ready_at is not null;
