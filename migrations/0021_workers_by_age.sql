-- no-transaction
-- Pruned by age, across projects.
create index concurrently workers_by_age on workers (last_seen_at);
