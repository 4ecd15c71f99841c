-- Bytes of schemas of job types.
call count_rows_of('job_types', 'note_counted_bytes', 'job_type', 'schema');
