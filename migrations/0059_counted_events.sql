-- Bytes of events: names of workers and types count, too, if they are long. Short ones are part of
-- the 256 bytes of an event.
create or replace function note_event_bytes() returns trigger language plpgsql as $$
begin
    insert into stored_byte_deltas
    select project_id,
           tg_argv[0]::int * sum(
               coalesce(octet_length(payload), 0) + coalesce(octet_length(reason), 0)
               + greatest(coalesce(octet_length(worker_id), 0) + octet_length(type) - 192, 0)
               + 256
           )
    from changed
    group by project_id;
    return null;
end
$$;
