//! What alarms find. Each statement is about a page of projects, and bounds what it finds for one
//! alarm of one project by a literal limit.

mod lost_jobs;

use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use fencepost_domain::{
    alarm::{MAX_BLOCKED_GROUPS, MAX_WAITING_GROUPS, MISSED_MINUTES},
    ids::ProjectId,
};

use crate::workers::{ALIVE_SECONDS, holders::MAX_LISTED_HOLDERS};

pub use self::lost_jobs::{jobs_lost, losing_workers};

/// Projects of one page.
pub const MAX_PAGE_PROJECTS: usize = 200;

/// Something that an alarm found.
#[derive(Debug, Clone)]
pub struct Found {
    pub project_id: ProjectId,
    pub alarm: String,
    pub rule: String,
    pub mail_to: String,
    /// The subject: a text, or the id of an endpoint or a key.
    pub subject: Option<String>,
    pub subject_id: Option<Uuid>,
    /// Beyond the threshold.
    pub is_beyond: bool,
    pub for_seconds: i32,
    pub queue: Option<String>,
    pub job_type: Option<String>,
    pub error_type: Option<String>,
    pub job_id: Option<Uuid>,
    /// The name of a key or a group, or a URL.
    pub name: Option<String>,
    pub value: Option<i64>,
    /// True of a queue that no live worker polls and that is not pushed, or whose jobs silent
    /// workers hold: such queues of a project have one cause.
    pub shares_cause: bool,
    /// Time when the last of the jobs that silent workers hold returns.
    pub return_by: Option<DateTime<Utc>>,
}

/// The projects among these in which alarms look, in the order of their ids.
pub async fn page(conn: &mut PgConnection, projects: &[ProjectId]) -> sqlx::Result<Vec<ProjectId>> {
    let ids: Vec<_> = projects.iter().map(|it| it.0).collect();
    sqlx::query_scalar!(
        r#"
        select id "id: ProjectId"
        from projects
        where id = any($1) and kind = 'user' and deleted_at is null and suspended_at is null
            and not exists (
                select from set_aside
                where project_id = projects.id and work = 'alarms' and next_try_at > now()
            )
        order by id
        "#,
        &ids,
    )
    .fetch_all(conn)
    .await
}

/// Error groups with dead letters in the time that the alarm names.
pub async fn dead_letters(conn: &mut PgConnection, projects: &[i32]) -> sqlx::Result<Vec<Found>> {
    sqlx::query_as!(
        Found,
        r#"
        select alarm.project_id "project_id!: ProjectId", alarm.name "alarm!",
               alarm.rule "rule!", alarm.mail_to "mail_to!",
               replace(letters.fingerprint::text, '-', '') as subject, null::uuid as subject_id,
               (
                   recent.jobs >= alarm.threshold
                   or letters.first_seen_at >= now() - make_interval(secs => alarm.for_seconds)
               ) "is_beyond!",
               0 "for_seconds!", null as queue, letters.job_type "job_type?", letters.error_type,
               letters.sample_job_id "job_id?", null as name, recent.jobs "value?", false "shares_cause!", null::timestamptz as return_by
        from effective_alarms alarm
        cross join lateral (
            select fingerprint, job_type, error_type, sample_job_id, first_seen_at
            from dead_letter_groups
            where project_id = alarm.project_id
                and last_seen_at > now() - make_interval(secs => alarm.for_seconds)
            order by last_seen_at desc
            limit 100
        ) letters
        cross join lateral (
            select count(*) filter (
                       where alarm.queues = '{}' or newest.queue = any(alarm.queues)
                   ) as jobs
            from (
                select queue
                from dead_letters
                where project_id = alarm.project_id and fingerprint = letters.fingerprint
                    and died_at >= now() - make_interval(secs => alarm.for_seconds)
                order by died_at desc
                limit 1000
            ) newest
        ) recent
        where alarm.project_id = any($1) and alarm.rule = 'dead_letters' and alarm.is_enabled
            and recent.jobs > 0
        "#,
        projects,
    )
    .fetch_all(conn)
    .await
}

