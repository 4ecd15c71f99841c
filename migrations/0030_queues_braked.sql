-- no-transaction
-- Which projects have queues with a brake: every node asks.
create index concurrently queues_braked on queues (project_id) where brake_after is not null;
