-- no-transaction
-- No two live jobs share a unique key.
create unique index concurrently jobs_unique on jobs (project_id, unique_key)
where unique_key is not null and state <> 'dead_letter';
