-- no-transaction
create index concurrently projects_deleted on projects (deleted_at) where deleted_at is not null;
