-- What a key may do, for how long, and who made it. Keys that are there already may do everything.
alter table api_keys
    add column scopes text[] not null default '{produce,work,read,manage}',
    add column expires_at timestamptz,
    add column last_used_at timestamptz,
    add column created_by text,
    -- Calls a minute that the key has for itself, beside the project's.
    add column produce_per_minute integer check (produce_per_minute > 0),
    add column work_per_minute integer check (work_per_minute > 0),
    add column manage_per_minute integer check (manage_per_minute > 0);
