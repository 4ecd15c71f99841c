//! A few jobs among many, that an index of their own holds: commands, and the jobs of a batch.

use fencepost_domain::{ids::BatchId, job::JobState};
use fencepost_store::{
    jobs::{Order, Payloads},
    people::audit::{self, AuditFilter, Place},
};

use super::*;

const BATCH: BatchId = BatchId(Uuid::from_u128(7));
const FEW: usize = 30;

/// Behind 100,000 other jobs: commands, half of them of a batch.
async fn fill_few(database: &Database) {
    database
        .execute(
            "insert into jobs (project_id, id, queue, job_type, state, rank, run_at, max_attempts,
                               timeout_seconds, has_command, batch_id)
             select 1, gen_random_uuid(), 'default', 'shell', 'pending', 0, now(), 3, 600, true,
                    '00000000-0000-0000-0000-000000000007'
             from generate_series(1, 30) n;
             insert into job_bodies (project_id, job_id, payload, batch_id)
             select 1, id, '\"ls\"', batch_id from jobs where has_command",
        )
        .await;
}

/// A first page.
const fn place(order: Order) -> jobs::Place {
    jobs::Place { order, after: None, jobs: 50 }
}

#[test]
fn commands_and_the_jobs_of_a_batch_are_found_behind_any_number_of_others() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    limited(async {
        let database = fresh_database().await;
        fill(&database).await;
        fill_few(&database).await;
        let pools = Pools::new(&database.url, PoolArgs::default(), None).expect("a URL");
        let conn = &mut *pools.background.acquire().await.expect("a connection");
        let filter = jobs::Filter { batch_id: Some(BATCH), ..jobs::Filter::default() };
        let (rows, next) = costs(conn, "list of a batch", 30 * 40, async |conn| {
            let page =
                jobs::page(conn, PROJECT, &filter, place(Order::Newest), Payloads::LeftOut).await;
            page.expect("it runs")
        })
        .await;
        assert_eq!((rows.len(), next), (FEW, None));
        let (rows, next) = costs(conn, "oldest of a batch", 30 * 40, async |conn| {
            let page =
                jobs::page(conn, PROJECT, &filter, place(Order::Oldest), Payloads::LeftOut).await;
            page.expect("it runs")
        })
        .await;
        assert_eq!((rows.len(), next), (FEW, None));
        let walked = costs(conn, "walk over a batch", 30 * 20, async |conn| {
            jobs::walk(conn, PROJECT, &filter, None, 50).await.expect("it runs")
        })
        .await;
        assert_eq!((walked.jobs.len(), walked.is_through), (FEW, true));
        let counted = costs(conn, "count of a batch", 30 * 20, async |conn| {
            jobs::count(conn, PROJECT, &filter).await.expect("it runs")
        })
        .await;
        assert_eq!(counted, (FEW as i64, false));
        let leased = costs(conn, "claim of commands", 30 * 60, async |conn| {
            let limits = limited_claims::ClaimLimits {
                constraint_keys: &[],
                job_types: None,
                max_concurrency: None,
                groups: &limited_claims::GroupLimits::default(),
                default_lease_seconds: None,
                max_jobs: 10,
            };
            let look = QueueClaim { only_commands: true, ..look("default", &[], 10) };
            limited_claims::claim_constrained(conn, &look, limits).await.expect("it runs").0
        })
        .await;
        assert_eq!(leased.len(), 10);
        // While a type is paused, those of the others are claimed.
        let open = ["common".to_owned(), "shell".to_owned()];
        let leased = costs(conn, "claim of commands of open types", 30 * 80, async |conn| {
            let limits = limited_claims::ClaimLimits {
                constraint_keys: &[],
                job_types: Some(&open),
                max_concurrency: None,
                groups: &limited_claims::GroupLimits::default(),
                default_lease_seconds: None,
                max_jobs: 10,
            };
            let look = QueueClaim { only_commands: true, ..look("default", &open, 10) };
            limited_claims::claim_constrained(conn, &look, limits).await.expect("it runs").0
        })
        .await;
        assert_eq!(leased.len(), 10);
    });
}

