-- Tells this instance's names in a shared Redis from those of others.
alter table instance add column public_id uuid not null default gen_random_uuid();
