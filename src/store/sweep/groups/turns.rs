//! Groups that take turns: who is in line. Claims choose among those that are.

use fencepost_domain::ids::ProjectId;
use sqlx::PgConnection;

use super::{GroupColumns, walks::Walk};
use crate::groups::{
    GroupKey,
    turns::{FIRST_REST_SECONDS, FORGOTTEN_AFTER_SECONDS},
};

/// Groups whose rest one statement ends at most, and those of which it chooses them.
const MAX_RESTED: i64 = 500;
const MAX_SEEN_RESTS: i64 = 2_000;
/// Groups of other queues that one statement looks at because they share a limit with a noted one.
const MAX_SIBLINGS: i64 = 1_000;
/// Groups that one step of a walk forgets.
const MAX_STEP_GROUPS: i64 = 1_000;

/// What became of noted groups of queues that take turns.
#[derive(Debug, Clone, Default)]
pub struct LinedUp {
    /// Queues with groups that have jobs for claims.
    pub queues: Vec<(ProjectId, String)>,
    /// Groups with a note again: a claim has them.
    pub left: usize,
}

/// Puts groups in line that have a job that may start, but for those that have used their rates. A
/// group whose row a claim has is noted again: what that decides may be older than the note. All
/// must be locked.
pub async fn line_up(conn: &mut PgConnection, groups: &[&GroupKey]) -> sqlx::Result<LinedUp> {
    let columns = GroupColumns::of(groups.iter().copied());
    let rows = sqlx::query!(
        r#"
        with wanted as materialized (
            select project_id, queue, group_key
            from unnest($1::int[], $2::text[], $3::text[]) as sent(project_id, queue, group_key)
            where has_turn_jobs(project_id, queue, group_key)
        ), known as materialized (
            select wanted.*
            from wanted
            join group_turns found on found.project_id = wanted.project_id
                and found.queue = wanted.queue and found.group_key = wanted.group_key
        ), held as materialized (
            select known.project_id, known.queue, known.group_key, locked.is_resting, case
                       when locked.is_resting and locked.empty_since is null and not exists (
                           -- After a change of the rules this may be no more so.
                           select from queues
                           where project_id = known.project_id and name = known.queue
                               and group_walks > 0
                       ) then greatest((
                           select full_until from group_handouts
                           where project_id = known.project_id and queue = known.queue
                               and group_key = known.group_key
                               and full_until > statement_timestamp()
                       ), shared_limits_hold_until(
                           known.project_id, known.queue, known.group_key
                       ))
                   end as held_until
            from known
            cross join lateral (
                select rest_until is not null as is_resting, empty_since
                from group_turns
                where project_id = known.project_id and queue = known.queue
                    and group_key = known.group_key
                for update skip locked
            ) locked
        ), back as (
            -- One that a pause or rates hold rests no longer than these do.
            update group_turns
            set rest_until = held.held_until, empty_since = null,
                is_new = is_new or held.held_until is null
            from held
            where group_turns.project_id = held.project_id and group_turns.queue = held.queue
                and group_turns.group_key = held.group_key and held.is_resting
                and (held.held_until is null or held.held_until < rest_until)
        ), added as (
            insert into group_turns (project_id, queue, group_key)
            select project_id, queue, group_key
            from wanted
            where (project_id, queue, group_key) not in (
                select project_id, queue, group_key from known
            )
            on conflict do nothing
        ), noted as (
            insert into group_notes (project_id, queue, group_key)
            select project_id, queue, group_key
            from known
            where (project_id, queue, group_key) not in (
                select project_id, queue, group_key from held
            )
            returning 1
        )
        select distinct project_id "project_id!: ProjectId", queue "queue!",
               (select count(*) from noted) "left!"
        from wanted
        where (project_id, queue, group_key) not in (
            select project_id, queue, group_key from held where held_until is not null
        )
        "#,
        &columns.project_id,
        &columns.queue as &[&str],
        &columns.group as &[&str],
    )
    .fetch_all(conn)
    .await?;
    let left = rows.first().map_or(0, |it| usize::try_from(it.left).unwrap_or(0));
    Ok(LinedUp { queues: rows.into_iter().map(|it| (it.project_id, it.queue)).collect(), left })
}

