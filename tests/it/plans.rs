//! What the hot statements read, on a table of 100,000 jobs that has churned and was never
//! analysed: no statement may scan a table, and each may touch only a few pages a job.

mod alarmed;
mod backlog;
mod few;
mod groups;
mod operator;
mod shared_limits;
mod targets;
mod turns;

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use fencepost_config::PoolArgs;
use fencepost_domain::{
    ids::{JobId, JobKey, LeaseId, ProjectId},
    job::{AttemptOutcome, StoredState},
    lease::{Fence, LeaseLength},
    text::ErrorReport,
};
use fencepost_store::{
    claims::{
        self, ClaimKey, LeaseRequest, LeasedJob, QueueClaim, limited_claims,
        polls::{self, PollKey},
    },
    connection::pools::Pools,
    jobs::{
        self,
        enqueue::{self, NewJob, Start},
    },
    queues::{counts, queue_limits},
    settle::{
        heartbeats::{self, Beat},
        settle_failure::{self, OutcomeToWrite},
        settle_success::{self, Success},
        standings,
    },
    sweep,
};

use crate::harness::{Database, fresh_database, limited};
use sqlx::{Executor, PgConnection, Row};
use uuid::Uuid;

const PROJECT: ProjectId = ProjectId(1);

/// During a large transaction, PostgreSQL learns late which rows are dead elsewhere.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// 100,000 pending jobs of one tenant, 32 of a rare type behind them, and the dead rows and index
/// entries of 30,000 jobs that were claimed and settled.
async fn fill(database: &Database) {
    database
        .execute(
            "insert into projects (public_id, slug, name, plan, mode)
             values (gen_random_uuid(), 'p', 'p', 'unlimited', 'live');
             insert into jobs (project_id, id, queue, job_type, state, rank, run_at, max_attempts,
                               timeout_seconds)
             select 1, gen_random_uuid(), 'default', 'common', 'pending', 0,
                    now() - interval '1 day' + n * interval '1 ms', 3, 600
             from generate_series(1, 130000) n;
             update jobs
             set state = 'processing', attempt = 1, lease_id = gen_random_uuid(), worker_id = 'old',
                 claimed_at = now(), lease_seconds = 300, lease_expires_at = now() + interval '300 s'
             where run_at < now() - interval '1 day' + interval '30000 ms';
             delete from jobs where state = 'processing';
             insert into jobs (project_id, id, queue, job_type, state, rank, run_at, max_attempts,
                               timeout_seconds)
             select 1, gen_random_uuid(), 'default', 'rare', 'pending', 0, now(), 3, 600
             from generate_series(1, 32) n;
             insert into jobs (project_id, id, queue, job_type, state, rank, run_at, max_attempts,
                               timeout_seconds)
             select 1, gen_random_uuid(), 'later', 'later', 'scheduled', 0,
                    now() + n * interval '1 s', 3, 600
             from generate_series(1, 20000) n;
             insert into job_bodies (project_id, job_id, payload) select 1, id, '1' from jobs",
        )
        .await;
}

/// What one statement did to the tables of jobs.
#[derive(Debug, Clone, Copy)]
struct Cost {
    sequential_scans: i64,
    pages: i64,
}

async fn counters(conn: &mut PgConnection) -> BTreeMap<String, Cost> {
    // Counters reach the view at the end of a transaction, at most once a second unless asked.
    conn.execute("select pg_stat_force_next_flush()").await.expect("it runs");
    conn.execute("select 1").await.expect("it runs");
    let rows = sqlx::query(
        "select relname::text, seq_scan,
                coalesce(heap_blks_hit + heap_blks_read + idx_blks_hit + idx_blks_read, 0) as pages
         from pg_stat_user_tables join pg_statio_user_tables using (relid, relname)
         where relname in ('jobs', 'job_bodies', 'finished_jobs', 'attempts', 'dead_letters',
                           'recurring_schedules', 'audit_log', 'group_turns')",
    )
    .fetch_all(conn)
    .await
    .expect("the statistics");
    rows.iter()
        .map(|it| (it.get(0), Cost { sequential_scans: it.get(1), pages: it.get(2) }))
        .collect()
}

