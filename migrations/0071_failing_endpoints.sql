-- no-transaction
-- Projects with endpoints that were disabled by failures or missed events, for alarms.
create index concurrently webhook_endpoints_in_trouble on webhook_endpoints (project_id)
where deleted_at is null and (disabled_reason in ('failing', 'gone') or dropped_at is not null);