#[test]
fn jobs_of_a_queue_in_a_state_are_found_behind_any_number_of_others() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    limited(async {
        let database = fresh_database().await;
        fill(&database).await;
        database
            .execute(
                "update jobs set queue = 'few'
                 where id in (select id from jobs where state = 'scheduled' limit 15)
                     or id in (select id from jobs where state = 'pending' limit 15)",
            )
            .await;
        let pools = Pools::new(&database.url, PoolArgs::default(), None).expect("a URL");
        let conn = &mut *pools.background.acquire().await.expect("a connection");
        let filter = jobs::Filter {
            queue: Some("few".into()),
            states: JobState::ALL.to_vec(),
            ..jobs::Filter::default()
        };
        let counted = costs(conn, "count of a queue in states", 30 * 20, async |conn| {
            jobs::count(conn, PROJECT, &filter).await.expect("it runs")
        })
        .await;
        assert_eq!(counted, (FEW as i64, false));
    });
}

#[test]
fn what_one_account_did_is_found_behind_any_number_of_other_entries() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    limited(async {
        let database = fresh_database().await;
        database
            .execute(
                "insert into projects (public_id, slug, name, plan, mode)
                 values (gen_random_uuid(), 'p', 'p', 'unlimited', 'live');
                 insert into audit_log (project_id, id, actor_kind, actor_id, action)
                 select 1, gen_random_uuid(), 'account',
                        case when n % 2000 = 0 then 'acct_mine' else 'acct_other' end,
                        'queue.paused'
                 from generate_series(1, 60000) n;
                 analyze audit_log",
            )
            .await;
        let pools = Pools::new(&database.url, PoolArgs::default(), None).expect("a URL");
        let conn = &mut *pools.background.acquire().await.expect("a connection");
        let mine = AuditFilter { actor_id: Some("acct_mine".to_owned()), ..<_>::default() };
        let rows = costs(conn, "entries of an account", 30 * 5, async |conn| {
            audit::page(conn, PROJECT, &mine, Place::Newest, 1_000).await.expect("it runs")
        })
        .await;
        assert_eq!(rows.len(), FEW);
    });
}

#[test]
fn a_page_counts_what_runs_in_a_queue_once_and_not_for_each_job_that_waits() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    limited(async {
        let database = fresh_database().await;
        database
            .execute(
                "insert into projects (public_id, slug, name, plan, mode)
                 values (gen_random_uuid(), 'p', 'p', 'unlimited', 'live');
                 insert into queues (project_id, name, max_concurrency) values (1, 'default', 50000);
                 insert into jobs (project_id, id, queue, job_type, state, rank, run_at, max_attempts,
                                   timeout_seconds, attempt, lease_id, worker_id, claimed_at,
                                   lease_seconds, lease_expires_at)
                 select 1, gen_random_uuid(), 'default', 'a', 'processing', 0, now(), 3, 600, 1,
                        gen_random_uuid(), 'w', now(), 300, now() + interval '300 s'
                 from generate_series(1, 20000);
                 insert into jobs (project_id, id, queue, job_type, state, rank, run_at, max_attempts,
                                   timeout_seconds)
                 select 1, gen_random_uuid(), 'default', 'a', 'pending', 0, now(), 3, 600
                 from generate_series(1, 300);
                 insert into job_bodies (project_id, job_id, payload)
                 select 1, id, '1' from jobs;
                 analyze jobs; analyze job_bodies",
            )
            .await;
        let pools = Pools::new(&database.url, PoolArgs::default(), None).expect("a URL");
        let conn = &mut *pools.background.acquire().await.expect("a connection");
        let ids: Vec<Uuid> =
            sqlx::query_scalar("select id from jobs where state = 'pending' limit 200")
                .fetch_all(&mut *conn)
                .await
                .expect("it runs");
        let ids: Vec<_> = ids.into_iter().map(JobId).collect();
        let rows = costs(conn, "200 jobs of a queue with a limit", 200 * 20, async |conn| {
            jobs::find_all(conn, PROJECT, &ids, Payloads::LeftOut).await.expect("it runs")
        })
        .await;
        assert_eq!(rows.len(), 200);
    });
}
