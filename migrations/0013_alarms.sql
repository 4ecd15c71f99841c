-- Alarms: what a project's people are told of without asking.

-- Alarms that every project has, unless a row of `alarms` has their name.
create table default_alarms (
    name text primary key,
    rule text not null,
    threshold integer not null,
    for_seconds integer not null
);
insert into default_alarms (name, rule, threshold, for_seconds) values
('dead_letters', 'dead_letters', 10, 300),
('oldest_ready', 'oldest_ready', 900, 120),
('circuit_open', 'circuit_open', 1, 0),
('schedule_missed', 'schedule_missed', 1, 0),
('endpoint_disabled', 'endpoint_disabled', 1, 0),
('deliveries_dropped', 'deliveries_dropped', 1, 0),
('push_failing', 'push_failing', 300, 0),
('key_expiring', 'key_expiring', 14, 0),
('key_expiring_soon', 'key_expiring', 1, 0);

-- Those that a project has changed, or made.
create table alarms (
    project_id integer not null,
    name text not null,
    rule text not null check (rule in (
        'dead_letters', 'oldest_ready', 'circuit_open', 'schedule_missed', 'endpoint_disabled',
        'deliveries_dropped', 'push_failing', 'key_expiring'
    )),
    -- Only about these queues; none: about all.
    queues text[] not null default '{}' check (cardinality(queues) <= 50),
    -- A number of dead letters, seconds, or days: see the rule. 1 for the others.
    threshold integer not null check (threshold > 0),
    -- Seconds within which, or for which, it is reached. 0 for most rules.
    for_seconds integer not null check (for_seconds >= 0),
    -- Members who get a mail: those who have at least this role.
    mail_to text not null default 'owners' check (mail_to in ('none', 'owners', 'admins')),
    is_enabled boolean not null default true,
    updated_at timestamptz not null default now(),
    primary key (project_id, name)
);

-- All alarms of all projects.
create view effective_alarms with (security_invoker = true) as
select project_id, name, rule, queues, threshold, for_seconds, mail_to, is_enabled, updated_at
from alarms
union all
select projects.id, given.name, given.rule, '{}', given.threshold, given.for_seconds, 'owners',
       true, null
from projects
cross join default_alarms given
where projects.kind = 'user' and projects.deleted_at is null and not exists (
    select from alarms it where it.project_id = projects.id and it.name = given.name
);

-- What alarms found: one row for each problem, from its beginning to its end.
create table incidents (
    project_id integer not null,
    -- UUIDv7: lists are in the order of their beginning.
    id uuid not null,
    alarm text not null,
    rule text not null,
    -- What it is about: a group of dead letters, a queue, a schedule, an endpoint or a key.
    subject text not null,
    -- JSON: what people are told of it.
    details text not null,
    mail_to text not null,
    began_at timestamptz not null default now(),
    -- To within a minute.
    last_found_at timestamptz not null default now(),
    -- Null: it does not last for long enough yet, and is not told.
    triggered_at timestamptz,
    resolved_at timestamptz,
    -- Until then, no further incident of this alarm about this subject is told.
    muted_until timestamptz,
    primary key (project_id, id)
);
-- Any number of nodes look, and one begins it.
create unique index incidents_open on incidents (project_id, alarm, subject)
where resolved_at is null;
-- Mutes.
create index incidents_muted on incidents (project_id, alarm, subject)
where muted_until is not null;
-- Retention.
create index incidents_by_age on incidents (resolved_at) where resolved_at is not null;

-- The job of a queue that has been ready for longest: the oldest of each of the first twenty
-- priorities. If `run_at` was past when the job was stored, its age counts from the enqueue.
create function oldest_ready_job(of_project integer, of_queue text)
returns table (id uuid, job_type text, ready_at timestamptz) language sql stable as $$
    with recursive first_of_rank as (
        (
            select jobs.rank, jobs.id, jobs.job_type,
                   greatest(jobs.run_at, jobs.created_at) as ready_at
            from jobs
            where jobs.project_id = of_project and jobs.queue = of_queue
                and jobs.state = 'pending' and jobs.constraint_key is null
            order by jobs.rank, jobs.run_at, jobs.id
            limit 1
        )
        union all
        select next.rank, next.id, next.job_type, next.ready_at
        from first_of_rank
        cross join lateral (
            select jobs.rank, jobs.id, jobs.job_type,
                   greatest(jobs.run_at, jobs.created_at) as ready_at
            from jobs
            where jobs.project_id = of_project and jobs.queue = of_queue
                and jobs.state = 'pending' and jobs.constraint_key is null
                and jobs.rank > first_of_rank.rank
            order by jobs.rank, jobs.run_at, jobs.id
            limit 1
        ) next
    )
    select bounded.id, bounded.job_type, bounded.ready_at
    from (
        select first_of_rank.id, first_of_rank.job_type, first_of_rank.ready_at
        from first_of_rank
        limit 20
    ) bounded
    order by bounded.ready_at
    limit 1
$$;
