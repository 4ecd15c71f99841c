-- A job may wait until its parent has `not_failed`: the parent has succeeded, or was not needed. Nodes
-- of the previous release call the function, too, and store no such dependency.
create or replace function dependency_standing(condition text, is_met boolean, parent_state text)
returns text
language sql
immutable
as $$
    select case
        when is_met then 'met'
        when parent_state = 'succeeded' then
            case when condition = 'failed' then 'broken' else 'met' end
        when parent_state in ('dead_letter', 'cancelled') then
            case when condition in ('succeeded', 'not_failed') then 'broken' else 'met' end
        when parent_state = 'skipped' then
            case when condition in ('ended', 'not_failed') then 'met' else 'broken' end
        else 'open'
    end
$$;

-- Rows that are there have one of the older conditions: nothing is scanned.
alter table job_edges
drop constraint job_edges_condition_check,
add constraint job_edges_condition_check
check (condition in ('succeeded', 'failed', 'ended', 'not_failed')) not valid;
