-- Bytes of dead letters that were deleted lately: a row and two entries of indexes each.
alter table deleted_jobs add column counted_bytes integer;
alter table deleted_jobs alter column counted_bytes set default 128;
create trigger deleted_jobs_added after insert on deleted_jobs
referencing new table as changed for each statement execute function note_counted_rows('1');
create trigger deleted_jobs_removed after delete on deleted_jobs
referencing old table as changed for each statement execute function note_counted_rows('-1');
