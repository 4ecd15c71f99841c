-- no-transaction
-- Swept across projects: workers whose silence means something.
create index concurrently workers_beating on workers (last_beat_at)
where last_beat_at is not null and lost_at is null and state <> 'terminated';
