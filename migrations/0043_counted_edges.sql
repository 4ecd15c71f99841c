-- Bytes of dependencies: a row and two entries of indexes each.
alter table job_edges add column counted_bytes integer;
alter table job_edges alter column counted_bytes set default 192;
create trigger job_edges_added after insert on job_edges
referencing new table as changed for each statement execute function note_counted_rows('1');
create trigger job_edges_removed after delete on job_edges
referencing old table as changed for each statement execute function note_counted_rows('-1');
