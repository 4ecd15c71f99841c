//! Groups as they are listed: what they wait for, and what holds them.

use chrono::{DateTime, Utc};
use fencepost_domain::{
    alarm::{MAX_BLOCKED_GROUPS, MAX_WAITING_GROUPS},
    group::GroupOverride,
    ids::{JobId, ProjectId},
    job::StoredState,
    limits::MAX_PAUSED_GROUPS,
};
use sqlx::PgConnection;

use super::rates;

/// A group, with what it waits for.
#[derive(Debug, Clone)]
pub struct GroupRow {
    pub group: String,
    /// By the database's clock.
    pub now: DateTime<Utc>,
    /// None: not paused.
    pub paused_at: Option<DateTime<Utc>>,
    /// None: it is not paused, or until it is resumed.
    pub paused_until: Option<DateTime<Utc>>,
    /// When its rates let the next job start; none: they let one start, or there is none.
    pub full_until: Option<DateTime<Utc>>,
    /// Since when its first job waits that is due, also while the group is paused or blocked. It
    /// counts anew from the end of a pause. None: none waits.
    pub waiting_since: Option<DateTime<Utc>>,
    /// Jobs that have not started, up to twice [`MAX_COUNTED_JOBS`].
    pub waiting: i64,
    /// Running ones among the first [`MAX_COUNTED_JOBS`] that do not wait for the group.
    pub running: i64,
    /// The first in line of those that have not ended, or the dead letter that blocks them.
    pub head_id: Option<JobId>,
    pub head_state: Option<StoredState>,
    pub head_run_at: Option<DateTime<Utc>>,
    pub head_created_at: Option<DateTime<Utc>>,
    /// Parents that it waits for.
    pub head_parents: Option<i32>,
    /// Time at which a person paused it; none: it is not paused.
    pub head_paused_at: Option<DateTime<Utc>>,
    /// Its own rules; all null: none.
    pub own_weight: Option<i16>,
    pub own_max_running: Option<i32>,
    pub own_rate_counts: Option<Vec<i32>>,
    pub own_rate_seconds: Option<Vec<i32>>,
    pub own_expires_at: Option<DateTime<Utc>>,
}

impl GroupRow {
    /// Its own rules; none: those of its queue hold.
    #[must_use]
    pub fn rules(&self) -> Option<GroupOverride> {
        let rates = self.own_rate_counts.as_deref().zip(self.own_rate_seconds.as_deref());
        Some(GroupOverride {
            weight: self.own_weight?,
            max_running: self.own_max_running,
            rates: rates.map(|(counts, seconds)| rates::pairs(counts, seconds)),
            expires_at: self.own_expires_at,
        })
    }
}

/// Jobs of a group are counted up to this number, which is a literal in the statement.
pub const MAX_COUNTED_JOBS: i64 = 1_000;

/// These groups of a queue, in this order, whether they have jobs or not.
pub async fn find(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    groups: &[String],
) -> sqlx::Result<Vec<GroupRow>> {
    sqlx::query_as!(
        GroupRow,
        r#"
        select named.group_key as "group!", statement_timestamp() "now!",
               pause.paused_at "paused_at?", nullif(pause.paused_until, 'infinity') as paused_until,
               group_full_until($1, $2, named.group_key) as full_until,
               (select since from first_waiting($1, $2, named.group_key)) as waiting_since,
               held.jobs + open.waiting "waiting!", open.running "running!", head.id "head_id?: JobId",
               head.state "head_state?: StoredState", head.run_at "head_run_at?",
               head.created_at "head_created_at?", head.parents "head_parents?",
               head.paused_at "head_paused_at?",
               own.weight "own_weight?", own.max_running "own_max_running?",
               own.rate_counts "own_rate_counts?", own.rate_seconds "own_rate_seconds?",
               own.expires_at "own_expires_at?"
        from unnest($3::text[]) with ordinality as named(group_key, number)
        left join job_groups pause
            on pause.project_id = $1 and pause.queue = $2 and pause.group_key = named.group_key
            and pause.paused_until > statement_timestamp()
        left join group_overrides own on own.project_id = $1 and own.queue = $2
            and own.group_key = named.group_key
            and (own.expires_at is null or own.expires_at > statement_timestamp())
        cross join lateral (
            select count(*) as jobs
            from (
                select
                from jobs
                where project_id = $1 and queue = $2 and group_key = named.group_key
                    and waits_for_group
                limit 1000
            ) counted
        ) held
        cross join lateral (
            select count(*) filter (where lease_id is null) as waiting,
                   count(lease_id) as running
            from (
                select lease_id
                from jobs
                where project_id = $1 and queue = $2 and group_key = named.group_key
                    and group_key is not null and waits_for_group is not true
                    and completed_at is null
                limit 1000
            ) counted
        ) open
        left join lateral (
            select *
            from (
                (
                    select id, state, run_at, created_at, paused_at, group_place,
                           unfinished_parents - other_holds(null, paused_at) as parents
                    from jobs
                    where project_id = $1 and queue = $2 and group_key = named.group_key
                        and group_key is not null and waits_for_group is not true
                        and completed_at is null
                    order by group_place
                    limit 1
                )
                union all
                (
                    select id, state, run_at, created_at, paused_at, group_place,
                           unfinished_parents - other_holds(true, paused_at)
                    from jobs
                    where project_id = $1 and queue = $2 and group_key = named.group_key
                        and waits_for_group
                    order by group_place
                    limit 1
                )
                union all
                (
                    select id, state, run_at, created_at, paused_at, group_place,
                           unfinished_parents
                    from jobs
                    where project_id = $1 and queue = $2 and group_key = named.group_key
                        and group_place is not null and completed_at is not null
                        and exists (
                            select from queues
                            where project_id = $1 and name = $2 and group_order = 'strict'
                                and group_on_dead = 'block'
                        )
                    order by group_place
                    limit 1
                )
            ) line
            order by state = 'processing' desc, group_place
            limit 1
        ) head on true
        order by named.number
        "#,
        project_id.0,
        queue,
        groups,
    )
    .fetch_all(conn)
    .await
}

