-- Length of leases in seconds, for polls of the native API that ask for none. Null: half of the
-- timeout of each job, at least 30.
alter table projects
add column default_lease_seconds integer check (default_lease_seconds between 1 and 86400);
