-- no-transaction
-- Projects with keys that expire soon, for alarms, across projects.
create index concurrently api_keys_expiring on api_keys (expires_at)
where revoked_at is null and not is_exchanged;
