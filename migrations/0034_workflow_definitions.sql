-- Workflows that are stored to be started by their id. Only adapters make them.
create table workflow_definitions (
    project_id integer not null,
    id uuid not null,
    namespace text not null,
    name text not null,
    version integer not null,
    -- The request that stored it, as its adapter keeps it.
    definition text not null,
    created_at timestamptz not null default now(),
    primary key (project_id, id),
    unique (project_id, namespace, name, version)
);

-- Which definition a workflow was started from.
create table workflow_starts (
    project_id integer not null,
    workflow_id uuid not null,
    -- It may have been deleted.
    definition_id uuid not null,
    -- A second start with this key starts nothing. Null: none was sent.
    request_key text,
    primary key (project_id, workflow_id),
    unique (project_id, request_key)
);

-- Names are short: they count as 1 KiB with the row.
create function note_definition_bytes() returns trigger language plpgsql as $$
begin
    if tg_op = 'INSERT' then
        insert into stored_byte_deltas
        values (new.project_id, octet_length(new.definition) + 1024);
    else
        insert into stored_byte_deltas
        values (old.project_id, -octet_length(old.definition) - 1024);
    end if;
    return null;
end
$$;
create trigger workflow_definitions_added after insert on workflow_definitions for each row
execute function note_definition_bytes();
create trigger workflow_definitions_removed after delete on workflow_definitions for each row
execute function note_definition_bytes();
