-- Bytes of endpoints.
call count_rows_of(
    'webhook_endpoints', 'note_counted_bytes', 'url', 'description', 'events', 'event_types',
    'queues', 'job_types'
);