/// Queues whose oldest ready job waits for more than half of the threshold. Jobs with labels or a
/// concurrency key are looked at up to a number of them. Paused queues and types are left out.
pub async fn oldest_ready(conn: &mut PgConnection, projects: &[i32]) -> sqlx::Result<Vec<Found>> {
    sqlx::query_as!(
        Found,
        r#"
        with waiting as materialized (
            select asking.project_id, busy.queue, oldest.id,
                   extract(epoch from now() - oldest.ready_at) as seconds
            from (
                select distinct project_id
                from effective_alarms
                where project_id = any($1) and rule = 'oldest_ready' and is_enabled
            ) asking
            cross join lateral alarmed_queues(asking.project_id, 'oldest_ready') busy
            cross join lateral longest_ready(asking.project_id, busy.queue, 200, false) oldest
            where not exists (
                select from queues
                where project_id = asking.project_id and name = busy.queue and paused_at is not null
            )
        ), polled as materialized (
            select workers.project_id, named.queue
            from workers
            cross join lateral unnest(workers.queues) as named(queue)
            where workers.project_id = any($1) and workers.state = 'running'
                and workers.lost_at is null
                and coalesce(workers.directive, 'running') = 'running'
                and workers.last_seen_at
                    > now() - make_interval(secs => greatest($2::int, 3 * workers.beat_seconds))
                and (workers.project_id, named.queue) in (select project_id, queue from waiting)
            union
            select project_id, queue
            from queue_pushes
            where project_id = any($1) and paused_at is null
        )
        select alarm.project_id "project_id!: ProjectId", alarm.name "alarm!",
               alarm.rule "rule!", alarm.mail_to "mail_to!", waiting.queue as subject,
               null::uuid as subject_id, waiting.seconds > alarm.threshold "is_beyond!",
               alarm.for_seconds "for_seconds!", waiting.queue "queue?", null as job_type,
               null as error_type, waiting.id "job_id?", null as name,
               waiting.seconds::bigint as value, not exists (
                   select from polled
                   where polled.project_id = waiting.project_id and polled.queue = waiting.queue
               ) "shares_cause!", null::timestamptz as return_by
        from effective_alarms alarm
        join waiting on waiting.project_id = alarm.project_id
        where alarm.project_id = any($1) and alarm.rule = 'oldest_ready' and alarm.is_enabled
            and waiting.seconds > alarm.threshold / 2
            and (alarm.queues = '{}' or waiting.queue = any(alarm.queues))
        "#,
        projects,
        ALIVE_SECONDS,
    )
    .fetch_all(conn)
    .await
}

/// Queues whose running jobs are held by workers that make no calls. As for [`oldest_ready`], a
/// project's largest queues are looked at, and those that an alarm names; and of each the first
/// [`MAX_LISTED_HOLDERS`] by name.
pub async fn workers_silent(conn: &mut PgConnection, projects: &[i32]) -> sqlx::Result<Vec<Found>> {
    sqlx::query_as!(
        Found,
        r#"
        with held as materialized (
            select asking.project_id, busy.queue, silent.jobs, silent.return_by
            from (
                select distinct project_id
                from effective_alarms
                where project_id = any($1) and rule = 'workers_silent' and is_enabled
            ) asking
            cross join lateral alarmed_queues(asking.project_id, 'workers_silent') busy
            cross join lateral (
                select sum(jobs)::bigint as jobs, max(return_by) as return_by
                from silent_holders(asking.project_id, busy.queue, $2, $3)
            ) silent
            where silent.jobs > 0
        )
        select alarm.project_id "project_id!: ProjectId", alarm.name "alarm!",
               alarm.rule "rule!", alarm.mail_to "mail_to!", held.queue as subject,
               null::uuid as subject_id, held.jobs >= alarm.threshold "is_beyond!",
               alarm.for_seconds "for_seconds!", held.queue "queue?", null as job_type,
               null as error_type, null::uuid as job_id,
               null as name, held.jobs as value, true "shares_cause!", held.return_by
        from effective_alarms alarm
        join held on held.project_id = alarm.project_id
        where alarm.project_id = any($1) and alarm.rule = 'workers_silent' and alarm.is_enabled
            and (alarm.queues = '{}' or held.queue = any(alarm.queues))
        "#,
        projects,
        ALIVE_SECONDS,
        MAX_LISTED_HOLDERS,
    )
    .fetch_all(conn)
    .await
}

