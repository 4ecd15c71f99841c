-- Bytes of settings of queues.
call count_rows_of('queues', 'note_counted_bytes', 'name', 'default_retry', 'paused_types');
