-- How many bytes each project has stored: the limit `stored_bytes` of its plan.
--
-- Each job counts as 1 KiB, which `queue_counts` knows. What is counted here is the rest: what is
-- larger, and all output and events. Triggers count it, so that no statement can forget it. Of jobs
-- only large ones cost anything.

-- Merged changes.
create table stored_bytes (
    project_id integer not null,
    bytes bigint not null,
    primary key (project_id)
);

-- Changes that are not merged yet. Insert-only, so that writers do not wait for each other.
create table stored_byte_deltas (
    project_id integer not null,
    bytes bigint not null
);
-- The sum of one project.
create index stored_byte_deltas_by_project on stored_byte_deltas (project_id) include (bytes);

-- Payloads, and what else a job is enqueued with.
create function note_job_bytes() returns trigger language plpgsql as $$
begin
    if tg_op = 'INSERT' then
        insert into stored_byte_deltas
        values (
            new.project_id,
            octet_length(new.payload) + coalesce(octet_length(new.envelope), 0)
                + coalesce(octet_length(new.callbacks), 0) + coalesce(pg_column_size(new.tags), 0)
        );
    else
        insert into stored_byte_deltas
        values (
            old.project_id,
            -(octet_length(old.payload) + coalesce(octet_length(old.envelope), 0)
                + coalesce(octet_length(old.callbacks), 0) + coalesce(pg_column_size(old.tags), 0))
        );
    end if;
    return null;
end
$$;
create trigger job_bodies_added after insert on job_bodies for each row
when (
    octet_length(new.payload) > 1024 or octet_length(new.envelope) > 1024
    or octet_length(new.callbacks) > 1024 or pg_column_size(new.tags) > 1024
)
execute function note_job_bytes();
create trigger job_bodies_removed after delete on job_bodies for each row
when (
    octet_length(old.payload) > 1024 or octet_length(old.envelope) > 1024
    or octet_length(old.callbacks) > 1024 or pg_column_size(old.tags) > 1024
)
execute function note_job_bytes();

-- Results.
create function note_result_bytes() returns trigger language plpgsql as $$
begin
    if tg_op = 'INSERT' then
        insert into stored_byte_deltas values (new.project_id, octet_length(new.result));
    else
        insert into stored_byte_deltas values (old.project_id, -octet_length(old.result));
    end if;
    return null;
end
$$;
create trigger finished_jobs_added after insert on finished_jobs for each row
when (octet_length(new.result) > 1024) execute function note_result_bytes();
create trigger finished_jobs_removed after delete on finished_jobs for each row
when (octet_length(old.result) > 1024) execute function note_result_bytes();

-- Errors of attempts.
create function note_error_bytes() returns trigger language plpgsql as $$
begin
    if tg_op = 'INSERT' then
        insert into stored_byte_deltas
        values (
            new.project_id,
            coalesce(octet_length(new.error_stack_trace), 0)
                + coalesce(octet_length(new.error_message), 0)
        );
    else
        insert into stored_byte_deltas
        values (
            old.project_id,
            -(coalesce(octet_length(old.error_stack_trace), 0)
                + coalesce(octet_length(old.error_message), 0))
        );
    end if;
    return null;
end
$$;
create trigger attempts_added after insert on attempts for each row
when (octet_length(new.error_stack_trace) > 512 or octet_length(new.error_message) > 512)
execute function note_error_bytes();
create trigger attempts_removed after delete on attempts for each row
when (octet_length(old.error_stack_trace) > 512 or octet_length(old.error_message) > 512)
execute function note_error_bytes();

-- Events and output come many at a time: one change for a statement.
create function note_event_bytes() returns trigger language plpgsql as $$
begin
    insert into stored_byte_deltas
    select project_id, tg_argv[0]::int * sum(coalesce(octet_length(payload), 0) + 256)
    from changed
    group by project_id;
    return null;
end
$$;
create trigger job_events_added after insert on job_events referencing new table as changed
for each statement execute function note_event_bytes('1');
create trigger job_events_removed after delete on job_events referencing old table as changed
for each statement execute function note_event_bytes('-1');

create function note_log_bytes() returns trigger language plpgsql as $$
begin
    insert into stored_byte_deltas
    select project_id, tg_argv[0]::int * sum(octet_length(data) + 128)
    from changed
    group by project_id;
    return null;
end
$$;
create trigger job_logs_added after insert on job_logs referencing new table as changed
for each statement execute function note_log_bytes('1');
create trigger job_logs_removed after delete on job_logs referencing old table as changed
for each statement execute function note_log_bytes('-1');

-- Inputs of workflows, and URLs that are told of their end.
create function note_workflow_bytes() returns trigger language plpgsql as $$
begin
    if tg_op = 'INSERT' then
        insert into stored_byte_deltas values (
            new.project_id,
            coalesce(octet_length(new.input), 0) + coalesce(octet_length(new.callback_url), 0)
        );
    else
        insert into stored_byte_deltas values (
            old.project_id,
            -coalesce(octet_length(old.input), 0) - coalesce(octet_length(old.callback_url), 0)
        );
    end if;
    return null;
end
$$;
create trigger workflows_added after insert on workflows for each row
when (octet_length(new.input) > 1024 or octet_length(new.callback_url) > 1024)
execute function note_workflow_bytes();
create trigger workflows_removed after delete on workflows for each row
when (octet_length(old.input) > 1024 or octet_length(old.callback_url) > 1024)
execute function note_workflow_bytes();
