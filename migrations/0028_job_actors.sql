-- Who changed a job, and why. Null: a version recorded the event that did not know, or a worker
-- reported it.
alter table job_events
add column actor_kind text,
-- Public id; null: the server.
add column actor_id text,
add column reason text;

-- The reason counts as stored bytes.
create or replace function note_event_bytes() returns trigger language plpgsql as $$
begin
    insert into stored_byte_deltas
    select project_id,
           tg_argv[0]::int * sum(
               coalesce(octet_length(payload), 0) + coalesce(octet_length(reason), 0) + 256
           )
    from changed
    group by project_id;
    return null;
end
$$;
