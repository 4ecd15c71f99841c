-- The same for a job type.
alter table queue_types add column resumed_at timestamptz;