/// Waits until no transaction of any test is older than this: until then PostgreSQL takes nothing
/// for dead that died before.
async fn until_dead_is_known(conn: &mut PgConnection) {
    let now: i64 = sqlx::query_scalar("select pg_current_xact_id()::text::bigint")
        .fetch_one(&mut *conn)
        .await
        .expect("a number");
    let look = "select pg_snapshot_xmin(pg_current_snapshot())::text::bigint > $1";
    while !sqlx::query_scalar::<_, bool>(look)
        .bind(now)
        .fetch_one(&mut *conn)
        .await
        .expect("it runs")
    {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

/// Runs a statement once all that is dead is known to be, and checks what it read.
async fn costs<T>(
    conn: &mut PgConnection,
    name: &str,
    max_pages: i64,
    statement: impl AsyncFnOnce(&mut PgConnection) -> T,
) -> T {
    until_dead_is_known(conn).await;
    costs_now(conn, name, max_pages, statement).await
}

/// The same at once, whatever is known.
async fn costs_now<T>(
    conn: &mut PgConnection,
    name: &str,
    max_pages: i64,
    statement: impl AsyncFnOnce(&mut PgConnection) -> T,
) -> T {
    let before = counters(conn).await;
    let answer = statement(conn).await;
    let after = counters(conn).await;
    let mut pages = 0;
    for (table, after) in after {
        let before = before[&table];
        assert_eq!(after.sequential_scans, before.sequential_scans, "{name} scans {table}");
        pages += after.pages - before.pages;
    }
    assert!(pages <= max_pages, "{name} reads {pages} pages, more than {max_pages}");
    answer
}

fn look<'a>(queue: &'a str, job_types: &'a [String], slots: usize) -> QueueClaim<'a> {
    let (lease, poll_id) = (LeaseLength::default(), Some(Uuid::from_u128(9)));
    let lease_id = || LeaseId(Uuid::new_v4());
    let slot =
        |_| LeaseRequest { worker_id: "w", lease, poll_id, loss_fails: None, lease_id: lease_id() };
    let slots = (0..slots).map(slot).collect();
    QueueClaim {
        project_id: PROJECT,
        queue,
        job_types,
        labels: &[],
        only_commands: false,
        from: ClaimKey::ZERO,
        slots,
    }
}

fn key(job: &LeasedJob) -> JobKey {
    JobKey { project_id: job.project_id, id: job.id }
}

fn fence(job: &LeasedJob) -> Fence {
    Fence { worker_id: Some("w".into()), attempt: Some(job.attempt), lease_id: Some(job.lease_id) }
}

fn new_job() -> NewJob {
    NewJob {
        project_id: PROJECT,
        id: JobId::generate(),
        queue: "default".into(),
        job_type: "common".into(),
        rank: 0,
        start: Start::After(0),
        max_attempts: Some(3),
        timeout_seconds: 60,
        payload: "1".into(),
        retry: None,
        tags: None,
        extras: None,
    }
}

#[test]
fn no_hot_statement_scans_a_table_or_reads_more_than_a_few_pages_a_job() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    limited(async {
        let database = fresh_database().await;
        fill(&database).await;
        let pools = Pools::new(&database.url, PoolArgs::default(), None).expect("a URL");
        let leased = claim(&mut pools.claim.acquire().await.expect("a connection")).await;
        let conn = &mut *pools.settle.acquire().await.expect("a connection");
        settle(conn, &leased).await;
        pass_gates(conn).await;
        sweep_and_read(conn, &leased).await;
    });
}

#[test]
fn a_claim_from_the_mark_reads_few_pages_though_a_snapshot_keeps_all_that_is_dead() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    limited(async {
        let database = fresh_database().await;
        fill(&database).await;
        let mut holder = database.connect().await;
        let hold = "begin isolation level repeatable read; select count(*) from projects";
        holder.execute(sqlx::raw_sql(hold)).await.expect("it is held");
        // Statistics say now that the table is tiny.
        database
            .execute(
                "delete from jobs where queue in ('default', 'later') and job_type <> 'rare';
                 analyze jobs",
            )
            .await;
        let pools = Pools::new(&database.url, PoolArgs::default(), None).expect("a URL");
        let conn = &mut *pools.claim.acquire().await.expect("a connection");
        let from = ClaimKey { rank: 0, run_at: now(conn).await - chrono::TimeDelta::hours(1) };
        let claims = || [QueueClaim { from, ..look("default", &[], 10) }];
        claims::claim_any_type(conn, &claims()).await.expect("it runs");
        let leased = costs_now(conn, "claim under a held snapshot", 10 * 40, async |conn| {
            claims::claim_any_type(conn, &claims()).await.expect("it runs")
        })
        .await;
        assert_eq!(leased.len(), 10);
        holder.execute("rollback").await.expect("it ends");
    });
}

