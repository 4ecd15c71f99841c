-- no-transaction
create index concurrently jobs_in_turn on jobs (project_id, queue, group_key, constraint_key, rank,
    run_at, id)
where takes_turns and state = 'pending';
