//! Admission: it opens jobs that wait for their groups, so that claims find them.
//!
//! Its statements run in one transaction: [`lock`], [`forget`], [`close`], and [`open`], or
//! [`open_limited`](super::rooms::open_limited) in queues that limit how many jobs of a group run.
//! Each sees what was committed before it, and meanwhile only this transaction opens jobs of the
//! group. A job that was stored before its queue had an order is open as well, until it is closed:
//! claims take it no more, but a claim that began earlier may.

use chrono::{DateTime, Utc};
use fencepost_domain::{
    ids::{JobId, ProjectId},
    job::StoredState,
};
use sqlx::PgConnection;

use super::{GroupColumns, noted::NotedGroup};
use crate::{groups::GroupKey, settle::settle_success::WaitingJob};

/// Jobs of a group that one pass opens or closes at most. The statements carry the same number as a
/// literal.
pub const MAX_MOVED_JOBS: i64 = 500;

/// A group that is locked.
#[derive(Debug, Clone, Copy)]
pub struct LockedGroup {
    /// Its index.
    pub number: i64,
    /// Whether its queue limits how many jobs of a group run, and has neither a strict order nor
    /// turns.
    pub is_limited: bool,
    /// Whether the groups of its queue take turns.
    pub has_turns: bool,
    /// Whether its queue shares limits with others.
    pub has_shared_limits: bool,
}

/// Tries to lock groups until the end of the transaction. Returns those that are locked: another
/// node may decide about the others at this moment.
pub async fn lock(
    conn: &mut PgConnection,
    groups: &[NotedGroup],
) -> sqlx::Result<Vec<LockedGroup>> {
    let columns = GroupColumns::of(groups.iter().map(|it| &it.key));
    sqlx::query_as!(
        LockedGroup,
        r#"
        select number - 1 "number!", exists (
                   select from queues
                   where project_id = noted.project_id and name = noted.queue
                       and group_order <> 'strict' and not group_fair
                       and (group_max_running is not null or group_rate_counts is not null)
               ) "is_limited!", takes_turns(project_id, queue) "has_turns!", exists (
                   select from queues
                   where project_id = noted.project_id and name = noted.queue
                       and shared_limits is not null
               ) "has_shared_limits!"
        from unnest($1::int[], $2::text[], $3::text[]) with ordinality
            as noted(project_id, queue, group_key, number)
        where pg_try_advisory_xact_lock(group_lock(project_id, queue, group_key))
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
/// order all but the first in line, if admission has opened it; all if one runs. As many as may run
/// stay open while the walks after a change of the limit last, and always as many as may start by
/// the rates, which `rooms` says of each group. While there are too many for one pass, the claims
/// of the queue rest.
pub async fn close(
    conn: &mut PgConnection,
    groups: &[&GroupKey],
    rooms: &[Option<i32>],
) -> sqlx::Result<Vec<Closed>> {
    let columns = GroupColumns::of(groups.iter().copied());
    let rows = sqlx::query!(
        r#"
        with ruled as materialized (
            select sent.*, setting.group_order = 'strict' as is_strict,
                   setting.group_on_dead = 'block' as blocks,
                   coalesce(sent.room, setting.max_running) as max_open, exists (
                       select from job_groups
                       where project_id = sent.project_id and queue = sent.queue
                           and group_key = sent.group_key
                           and paused_until > statement_timestamp()
                   ) as is_paused
            from unnest($1::int[], $2::text[], $3::text[], $4::int[]) with ordinality
                as sent(project_id, queue, group_key, room, number)
            cross join lateral (
                select group_order, group_on_dead, case
                           when group_order <> 'strict' and not group_fair and group_walks > 0
                           then group_max_running
                       end as max_running
                from queues
                where project_id = sent.project_id and name = sent.queue and has_gate
                offset 0
            ) setting
        ), open as materialized (
            select ruled.number, job.project_id, job.id, job.group_place, job.waits_for_group,
                   row_number() over (partition by ruled.number order by job.group_place) as turn
            from ruled
            cross join lateral (
                select project_id, id, group_place, waits_for_group
                from jobs
                where project_id = ruled.project_id and queue = ruled.queue
                    and group_key = ruled.group_key and group_key is not null
                    and waits_for_group is not true and completed_at is null
                    and lease_id is null and (ruled.max_open is null or state = 'pending')
                order by group_place
                limit 500
            ) job
            where ruled.is_paused or ruled.is_strict or ruled.max_open is not null
        ), line as materialized (
            select ruled.number, ruled.project_id, ruled.queue, ruled.is_paused, ruled.is_strict,
                   ruled.max_open, count(*) as jobs,
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
                     ruled.is_strict, ruled.max_open, ruled.blocks
        ), excess as materialized (
            select open.number, open.project_id, open.id
            from open
            join line on line.number = open.number
            where line.is_paused or open.turn > line.max_open or line.is_strict and (
                line.is_running or open.waits_for_group is null
                or open.group_place > line.first_place
            )
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
        rooms as &[Option<i32>],
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
    /// Queues in which jobs are open for claims, and room was made in their groups.
    pub freed: Vec<(ProjectId, String)>,
}

/// Opens the next jobs of groups that are not paused: in a queue with strict order the first in
/// line, if no other is open and, where dead letters block, none is ahead of it; else all, up to
/// [`MAX_MOVED_JOBS`] of a group. Groups with more to do are noted again: `unclosed` says which of
/// them [`close`] left so. All must be locked.
pub async fn open(
    conn: &mut PgConnection,
    groups: &[&GroupKey],
    unclosed: &[bool],
) -> sqlx::Result<Opened> {
    let columns = GroupColumns::of(groups.iter().copied());
    let rows = sqlx::query_as!(
        OpenedRow,
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
    Ok(Opened::of(rows))
}

/// A job that was opened; only `left` is there if none was.
pub(super) struct OpenedRow {
    pub left: i64,
    pub project_id: Option<ProjectId>,
    pub id: Option<JobId>,
    pub queue: Option<String>,
    pub job_type: Option<String>,
    pub rank: Option<i16>,
    pub run_at: Option<DateTime<Utc>>,
    pub state: Option<StoredState>,
    pub is_constrained: bool,
    pub unfinished_parents: Option<i32>,
}

impl Opened {
    pub(super) fn of(rows: Vec<OpenedRow>) -> Self {
        let left = rows.first().map_or(0, |it| it.left);
        let mut opened = Self { left: usize::try_from(left).unwrap_or(0), ..Self::default() };
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
                    // The same pass puts it in line.
                    has_noted_turn: false,
                });
            }
        }
        opened
    }

    /// Adds what was done with other groups in the same pass.
    pub fn add(&mut self, other: Self) {
        self.jobs.extend(other.jobs);
        self.opened += other.opened;
        self.closed += other.closed;
        self.left += other.left;
        self.freed.extend(other.freed);
    }
}