/// Ends the rests of the same groups in queues that share a limit with theirs: what is noted may
/// have left room under it. A group is noted again if a claim has the row of such a one, or if the
/// groups have more than [`MAX_SIBLINGS`] together. All must be locked.
pub async fn end_rests_of_siblings(
    conn: &mut PgConnection,
    groups: &[&GroupKey],
) -> sqlx::Result<LinedUp> {
    let columns = GroupColumns::of(groups.iter().copied());
    let rows = sqlx::query!(
        r#"
        with known as materialized (
            select sent.project_id, sent.queue as noted_queue, sibling.queue, sent.group_key,
                   row_number() over (order by sent.number) <= $4 as is_looked_at
            from unnest($1::int[], $2::text[], $3::text[]) with ordinality
                as sent(project_id, queue, group_key, number)
            cross join lateral queues_sharing_groups(sent.project_id, sent.queue) as sibling(queue)
            cross join lateral (
                select 1
                from group_turns
                where project_id = sent.project_id and queue = sibling.queue
                    and group_key = sent.group_key
                limit 1
            ) found
            where sent.group_key <> ''
        ), held as materialized (
            select known.project_id, known.queue, known.group_key, locked.held_until,
                   locked.is_resting
            from known
            cross join lateral (
                select rest_until is not null and empty_since is null as is_resting,
                       greatest(shared_limits_hold_until(project_id, queue, group_key), (
                           select full_until from group_handouts
                           where project_id = known.project_id and queue = known.queue
                               and group_key = known.group_key
                               and full_until > statement_timestamp()
                       )) as held_until
                from group_turns
                where project_id = known.project_id and queue = known.queue
                    and group_key = known.group_key
                for update skip locked
            ) locked
            where known.is_looked_at
        ), back as (
            -- One that a pause or rates hold rests no longer than these do.
            update group_turns
            set rest_until = held.held_until, is_new = is_new or held.held_until is null
            from held
            where group_turns.project_id = held.project_id and group_turns.queue = held.queue
                and group_turns.group_key = held.group_key and held.is_resting
                and (held.held_until is null or held.held_until < rest_until)
        ), noted as (
            insert into group_notes (project_id, queue, group_key)
            select distinct project_id, noted_queue, group_key
            from known
            where (project_id, queue, group_key) not in (
                select project_id, queue, group_key from held
            )
            returning 1
        )
        select rested.project_id "project_id?: ProjectId", rested.queue "queue?",
               (select count(*) from noted) "left!"
        from (select) as always
        left join (
            select distinct project_id, queue from held where is_resting and held_until is null
        ) rested on true
        "#,
        &columns.project_id,
        &columns.queue as &[&str],
        &columns.group as &[&str],
        MAX_SIBLINGS,
    )
    .fetch_all(conn)
    .await?;
    let left = rows.first().map_or(0, |it| usize::try_from(it.left).unwrap_or(0));
    let queues = rows.into_iter().filter_map(|it| Some((it.project_id?, it.queue?)));
    Ok(LinedUp { queues: queues.collect(), left })
}

/// Ends the rests that have lasted long enough, of projects in turn. A group without a job rests
/// on, and is forgotten in the end. Returns queues with groups that have jobs for claims, and
/// whether there may be more rests to end.
pub async fn end_rests(conn: &mut PgConnection) -> sqlx::Result<(Vec<(ProjectId, String)>, bool)> {
    let rows = sqlx::query!(
        r#"
        with seen as materialized (
            select project_id, queue, group_key
            from (
                select *, row_number() over (partition by project_id order by rest_until) as place
                from (
                    select project_id, queue, group_key, rest_until
                    from group_turns
                    where rest_until <= statement_timestamp()
                    order by rest_until
                    limit $4
                ) first
            ) ordered
            order by place
            limit $1
        ), due as materialized (
            select found.*
            from seen
            cross join lateral (
                select project_id, queue, group_key, empty_since,
                       empty_since is null or has_turn_jobs(project_id, queue, group_key) as is_back
                from group_turns
                where project_id = seen.project_id and queue = seen.queue
                    and group_key = seen.group_key and rest_until <= statement_timestamp()
                for update skip locked
            ) found
        ), forgotten as (
            delete from group_turns
            using due
            where group_turns.project_id = due.project_id and group_turns.queue = due.queue
                and group_turns.group_key = due.group_key and not due.is_back
                and due.empty_since < statement_timestamp() - make_interval(secs => $2)
        ), kept as (
            update group_turns
            set rest_until = case when not due.is_back then statement_timestamp() + greatest(
                    make_interval(secs => $3), 7 * (statement_timestamp() - due.empty_since)
                ) end,
                empty_since = case when not due.is_back then due.empty_since end,
                is_new = group_turns.is_new or due.is_back
            from due
            where group_turns.project_id = due.project_id and group_turns.queue = due.queue
                and group_turns.group_key = due.group_key and (
                    due.is_back
                    or due.empty_since >= statement_timestamp() - make_interval(secs => $2)
                )
        )
        select project_id "project_id!: ProjectId", queue "queue!", bool_or(is_back) "is_back!",
               (select count(*) from seen) = $1 "is_full!"
        from due
        group by project_id, queue
        "#,
        MAX_RESTED,
        FORGOTTEN_AFTER_SECONDS,
        FIRST_REST_SECONDS,
        MAX_SEEN_RESTS,
    )
    .fetch_all(conn)
    .await?;
    let is_full = rows.first().is_some_and(|it| it.is_full);
    let back = rows.into_iter().filter(|it| it.is_back);
    Ok((back.map(|it| (it.project_id, it.queue)).collect(), is_full))
}

/// Forgets groups of a queue that takes no turns any more. Returns whether there may be more.
pub async fn forget(conn: &mut PgConnection, walk: &Walk) -> sqlx::Result<bool> {
    let forgotten = sqlx::query!(
        "
        delete from group_turns
        where project_id = $1 and queue = $2 and group_key in (
            select group_key
            from group_turns
            where project_id = $1 and queue = $2 and not takes_turns($1, $2)
            limit $3
        )
        ",
        walk.project_id.0,
        walk.queue,
        MAX_STEP_GROUPS,
    )
    .execute(conn)
    .await?;
    Ok(forgotten.rows_affected() as i64 == MAX_STEP_GROUPS)
}
