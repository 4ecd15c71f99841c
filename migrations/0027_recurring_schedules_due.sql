-- no-transaction
-- Swept across projects: ticks that are due.
create index concurrently recurring_schedules_due on recurring_schedules (next_tick)
where next_tick is not null;
