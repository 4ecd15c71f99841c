-- Jobs: live, finished, their attempts, history and logs; dead letters; bulk operations; requests
-- that are repeated.

-- Live jobs and dead letters only, and narrow: every statement of the hot path writes this table.
-- What never changes is in `job_bodies`; succeeded and cancelled jobs move to `finished_jobs`.
create table jobs (
    project_id integer not null,
    -- UUIDv7, so that new rows go to the end of the key.
    id uuid not null,
    queue text not null,
    job_type text not null,
    -- `scheduled`, `backoff`, `pending`, `processing` or `dead_letter`.
    state text not null,
    -- Minus the priority, so that the order of a claim is ascending in every column.
    rank smallint not null,
    -- When it may run; within a rank, the order of claims.
    run_at timestamptz not null,
    created_at timestamptz not null default now(),
    -- The fence: each claim adds 1, nothing else changes it, so no number is given twice.
    attempt integer not null default 0,
    -- Attempts that failed, timed out or lost their lease; releases do not count.
    failures integer not null default 0,
    -- Failures after which it is dead-lettered.
    max_attempts integer not null,
    -- Longest time of one attempt.
    timeout_seconds integer not null,
    -- Labels that its worker must have. Null: none.
    labels text[],
    -- The worker of a running job is asked to stop.
    cancel_requested boolean not null default false,
    -- 0 to 1, as its worker reported. Null: not reported.
    progress real,
    -- Dependencies that are not met. It waits while there are any.
    unfinished_parents integer not null default 0,
    -- When it became a dead letter.
    completed_at timestamptz,
    -- The lease: these five are null together, unless it is running.
    lease_id uuid,
    worker_id text,
    claimed_at timestamptz,
    -- What a heartbeat adds.
    lease_seconds integer,
    lease_expires_at timestamptz,
    -- The poll that leased it, if the worker gave it an id: repeating it returns the same jobs.
    poll_id uuid,
    -- Null: any worker of the queue may have it at any time. Otherwise a hash of job type, labels
    -- and concurrency key: jobs with the same hash are claimable, or not, together.
    constraint_key uuid,
    -- At most `concurrency_limit` jobs with this key run at a time. Null: no such limit.
    concurrency_key text,
    concurrency_limit integer,
    -- No two live jobs of a project have the same. Null: none.
    unique_key text,
    -- It is cancelled if it has not started by then. Null: never.
    expires_at timestamptz,
    -- Its lease counts against a limit: its end lets another job run.
    holds_slot boolean not null default false,
    -- Jobs that were stored with it as a parent: its end must find them.
    children integer not null default 0,
    -- The batch that counts its end. Null: none.
    batch_id uuid,
    -- Its end enqueues jobs. Null: it does not.
    has_callbacks boolean,
    -- Its payload is a command for a shell. Null: it is not.
    has_command boolean,
    primary key (project_id, id),
    -- PostgreSQL reads and prepares each check in every statement that writes rows, which took a
    -- tenth of its time. So only this one is here: a running job must have an end that the reaper
    -- finds. All others are in every database of the tests: tests/it/harness/checks.sql.
    check ((state = 'processing') = (lease_expires_at is not null))
) with (
    -- Room for updates that stay in their page.
    fillfactor = 90,
    -- Dead rows come with every job: vacuum by their number, not by the table's size.
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0,
    autovacuum_analyze_threshold = 50000
);
-- Claims. Jobs with a constraint key are not in it: a claim must not walk over jobs that it may not
-- deliver.
create index jobs_ready on jobs (project_id, queue, rank, run_at, id)
where state = 'pending' and constraint_key is null;
-- Claims of polls that name job types: they must not walk over other types.
create index jobs_ready_by_type on jobs (project_id, queue, job_type, rank, run_at, id)
where state = 'pending' and constraint_key is null;
-- Claims of polls for commands only: they must not walk over other jobs.
create index jobs_ready_commands on jobs (project_id, queue, rank, run_at, id)
where state = 'pending' and constraint_key is null and has_command;
-- Claims of constrained jobs, key by key.
create index jobs_constrained on jobs (project_id, queue, constraint_key, rank, run_at, id)
where state = 'pending' and constraint_key is not null;
-- Running jobs of a queue, for its limit and its list, and of a worker.
create index jobs_running on jobs (project_id, queue, worker_id)
where state = 'processing';
-- Running jobs with a concurrency key, for its limit.
create index jobs_running_by_key on jobs (project_id, concurrency_key)
where state = 'processing' and concurrency_key is not null;
-- The leases of a poll that is repeated.
create index jobs_by_poll on jobs (project_id, poll_id) where poll_id is not null;
-- No two live jobs have the same unique key; a dead letter is not live.
create unique index jobs_unique on jobs (project_id, unique_key)
where unique_key is not null and state <> 'dead_letter';
-- The reaper: leases in the order of their expiry, across projects.
create index jobs_expiring on jobs (lease_expires_at) where state = 'processing';
-- The promoter: waiting jobs in the order of their time, across projects.
create index jobs_due on jobs (run_at)
where state in ('scheduled', 'backoff') and unfinished_parents = 0;
-- The same for each project: they take turns when many jobs are due.
create index jobs_due_by_project on jobs (project_id, run_at)
where state in ('scheduled', 'backoff') and unfinished_parents = 0;

