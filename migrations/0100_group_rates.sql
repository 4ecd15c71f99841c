-- Rate limits of each group of the queue: of each, the number of starts and the seconds of its
-- window. Null: none.
alter table queues
add column group_rate_counts integer[],
add column group_rate_seconds integer[];
