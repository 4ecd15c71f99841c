-- Bytes of groups of dead letters.
call count_rows_of(
    'dead_letter_groups', 'note_counted_bytes', 'job_type', 'error_type', 'sample_message'
);
drop procedure count_rows_of;
