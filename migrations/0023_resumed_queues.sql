-- The end of the last pause: jobs that waited through it are ready since then. Null: never paused.
alter table queues add column resumed_at timestamptz;
