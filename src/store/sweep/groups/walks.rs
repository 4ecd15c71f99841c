//! Walks over the groups of a queue whose rules have changed: each group is noted.

use fencepost_domain::ids::ProjectId;
use sqlx::PgConnection;
use uuid::Uuid;

/// Groups of one step.
const MAX_STEP_GROUPS: i64 = 500;
/// Walks after a change. The second finds what statements did that had begun before the change.
pub const WALKS: i16 = 2;
/// Seconds between the two: longer than any statement that stores or ends jobs may take.
const SECOND_WALK_SECONDS: i32 = 60;

/// A walk, locked until the end of the transaction.
#[derive(Debug, Clone)]
pub struct Walk {
    pub project_id: ProjectId,
    pub queue: String,
    /// The last group that was noted.
    after: String,
    /// The last job that was read, where groups are to take turns; none: all were read.
    pub job: Option<Uuid>,
}

/// The next walk that is due; none: another node has it, or there is none.
pub async fn find_due(conn: &mut PgConnection) -> sqlx::Result<Option<Walk>> {
    sqlx::query_as!(
        Walk,
        r#"
        select project_id "project_id: ProjectId", name as queue, group_walk_after as after,
               nullif(group_walk_job, 'ffffffff-ffff-ffff-ffff-ffffffffffff') as job
        from queues
        where group_walk_at <= now()
        order by group_walk_at
        limit 1
        for no key update skip locked
        "#,
    )
    .fetch_optional(conn)
    .await
}

/// Dead letters that one statement lets block nothing.
pub const MAX_UNBLOCKED: i64 = 500;

/// Lets dead letters from before the rules were changed block nothing, up to [`MAX_UNBLOCKED`].
/// Returns how many.
pub async fn unblock_from_before_rules(conn: &mut PgConnection, walk: &Walk) -> sqlx::Result<i64> {
    sqlx::query_scalar!(
        r#"
        with dead as materialized (
            select id
            from jobs
            where project_id = $1 and queue = $2 and group_key is not null
                and group_place is not null and completed_at is not null and completed_at < (
                    select group_rules_at from queues where project_id = $1 and name = $2
                )
            order by group_key, group_place
            limit $3
            for update skip locked
        ), passed as (
            update jobs
            set group_place = null
            from dead
            where jobs.project_id = $1 and jobs.id = dead.id
            returning jobs.group_key
        ), noted as (
            insert into group_notes (project_id, queue, group_key)
            select distinct $1::int, $2, group_key from passed
        )
        select count(*) "passed!" from passed
        "#,
        walk.project_id.0,
        walk.queue,
        MAX_UNBLOCKED,
    )
    .fetch_one(conn)
    .await
}

/// Notes the next groups, and moves the walk on: to the end of the line of walks, or to its end.
/// Returns whether it continues.
pub async fn step(conn: &mut PgConnection, walk: &Walk) -> sqlx::Result<bool> {
    let is_more = sqlx::query_scalar!(
        r#"
        with recursive seen as (
            select next_listed_group($1, $2, $3, true, true, false, false) as group_key
            union all
            select next_listed_group($1, $2, seen.group_key, true, true, false, false)
            from seen
            where seen.group_key is not null
        ), step as materialized (
            select group_key from (select group_key from seen limit $5) first
            where group_key is not null
        ), noted as (
            insert into group_notes (project_id, queue, group_key)
            select $1, $2, group_key from step
        )
        update queues
        set group_walk_at = case
                when (select count(*) from step) = $5 then now()
                when group_walks > 1 then now() + make_interval(secs => $4)
            end,
            group_walks = case
                when (select count(*) from step) = $5 then group_walks else group_walks - 1
            end,
            group_walk_job = case
                when (select count(*) from step) = $5 then group_walk_job
                when group_walks > 1 and group_walk_job is not null
                then '00000000-0000-0000-0000-000000000000'::uuid
            end,
            group_walk_after = case
                when (select count(*) from step) = $5 then (select max(group_key) from step)
                else ''
            end
        where project_id = $1 and name = $2
        returning group_walk_after <> '' "is_more!"
        "#,
        walk.project_id.0,
        walk.queue,
        walk.after,
        f64::from(SECOND_WALK_SECONDS),
        MAX_STEP_GROUPS,
    )
    .fetch_one(conn)
    .await?;
    Ok(is_more)
}

/// Jobs that one step reads.
const MAX_STEP_JOBS: i64 = 1_000;

/// Lets claims find the next jobs of a queue by their groups, which are to take turns, and moves
/// the walk on: before the groups, all jobs. Jobs that another transaction has locked are left to
/// the second walk.
pub async fn step_over_jobs(conn: &mut PgConnection, walk: &Walk) -> sqlx::Result<()> {
    sqlx::query!(
        "
        with seen as materialized (
            select id, queue = $2 and takes_turns is null and completed_at is null as is_found
            from jobs
            where project_id = $1 and id > $3
            order by id
            limit $4
        ), held as materialized (
            select found.id
            from seen
            cross join lateral (
                select id
                from jobs
                where project_id = $1 and id = seen.id and queue = $2 and takes_turns is null
                    and completed_at is null and takes_turns($1, $2)
                for no key update skip locked
            ) found
            where seen.is_found
        ), found as (
            update jobs
            set takes_turns = true
            from held
            where jobs.project_id = $1 and jobs.id = held.id
            returning coalesce(jobs.group_key, '') as group_key, jobs.state
        ), noted as (
            insert into group_notes (project_id, queue, group_key)
            select distinct $1, $2, group_key
            from found
            where state = 'pending' and not exists (
                select from group_turns
                where project_id = $1 and queue = $2 and group_key = found.group_key
                    and rest_until is null
            )
        )
        update queues
        set group_walk_job = case
                when (select count(*) from seen) = $4
                then (select id from seen order by id desc limit 1)
                else 'ffffffff-ffff-ffff-ffff-ffffffffffff'
            end
        where project_id = $1 and name = $2
        ",
        walk.project_id.0,
        walk.queue,
        walk.job,
        MAX_STEP_JOBS,
    )
    .execute(conn)
    .await?;
    Ok(())
}
