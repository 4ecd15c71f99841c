-- Bytes of workers.
call count_rows_of(
    'workers', 'note_counted_bytes', 'worker_id', 'queues', 'job_types', 'labels', 'hostname'
);
