-- no-transaction
-- Projects with thresholds of their own for the expiry of keys.
create index concurrently alarms_about_keys on alarms (project_id) where rule = 'key_expiring';
