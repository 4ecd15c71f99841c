-- Bytes of what became of ticks.
alter table schedule_fires add column counted_bytes integer;
create function count_fire_bytes() returns trigger language plpgsql as $$
begin
    new.counted_bytes := 128 + 2 * octet_length(new.schedule_id);
    return new;
end
$$;
create trigger schedule_fires_counted before insert on schedule_fires for each row
execute function count_fire_bytes();
create trigger schedule_fires_added after insert on schedule_fires
referencing new table as changed for each statement execute function note_counted_rows('1');
create trigger schedule_fires_removed after delete on schedule_fires
referencing old table as changed for each statement execute function note_counted_rows('-1');
