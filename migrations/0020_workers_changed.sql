-- no-transaction
-- Swept across projects: what other nodes must forget of workers.
create index concurrently workers_changed on workers (changed_at);
