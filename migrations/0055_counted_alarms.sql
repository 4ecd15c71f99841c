-- Bytes of alarms.
call count_rows_of('alarms', 'note_counted_bytes', 'name', 'queues');
