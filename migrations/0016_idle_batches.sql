-- When a job last joined the batch, to within a day: one that nothing joins any more ends by itself.
alter table batches add column joined_at timestamptz not null default now();
