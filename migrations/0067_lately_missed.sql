-- no-transaction
-- Projects whose schedules have just missed a tick, for alarms, across projects.
create index concurrently schedule_fires_missed_lately on schedule_fires (at)
where outcome = 'missed';
