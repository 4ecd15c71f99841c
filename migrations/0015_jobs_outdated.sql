-- no-transaction
-- Swept across projects: waiting jobs that are called off at a time.
create index concurrently jobs_outdated on jobs (expires_at)
where expires_at is not null and state in ('scheduled', 'backoff', 'pending', 'held');
