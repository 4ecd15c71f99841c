-- Bytes of jobs: all that they are enqueued with. The statement that stores one sets
-- `counted_bytes` to `long_names`: these are in other tables and in indexes, four times in all.
-- Labels and keys are in `jobs` as well.
alter table job_bodies add column counted_bytes integer;
create function count_job_bytes() returns trigger language plpgsql as $$
begin
    new.counted_bytes := 4 * coalesce(new.counted_bytes, 0)
        + octet_length(new.payload) + coalesce(octet_length(new.envelope), 0)
        + coalesce(octet_length(new.callbacks), 0) + coalesce(pg_column_size(new.tags), 0)
        + coalesce(pg_column_size(new.retry), 0) + 2 * coalesce(pg_column_size(new.labels), 0)
        + 3 * coalesce(octet_length(new.concurrency_key), 0)
        + 3 * coalesce(octet_length(new.unique_key), 0)
        + 2 * coalesce(octet_length(new.workflow_key), 0);
    return new;
end
$$;
create trigger job_bodies_counted before insert on job_bodies for each row
when (
    new.counted_bytes is not null
    or octet_length(new.payload) + coalesce(octet_length(new.envelope), 0)
        + coalesce(octet_length(new.callbacks), 0) + coalesce(pg_column_size(new.tags), 0)
        + coalesce(pg_column_size(new.retry), 0) + 2 * coalesce(pg_column_size(new.labels), 0)
        + 3 * coalesce(octet_length(new.concurrency_key), 0)
        + 3 * coalesce(octet_length(new.unique_key), 0)
        + 2 * coalesce(octet_length(new.workflow_key), 0) > 1024
)
execute function count_job_bytes();
drop trigger job_bodies_added on job_bodies;
create trigger job_bodies_added after insert on job_bodies for each row
when (new.counted_bytes is not null) execute function note_counted_bytes();
drop trigger job_bodies_removed on job_bodies;
create trigger job_bodies_removed after delete on job_bodies for each row
when (old.counted_bytes is not null) execute function note_counted_bytes();
-- Those that are older than the column.
create trigger old_job_bodies_removed after delete on job_bodies for each row
when (
    old.counted_bytes is null
    and (
        octet_length(old.payload) > 1024 or octet_length(old.envelope) > 1024
        or octet_length(old.callbacks) > 1024 or pg_column_size(old.tags) > 1024
    )
)
execute function note_job_bytes();
