-- no-transaction
-- The order of a claim. Jobs behind a gate are not in it: a claim must not walk over jobs that it may
-- not hand out.
create index concurrently jobs_ready on jobs (project_id, queue, rank, run_at, id)
where state = 'pending' and gate is null;
