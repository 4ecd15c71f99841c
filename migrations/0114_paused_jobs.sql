-- Since when a person lets the job wait. What holds it counts as one more parent, as its group does:
-- so no index of jobs that can run or become due has it, and no statement of others asks. Null: no one
-- does.
alter table jobs add column paused_at timestamptz;

-- How many of its `unfinished_parents` are no parents.
create function other_holds(waits_for_group boolean, paused_at timestamptz) returns integer
language sql immutable as $$
    select (waits_for_group is true)::int + (paused_at is not null)::int
$$;
