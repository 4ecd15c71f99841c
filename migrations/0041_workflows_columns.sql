-- Some wires store a workflow first and start it later, or again.
alter table workflows
    -- Its first jobs wait for somebody to start it.
    add column is_held boolean not null default false,
    -- The same workflow, run again: what stands for this one from then on.
    add column successor_id uuid,
    -- The workflow that this one runs again.
    add column original_id uuid;
