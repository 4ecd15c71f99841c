//! Admission: it opens jobs that wait for their groups, so that claims find them.
//!
//! Its statements run in one transaction: [`lock`], [`forget`], [`close`], [`open`]. Each sees what
//! was committed before it, and meanwhile only this transaction opens jobs of the group. A job that
//! was stored before its queue had an order is open as well, until it is closed: claims take it no
//! more, but a claim that began earlier may.

use fencepost_domain::{
    ids::{JobId, ProjectId},
    job::StoredState,
};
use sqlx::PgConnection;

use super::GroupColumns;
use crate::{groups::GroupKey, settle::settle_success::WaitingJob};

/// Notes of which the groups of a pass are chosen. The statement carries the same number as a
/// literal.
pub const MAX_SEEN_NOTES: i64 = 20_000;
/// Groups of a pass: each is a lock, and PostgreSQL has few thousand for everybody.
pub const MAX_PASS_GROUPS: i64 = 200;
/// Jobs of a group that one pass opens or closes at most. The statements carry the same number as a
/// literal.
pub const MAX_MOVED_JOBS: i64 = 500;

/// A group with notes.
#[derive(Debug, Clone)]
pub struct NotedGroup {
    pub key: GroupKey,
    /// The transactions that wrote its first and its last note, of those that were seen.
    pub noted_by: (i64, i64),
}

/// What there is to do.
#[derive(Debug, Clone, Default)]
pub struct Noted {
    pub groups: Vec<NotedGroup>,
    /// No transaction before this one has left a note.
    pub all_since: i64,
    /// Milliseconds until the next pause ends, negative if it has; none: none ends by itself.
    pub next_end_ms: Option<f64>,
    /// Whether the groups of a queue must be noted.
    pub has_walk: bool,
}

/// Groups with notes, of projects in turn, and what else is due. Notes of transactions before
/// `since` are gone, so dead rows of them are not read.
pub async fn find_noted(conn: &mut PgConnection, since: i64) -> sqlx::Result<Noted> {
    let rows = sqlx::query!(
        r#"
        with clock as materialized (
            select pg_snapshot_xmin(pg_current_snapshot())::text::bigint as oldest
        ), first as materialized (
            select project_id, queue, group_key, made_by, exists (
                       select from set_aside
                       where project_id = group_notes.project_id and work = 'groups'
                           and item = queue || '/' || group_key and next_try_at > now()
                   ) as is_aside
            from group_notes
            where made_by >= (select case when $1 <= oldest then $1 else 0 end from clock)
            limit 20000
        ), noted as (
            select project_id, queue, group_key, min(made_by) as first_by, max(made_by) as last_by,
                   row_number() over (partition by project_id order by min(made_by)) as turn
            from first
            where not is_aside
            group by project_id, queue, group_key
        )
        select clock.oldest "oldest!", seen.notes "notes!", seen.first_by,
               (extract(epoch from least((
                   select paused_until
                   from job_groups
                   where paused_until < 'infinity'
                   order by paused_until
                   limit 1
               ), (
                   select rate_limited_until
                   from queues
                   where rate_limited_until is not null
                   order by rate_limited_until
                   limit 1
               )) - now()) * 1000)::float8 as next_end_ms,
               exists (select from queues where group_walk_at <= now()) "has_walk!",
               noted.project_id "project_id?: ProjectId", noted.queue "queue?",
               noted.group_key "group?", noted.first_by "noted_first?", noted.last_by "noted_last?"
        from clock
        cross join (select count(*) as notes, min(made_by) as first_by from first) seen
        left join noted on true
        order by noted.turn, noted.first_by
        limit $2
        "#,
        since,
        MAX_PASS_GROUPS,
    )
    .fetch_all(conn)
    .await?;
    let all_since = rows.first().map_or(0, |it| match it.first_by {
        // Notes are not read in their order.
        _ if it.notes >= MAX_SEEN_NOTES => since,
        first_by => first_by.unwrap_or(it.oldest).min(it.oldest),
    });
    let next_end_ms = rows.first().and_then(|it| it.next_end_ms);
    let has_walk = rows.first().is_some_and(|it| it.has_walk);
    let groups = rows.into_iter().filter_map(|row| {
        let key = GroupKey { project_id: row.project_id?, queue: row.queue?, group: row.group? };
        Some(NotedGroup { key, noted_by: (row.noted_first?, row.noted_last?) })
    });
    Ok(Noted { groups: groups.collect(), all_since, next_end_ms, has_walk })
}

