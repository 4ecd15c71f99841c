-- A waiting job may change its tags and labels: its bytes are counted anew.
create function recount_job_bytes() returns trigger language plpgsql as $$
declare
    more bigint := coalesce(pg_column_size(new.tags), 0) - coalesce(pg_column_size(old.tags), 0)
        + 2 * (coalesce(pg_column_size(new.labels), 0) - coalesce(pg_column_size(old.labels), 0));
    before bigint := coalesce(
        old.counted_bytes,
        octet_length(old.payload) + coalesce(octet_length(old.envelope), 0)
            + coalesce(octet_length(old.callbacks), 0) + coalesce(pg_column_size(old.tags), 0)
            + coalesce(pg_column_size(old.retry), 0) + 2 * coalesce(pg_column_size(old.labels), 0)
            + 3 * coalesce(octet_length(old.concurrency_key), 0)
            + 3 * coalesce(octet_length(old.unique_key), 0)
            + 2 * coalesce(octet_length(old.workflow_key), 0)
    );
begin
    -- A row that was counted stays so: it may have long names.
    if old.counted_bytes is not null or before + more > 1024 then
        new.counted_bytes := before + more;
    end if;
    return new;
end
$$;
create trigger job_bodies_recounted before update of tags, labels on job_bodies for each row
when (new.tags is distinct from old.tags or new.labels is distinct from old.labels)
execute function recount_job_bytes();
create trigger job_bodies_changed after update of tags, labels on job_bodies for each row
when (new.counted_bytes is distinct from old.counted_bytes)
execute function note_counted_bytes();
