-- Bytes of statistics: a row with two histograms each. Long names are also in the key, whose pages
-- are half empty.
alter table job_stats add column counted_bytes integer;
alter table job_stats alter column counted_bytes set default 512;
create function count_stat_bytes() returns trigger language plpgsql as $$
begin
    new.counted_bytes := 512 + 4 * long_names(new.queue, new.job_type);
    return new;
end
$$;
create trigger job_stats_counted before insert on job_stats for each row
when (octet_length(new.queue) + octet_length(new.job_type) > 256)
execute function count_stat_bytes();
create trigger job_stats_added after insert on job_stats
referencing new table as changed for each statement execute function note_counted_rows('1');
create trigger job_stats_removed after delete on job_stats
referencing old table as changed for each statement execute function note_counted_rows('-1');