/// Queues of which groups wait behind dead letters: the first 100 queues with a strict order by
/// name, and of each the first [`MAX_BLOCKED_GROUPS`] groups with dead letters.
pub async fn groups_blocked(conn: &mut PgConnection, projects: &[i32]) -> sqlx::Result<Vec<Found>> {
    sqlx::query_as!(
        Found,
        r#"
        with blocked as materialized (
            select asking.project_id, ordered.name as queue, found.groups, found.first_group,
                   found.job_id
            from (
                select distinct project_id
                from effective_alarms
                where project_id = any($1) and rule = 'groups_blocked' and is_enabled
            ) asking
            cross join lateral (
                select name
                from queues
                where project_id = asking.project_id and group_order = 'strict'
                    and group_on_dead = 'block'
                order by name
                limit 100
            ) ordered
            cross join lateral (
                select count(*) as groups, min(group_key) as first_group,
                       (array_agg(job_id order by group_key))[1] as job_id
                from blocked_groups(asking.project_id, ordered.name, $2)
            ) found
            where found.groups > 0
        )
        select alarm.project_id "project_id!: ProjectId", alarm.name "alarm!",
               alarm.rule "rule!", alarm.mail_to "mail_to!", blocked.queue as subject,
               null::uuid as subject_id, blocked.groups >= alarm.threshold "is_beyond!",
               alarm.for_seconds "for_seconds!", blocked.queue "queue?", null as job_type,
               null as error_type, blocked.job_id, blocked.first_group as name,
               blocked.groups as value, false "shares_cause!", null::timestamptz as return_by
        from effective_alarms alarm
        join blocked on blocked.project_id = alarm.project_id
        where alarm.project_id = any($1) and alarm.rule = 'groups_blocked' and alarm.is_enabled
            and (alarm.queues = '{}' or blocked.queue = any(alarm.queues))
        "#,
        projects,
        MAX_BLOCKED_GROUPS,
    )
    .fetch_all(conn)
    .await
}

/// Queues in which the first job of a group waits for more than half of the threshold: the first
/// 100 queues with rules of groups by name that are not paused, and of each the first
/// [`MAX_WAITING_GROUPS`] groups with waiting jobs.
pub async fn groups_waiting(conn: &mut PgConnection, projects: &[i32]) -> sqlx::Result<Vec<Found>> {
    sqlx::query_as!(
        Found,
        r#"
        with waiting as materialized (
            select asking.project_id, gated.name as queue, longest.group_key, longest.job_id,
                   extract(epoch from now() - longest.since) as seconds
            from (
                select distinct project_id
                from effective_alarms
                where project_id = any($1) and rule = 'groups_waiting' and is_enabled
            ) asking
            cross join lateral (
                select name
                from queues
                where project_id = asking.project_id and has_gate and paused_at is null
                    and (rate_limited_until > now()) is not true
                order by name
                limit 100
            ) gated
            cross join lateral (
                select group_key, job_id, since
                from waiting_groups(asking.project_id, gated.name, $2)
                order by since
                limit 1
            ) longest
        )
        select alarm.project_id "project_id!: ProjectId", alarm.name "alarm!",
               alarm.rule "rule!", alarm.mail_to "mail_to!", waiting.queue as subject,
               null::uuid as subject_id, waiting.seconds > alarm.threshold "is_beyond!",
               alarm.for_seconds "for_seconds!", waiting.queue "queue?", null as job_type,
               null as error_type, waiting.job_id "job_id?", waiting.group_key as name,
               waiting.seconds::bigint as value, false "shares_cause!", null::timestamptz as return_by
        from effective_alarms alarm
        join waiting on waiting.project_id = alarm.project_id
        where alarm.project_id = any($1) and alarm.rule = 'groups_waiting' and alarm.is_enabled
            and waiting.seconds > alarm.threshold / 2
            and (alarm.queues = '{}' or waiting.queue = any(alarm.queues))
        "#,
        projects,
        MAX_WAITING_GROUPS,
    )
    .fetch_all(conn)
    .await
}

