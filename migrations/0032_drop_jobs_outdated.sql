-- no-transaction
-- `job_expiries` has taken its place.
drop index concurrently jobs_outdated;
