-- no-transaction
-- Swept across projects: schedules whose next tick is to be found out.
create index concurrently recurring_schedules_unplanned on recurring_schedules (project_id, id)
where next_tick is null and problem is null and not is_paused;