/// Job types that a circuit breaker has paused.
pub async fn circuit_open(conn: &mut PgConnection, projects: &[i32]) -> sqlx::Result<Vec<Found>> {
    sqlx::query_as!(
        Found,
        r#"
        select alarm.project_id "project_id!: ProjectId", alarm.name "alarm!",
               alarm.rule "rule!", alarm.mail_to "mail_to!", paused.queue || '/' || paused.job_type as subject,
               null::uuid as subject_id, true "is_beyond!", 0 "for_seconds!", paused.queue "queue?",
               paused.job_type "job_type?", null as error_type, null::uuid as job_id,
               null as name, null::bigint as value, false "shares_cause!", null::timestamptz as return_by
        from effective_alarms alarm
        cross join lateral (
            select queue, job_type
            from queue_types
            where project_id = alarm.project_id and paused_by = 'brake'
                and (alarm.queues = '{}' or queue = any(alarm.queues))
            order by queue, job_type
            limit 100
        ) paused
        where alarm.project_id = any($1) and alarm.rule = 'circuit_open' and alarm.is_enabled
        "#,
        projects,
    )
    .fetch_all(conn)
    .await
}

/// Schedules that have missed a tick lately, or have fired none since.
pub async fn schedule_missed(
    conn: &mut PgConnection,
    projects: &[i32],
) -> sqlx::Result<Vec<Found>> {
    sqlx::query_as!(
        Found,
        r#"
        select alarm.project_id "project_id!: ProjectId", alarm.name "alarm!",
               alarm.rule "rule!", alarm.mail_to "mail_to!", missed.schedule_id as subject, null::uuid as subject_id,
               missed.at > now() - make_interval(mins => $2::int) "is_beyond!", 0 "for_seconds!",
               null as queue, null as job_type, null as error_type, null::uuid as job_id,
               missed.schedule_id as "name?", null::bigint as value, false "shares_cause!", null::timestamptz as return_by
        from effective_alarms alarm
        cross join lateral (
            select schedule_id, max(tick) as tick, max(at) as at
            from (
                select schedule_id, tick, at
                from schedule_fires
                where project_id = alarm.project_id and outcome = 'missed'
                order by at desc
                limit 10000
            ) bounded
            group by schedule_id
        ) missed
        join recurring_schedules schedule
            on schedule.project_id = alarm.project_id and schedule.id = missed.schedule_id
            and not schedule.is_paused
        where alarm.project_id = any($1) and alarm.rule = 'schedule_missed' and alarm.is_enabled
            and (
                missed.at > now() - make_interval(mins => $2::int)
                or not exists (
                    select from schedule_fires fired
                    where fired.project_id = alarm.project_id
                        and fired.schedule_id = missed.schedule_id and fired.outcome = 'fired'
                        and fired.tick > missed.tick
                )
            )
        "#,
        projects,
        MISSED_MINUTES,
    )
    .fetch_all(conn)
    .await
}

