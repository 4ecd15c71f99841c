-- no-transaction
-- Empty: the jobs without a group.
create index concurrently jobs_in_turn on jobs (project_id, queue, coalesce(group_key, ''),
    constraint_key, rank, run_at, id)
where takes_turns and state = 'pending';
