-- Webhooks: who is told of what, and events that are not told yet.
--
-- A delivery is a job of the project's outbox: retries, dead letters and counts are the engine's.

-- Projects with webhooks. Changes of a project's endpoints lock its row, one after the other: what
-- they subscribe to is written with each change, and must fit all of them.
create table outboxes (
    project_id integer not null,
    -- The project whose jobs are the deliveries, in a queue for each endpoint.
    outbox_id integer not null,
    primary key (project_id)
);

create table webhook_endpoints (
    project_id integer not null,
    -- UUIDv7: lists are in the order of creation.
    id uuid not null,
    url text not null,
    description text,
    -- As they were sent: types, and groups of them such as `job.*`.
    events text[] not null check (cardinality(events) <= 50),
    -- The types that these name.
    event_types text[] not null,
    -- Only events about jobs of these queues; none: of all.
    queues text[] not null check (cardinality(queues) <= 50),
    -- Only events about jobs of these types, or with a beginning as in `mail.*`; none: of all.
    job_types text[] not null check (cardinality(job_types) <= 50),
    -- Jobs, batches and workflows may name URLs below this one, which are told of their end.
    takes_callbacks boolean not null default false,
    -- Deliveries that one node sends at a time.
    max_in_flight integer not null check (max_in_flight between 1 and 50),
    timeout_seconds integer not null check (timeout_seconds between 1 and 30),
    -- Signs deliveries. Encrypted, if there is a master key.
    secret bytea not null,
    -- The one before, which signs as well until then.
    old_secret bytea,
    old_secret_until timestamptz,
    created_at timestamptz not null default now(),
    -- Of its settings. What a node saw under other settings is not noted.
    updated_at timestamptz not null default now(),
    -- It is told of what happens from then on.
    subscribed_at timestamptz not null default now(),
    -- Null: it is enabled.
    disabled_at timestamptz,
    disabled_reason text check (disabled_reason in ('by_user', 'failing', 'gone')),
    -- What waited for it when it was disabled is cancelled.
    is_emptied boolean not null default false,
    -- From then on it does not exist for any caller; a loop cancels what waits, and deletes it.
    deleted_at timestamptz,
    -- To within some seconds: nodes write what they saw in batches.
    last_success_at timestamptz,
    last_failure_at timestamptz,
    -- The first failure since the last success.
    failing_since timestamptz,
    -- Failures since the last success.
    failures integer not null default 0,
    -- Events that it was not told, because too many deliveries to it waited.
    dropped_events bigint not null default 0,
    -- The last of them.
    dropped_at timestamptz,
    primary key (project_id, id),
    check ((disabled_at is null) = (disabled_reason is null)),
    check ((old_secret is null) = (old_secret_until is null))
);
-- Endpoints whose deliveries are to be cancelled, across projects.
create index webhook_endpoints_to_empty on webhook_endpoints (disabled_at, deleted_at)
where deleted_at is not null or (disabled_at is not null and not is_emptied);

-- Types of events that some enabled endpoint of the project wants, and `workflow.callback` if one
-- takes callbacks. Without a row, an end of a job writes nothing more.
create table event_subscriptions (
    project_id integer not null,
    type text not null,
    primary key (project_id, type)
);

-- Events of the types above, until a loop has made deliveries of them. Insert-only, and without
-- what the job's own rows say.
create table outbound_events (
    project_id integer not null,
    id bigint generated always as identity,
    type text not null,
    -- Null: it is about no job, and so for the next three.
    job_id uuid,
    queue text,
    job_type text,
    attempt integer,
    incident_id uuid,
    batch_id uuid,
    workflow_id uuid,
    -- The URL that the job, batch or workflow has named: it is told, and no other. Null: those that
    -- asked.
    callback_url text,
    at timestamptz not null default statement_timestamp(),
    primary key (project_id, id),
    check (num_nonnulls(job_id, incident_id, batch_id, workflow_id) = 1)
) with (
    -- Every told row is dead: vacuum by their number.
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0
);
-- Events that are too old to be told, across projects.
create index outbound_events_by_age on outbound_events (at);

