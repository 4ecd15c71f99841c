-- Attempts that their workers ended with a delay. Null: none. With what claims do not read, so a job
-- that is never put off pays nothing.
alter table job_bodies add column snoozes integer;
