-- no-transaction
-- Jobs behind gates, gate by gate.
create index concurrently jobs_gated on jobs (project_id, queue, gate, rank, run_at, id)
where state = 'pending' and gate is not null;
