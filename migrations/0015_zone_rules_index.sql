-- Schedules whose next tick was computed by other rules than the nodes use now, across projects.
create index recurring_schedules_by_zone_rules on recurring_schedules (zone_rules)
where next_tick is not null;
