-- Bytes of schedules.
call count_rows_of(
    'recurring_schedules', 'note_counted_bytes', 'id', 'job_type', 'queue', 'payload', 'retry'
);
