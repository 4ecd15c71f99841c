-- What a project says about its job types. A type without a row works as well.
create table job_types (
    project_id integer not null,
    job_type text not null,
    -- A JSON Schema of the payload, as it was sent.
    schema text not null,
    updated_at timestamptz not null default now(),
    primary key (project_id, job_type)
);
