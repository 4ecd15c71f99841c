-- For who relied on it: every expired lease counts as a failure.
alter table projects add column losses_count_as_failures boolean not null default false;
