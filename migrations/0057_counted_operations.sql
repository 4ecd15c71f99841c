-- Bytes of bulk operations.
call count_rows_of(
    'operations', 'note_counted_bytes', 'filter', 'sample_error', 'last_error', 'skipped_by'
);
