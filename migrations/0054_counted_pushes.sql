-- Bytes of pushes.
call count_rows_of('queue_pushes', 'note_counted_bytes', 'queue', 'url', 'headers', 'header_names');
