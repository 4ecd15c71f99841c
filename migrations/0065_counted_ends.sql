-- Bytes of ends whose callbacks wait: a copy of each.
alter table job_ends add column counted_bytes integer;
create function count_end_bytes() returns trigger language plpgsql as $$
begin
    new.counted_bytes := 128 + octet_length(new.callbacks);
    return new;
end
$$;
create trigger job_ends_counted before insert on job_ends for each row
when (new.callbacks is not null) execute function count_end_bytes();
create trigger job_ends_added after insert on job_ends for each row
when (new.counted_bytes is not null) execute function note_counted_bytes();
create trigger job_ends_removed after delete on job_ends for each row
when (old.counted_bytes is not null) execute function note_counted_bytes();