/// Numbers of groups of a queue that are held, and how long the jobs of others wait.
#[derive(Debug, Clone)]
pub struct HeldGroups {
    pub queue: String,
    /// Jobs of them wait behind a dead letter; up to [`MAX_BLOCKED_GROUPS`].
    pub blocked: i64,
    /// Up to [`MAX_PAUSED_GROUPS`].
    pub paused: i64,
    /// Those that a limit keeps from starting a job, among the first [`MAX_WAITING_GROUPS`] whose
    /// jobs wait, by name. Zero for a paused queue.
    pub limited: i64,
    /// Seconds for which the first job of one of these groups has waited: the longest. Zero: none
    /// waits.
    pub longest_wait: f64,
}

/// The same for these queues, of which those without rules of groups and without pauses are left
/// out.
pub async fn held(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queues: &[&str],
) -> sqlx::Result<Vec<HeldGroups>> {
    sqlx::query_as!(
        HeldGroups,
        r#"
        select gated.name as queue, blocked.groups "blocked!", paused.groups "paused!",
               waiting.limited "limited!", waiting.longest "longest_wait!"
        from queues gated
        cross join lateral (
            select count(*) as groups from blocked_groups($1, gated.name, $3)
        ) blocked
        cross join lateral (
            select count(*) as groups
            from (
                select
                from job_groups
                where project_id = $1 and queue = gated.name
                    and paused_until > statement_timestamp()
                limit $4
            ) counted
        ) paused
        cross join lateral (
            select count(*) filter (where is_limited) as limited, coalesce(
                       extract(epoch from statement_timestamp() - min(since)), 0
                   )::double precision as longest
            from waiting_groups($1, gated.name, $5)
            where gated.paused_at is null
                and (gated.rate_limited_until > statement_timestamp()) is not true
        ) waiting
        where gated.project_id = $1 and gated.name = any($2) and gated.has_gate
        order by gated.name
        "#,
        project_id.0,
        queues as &[&str],
        MAX_BLOCKED_GROUPS,
        MAX_PAUSED_GROUPS,
        MAX_WAITING_GROUPS,
    )
    .fetch_all(conn)
    .await
}

/// Which groups of a queue to list.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Listed {
    /// With jobs that wait for their group, or its turn.
    pub waiting: bool,
    /// With other jobs that have not ended.
    pub open: bool,
    /// That are paused.
    pub paused: bool,
    /// With a dead letter that blocks them.
    pub blocked: bool,
}

/// Names of groups of a queue with rules of groups whose first job has waited longest, among the
/// first `compared` with waiting jobs by name.
pub async fn longest_waiting(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    compared: i32,
    limit: i64,
) -> sqlx::Result<Vec<String>> {
    sqlx::query_scalar!(
        r#"
        select group_key "group_key!"
        from waiting_groups($1, $2, $3)
        order by since, group_key
        limit $4
        "#,
        project_id.0,
        queue,
        compared,
        limit,
    )
    .fetch_all(conn)
    .await
}

/// Names of groups of a queue after `after`, in order.
pub async fn names(
    conn: &mut PgConnection,
    project_id: ProjectId,
    queue: &str,
    listed: Listed,
    after: &str,
    limit: i64,
) -> sqlx::Result<Vec<String>> {
    sqlx::query_scalar!(
        r#"
        with recursive seen as (
            select next_listed_group($1, $2, $3, $5, $6, $7, $8) as group_key
            union all
            select next_listed_group($1, $2, seen.group_key, $5, $6, $7, $8)
            from seen
            where seen.group_key is not null
        )
        select group_key "group_key!"
        from (select group_key from seen limit $4) first
        where group_key is not null
        "#,
        project_id.0,
        queue,
        after,
        limit,
        listed.waiting,
        listed.open,
        listed.paused,
        listed.blocked,
    )
    .fetch_all(conn)
    .await
}