/// Pages of `queue_deltas` that were read so far.
async fn delta_pages(conn: &mut PgConnection) -> i64 {
    conn.execute("select pg_stat_force_next_flush()").await.expect("it runs");
    conn.execute("select 1").await.expect("it runs");
    let pages = "select coalesce(heap_blks_hit + heap_blks_read + idx_blks_hit + idx_blks_read, 0)
                 from pg_statio_user_tables where relname = 'queue_deltas'";
    sqlx::query_scalar(pages).fetch_one(conn).await.expect("the statistics")
}

#[test]
fn counts_read_few_pages_though_a_snapshot_keeps_all_merged_deltas() {
    const DELTAS: usize = 60_000;
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    limited(async {
        let database = fresh_database().await;
        let mut holder = database.connect().await;
        let hold = "begin isolation level repeatable read; select count(*) from projects";
        holder.execute(sqlx::raw_sql(hold)).await.expect("it is held");
        database
            .execute(&format!(
                "insert into queue_deltas (project_id, queue, active)
                 select 1 + n % 100, 'q', 1 from generate_series(1, {DELTAS}) n;
                 analyze queue_deltas"
            ))
            .await;
        let pools = Pools::new(&database.url, PoolArgs::default(), None).expect("a URL");
        let conn = &mut *pools.background.acquire().await.expect("a connection");
        while sweep::counts::merge_counts(conn, None).await.expect("it runs") > 0 {}
        until_dead_is_known(conn).await;
        sweep::counts::merge_counts(conn, None).await.expect("it runs");
        // As a loop does after many jobs.
        database.execute("vacuum queue_deltas").await;
        database
            .execute("insert into queue_deltas (project_id, queue, active) values (1, 'q', 1)")
            .await;
        let before = delta_pages(conn).await;
        assert_eq!(counts::waiting(conn, PROJECT).await.expect("it runs"), 601);
        assert!(sweep::probe::probe(conn, 0).await.expect("it runs").has_deltas);
        assert_eq!(sweep::counts::merge_counts(conn, None).await.expect("it runs"), 1);
        let pages = delta_pages(conn).await - before;
        // The table has some 600.
        assert!(pages <= 150, "{pages} pages");
        holder.execute("rollback").await.expect("it ends");
    });
}

async fn now(conn: &mut PgConnection) -> chrono::DateTime<chrono::Utc> {
    sqlx::query_scalar("select now()").fetch_one(conn).await.expect("a time")
}

/// The first to come by walks over what has died; then it is known to be dead.
async fn claim(conn: &mut PgConnection) -> Vec<LeasedJob> {
    let any = || [look("default", &[], 100), look("other", &[], 50), look("none", &[], 50)];
    until_dead_is_known(conn).await;
    claims::claim_any_type(conn, &any()).await.expect("it runs");
    let leased = costs(conn, "claim", 100 * 25, async |conn| {
        claims::claim_any_type(conn, &any()).await.expect("it runs")
    })
    .await;
    assert_eq!(leased.len(), 100);

    let types = ["rare".to_owned(), "none".to_owned()];
    let typed = || look("default", &types, 8);
    claims::claim_some_types(conn, &typed()).await.expect("it runs");
    let rare = costs(conn, "claim of types behind 100,000 others", 8 * 30, async |conn| {
        claims::claim_some_types(conn, &typed()).await.expect("it runs")
    })
    .await;
    assert_eq!((rare.0.len(), rare.1), (8, 8));

    let queues = [(PROJECT, "default".into()), (PROJECT, "none".into())];
    // It walks over the 200 jobs that were claimed a moment ago.
    let found = costs(conn, "look for work", 200 + 60, async |conn| {
        polls::queues_with_work(conn, &queues).await.expect("it runs")
    })
    .await;
    assert_eq!(found, [0]);
    let found = costs(conn, "look for gates", 200, async |conn| {
        let queues = [(PROJECT, "default"), (PROJECT, "none")];
        limited_claims::queues_with_constraint_keys(conn, &queues).await.expect("it runs")
    })
    .await;
    assert!(found.is_empty());
    let poll = PollKey { project_id: PROJECT, worker_id: "w".into(), poll_id: Uuid::from_u128(9) };
    let polls = [poll.clone(), PollKey { poll_id: Uuid::from_u128(8), ..poll }];
    let again = costs(conn, "repeated poll", 216 * 20, async |conn| {
        polls::leased_by_polls(conn, &polls).await.expect("it runs")
    })
    .await;
    assert_eq!(again.len(), 216);
    leased
}

