-- Attempts of a job that were lost: nothing came from their worker. With what claims do not read, so
-- a job that is never lost pays nothing.
alter table job_bodies
    -- All, and those since the last outcome or progress. Null: none.
    add column losses integer,
    add column losses_in_row integer,
    -- The highest progress of a lost attempt. Null: none reported any.
    add column lost_progress real,
    -- Losses in a row after which it is dead-lettered. Null: the default.
    add column max_losses integer,
    -- Why it was dead-lettered. Null: an attempt failed.
    add column death text;
