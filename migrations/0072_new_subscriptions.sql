-- When a project began to want events of a type: nodes read what is new, and not all of it.
alter table event_subscriptions add column created_at timestamptz not null default now();