-- Triggers write the events, in the transaction of the end: no statement can forget one, and no
-- crash can lose one.
create function note_finished_jobs() returns trigger language plpgsql as $$
begin
    if not exists (select from ended join event_subscriptions using (project_id)) then
        return null;
    end if;
    insert into outbound_events (project_id, type, job_id, queue, job_type, attempt)
    select ended.project_id, wanted.type, ended.id, ended.queue, ended.job_type, ended.attempt
    from ended
    join event_subscriptions wanted
        on wanted.project_id = ended.project_id and wanted.type = 'job.' || ended.state;
    insert into job_ends (project_id, job_id, workflow_id)
    select ended.project_id, ended.id, body.workflow_id
    from (
        select distinct wanted.project_id
        from ended
        join event_subscriptions wanted using (project_id)
        where wanted.type like 'workflow.%'
    ) wanting
    join ended using (project_id)
    cross join lateral (
        select workflow_id
        from job_bodies
        where project_id = ended.project_id and job_id = ended.id
        offset 0
    ) body
    where body.workflow_id is not null;
    return null;
end
$$;
create trigger finished_jobs_told after insert on finished_jobs referencing new table as ended
for each statement execute function note_finished_jobs();

-- An attempt without a time for the next one was the last, and its job is a dead letter; or it was
-- cancelled, which the trigger above tells.
create function note_failed_attempts() returns trigger language plpgsql as $$
begin
    if not exists (select from ended join event_subscriptions using (project_id)) then
        return null;
    end if;
    insert into outbound_events (project_id, type, job_id, queue, job_type, attempt)
    select ended.project_id, wanted.type, ended.job_id, job.queue, job.job_type, ended.attempt
    from ended
    join event_subscriptions wanted
        on wanted.project_id = ended.project_id
        and (
            (
                wanted.type = 'job.attempt_failed'
                and ended.outcome in ('failed', 'timeout', 'lease_expired')
            )
            or (
                wanted.type = 'job.dead_lettered'
                and ended.outcome <> 'cancelled' and ended.retry_at is null
            )
        )
    -- Lateral, so that no job is read that no endpoint asks for.
    cross join lateral (
        select queue, job_type
        from jobs
        where project_id = wanted.project_id and id = ended.job_id
        offset 0
    ) job;
    insert into job_ends (project_id, job_id, workflow_id)
    select ended.project_id, ended.job_id, body.workflow_id
    from (
        select distinct wanted.project_id
        from ended
        join event_subscriptions wanted using (project_id)
        where wanted.type like 'workflow.%'
    ) wanting
    join ended using (project_id)
    cross join lateral (
        select workflow_id
        from job_bodies
        where project_id = ended.project_id and job_id = ended.job_id
        offset 0
    ) body
    where ended.outcome <> 'cancelled' and ended.retry_at is null
        and body.workflow_id is not null;
    return null;
end
$$;
create trigger attempts_told after insert on attempts referencing new table as ended
for each statement execute function note_failed_attempts();

-- Push: queues whose jobs are sent to a URL.
create table queue_pushes (
    project_id integer not null,
    queue text not null,
    url text not null,
    -- Longest time of a request.
    timeout_seconds integer not null check (timeout_seconds between 1 and 600),
    -- Jobs that one node sends at a time.
    max_in_flight integer not null check (max_in_flight between 1 and 200),
    -- Null: not paused.
    paused_at timestamptz,
    -- JSON of the headers that requests carry besides ours. Encrypted, if there is a master key.
    -- Null: none.
    headers bytea,
    header_names text[] not null default '{}',
    -- Signs requests. Encrypted, if there is a master key.
    secret bytea not null,
    -- The one before, which signs as well until then.
    old_secret bytea,
    old_secret_until timestamptz,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    -- To within some seconds: nodes write what they saw in batches.
    last_success_at timestamptz,
    last_failure_at timestamptz,
    -- The first failure since the last success.
    failing_since timestamptz,
    -- What went wrong last, as `http_503`.
    last_error text,
    primary key (project_id, queue),
    check ((old_secret is null) = (old_secret_until is null))
);