/// 20,000 jobs with one constraint key, and one each with 300 others, before and after the rest.
async fn pass_gates(conn: &mut PgConnection) {
    conn.execute(
        "insert into jobs (project_id, id, queue, job_type, state, rank, run_at, max_attempts,
                           timeout_seconds, constraint_key, concurrency_key, concurrency_limit)
         select 1, gen_random_uuid(), 'gated', 'common', 'pending', 0, now(), 3, 600,
                constraint_key, constraint_key::text, 2
         from generate_series(1, 20000) n,
              lateral (select md5(case when n <= 300 then n::text else '' end)::uuid as constraint_key) it;
         insert into job_bodies (project_id, job_id, payload)
         select 1, id, '1' from jobs where queue = 'gated'",
    )
    .await
    .expect("it runs");
    let look = || look("gated", &[], 50);
    let seen = costs(conn, "page of gates", 200 * 12, async |conn| {
        let found = limited_claims::find_constraint_keys(conn, &look(), &[], Uuid::nil()).await;
        found.expect("it runs")
    })
    .await;
    assert_eq!(seen.keys.len(), limited_claims::MAX_PAGE_CONSTRAINT_KEYS);
    let open: Vec<_> = seen.keys.iter().map(|it| it.constraint_key).collect();
    let (leased, _) = costs(conn, "claim behind gates", 200 * 12 + 50 * 30, async |conn| {
        let limits = limited_claims::ClaimLimits {
            constraint_keys: &open,
            job_types: None,
            max_concurrency: None,
            groups: &limited_claims::GroupLimits::default(),
            default_lease_seconds: None,
            max_jobs: 50,
        };
        limited_claims::claim_constrained(conn, &look(), limits).await.expect("it runs")
    })
    .await;
    assert_eq!(leased.len(), 50);
    let held = costs(conn, "leases of one worker", 600 * 5, async |conn| {
        settle_failure::lock_held_by(conn, PROJECT, "w", 500, None).await.expect("it runs")
    })
    .await;
    assert!(held.len() >= 50);
    operator::look_at_silent_worker(conn).await;
}

async fn settle(conn: &mut PgConnection, leased: &[LeasedJob]) {
    let (beating, rest) = leased.split_at(20);
    let beats: Vec<_> =
        beating.iter().map(|it| Beat { key: key(it), fence: fence(it), progress: None }).collect();
    let renewed = costs(conn, "heartbeat", 20 * 25, async |conn| {
        heartbeats::renew(conn, &beats).await.expect("it runs")
    })
    .await;
    assert_eq!(renewed.len(), 20);

    let (succeeding, failing) = rest.split_at(50);
    let successes: Vec<_> = succeeding
        .iter()
        .map(|it| Success {
            project_id: PROJECT,
            job_id: it.id,
            fence: fence(it),
            result: None,
            duration_ms: None,
        })
        .collect();
    // Each job is looked up twice: as it is, and as the statement sees it.
    let moved = costs(conn, "ack", 50 * 20, async |conn| {
        settle_success::succeed(conn, &successes.iter().collect::<Vec<_>>()).await.expect("it runs")
    })
    .await;
    assert_eq!(moved.len(), 50);

    let fences: Vec<_> = failing.iter().map(|it| (key(it), fence(it))).collect();
    let ended: Vec<_> = failing
        .iter()
        .map(|it| OutcomeToWrite {
            key: key(it),
            attempt: it.attempt,
            state: StoredState::Backoff,
            failures: 1,
            losses: None,
            wait: std::time::Duration::from_secs(15),
            outcome: AttemptOutcome::Failed,
            error: ErrorReport::default(),
            duration_ms: None,
            ran_ms: 0,
        })
        .collect();
    let rested = costs(conn, "failure", 30 * 36, async |conn| {
        let held = settle_failure::lock_held(conn, fences.iter().map(|(key, it)| (*key, it))).await;
        assert_eq!(held.expect("it runs").len(), 30);
        settle_failure::write_outcomes(conn, &ended).await.expect("it runs")
    })
    .await;
    assert_eq!(rested.len(), 30);
    let standings = costs(conn, "explain refusals", 30 * 12, async |conn| {
        let fences = fences.iter().map(|(key, it)| (*key, it));
        standings::find_standings(conn, fences).await.expect("it runs")
    })
    .await;
    assert_eq!(standings.len(), 30);
}

