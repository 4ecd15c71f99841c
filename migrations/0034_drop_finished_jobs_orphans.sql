-- no-transaction
-- `orphaned_parents` has taken its place.
drop index concurrently finished_jobs_orphans;