-- Dead letters that were deleted lately. If a client stores a job under the id of one, the numbers
-- of its attempts continue: an ack of an old attempt must not settle a new one.
create table deleted_jobs (
    project_id integer not null,
    job_id uuid not null,
    -- The last attempt.
    attempt integer not null,
    deleted_at timestamptz not null default now(),
    primary key (project_id, job_id)
);
-- Retention, across projects.
create index deleted_jobs_by_time on deleted_jobs (deleted_at);

-- What a job is, from its enqueue to its retention: insert-only.
create table job_bodies (
    project_id integer not null,
    job_id uuid not null,
    -- The bytes that were sent: nothing reads them but workers.
    payload text not null,
    -- Null: the default policy.
    retry jsonb,
    -- Null: none.
    tags jsonb,
    -- The trace context of the enqueue.
    traceparent text,
    -- How many deliveries of webhooks have led to it, each by the one before. Null: none.
    hop smallint,
    -- The next seven repeat columns of `jobs`, for a retry of a cancelled job. Null: not used.
    labels text[],
    constraint_key uuid,
    concurrency_key text,
    concurrency_limit integer,
    unique_key text,
    expires_at timestamptz,
    batch_id uuid,
    -- JSON of the jobs that its end enqueues. Null: none.
    callbacks text,
    -- How often it has ended, if its end enqueues jobs. Null: never.
    ends integer,
    -- Null: it belongs to no workflow.
    workflow_id uuid,
    -- Its name in the workflow.
    workflow_key text,
    -- Its delivery brings the parents' results.
    has_parents boolean not null default false,
    -- Its payload has places that parents' results fill when it is delivered. Null: it has none.
    is_template boolean,
    -- The job whose work it repeats. Null: it is no replay.
    replay_of uuid,
    -- Fields of another protocol without a native equivalent; only its adapter reads them.
    envelope text,
    primary key (project_id, job_id)
);

-- The jobs of a batch, live and ended: its list, and bulk operations on it.
create index job_bodies_by_batch on job_bodies (project_id, batch_id, job_id)
where batch_id is not null;

-- Succeeded and cancelled jobs, with what answers a repeated ack and what a retry restores. The
-- columns are those of `jobs`.
create table finished_jobs (
    project_id integer not null,
    id uuid not null,
    queue text not null,
    job_type text not null,
    -- `succeeded` or `cancelled`.
    state text not null,
    rank smallint not null,
    run_at timestamptz not null,
    created_at timestamptz not null,
    attempt integer not null,
    failures integer not null,
    max_attempts integer not null,
    timeout_seconds integer not null,
    labels text[],
    cancel_requested boolean not null,
    progress real,
    -- The lease under which it succeeded; null: cancelled while it waited.
    lease_id uuid,
    worker_id text,
    claimed_at timestamptz,
    completed_at timestamptz not null default now(),
    -- As its worker reported.
    duration_ms bigint,
    -- The bytes that were sent. Null: none.
    result text,
    -- Children that its success made claimable: part of the answer to the ack.
    children_activated integer,
    children integer not null default 0,
    -- The parent whose end cancelled it; null: a caller did.
    cancelled_by uuid,
    -- That parent ended otherwise than this job waited for, without failing: it was not needed.
    is_skipped boolean,
    primary key (project_id, id)
);
-- Retention by queue.
create index finished_jobs_by_age on finished_jobs (project_id, queue, completed_at);

