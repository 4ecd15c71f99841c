-- Rules of time zones: nodes may know different releases of the IANA database, and use the newest
-- that all have.

-- The newest release that a node has. Null: it is of a version that cannot say.
alter table nodes add column zone_rules text;

-- By which release `next_tick` was computed. Empty: by a version that cannot say.
alter table recurring_schedules add column zone_rules text not null default '';