/// Tries to lock groups until the end of the transaction. Returns the indexes of those that are
/// locked: another node may decide about the others at this moment.
pub async fn lock(conn: &mut PgConnection, groups: &[NotedGroup]) -> sqlx::Result<Vec<i64>> {
    let columns = GroupColumns::of(groups.iter().map(|it| &it.key));
    sqlx::query_scalar!(
        r#"
        select number - 1 "number!"
        from unnest($1::int[], $2::text[], $3::text[]) with ordinality
            as noted(project_id, queue, group_key, number)
        where pg_try_advisory_xact_lock(hashtextextended(
            'group ' || octet_length(queue) || ' ' || queue || group_key, project_id
        ))
        order by number
        "#,
        &columns.project_id,
        &columns.queue as &[&str],
        &columns.group as &[&str],
    )
    .fetch_all(conn)
    .await
}

/// Deletes the notes of these groups. They must be locked: what follows in this transaction sees
/// all that the notes are about.
pub async fn forget(conn: &mut PgConnection, groups: &[&NotedGroup]) -> sqlx::Result<()> {
    let columns = GroupColumns::of(groups.iter().map(|it| &it.key));
    sqlx::query!(
        "
        delete from group_notes
        where made_by >= $4 and made_by <= $5
            and (project_id, queue, group_key) in (
                select * from unnest($1::int[], $2::text[], $3::text[])
            )
        ",
        &columns.project_id,
        &columns.queue as &[&str],
        &columns.group as &[&str],
        groups.iter().map(|it| it.noted_by.0).min().unwrap_or_default(),
        groups.iter().map(|it| it.noted_by.1).max().unwrap_or_default(),
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// What was closed of a group.
#[derive(Debug, Clone, Copy)]
pub struct Closed {
    /// The index of the group.
    pub number: usize,
    pub jobs: usize,
    /// Whether there is more to close: another transaction has some of the jobs, or there are too
    /// many.
    pub is_unfinished: bool,
}

/// Sets jobs that no worker has back to waiting: all of a paused group, and in a queue with strict
/// order all but the one that is first in line, or all if one runs. While there are too many for
/// one pass, the claims of the queue rest.
pub async fn close(conn: &mut PgConnection, groups: &[&GroupKey]) -> sqlx::Result<Vec<Closed>> {
    let columns = GroupColumns::of(groups.iter().copied());
    let rows = sqlx::query!(
        r#"
        with ruled as materialized (
            select sent.*, setting.group_order = 'strict' as is_strict,
                   setting.group_on_dead = 'block' as blocks, exists (
                       select from job_groups
                       where project_id = sent.project_id and queue = sent.queue
                           and group_key = sent.group_key
                           and paused_until > statement_timestamp()
                   ) as is_paused
            from unnest($1::int[], $2::text[], $3::text[]) with ordinality
                as sent(project_id, queue, group_key, number)
            cross join lateral (
                select group_order, group_on_dead
                from queues
                where project_id = sent.project_id and name = sent.queue and has_gate
                offset 0
            ) setting
        ), open as materialized (
            select ruled.number, job.project_id, job.id, job.group_place, job.waits_for_group
            from ruled
            cross join lateral (
                select project_id, id, group_place, waits_for_group
                from jobs
                where project_id = ruled.project_id and queue = ruled.queue
                    and group_key = ruled.group_key and group_key is not null
                    and waits_for_group is not true and completed_at is null
                    and lease_id is null
                order by group_place
                limit 500
            ) job
            where ruled.is_paused or ruled.is_strict
        ), line as materialized (
            select ruled.number, ruled.project_id, ruled.queue, ruled.is_paused, count(*) as jobs,
                   -- Of many, those that run are not looked for before the others are closed.
                   case when count(*) < 500 then exists (
                       select
                       from jobs
                       where project_id = ruled.project_id and queue = ruled.queue
                           and group_key = ruled.group_key and group_key is not null
                           and waits_for_group is not true and completed_at is null
                           and lease_id is not null
                   ) else true end as is_running,
                   least(min(open.group_place), (
                       select group_place
                       from jobs
                       where project_id = ruled.project_id and queue = ruled.queue
                           and group_key = ruled.group_key and waits_for_group
                       order by group_place
                       limit 1
                   ), case when ruled.blocks then (
                       select group_place
                       from jobs
                       where project_id = ruled.project_id and queue = ruled.queue
                           and group_key = ruled.group_key and group_place is not null
                           and completed_at is not null
                       order by group_place
                       limit 1
                   ) end) as first_place
            from open
            join ruled on ruled.number = open.number
            group by ruled.number, ruled.project_id, ruled.queue, ruled.group_key, ruled.is_paused,
                     ruled.blocks
        ), excess as materialized (
            select open.number, open.project_id, open.id
            from open
            join line on line.number = open.number
            where line.is_paused or line.is_running or open.waits_for_group is null
                or open.group_place > line.first_place
        ), held as materialized (
            select excess.number, found.project_id, found.id, found.queue, found.state
            from excess
            cross join lateral (
                select project_id, id, queue, state
                from jobs
                where project_id = excess.project_id and id = excess.id
                    and waits_for_group is not true and lease_id is null and completed_at is null
                for update skip locked
            ) found
        ), closed as (
            update jobs
            set state = 'scheduled', waits_for_group = true, ready_at = null,
                unfinished_parents = jobs.unfinished_parents + 1
            from held
            where jobs.project_id = held.project_id and jobs.id = held.id
        ), counted as (
            insert into queue_deltas (project_id, queue, scheduled, active, backoff)
            select project_id, queue, count(*) filter (where state <> 'scheduled'),
                   -count(*) filter (where state <> 'scheduled'),
                   -count(*) filter (where state = 'backoff')
            from held
            group by project_id, queue
        ), full_queues as materialized (
            select setting.project_id, setting.name
            from (select distinct project_id, queue from line where jobs >= 500) it
            join queues setting on setting.project_id = it.project_id and setting.name = it.queue
            for no key update of setting skip locked
        ), rested as (
            update queues
            set groups_close_until = statement_timestamp() + interval '1 second'
            from full_queues
            where queues.project_id = full_queues.project_id and queues.name = full_queues.name
        )
        select line.number - 1 "number!", closed.jobs "jobs!",
               line.jobs >= 500
                   or (select count(*) from excess where number = line.number) > closed.jobs
                   "is_unfinished!"
        from line
        cross join lateral (select count(*) as jobs from held where number = line.number) closed
        "#,
        &columns.project_id,
        &columns.queue as &[&str],
        &columns.group as &[&str],
    )
    .fetch_all(conn)
    .await?;
    let count = |it: i64| usize::try_from(it).unwrap_or(0);
    let closed = rows.into_iter().map(|it| Closed {
        number: count(it.number),
        jobs: count(it.jobs),
        is_unfinished: it.is_unfinished,
    });
    Ok(closed.collect())
}

/// What a pass did with a group.
#[derive(Debug, Clone, Default)]
pub struct Opened {
    /// Jobs that wait for nothing but their time, if for that.
    pub jobs: Vec<WaitingJob>,
    /// Jobs that were opened, with those that wait for parents still.
    pub opened: usize,
    /// Jobs that were closed before.
    pub closed: usize,
    /// Groups that have a note again, because more is to be done.
    pub left: usize,
}

/// Opens the next jobs: in a queue with strict order the first in line, if no other is open and no
/// dead letter is ahead of it; else all, up to [`MAX_MOVED_JOBS`] of a group. Groups with more to
/// do are noted again: `unclosed` says which of them [`close`] left so. All must be locked.
pub async fn open(
    conn: &mut PgConnection,
    groups: &[&GroupKey],
    unclosed: &[bool],
) -> sqlx::Result<Opened> {
    let columns = GroupColumns::of(groups.iter().copied());
    let rows = sqlx::query!(
        r#"
        with ruled as materialized (
            select sent.*, coalesce(setting.group_order = 'strict', false) as is_strict,
                   coalesce(setting.group_on_dead = 'block', false) as blocks, exists (
                       select from job_groups
                       where project_id = sent.project_id and queue = sent.queue
                           and group_key = sent.group_key
                           and paused_until > statement_timestamp()
                   ) as is_paused
            from unnest($1::int[], $2::text[], $3::text[], $4::bool[]) with ordinality
                as sent(project_id, queue, group_key, is_unclosed, number)
            left join lateral (
                select group_order, group_on_dead
                from queues
                where project_id = sent.project_id and name = sent.queue
                offset 0
            ) setting on true
        ), line as materialized (
            select ruled.*, open.is_there is true as has_open,
                   open.is_stray is true or is_unclosed as is_stray,
                   case when ruled.is_strict and ruled.blocks then (
                       select group_place
                       from jobs
                       where project_id = ruled.project_id and queue = ruled.queue
                           and group_key = ruled.group_key and group_place is not null
                           and completed_at is not null
                       order by group_place
                       limit 1
                   ) end as dead_place
            from ruled
            left join lateral (
                select true as is_there, bool_or(waits_for_group is null and not runs) as is_stray
                from (
                    select waits_for_group, lease_id is not null as runs
                    from jobs
                    where ruled.is_strict and project_id = ruled.project_id
                        and queue = ruled.queue and group_key = ruled.group_key
                        and group_key is not null and waits_for_group is not true
                        and completed_at is null
                    order by group_place
                    limit 500
                ) job
                having count(*) > 0
            ) open on true
        ), next as materialized (
            select line.number, job.project_id, job.id, line.is_strict
            from line
            cross join lateral (
                select project_id, id, group_place
                from jobs
                where project_id = line.project_id and queue = line.queue
                    and group_key = line.group_key and waits_for_group
                order by group_place
                limit case when line.is_strict then 1 else 500 end
            ) job
            where not line.is_paused and not (line.is_strict and line.has_open)
                and (line.dead_place < job.group_place) is not true
        ), held as materialized (
            select next.number, next.is_strict, found.project_id, found.id
            from next
            cross join lateral (
                select project_id, id
                from jobs
                where project_id = next.project_id and id = next.id and waits_for_group
                for update skip locked
            ) found
        ), opened as (
            update jobs
            set waits_for_group = case when held.is_strict then false end,
                unfinished_parents = jobs.unfinished_parents - 1,
                state = case
                    when jobs.unfinished_parents = 1 and jobs.run_at <= statement_timestamp()
                    then 'pending'
                    else jobs.state
                end,
                ready_at = case
                    when jobs.unfinished_parents = 1 and jobs.run_at <= statement_timestamp()
                    then statement_timestamp()
                end
            from held
            where jobs.project_id = held.project_id and jobs.id = held.id
            returning held.number, jobs.project_id, jobs.id, jobs.queue, jobs.job_type, jobs.rank,
                      jobs.run_at, jobs.state, jobs.constraint_key, jobs.unfinished_parents
        ), counted as (
            insert into queue_deltas (project_id, queue, scheduled, active)
            select project_id, queue, -count(*), count(*)
            from opened
            where state = 'pending'
            group by project_id, queue
        ), unfinished as (
            insert into group_notes (project_id, queue, group_key)
            select project_id, queue, group_key
            from line
            where is_stray or (
                select count(*) >= 500 or count(*) > (
                    select count(*) from held where held.number = line.number
                )
                from next
                where next.number = line.number
            )
            returning 1
        )
        select (select count(*) from unfinished) "left!",
               opened.project_id "project_id?: ProjectId", opened.id "id?: JobId",
               opened.queue "queue?", opened.job_type "job_type?", opened.rank "rank?",
               opened.run_at "run_at?", opened.state "state?: StoredState",
               opened.constraint_key is not null "is_constrained!",
               opened.unfinished_parents "unfinished_parents?"
        from (select) as always
        left join opened on true
        "#,
        &columns.project_id,
        &columns.queue as &[&str],
        &columns.group as &[&str],
        unclosed,
    )
    .fetch_all(conn)
    .await?;
    let left = rows.first().map_or(0, |it| it.left);
    let mut opened = Opened { left: usize::try_from(left).unwrap_or(0), ..Opened::default() };
    for it in rows {
        let (Some(project_id), Some(id), Some(queue)) = (it.project_id, it.id, it.queue) else {
            continue;
        };
        opened.opened += 1;
        if let (Some(job_type), Some(rank), Some(run_at), Some(state), Some(0)) =
            (it.job_type, it.rank, it.run_at, it.state, it.unfinished_parents)
        {
            let is_constrained = it.is_constrained;
            opened.jobs.push(WaitingJob {
                project_id,
                id,
                queue,
                job_type,
                rank,
                run_at,
                state,
                is_constrained,
            });
        }
    }
    Ok(opened)
}
