//! Room in groups whose queue limits how many of their jobs run. Claims count exactly; what is here
//! keeps them from walking over jobs that may not start.

use chrono::{DateTime, Utc};
use fencepost_domain::{
    ids::{JobId, ProjectId},
    job::StoredState,
    rate::{Handout, RateLimits},
};
use sqlx::{PgConnection, types::Json};

use super::{
    GroupColumns,
    admission::{Opened, OpenedRow},
};
use crate::groups::{
    GroupKey,
    rates::{self, Stored},
};

/// Opens the best jobs of groups that are not paused, by priority and then place, as many as there
/// is room for beside those that run or are pending. Of groups with rates no more are opened than
/// `rooms` says, which may start now. Jobs that are not due are opened as well: they wait for room
/// when they are. Groups with more to do are noted again: `unclosed` says which of them
/// [`close`](super::admission::close) left so. All must be locked.
pub async fn open_limited(
    conn: &mut PgConnection,
    groups: &[&GroupKey],
    unclosed: &[bool],
    rooms: &[Option<i32>],
) -> sqlx::Result<Opened> {
    let columns = GroupColumns::of(groups.iter().copied());
    let rows = sqlx::query_as!(
        OpenedRow,
        r#"
        with ruled as materialized (
            select sent.*, setting.group_max_running as max_running
            from unnest($1::int[], $2::text[], $3::text[], $4::bool[], $5::int[]) with ordinality
                as sent(project_id, queue, group_key, is_unclosed, rate_room, number)
            cross join lateral (
                select group_max_running
                from queues
                where project_id = sent.project_id and name = sent.queue
                offset 0
            ) setting
            where (setting.group_max_running is not null or sent.rate_room is not null)
                and not is_group_paused(sent.project_id, sent.queue, sent.group_key)
        ), busy as materialized (
            select named.project_id, named.queue, running.group_key, count(*) as jobs
            from (select distinct project_id, queue from ruled) named
            cross join lateral (
                select group_key
                from jobs
                where project_id = named.project_id and queue = named.queue
                    and state = 'processing' and group_key is not null
            ) running
            group by named.project_id, named.queue, running.group_key
        ), line as materialized (
            select ruled.*, greatest(0, least(
                       max_running - coalesce(busy.jobs, 0), ruled.rate_room
                   ) - (
                       select count(*)
                       from (
                           select
                           from jobs
                           where project_id = ruled.project_id and queue = ruled.queue
                               and group_key = ruled.group_key and waits_for_group is false
                               and state = 'pending'
                           limit coalesce(ruled.max_running, ruled.rate_room)
                       ) admitted
                   )) as room
            from ruled
            left join busy on busy.project_id = ruled.project_id and busy.queue = ruled.queue
                and busy.group_key = ruled.group_key
        ), next as materialized (
            select line.number, line.room, job.project_id, job.id, job.is_due,
                   count(*) filter (where job.is_due) over (
                       partition by line.number order by job.rank, job.group_place
                   ) as turn
            from line
            cross join lateral (
                select project_id, id, rank, group_place,
                       run_at <= statement_timestamp() and unfinished_parents = 1 as is_due
                from jobs
                where project_id = line.project_id and queue = line.queue
                    and group_key = line.group_key and waits_for_group
                order by rank, group_place
                limit least(500, line.room + 100)
            ) job
        ), held as materialized (
            select next.number, found.*
            from next
            cross join lateral (
                select project_id, id,
                       run_at <= statement_timestamp() and unfinished_parents = 1 as is_due
                from jobs
                where project_id = next.project_id and id = next.id and waits_for_group
                for update skip locked
            ) found
            where not next.is_due or next.turn <= next.room
        ), opened as (
            update jobs
            set waits_for_group = case when held.is_due then false end,
                unfinished_parents = jobs.unfinished_parents - 1,
                state = case when held.is_due then 'pending' else jobs.state end,
                ready_at = case when held.is_due then statement_timestamp() end
            from held
            where jobs.project_id = held.project_id and jobs.id = held.id
            returning jobs.project_id, jobs.id, jobs.queue, jobs.job_type, jobs.rank, jobs.run_at,
                      jobs.state, jobs.constraint_key, jobs.unfinished_parents
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
            where is_unclosed or (
                select bool_or(not is_due) or count(*) = 500 and line.room > 500
                       or count(*) filter (where turn <= room) > (
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
        rooms as &[Option<i32>],
    )
    .fetch_all(conn)
    .await?;
    Ok(Opened::of(rows))
}

/// The rates of a group, and its starts.
#[derive(Debug, Clone)]
pub struct RatedGroup {
    /// The index of the group.
    pub number: usize,
    pub rates: RateLimits,
    /// Oldest first.
    pub starts: Vec<Handout>,
    /// The database's clock.
    pub now: DateTime<Utc>,
}

/// Those of these groups that have rates.
pub async fn rated(conn: &mut PgConnection, groups: &[&GroupKey]) -> sqlx::Result<Vec<RatedGroup>> {
    let columns = GroupColumns::of(groups.iter().copied());
    let rows = sqlx::query!(
        r#"
        select sent.number - 1 "number!", setting.group_rate_counts "counts!",
               setting.group_rate_seconds "seconds!", past.starts "starts?: Json<Stored>",
               statement_timestamp() "now!"
        from unnest($1::int[], $2::text[], $3::text[]) with ordinality
            as sent(project_id, queue, group_key, number)
        join queues setting on setting.project_id = sent.project_id and setting.name = sent.queue
            and setting.group_rate_counts is not null and setting.group_order <> 'strict'
            and not setting.group_fair
        left join group_handouts past on past.project_id = sent.project_id
            and past.queue = sent.queue and past.group_key = sent.group_key
        "#,
        &columns.project_id,
        &columns.queue as &[&str],
        &columns.group as &[&str],
    )
    .fetch_all(conn)
    .await?;
    let rated = rows.into_iter().map(|it| RatedGroup {
        number: usize::try_from(it.number).unwrap_or_default(),
        rates: rates::limits(&it.counts, &it.seconds),
        starts: rates::read(it.starts),
        now: it.now,
    });
    Ok(rated.collect())
}

/// Queues in which jobs of these groups are open for claims: ends have made room for them.
pub async fn queues_with_open(
    conn: &mut PgConnection,
    groups: &[&GroupKey],
) -> sqlx::Result<Vec<(ProjectId, String)>> {
    let columns = GroupColumns::of(groups.iter().copied());
    let rows = sqlx::query!(
        r#"
        select distinct project_id "project_id!: ProjectId", queue "queue!"
        from unnest($1::int[], $2::text[], $3::text[]) as sent(project_id, queue, group_key)
        where exists (
            select from jobs
            where project_id = sent.project_id and queue = sent.queue
                and group_key = sent.group_key and waits_for_group is false and state = 'pending'
        )
        "#,
        &columns.project_id,
        &columns.queue as &[&str],
        &columns.group as &[&str],
    )
    .fetch_all(conn)
    .await?;
    Ok(rows.into_iter().map(|it| (it.project_id, it.queue)).collect())
}
