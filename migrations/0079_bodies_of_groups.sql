-- The group of a job, for lists of ended jobs and for a retry of a cancelled one. It is in `jobs` as
-- well, and in the indexes of groups.
alter table job_bodies add column group_key text;
create or replace function count_job_bytes() returns trigger language plpgsql as $$
begin
    new.counted_bytes := 4 * coalesce(new.counted_bytes, 0)
        + octet_length(new.payload) + coalesce(octet_length(new.envelope), 0)
        + coalesce(octet_length(new.callbacks), 0) + coalesce(pg_column_size(new.tags), 0)
        + coalesce(pg_column_size(new.retry), 0) + 2 * coalesce(pg_column_size(new.labels), 0)
        + 3 * coalesce(octet_length(new.concurrency_key), 0)
        + 3 * coalesce(octet_length(new.unique_key), 0)
        + 4 * coalesce(octet_length(new.group_key), 0)
        + 2 * coalesce(octet_length(new.workflow_key), 0);
    return new;
end
$$;
drop trigger job_bodies_counted on job_bodies;
create trigger job_bodies_counted before insert on job_bodies for each row
when (
    new.counted_bytes is not null
    or octet_length(new.payload) + coalesce(octet_length(new.envelope), 0)
        + coalesce(octet_length(new.callbacks), 0) + coalesce(pg_column_size(new.tags), 0)
        + coalesce(pg_column_size(new.retry), 0) + 2 * coalesce(pg_column_size(new.labels), 0)
        + 3 * coalesce(octet_length(new.concurrency_key), 0)
        + 3 * coalesce(octet_length(new.unique_key), 0)
        + 4 * coalesce(octet_length(new.group_key), 0)
        + 2 * coalesce(octet_length(new.workflow_key), 0) > 1024
)
execute function count_job_bytes();
