-- How far the attempts of a job have come, as their workers reported: the next lease brings it. Apart
-- from the job, so that others pay nothing.
create table job_checkpoints (
    project_id integer not null,
    job_id uuid not null,
    -- The worker's number: a smaller one does not replace it.
    sequence bigint not null,
    -- The bytes of the JSON that was sent.
    data text not null,
    -- The attempt that sent it.
    attempt integer not null,
    stored_at timestamptz not null,
    counted_bytes integer not null,
    primary key (project_id, job_id)
) with (
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_analyze_scale_factor = 0.02
);

create trigger bytes_added after insert on job_checkpoints for each row
execute function note_counted_bytes();
create trigger bytes_changed after update on job_checkpoints for each row
when (new.counted_bytes <> old.counted_bytes)
execute function note_counted_bytes();
create trigger bytes_removed after delete on job_checkpoints for each row
execute function note_counted_bytes();
