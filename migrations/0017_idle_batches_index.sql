-- Batches that wait for jobs, across projects: those that nothing joins any more are sealed.
create index batches_by_joining on batches (joined_at) where sealed_at is null;
