-- The parts of a job's definition that came with later features; null: not used.
alter table job_bodies
    add column labels text[],
    add column gate uuid,
    add column concurrency_key text,
    add column concurrency_limit integer,
    add column unique_key text,
    add column expires_at timestamptz,
    add column workflow_id uuid,
    add column workflow_key text,
    add column has_parents boolean not null default false;
