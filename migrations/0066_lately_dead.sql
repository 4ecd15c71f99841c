-- no-transaction
-- Projects with new dead letters, for alarms, across projects.
create index concurrently dead_letter_groups_lately on dead_letter_groups (last_seen_at);
