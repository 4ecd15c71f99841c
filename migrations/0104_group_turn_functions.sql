-- Whether groups of a queue take turns.
create function takes_turns(of_project integer, of_queue text) returns boolean
language plpgsql stable as $$
begin
    return exists (
        select from queues
        where project_id = of_project and name = of_queue and group_fair
            and group_order <> 'strict'
    );
end
$$;

-- Notes a group with a job that may start, if its queue takes turns and the group is not in line.
-- Null: the jobs without a group. One that rests because of a limit or a pause comes back with its
-- end. Returns whether it was noted.
create function note_turn(of_project integer, of_queue text, of_group text) returns boolean
language plpgsql as $$
begin
    if takes_turns(of_project, of_queue) and not exists (
        select from group_turns
        where project_id = of_project and queue = of_queue
            and group_key = coalesce(of_group, '') and empty_since is null
    ) then
        insert into group_notes (project_id, queue, group_key)
        values (of_project, of_queue, coalesce(of_group, ''));
        return true;
    end if;
    return false;
end
$$;

-- Whether a group, or the jobs without one, has a job that may start, in a queue that takes turns.
create function has_turn_jobs(of_project integer, of_queue text, of_group text) returns boolean
language plpgsql stable as $$
begin
    return case when of_group = '' then exists (
        select from jobs
        where project_id = of_project and queue = of_queue and group_key is null
            and waits_for_group is false and state = 'pending'
    ) else exists (
        select from jobs
        where project_id = of_project and queue = of_queue and group_key = of_group
            and waits_for_group is false and state = 'pending'
    ) end;
end
$$;

-- Whether a noted group has to be put in line.
create function lacks_turn(of_project integer, of_queue text, of_group text) returns boolean
language plpgsql stable as $$
begin
    return takes_turns(of_project, of_queue) and not exists (
        select from group_turns
        where project_id = of_project and queue = of_queue and group_key = of_group
            and rest_until is null
    ) and has_turn_jobs(of_project, of_queue, of_group);
end
$$;
