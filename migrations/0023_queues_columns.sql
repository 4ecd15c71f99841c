-- What a queue can be set to, and what claims must know of it.
alter table queues
    add column rate_limit_count integer check (rate_limit_count between 1 and 100000),
    add column rate_limit_per_seconds integer check (rate_limit_per_seconds between 1 and 86400),
    add column default_lease_seconds integer check (default_lease_seconds between 1 and 86400),
    add column retention_days integer check (retention_days between 1 and 3650),
    add column default_max_attempts integer check (default_max_attempts between 1 and 100),
    add column default_retry jsonb,
    -- Dead letters of one type in a row that pause it.
    add column brake_after integer check (brake_after between 1 and 10000),
    add column paused_at timestamptz,
    add column paused_types text[] not null default '{}',
    -- Whether ordinary claims must leave the queue to those that know its settings.
    add column has_rules boolean not null generated always as (
        max_concurrency is not null or rate_limit_count is not null
        or default_lease_seconds is not null or paused_at is not null or paused_types <> '{}'
    ) stored,
    add constraint queues_rate_limit_is_whole
        check ((rate_limit_count is null) = (rate_limit_per_seconds is null));