/// Endpoints that were disabled because they failed, and those that missed events lately.
pub async fn endpoints(conn: &mut PgConnection, projects: &[i32]) -> sqlx::Result<Vec<Found>> {
    sqlx::query_as!(
        Found,
        r#"
        select alarm.project_id "project_id!: ProjectId", alarm.name "alarm!",
               alarm.rule "rule!", alarm.mail_to "mail_to!", null as subject, it.id "subject_id?",
               true "is_beyond!", 0 "for_seconds!", null as queue, null as job_type,
               null as error_type, null::uuid as job_id, it.url "name?",
               it.dropped_events "value?", false "shares_cause!", null::timestamptz as return_by
        from effective_alarms alarm
        join webhook_endpoints it on it.project_id = alarm.project_id and it.deleted_at is null
        where alarm.project_id = any($1) and alarm.is_enabled
            and case alarm.rule
                when 'endpoint_disabled' then it.disabled_reason in ('failing', 'gone')
                when 'deliveries_dropped' then it.dropped_at > now() - interval '1 minute'
                else false
            end
        "#,
        projects,
    )
    .fetch_all(conn)
    .await
}

/// Pushed queues whose requests fail.
pub async fn push_failing(conn: &mut PgConnection, projects: &[i32]) -> sqlx::Result<Vec<Found>> {
    sqlx::query_as!(
        Found,
        r#"
        select alarm.project_id "project_id!: ProjectId", alarm.name "alarm!",
               alarm.rule "rule!", alarm.mail_to "mail_to!", it.queue as subject, null::uuid as subject_id,
               failing.seconds >= alarm.threshold "is_beyond!", 0 "for_seconds!", it.queue "queue?",
               null as job_type, it.last_error as error_type, null::uuid as job_id, it.url "name?",
               failing.seconds::bigint as value, false "shares_cause!", null::timestamptz as return_by
        from effective_alarms alarm
        cross join lateral (
            select queue, url, last_error, failing_since, last_failure_at
            from queue_pushes
            where project_id = alarm.project_id and paused_at is null
                and failing_since is not null
                and (alarm.queues = '{}' or queue = any(alarm.queues))
            order by failing_since, queue
            limit 100
        ) it
        cross join lateral (
            -- One failure of a quiet queue lasts for no time.
            select extract(epoch from it.last_failure_at - it.failing_since) as seconds
        ) failing
        where alarm.project_id = any($1) and alarm.rule = 'push_failing' and alarm.is_enabled
        "#,
        projects,
    )
    .fetch_all(conn)
    .await
}

/// Keys that expire soon or have expired lately, but for those that were made for a shorter time.
pub async fn key_expiring(conn: &mut PgConnection, projects: &[i32]) -> sqlx::Result<Vec<Found>> {
    sqlx::query_as!(
        Found,
        r#"
        select alarm.project_id "project_id!: ProjectId", alarm.name "alarm!",
               alarm.rule "rule!", alarm.mail_to "mail_to!", null as subject, key.id "subject_id?", key.expires_at > now() "is_beyond!",
               0 "for_seconds!", null as queue, null as job_type, null as error_type,
               null::uuid as job_id, key.name "name?", alarm.threshold::bigint as value, false "shares_cause!", null::timestamptz as return_by
        from effective_alarms alarm
        cross join lateral (
            select id, name, expires_at
            from api_keys
            where project_id = alarm.project_id and revoked_at is null and not is_exchanged
                and expires_at > now() - interval '30 days'
                and expires_at <= now() + make_interval(days => alarm.threshold)
                and expires_at > created_at + make_interval(days => alarm.threshold)
            order by expires_at <= now(), expires_at, id
            limit 100
        ) key
        where alarm.project_id = any($1) and alarm.rule = 'key_expiring' and alarm.is_enabled
        "#,
        projects,
    )
    .fetch_all(conn)
    .await
}

/// Deletes incidents that were resolved long ago, up to a number of them. Returns how many.
pub async fn prune(conn: &mut PgConnection, keep_days: i32, limit: i64) -> sqlx::Result<u64> {
    let done = sqlx::query!(
        "
        delete from incidents it
        using (
            select project_id, id
            from incidents
            where resolved_at < now() - make_interval(days => $1)
            order by resolved_at
            limit $2
        ) old
        where it.project_id = old.project_id and it.id = old.id
        ",
        keep_days,
        limit,
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected())
}
