-- Bytes of types that are paused or fail.
call count_rows_of('queue_types', 'note_counted_bytes', 'queue', 'job_type');
