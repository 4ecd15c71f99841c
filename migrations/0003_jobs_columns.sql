-- What a live job needs beside its state: who may have it, how many at a time, and until when.
alter table jobs
    -- Null: any worker of the queue may have it, at any time. Otherwise a hash of its type, labels and
    -- concurrency key: jobs that share it are let in, or kept waiting, together.
    add column gate uuid,
    add column concurrency_key text,
    add column concurrency_limit integer,
    -- No two live jobs of a project have the same; a dead letter does not count.
    add column unique_key text,
    add column expires_at timestamptz,
    -- Its latest lease counts against a limit: somebody may wait for its end.
    add column holds_slot boolean not null default false,
    -- Jobs that wait for this one.
    add column children integer not null default 0,
    -- Children that must be called off, because this job is a dead letter.
    add column has_orphans boolean not null default false;
