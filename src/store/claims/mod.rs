//! Leasing jobs.
//!
//! A claim of any type locks jobs while it reads them. One of some types selects jobs from several
//! ranges of an index, and locks them then. Both must join `jobs` on its whole key and give the
//! planner a constant limit, or it plans a sequential scan of the table. `due` is
//! materialized because a plain subquery with a limit may run more than once. A lease begins when
//! its row is written: a statement that had to wait must not hand out leases that are over.

pub mod leased;
pub mod limited_claims;
pub mod polls;
pub mod turn_claims;

use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use fencepost_domain::{
    ids::{JobId, LeaseId, ProjectId, WorkflowId},
    lease::{LeaseLength, MIN_DEFAULT_LEASE_SECONDS, TIMEOUT_GRACE_SECONDS},
};

pub use self::leased::{ClaimKey, LeasedJob};
use self::leased::{ClaimLimits, GroupLimits, leased_jobs, query_leased, query_leased_of_best};

/// Jobs that one claim statement leases at most. The statements carry the same number as a literal.
pub const MAX_CLAIM_SLOTS: usize = 250;

/// A claim: jobs of one queue, from one position on.
#[derive(Debug, Clone)]
pub struct QueueClaim<'a> {
    pub project_id: ProjectId,
    pub queue: &'a str,
    /// Only these types, if any are named.
    pub job_types: &'a [String],
    /// The labels of the polling workers.
    pub labels: &'a [String],
    /// Only jobs whose payload is a command. Only
    /// [`limited_claims::claim_constrained`] checks it.
    pub only_commands: bool,
    /// The low-water mark: jobs before this position are not scanned.
    pub from: ClaimKey,
    /// Requests that get the jobs, first job first.
    pub slots: Vec<LeaseRequest<'a>>,
}

/// A worker's request for one job.
#[derive(Debug, Clone, Copy)]
pub struct LeaseRequest<'a> {
    pub worker_id: &'a str,
    pub lease: LeaseLength,
    pub poll_id: Option<Uuid>,
    /// Whether an expired lease counts as a failure; none: as its project says.
    pub loss_fails: Option<bool>,
    /// The lease id, made before the claim: if the result is lost, the lease can be found.
    pub lease_id: LeaseId,
}

pub(super) struct Columns<'a> {
    project_id: Vec<i32>,
    queue: Vec<&'a str>,
    wanted: Vec<i64>,
    from_rank: Vec<i16>,
    from_run_at: Vec<DateTime<Utc>>,
    slot_claim: Vec<i64>,
    pub slot_place: Vec<i64>,
    pub slot_worker_id: Vec<&'a str>,
    pub slot_lease_seconds: Vec<Option<i32>>,
    pub slot_poll_id: Vec<Option<Uuid>>,
    pub slot_loss_fails: Vec<Option<bool>>,
    pub slot_lease_id: Vec<Uuid>,
}

impl<'a> Columns<'a> {
    /// `min_lease_seconds` is that of the queue, for polls that ask for no length.
    pub fn of(claims: &'a [QueueClaim<'a>], min_lease_seconds: Option<i32>) -> Self {
        let slots = || {
            (1_i64..).zip(claims).flat_map(|(claim, it)| {
                (1_i64..).zip(&it.slots).map(move |(place, slot)| (claim, place, slot))
            })
        };
        Self {
            project_id: claims.iter().map(|it| it.project_id.0).collect(),
            queue: claims.iter().map(|it| it.queue).collect(),
            wanted: claims.iter().map(|it| it.slots.len() as i64).collect(),
            from_rank: claims.iter().map(|it| it.from.rank).collect(),
            from_run_at: claims.iter().map(|it| it.from.run_at).collect(),
            slot_claim: slots().map(|(claim, ..)| claim).collect(),
            slot_place: slots().map(|(_, place, _)| place).collect(),
            slot_worker_id: slots().map(|(.., it)| it.worker_id).collect(),
            slot_lease_seconds: slots()
                .map(|(.., it)| it.lease.seconds(min_lease_seconds))
                .collect(),
            slot_poll_id: slots().map(|(.., it)| it.poll_id).collect(),
            slot_loss_fails: slots().map(|(.., it)| it.loss_fails).collect(),
            slot_lease_id: slots().map(|(.., it)| it.lease_id.0).collect(),
        }
    }
}

