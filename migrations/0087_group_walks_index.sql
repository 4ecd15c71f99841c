-- no-transaction
create index concurrently queues_with_group_walk
on queues (group_walk_at) where group_walk_at is not null;