-- Attempts that did not succeed: a job's history, and the answer to a repeated ack.
create table attempts (
    project_id integer not null,
    job_id uuid not null,
    attempt integer not null,
    worker_id text not null,
    lease_id uuid not null,
    claimed_at timestamptz not null,
    ended_at timestamptz not null default now(),
    outcome text not null
        check (outcome in ('failed', 'timeout', 'lease_expired', 'released', 'cancelled')),
    -- The reported error, cut to its limits. Null: not reported.
    error_kind text,
    error_message text,
    error_stack_trace text,
    -- Whether something was cut off.
    error_truncated boolean not null default false,
    -- When the job could run again; null: it was the last attempt.
    retry_at timestamptz,
    -- As its worker reported.
    duration_ms bigint,
    primary key (project_id, job_id, attempt)
);

-- Whether a dependency is `met`, still `open`, or can no longer be met: `broken`. A `skipped` parent
-- was not needed: it neither succeeded nor failed.
create function dependency_standing(condition text, is_met boolean, parent_state text)
returns text
language sql
immutable
as $$
    select case
        when is_met then 'met'
        when parent_state = 'succeeded' then
            case when condition = 'failed' then 'broken' else 'met' end
        when parent_state in ('dead_letter', 'cancelled') then
            case when condition = 'succeeded' then 'broken' else 'met' end
        when parent_state = 'skipped' then
            case when condition = 'ended' then 'met' else 'broken' end
        else 'open'
    end
$$;

-- A child runs when all of its dependencies are met.
create table job_edges (
    project_id integer not null,
    parent_id uuid not null,
    child_id uuid not null,
    -- The parent's index in the child's `depends_on`: results are delivered in this order.
    ordinal smallint not null,
    -- The end of the parent that the child waits for.
    condition text not null default 'succeeded'
        check (condition in ('succeeded', 'failed', 'ended')),
    -- The parent has met the condition: it counts even if the parent is retried.
    is_met boolean not null default false,
    -- How the parent ended, kept when it is deleted. Null: the parent is still there.
    outcome text check (outcome in ('succeeded', 'skipped', 'cancelled', 'dead_letter')),
    primary key (project_id, child_id, parent_id)
);
-- The children of a parent that ends.
create index job_edges_by_parent on job_edges (project_id, parent_id, child_id);

-- Jobs that ended, and whose children must be cancelled or may run. Not a column of `jobs`: every
-- statement that writes that table would maintain its index.
create table ended_parents (
    project_id integer not null,
    job_id uuid not null,
    primary key (project_id, job_id)
);

-- Retried jobs of large families, whose cancelled children are retried step by step.
create table revived_parents (
    project_id integer not null,
    job_id uuid not null,
    -- Children up to this id have had their turn.
    after_id uuid not null default '00000000-0000-0000-0000-000000000000',
    primary key (project_id, job_id)
);

-- Jobs with an `expires_at`, apart from `jobs` for the same reason.
create table job_expiries (
    project_id integer not null,
    job_id uuid not null,
    expires_at timestamptz not null,
    primary key (project_id, job_id)
);
-- Expiry, across projects.
create index job_expiries_by_time on job_expiries (expires_at);

-- Rare transitions, and events that workers report. All other history is read from the rows above.
create table job_events (
    project_id integer not null,
    job_id uuid not null,
    -- Ordered by time.
    id uuid not null,
    type text not null,
    at timestamptz not null default now(),
    -- The attempt that reported it. Null: no attempt did.
    attempt integer,
    worker_id text,
    -- The bytes that were sent, or JSON of what changed.
    payload text,
    primary key (project_id, job_id, id)
);

create table job_logs (
    project_id integer not null,
    job_id uuid not null,
    attempt integer not null,
    stream text not null check (stream in ('stdout', 'stderr', 'system')),
    -- The worker's number of the chunk: a chunk that is sent again is stored once.
    sequence bigint not null,
    data text not null,
    -- The worker's clock, in milliseconds since 1970.
    timestamp_ms bigint not null,
    primary key (project_id, job_id, attempt, stream, sequence)
);

-- How much of an attempt's logs is stored: it is bounded.
create table job_log_totals (
    project_id integer not null,
    job_id uuid not null,
    attempt integer not null,
    kept_bytes bigint not null default 0,
    kept_chunks integer not null default 0,
    -- Whether chunks were refused.
    is_truncated boolean not null default false,
    primary key (project_id, job_id, attempt)
);

-- Dead letters, as they are found and grouped. The jobs themselves stay in `jobs`.
create table dead_letters (
    project_id integer not null,
    job_id uuid not null,
    -- A hash of job type, error type, and message without numbers: the same for failures alike.
    fingerprint uuid not null,
    queue text not null,
    job_type text not null,
    died_at timestamptz not null default now(),
    primary key (project_id, job_id)
);
-- The list, and bulk operations on all.
create index dead_letters_by_age on dead_letters (project_id, died_at, job_id);
-- The same for one group.
create index dead_letters_by_fingerprint on dead_letters (project_id, fingerprint, died_at, job_id);

