-- What a manual retry of a cancelled job must know.
alter table finished_jobs
    add column children integer not null default 0,
    -- Children that must be called off, because this job was.
    add column has_orphans boolean not null default false,
    -- The parent whose end called this job off; null: somebody else did.
    add column cancelled_by uuid;
