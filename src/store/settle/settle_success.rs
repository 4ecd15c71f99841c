//! Recording successes.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use fencepost_domain::{
    ids::{JobId, JobKey, ProjectId},
    job::StoredState,
    lease::Fence,
};

/// A success to record, if its fence still holds.
#[derive(Debug, Clone, PartialEq)]
pub struct Success {
    pub project_id: ProjectId,
    pub job_id: JobId,
    pub fence: Fence,
    /// The JSON as it was sent.
    pub result: Option<String>,
    pub duration_ms: Option<i64>,
}

pub(super) struct FenceColumns<'a> {
    pub project_id: Vec<i32>,
    pub job_id: Vec<Uuid>,
    pub worker_id: Vec<Option<&'a str>>,
    pub attempt: Vec<Option<i32>>,
    pub lease_id: Vec<Option<Uuid>>,
}

impl<'a> FenceColumns<'a> {
    pub fn of(fences: impl Iterator<Item = (JobKey, &'a Fence)> + Clone) -> Self {
        Self {
            project_id: fences.clone().map(|(key, _)| key.project_id.0).collect(),
            job_id: fences.clone().map(|(key, _)| key.id.0).collect(),
            worker_id: fences.clone().map(|(_, it)| it.worker_id.as_deref()).collect(),
            attempt: fences.clone().map(|(_, it)| it.attempt).collect(),
            lease_id: fences.map(|(_, it)| it.lease_id.map(|it| it.0)).collect(),
        }
    }
}

impl Success {
    /// The job's key.
    #[must_use]
    pub fn key(&self) -> JobKey {
        JobKey { project_id: self.project_id, id: self.job_id }
    }
}

/// A job that has succeeded.
#[derive(Debug, Clone)]
pub struct Settled {
    pub key: JobKey,
    pub queue: String,
    pub job_type: String,
    /// From its lease to the present, by the database's clock.
    pub ran_ms: i64,
    /// Children that may run now; none if it has no children.
    pub children_activated: Option<i32>,
    /// Whether its lease counted against a limit.
    pub held_slot: bool,
    /// Whether the cascade has more to do: children waited for its failure, or it has callbacks or
    /// a batch.
    pub has_follow_ups: bool,
    /// Whether this or another of these ends lets a group continue.
    pub has_noted_groups: bool,
}

/// A row that a success changed.
#[derive(Debug, Clone)]
pub enum SettledRow {
    /// A job that has succeeded.
    Job(Settled),
    /// A child whose parents have all succeeded now.
    FreedChild(WaitingJob),
}

/// Moves the jobs whose fences hold to `finished_jobs`, and returns them. Jobs with children are
/// left alone: a child that is stored while this statement waits for its parent's lock would not be
/// visible to it. So are those with callbacks or a batch, for which other jobs must not pay.
/// [`succeed_parents`] settles them.
///
/// No job may appear twice in `acks`. The fence stands in the `where`, so that checking and writing
/// are one act. A fence that holds implies `processing`; `state` is not in the condition, because
/// it would invite the index of leases, whose entries are nearly all dead. Rows that another
/// transaction holds are left alone: they must not delay the others.
///
/// Each job is looked up by itself, and deleted by its place: joins depend on statistics, and a
/// plan for a nearly empty table compares each ack with each job of a burst. If a job has a new
/// version since the statement began, the delete finds the one that the statement sees, follows it
/// to the locked one, and compares that again: the places of both must be listed.
pub async fn succeed(conn: &mut PgConnection, acks: &[&Success]) -> sqlx::Result<Vec<SettledRow>> {
    let fences = FenceColumns::of(acks.iter().map(|it| (it.key(), &it.fence)));
    let moved = sqlx::query!(
        r#"
        with held as materialized (
            select job.place, job.project_id, job.id, job.queue, job.job_type, job.rank, job.run_at,
                   job.created_at, job.attempt, job.failures, job.max_attempts,
                   job.timeout_seconds, job.labels, job.cancel_requested, job.progress,
                   job.lease_id, job.worker_id, job.claimed_at, job.holds_slot,
                   job.expires_at, job.group_key, ack.duration_ms, ack.result
            from (
                select * from unnest(
                    $1::int[], $2::uuid[], $3::text[], $4::int[], $5::uuid[], $6::bigint[], $7::text[]
                ) as sent(project_id, job_id, worker_id, attempt, lease_id, duration_ms, result)
                order by project_id, job_id
                limit 500
            ) ack
            cross join lateral (
                select ctid as place, jobs.*
                from jobs
                where jobs.project_id = ack.project_id and jobs.id = ack.job_id
                    and jobs.worker_id = coalesce(ack.worker_id, jobs.worker_id)
                    and (ack.attempt is null or jobs.attempt = ack.attempt)
                    and (ack.lease_id is null or jobs.lease_id = ack.lease_id)
                    and jobs.children = 0 and jobs.batch_id is null and jobs.has_callbacks is null
                for update skip locked
            ) job
        ), gone as (
            delete from jobs
            where ctid = any(array(
                select seen.place
                from held
                cross join lateral (
                    select ctid as place from jobs
                    where jobs.project_id = held.project_id and jobs.id = held.id offset 0
                ) seen
                union all
                select place from held
            )) returning 1
        ), unexpired as (
            delete from job_expiries
            using held
            where held.expires_at is not null and job_expiries.project_id = held.project_id
                and job_expiries.job_id = held.id
        ), moved as (
            insert into finished_jobs (
                project_id, id, queue, job_type, state, rank, run_at, created_at, attempt, failures,
                max_attempts, timeout_seconds, labels, cancel_requested, progress, lease_id,
                worker_id, claimed_at, duration_ms, result
            )
            select project_id, id, queue, job_type, 'succeeded', rank, run_at, created_at, attempt,
                   failures, max_attempts, timeout_seconds, labels, cancel_requested, progress,
                   lease_id, worker_id, claimed_at, duration_ms, result
            from held
        ), counted as (
            insert into queue_deltas (project_id, queue, processing, active, succeeded)
            select project_id, queue, -count(*), -count(*), count(*)
            from held
            group by project_id, queue
        )
        select project_id "project_id!: ProjectId", id "id!: JobId", queue "queue!", job_type "job_type!",
               (extract(epoch from now() - claimed_at) * 1000)::bigint "ran_ms!",
               holds_slot "held_slot!", (select count(*) from gone) "gone!",
               group_key is not null and note_group_with_rules(project_id, queue, group_key)
                   "has_noted_groups!"
        from held
        "#,
        &fences.project_id,
        &fences.job_id,
        &fences.worker_id as &[Option<&str>],
        &fences.attempt as &[Option<i32>],
        &fences.lease_id as &[Option<Uuid>],
        &acks.iter().map(|it| it.duration_ms).collect::<Vec<_>>() as &[Option<i64>],
        &acks.iter().map(|it| it.result.as_deref()).collect::<Vec<_>>() as &[Option<&str>],
    )
    .fetch_all(conn)
    .await?;
    if moved.first().is_some_and(|it| it.gone.unsigned_abs() != moved.len() as u64) {
        return Err(sqlx::Error::Protocol("a job stayed beside its success".to_owned()));
    }
    let moved = moved.into_iter().map(|row| {
        SettledRow::Job(Settled {
            key: JobKey { project_id: row.project_id, id: row.id },
            queue: row.queue,
            job_type: row.job_type,
            ran_ms: row.ran_ms,
            children_activated: None,
            held_slot: row.held_slot,
            has_follow_ups: false,
            has_noted_groups: row.has_noted_groups,
        })
    });
    Ok(moved.collect())
}

/// The same for jobs that an earlier statement of this transaction has locked, so that every child
/// is visible: activates the children, and returns both. Jobs with children that waited for their
/// failure are marked for the cascade.
///
/// A child is compared with its own columns alone: if admission has just changed it, its row is
/// first made from the version that this statement sees, and then again from the newest one.
///
/// The result is read from `outcome` and not joined to the inserted rows: without statistics on
/// either, such a join compares each with each.
pub async fn succeed_parents(
    conn: &mut PgConnection,
    acks: &[&Success],
) -> sqlx::Result<Vec<SettledRow>> {
    let fences = FenceColumns::of(acks.iter().map(|it| (it.key(), &it.fence)));
    let moved = sqlx::query!(
        r#"
        with held as materialized (
            select job.project_id, job.id, job.queue, job.job_type, job.rank, job.run_at,
                   job.created_at, job.attempt, job.failures, job.max_attempts,
                   job.timeout_seconds, job.labels, job.cancel_requested, job.progress,
                   job.lease_id, job.worker_id, job.claimed_at, job.children, job.holds_slot,
                   job.expires_at, job.batch_id, job.has_callbacks, job.group_key, ack.duration_ms,
                   ack.result
            from unnest(
                $1::int[], $2::uuid[], $3::text[], $4::int[], $5::uuid[], $6::bigint[], $7::text[]
            ) as ack(project_id, job_id, worker_id, attempt, lease_id, duration_ms, result)
            join jobs job on job.project_id = ack.project_id and job.id = ack.job_id
            where job.worker_id = coalesce(ack.worker_id, job.worker_id)
                and (ack.attempt is null or job.attempt = ack.attempt)
                and (ack.lease_id is null or job.lease_id = ack.lease_id)
            order by job.project_id, job.id
            limit 500
            for update of job
        ), gone as (
            delete from jobs
            using held
            where jobs.project_id = held.project_id and jobs.id = held.id
        ), unexpired as (
            delete from job_expiries
            using held
            where held.expires_at is not null and job_expiries.project_id = held.project_id
                and job_expiries.job_id = held.id
        ), child as materialized (
            select kid.project_id, kid.id, kid.state as was, done.parents, done.last_parent
            from (
                select edge.project_id, edge.child_id, count(*)::int as parents,
                       (array_agg(edge.parent_id))[1] as last_parent
                from held
                join job_edges edge
                    on edge.project_id = held.project_id and edge.parent_id = held.id
                where held.children > 0 and edge.condition <> 'failed' and not edge.is_met
                group by edge.project_id, edge.child_id
            ) done
            join jobs kid on kid.project_id = done.project_id and kid.id = done.child_id
            order by kid.project_id, kid.id
            for no key update of kid
        ), freed as (
            update jobs
            set unfinished_parents = jobs.unfinished_parents - child.parents,
                state = case when jobs.unfinished_parents <= child.parents and jobs.run_at <= now()
                    then 'pending' else jobs.state end,
                ready_at = case when jobs.unfinished_parents <= child.parents
                    and jobs.run_at <= now() then statement_timestamp() end
            from child
            where jobs.project_id = child.project_id and jobs.id = child.id
            returning jobs.project_id, jobs.id, jobs.queue, jobs.job_type, jobs.rank, jobs.run_at,
                      jobs.state, jobs.constraint_key, jobs.unfinished_parents, child.last_parent,
                      jobs.state <> child.was as is_moved, case
                          when jobs.takes_turns and jobs.state = 'pending'
                          then note_turn(jobs.project_id, jobs.queue, jobs.group_key)
                      end as turn
        ), marked as (
            insert into ended_parents (project_id, job_id)
            select distinct held.project_id, held.id
            from held
            join job_edges edge on edge.project_id = held.project_id and edge.parent_id = held.id
            where held.children > 0 and edge.condition = 'failed' and not edge.is_met
            on conflict do nothing
            returning project_id, job_id
        ), counted as (
            insert into queue_deltas (project_id, queue, processing, scheduled, active, succeeded)
            select project_id, queue, sum(processing), sum(scheduled), sum(active), sum(succeeded)
            from (
                select project_id, queue, -1 as processing, 0 as scheduled, -1 as active,
                       1 as succeeded
                from held
                union all
                select project_id, queue, 0, -1, 1, 0 from freed where is_moved
            ) moves
            group by project_id, queue
        ), outcome as materialized (
            select held.*, case when held.children > 0 then (
                select count(*)::int
                from freed
                where freed.project_id = held.project_id and freed.last_parent = held.id
                    and freed.unfinished_parents = 0
            ) end as activated,
            (held.project_id, held.id) in (select project_id, job_id from marked)
                or held.batch_id is not null or held.has_callbacks is true as has_follow_ups
            from held
        ), moved as (
            insert into finished_jobs (
                project_id, id, queue, job_type, state, rank, run_at, created_at, attempt, failures,
                max_attempts, timeout_seconds, labels, cancel_requested, progress, lease_id,
                worker_id, claimed_at, duration_ms, result, children, children_activated
            )
            select project_id, id, queue, job_type, 'succeeded', rank, run_at, created_at, attempt,
                   failures, max_attempts, timeout_seconds, labels, cancel_requested, progress,
                   lease_id, worker_id, claimed_at, duration_ms, result, children, activated
            from outcome
        ), ends as (
            insert into job_ends (project_id, job_id, batch_id, callbacks, succeeded)
            select held.project_id, held.id, held.batch_id, case when held.has_callbacks then (
                       select callbacks
                       from job_bodies
                       where project_id = held.project_id and job_id = held.id
                   ) end, 1
            from held
            where held.batch_id is not null or held.has_callbacks
        )
        select project_id "project_id!: ProjectId", id "id!: JobId",
               activated as children_activated, holds_slot "held_slot!",
               has_follow_ups "has_follow_ups!", queue "queue!", job_type "job_type!",
               (extract(epoch from now() - claimed_at) * 1000)::bigint as ran_ms,
               null::smallint as rank, null::timestamptz as run_at,
               null::text as "state: StoredState", false "is_constrained!",
               group_key is not null and note_group_with_rules(project_id, queue, group_key)
                   "has_noted_groups!"
        from outcome
        union all
        select project_id, id, null, false, false, queue, job_type, null, rank, run_at, state,
               constraint_key is not null, turn is true
        from freed
        where unfinished_parents = 0
        "#,
        &fences.project_id,
        &fences.job_id,
        &fences.worker_id as &[Option<&str>],
        &fences.attempt as &[Option<i32>],
        &fences.lease_id as &[Option<Uuid>],
        &acks.iter().map(|it| it.duration_ms).collect::<Vec<_>>() as &[Option<i64>],
        &acks.iter().map(|it| it.result.as_deref()).collect::<Vec<_>>() as &[Option<&str>],
    )
    .fetch_all(conn)
    .await?;
    let moved = moved.into_iter().map(|row| {
        let key = JobKey { project_id: row.project_id, id: row.id };
        let (queue, job_type) = (row.queue, row.job_type);
        match (row.rank, row.run_at, row.state) {
            (Some(rank), Some(run_at), Some(state)) => {
                let is_constrained = row.is_constrained;
                SettledRow::FreedChild(WaitingJob {
                    project_id: row.project_id,
                    id: row.id,
                    queue,
                    job_type,
                    rank,
                    run_at,
                    state,
                    is_constrained,
                    has_noted_turn: row.has_noted_groups,
                })
            }
            _ => SettledRow::Job(Settled {
                key,
                queue,
                job_type,
                ran_ms: row.ran_ms.unwrap_or_default(),
                children_activated: row.children_activated,
                held_slot: row.held_slot,
                has_follow_ups: row.has_follow_ups,
                has_noted_groups: row.has_noted_groups,
            }),
        }
    });
    Ok(moved.collect())
}

/// A job that waits, as the pump and the promoter need to know it.
#[derive(Debug, Clone)]
pub struct WaitingJob {
    pub project_id: ProjectId,
    pub id: JobId,
    pub queue: String,
    pub job_type: String,
    /// Minus the priority.
    pub rank: i16,
    /// Its position in the claim order.
    pub run_at: DateTime<Utc>,
    pub state: StoredState,
    /// Whether it has a constraint key.
    pub is_constrained: bool,
    /// Whether its group has to be put in line.
    pub has_noted_turn: bool,
}

impl WaitingJob {
    #[must_use]
    pub fn key(&self) -> JobKey {
        JobKey { project_id: self.project_id, id: self.id }
    }
}
