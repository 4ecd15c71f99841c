-- Whether a job that waited for a failure has succeeded: for the failure of this job, of one that was
-- cancelled because of it, or of one that waited for a failure and has failed itself. Nodes of the
-- previous release call `is_failure_handled`, which stays.
create function was_failure_handled(of_project integer, of_workflow uuid, failed_job uuid)
returns boolean
language sql
stable
as $$
    with recursive failed as (
        select failed_job as id
        union
        select child.id
        from failed
        join job_edges edge on edge.project_id = of_project and edge.parent_id = failed.id
        cross join lateral (
            select ended.id
            from finished_jobs ended
            where ended.project_id = of_project and ended.id = edge.child_id
                and ended.state = 'cancelled' and ended.cancelled_by is not null
                and ended.is_skipped is null
                -- One that waited for the end alone was cancelled because of another job.
                and edge.condition in ('succeeded', 'not_failed')
            union all
            select handler.id
            from jobs handler
            where handler.project_id = of_project and handler.id = edge.child_id
                and handler.state = 'dead_letter' and edge.condition = 'failed'
        ) child
        join job_bodies body on body.project_id = of_project and body.job_id = child.id
        where body.workflow_id = of_workflow
    )
    select exists (
        select
        from failed
        join job_edges edge on edge.project_id = of_project and edge.parent_id = failed.id
        join finished_jobs handler on handler.project_id = of_project and handler.id = edge.child_id
        where edge.condition = 'failed' and handler.state = 'succeeded'
    )
$$;

-- A start counts as 128 bytes and its key.
create function note_start_bytes() returns trigger language plpgsql as $$
begin
    if tg_op = 'INSERT' then
        insert into stored_byte_deltas
        values (new.project_id, coalesce(octet_length(new.request_key), 0) + 128);
    else
        insert into stored_byte_deltas
        values (old.project_id, -coalesce(octet_length(old.request_key), 0) - 128);
    end if;
    return null;
end
$$;
create trigger workflow_starts_added after insert on workflow_starts for each row
execute function note_start_bytes();
create trigger workflow_starts_removed after delete on workflow_starts for each row
execute function note_start_bytes();
insert into stored_byte_deltas
select project_id, sum(coalesce(octet_length(request_key), 0) + 128)
from workflow_starts
group by project_id;