/// Leases jobs of any type for several claims: highest priority first, then oldest. Jobs with a
/// constraint key, and queues with limits, are left to [`limited_claims`].
///
/// Jobs locked by another claim are skipped, not awaited. No queue may appear twice in `claims`: a
/// statement does not skip rows that it has locked itself.
pub async fn claim_any_type(
    conn: &mut PgConnection,
    claims: &[QueueClaim<'_>],
) -> sqlx::Result<Vec<LeasedJob>> {
    let columns = Columns::of(claims, None);
    query_leased!(
        r#"
        with due as materialized (
            select claim.number as claim, found.project_id, found.id, claim.queue,
                   row_number() over (
                       partition by claim.number order by found.rank, found.run_at, found.id
                   ) as place
            from unnest($1::int[], $2::text[], $3::bigint[], $4::smallint[], $5::timestamptz[])
                with ordinality
                as claim(project_id, queue, wanted, from_rank, from_run_at, number)
            left join queues setting
                on setting.project_id = claim.project_id and setting.name = claim.queue
            cross join lateral (
                select project_id, id, rank, run_at
                from jobs
                where project_id = claim.project_id
                    and queue = claim.queue
                    and state = 'pending'
                    and constraint_key is null
                    and (expires_at is null or expires_at > now())
                    and (rank, run_at) >= (claim.from_rank, claim.from_run_at)
                order by rank, run_at, id
                limit case when setting.has_rules or setting.has_gate then 0 else claim.wanted end
                for update skip locked
            ) found
            limit 250
        ), slot as materialized (
            select number, claim, place, worker_id, lease_seconds, poll_id, lease_id, loss_fails
            from unnest(
                $6::bigint[], $7::bigint[], $8::text[], $9::int[], $10::uuid[], $13::uuid[],
                $14::boolean[]
            ) with ordinality as sent(
                claim, place, worker_id, lease_seconds, poll_id, lease_id, loss_fails, number
            )
        ), counted as (
            insert into queue_deltas (project_id, queue, processing)
            select project_id, queue, count(*) from due group by project_id, queue
        )
        update jobs
        set state = 'processing',
            attempt = jobs.attempt + 1,
            lease_id = slot.lease_id,
            worker_id = slot.worker_id,
            poll_id = slot.poll_id,
            loss_fails = slot.loss_fails,
            progress = null,
            claimed_at = statement_timestamp(),
            lease_seconds = least(
                coalesce(slot.lease_seconds, greatest($11::int, jobs.timeout_seconds / 2)),
                jobs.timeout_seconds + $12::int
            ),
            lease_expires_at = statement_timestamp() + make_interval(secs => least(
                coalesce(slot.lease_seconds, greatest($11::int, jobs.timeout_seconds / 2)),
                jobs.timeout_seconds + $12::int
            ))
        from due
        join slot on slot.claim = due.claim and slot.place = due.place
        join job_bodies body on body.project_id = due.project_id and body.job_id = due.id
        where jobs.project_id = due.project_id and jobs.id = due.id
        returning slot.number - 1 as slot,
        "# + LEASED
            + "",
        &columns.project_id,
        &columns.queue as &[&str],
        &columns.wanted,
        &columns.from_rank,
        &columns.from_run_at,
        &columns.slot_claim,
        &columns.slot_place,
        &columns.slot_worker_id as &[&str],
        &columns.slot_lease_seconds as &[Option<i32>],
        &columns.slot_poll_id as &[Option<Uuid>],
        MIN_DEFAULT_LEASE_SECONDS,
        TIMEOUT_GRACE_SECONDS,
        &columns.slot_lease_id,
        &columns.slot_loss_fails as &[Option<bool>],
    )
    .fetch_all(conn)
    .await
}

/// Like [`claim_any_type`], for one claim that names job types.
///
/// Each type is read from an index in claim order and the best are selected from all of them, so a
/// claim never scans rows of other types. Jobs are locked after they are selected: one that another
/// claim took in between is not replaced. The check that a job is still pending compares columns,
/// because a constant would invite the partial indexes of pending jobs. Also returns how many jobs
/// were selected: fewer than wanted means that there are no more.
pub async fn claim_some_types(
    conn: &mut PgConnection,
    claim: &QueueClaim<'_>,
) -> sqlx::Result<(Vec<LeasedJob>, usize)> {
    let columns = Columns::of(std::slice::from_ref(claim), None);
    let limits = ClaimLimits {
        constraint_keys: &[],
        job_types: Some(claim.job_types),
        max_concurrency: None,
        groups: &GroupLimits::default(),
        default_lease_seconds: None,
        max_jobs: claim.slots.len() as i64,
    };
    let rows = query_leased_of_best!(
        r#"
        with best as materialized (
            select found.id, found.rank, found.run_at, 'pending'::text as state
            from unnest($15::text[]) as wanted(job_type)
            left join queues setting on setting.project_id = $1 and setting.name = $2
            cross join lateral (
                select id, rank, run_at
                from jobs
                where project_id = $1
                    and queue = $2
                    and job_type = wanted.job_type
                    and state = 'pending'
                    and constraint_key is null
                    and (expires_at is null or expires_at > now())
                    and (rank, run_at) >= ($12::smallint, $13::timestamptz)
                order by rank, run_at, id
                limit case when setting.has_rules or setting.has_gate then 0 else $14::bigint end
            ) found
            order by found.rank, found.run_at, found.id
            limit least($14::bigint, 250)
        "#,
        claim,
        limits,
        columns,
    )
    .fetch_all(conn)
    .await?;
    let chosen = rows.first().map_or(0, |it| usize::try_from(it.chosen).unwrap_or(0));
    Ok((leased_jobs!(rows).collect(), chosen))
}
