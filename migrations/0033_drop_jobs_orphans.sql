-- no-transaction
-- `orphaned_parents` has taken its place.
drop index concurrently jobs_orphans;
