-- At most this many jobs of each group of the queue run at the same time. Null: as many as want.
alter table queues
add column group_max_running integer check (group_max_running between 1 and 100000);
