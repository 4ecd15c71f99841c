-- no-transaction
-- Swept across projects: what other nodes must forget of queues.
create index concurrently queues_changed on queues (updated_at);
