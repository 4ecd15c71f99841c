-- no-transaction
-- The probe, across projects.
create index concurrently event_subscriptions_new on event_subscriptions (created_at);
