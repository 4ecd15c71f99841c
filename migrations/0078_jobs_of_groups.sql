-- The group of a job, and its place in it: jobs of a group that were stored one after another have
-- places in that order. Null: it has no group.
alter table jobs add column group_key text, add column group_place bigint;
-- Each statement that stores jobs takes one value, and numbers its jobs from there.
create sequence job_places increment by 100000;