-- One row per fingerprint, so that groups are listed without counting.
create table dead_letter_groups (
    project_id integer not null,
    fingerprint uuid not null,
    job_type text not null,
    error_type text,
    -- Of the first dead letter, as it was sent.
    sample_message text,
    sample_job_id uuid not null,
    -- Present dead letters.
    jobs bigint not null default 0,
    first_seen_at timestamptz not null default now(),
    last_seen_at timestamptz not null default now(),
    primary key (project_id, fingerprint)
);
-- The list, the most recent first.
create index dead_letter_groups_by_age on dead_letter_groups (project_id, last_seen_at, fingerprint);

-- Bulk operations: steps in the background, resumable on any node.
create table operations (
    project_id integer not null,
    id uuid not null,
    kind text not null,
    state text not null default 'running'
        check (state in ('running', 'succeeded', 'failed', 'aborted')),
    -- Which jobs, as the request said.
    filter jsonb not null,
    -- The error of the group that the filter names: the group is gone when its jobs are.
    sample_error text,
    -- Matching jobs at the start; null: more than were counted.
    expected bigint,
    done bigint not null default 0,
    -- Jobs that no longer allowed it.
    skipped bigint not null default 0,
    -- Maximum of jobs; null: all.
    max_jobs bigint,
    -- Null: unlimited.
    rate_per_second integer,
    -- Where the next step begins.
    after_at timestamptz,
    after_id uuid,
    -- Consecutive failed steps; too many end the operation.
    failed_steps integer not null default 0,
    last_error text,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    ended_at timestamptz,
    -- Null: it has ended.
    next_step_at timestamptz default now(),
    primary key (project_id, id),
    check ((state = 'running') = (next_step_at is not null))
);
-- Due steps, across projects.
create index operations_due on operations (next_step_at) where next_step_at is not null;
-- Retention.
create index operations_by_age on operations (ended_at) where ended_at is not null;

-- The first answer to a request with an `Idempotency-Key`.
create table idempotency_keys (
    project_id integer not null,
    key text not null,
    -- SHA-256 of route and body: the key is for this request only.
    fingerprint bytea not null check (octet_length(fingerprint) = 32),
    -- The ids of what the request creates are derived from it: running it twice creates it once.
    seed uuid not null,
    created_at timestamptz not null default now(),
    -- When it was last started; after a while another request may take it over.
    locked_at timestamptz not null default now(),
    -- The node that runs it; when it is gone, another request may take over at once.
    locked_by uuid not null,
    -- The run that holds the lock.
    lock_id uuid not null,
    -- The answer; null while the request runs.
    status smallint,
    location text,
    body text,
    -- Whether the body is whole. Else the payloads of its jobs are left out: the jobs have them.
    has_payloads boolean not null default true,
    primary key (project_id, key)
);
-- Retention.
create index idempotency_keys_by_age on idempotency_keys (created_at);

-- When the reaper last ran on any node. After a gap, leases that expired in it are extended once:
-- their workers had no node to send a heartbeat to.
create table reaper_state (
    only_row boolean primary key default true check (only_row),
    last_pass_at timestamptz not null default now()
);
insert into reaper_state default values;

-- Whether a payload is a command for a shell: a string, or an object with a string `command`. A
-- payload may be JSON that PostgreSQL does not accept (such as \u0000): that is no command.
create function offers_command(payload text) returns boolean
language plpgsql immutable strict
as $$
begin
    return case
        when ltrim(payload, E' \t\r\n') like '"%' then true
        when payload not like '%"command"%' then false
        when json_typeof(payload::json) <> 'object' then false
        else coalesce(json_typeof(payload::json -> 'command') = 'string', false)
    end;
exception when data_exception or syntax_error_or_access_rule_violation then
    return false;
end
$$;

-- What clients send. lz4 compresses several times faster than PostgreSQL's own method, at about the
-- same size. A server that was built without it keeps that one.
do $$
begin
    alter table job_bodies
        alter column payload set compression lz4,
        alter column envelope set compression lz4;
    alter table finished_jobs alter column result set compression lz4;
    alter table attempts alter column error_stack_trace set compression lz4;
    alter table job_events alter column payload set compression lz4;
    alter table job_logs alter column data set compression lz4;
    alter table idempotency_keys alter column body set compression lz4;
exception when feature_not_supported then
    raise notice 'this server has no lz4: payloads are compressed by pglz';
end
$$;
