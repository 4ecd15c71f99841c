-- Bytes of batches.
call count_rows_of('batches', 'note_counted_bytes', 'name', 'callbacks');
