-- no-transaction
create index concurrently workflows_by_successor on workflows (project_id, successor_id)
where successor_id is not null;