async fn sweep_and_read(conn: &mut PgConnection, leased: &[LeasedJob]) {
    let new: Vec<_> = (0..50).map(|_| new_job()).collect();
    let new: Vec<_> = new.iter().collect();
    let stored = costs(conn, "enqueue", 50 * 13, async |conn| {
        enqueue::insert_jobs(conn, &new, &vec![None; 50], &[], &[]).await.expect("it runs")
    })
    .await;
    assert_eq!(stored.len(), 50);
    // Without statistics an index of any order would seem good for a table that seems to be empty.
    conn.execute(
        "insert into finished_jobs (project_id, id, queue, job_type, state, rank, run_at,
                                    created_at, completed_at, attempt, failures, max_attempts,
                                    timeout_seconds, cancel_requested)
         select 1, gen_random_uuid(), 'past', 'past', 'succeeded', 0, now(), now(), now(), 1, 0, 3,
                600, false
         from generate_series(1, 20000); analyze finished_jobs",
    )
    .await
    .expect("it runs");
    let found = costs(conn, "look for what was stored", 50 * 11, async |conn| {
        jobs::stored_before::find_stored(conn, &new).await.expect("it runs")
    })
    .await;
    assert_eq!(found.len(), 50);
    costs(conn, "next due", 13, async |conn| {
        sweep::next_due_ms(conn).await.expect("it runs").expect("something is scheduled")
    })
    .await;
    let due =
        costs(conn, "find due", 60, async |conn| sweep::find_due(conn).await.expect("it runs"))
            .await;
    costs(conn, "find due by turns", 60 + 100, async |conn| {
        sweep::find_due_by_turns(conn).await.expect("it runs")
    })
    .await;
    // One more is due each second.
    let pages = (due.len() as i64 + 1) * 50;
    costs(conn, "promote", pages, async |conn| sweep::promote(conn, &due).await.expect("it runs"))
        .await;
    // The dead leases of the churn are walked over once.
    sweep::lock_expired(conn).await.expect("it runs");
    costs(conn, "reap", 20, async |conn| sweep::lock_expired(conn).await.expect("it runs")).await;
    // The first plan reads a page of each index.
    jobs::find(conn, PROJECT, leased[0].id).await.expect("it runs");
    costs(conn, "read", 12, async |conn| {
        jobs::find(conn, PROJECT, leased[0].id).await.expect("it runs").expect("the job")
    })
    .await;
    costs(conn, "list", 5 * 2_000 * 2, async |conn| {
        let filter = jobs::Filter { job_type: Some("none".into()), ..jobs::Filter::default() };
        let newest = jobs::Place { order: jobs::Order::Newest, after: None, jobs: 50 };
        jobs::page(conn, PROJECT, &filter, newest, jobs::Payloads::Shown).await.expect("it runs")
    })
    .await;
    let seen: Vec<_> = leased.iter().map(|it| it.id).collect();
    costs(conn, "workers of a list", 2_000, async |conn| {
        fencepost_store::workers::fitting::serving(conn, PROJECT, &seen).await.expect("it runs")
    })
    .await;
}
