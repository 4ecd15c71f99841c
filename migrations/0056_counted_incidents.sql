-- Bytes of incidents.
call count_rows_of('incidents', 'note_counted_bytes', 'alarm', 'subject', 'details');
