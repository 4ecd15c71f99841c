-- When the rules of the queue's groups were changed last: dead letters from before block no group.
alter table queues add column group_rules_at timestamptz;
