-- Bytes of attempts. The first one is part of the 1 KiB of its job, unless its texts are long.
alter table attempts add column counted_bytes integer;
create function count_attempt_bytes() returns trigger language plpgsql as $$
begin
    new.counted_bytes := 256 + octet_length(new.worker_id)
        + coalesce(octet_length(new.error_kind), 0) + coalesce(octet_length(new.error_message), 0)
        + coalesce(octet_length(new.error_stack_trace), 0);
    return new;
end
$$;
create trigger attempts_counted before insert on attempts for each row
when (
    new.attempt > 1
    or octet_length(new.worker_id) + coalesce(octet_length(new.error_kind), 0)
        + coalesce(octet_length(new.error_message), 0)
        + coalesce(octet_length(new.error_stack_trace), 0) > 512
)
execute function count_attempt_bytes();
drop trigger attempts_added on attempts;
create trigger attempts_added after insert on attempts for each row
when (new.counted_bytes is not null) execute function note_counted_bytes();
drop trigger attempts_removed on attempts;
create trigger attempts_removed after delete on attempts for each row
when (old.counted_bytes is not null) execute function note_counted_bytes();
-- Those that are older than the column.
create trigger old_attempts_removed after delete on attempts for each row
when (
    old.counted_bytes is null
    and (octet_length(old.error_stack_trace) > 512 or octet_length(old.error_message) > 512)
)
execute function note_error_bytes();
