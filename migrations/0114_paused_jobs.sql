-- Time at which a person paused the job; null: it is not paused. A pause counts as one more parent, as
-- a group does, so no index of ready or due jobs contains the job.
alter table jobs add column paused_at timestamptz;

-- Holds in `unfinished_parents` that are not parents: the group and the pause.
create function other_holds(waits_for_group boolean, paused_at timestamptz) returns integer
language sql immutable as $$
    select (waits_for_group is true)::int + (paused_at is not null)::int
$$;
