-- no-transaction
-- Succeeded by jobs_ready.
drop index concurrently jobs_claim;
