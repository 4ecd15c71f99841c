-- The group of a schedule's jobs. Null: they have none.
alter table recurring_schedules add column group_key text;
create or replace trigger texts_counted before insert on recurring_schedules for each row
execute function count_texts('id', 'job_type', 'queue', 'payload', 'retry', 'group_key');
create or replace trigger texts_changed
before update of id, job_type, queue, payload, retry, group_key on recurring_schedules for each row
when (
    (old.id, old.job_type, old.queue, old.payload, old.retry, old.group_key)
        is distinct from (new.id, new.job_type, new.queue, new.payload, new.retry, new.group_key)
)
execute function count_texts('id', 'job_type', 'queue', 'payload', 'retry', 'group_key');
create or replace trigger bytes_changed
after update of id, job_type, queue, payload, retry, group_key on recurring_schedules for each row
when (new.counted_bytes is distinct from old.counted_bytes) execute function note_counted_bytes();
