-- no-transaction
-- Succeeded by jobs_ready_by_type.
drop index concurrently jobs_claim_by_type;
