//! What claims and admission read where queues share limits.

use chrono::TimeDelta;
use fencepost_domain::{ids::ProjectId, rate::Handout};
use fencepost_store::{
    groups::GroupKey,
    shared_limits::{
        self,
        claimed::{self, StartsUnder},
        keys,
    },
    sweep::{groups::turns, prune},
};

use super::*;

/// Queues that share the limits, and others with a limit of their own.
const QUEUES: i64 = 20;
const OTHER_QUEUES: i64 = 20_000;
/// Groups of which the limit by group knows starts, and that wait in each queue.
const GROUPS: i64 = 20_000;
/// Jobs that run, all together.
const RUNNING: i64 = 200;

async fn fill(database: &Database) {
    database
        .execute(&format!(
            "insert into projects (public_id, slug, name, plan, mode)
             values (gen_random_uuid(), 'p', 'p', 'unlimited', 'live');
             insert into queues (project_id, name, group_fair, has_gate, shared_limits)
             select 1, 'q' || n, true, true, '{{all,each}}' from generate_series(1, {QUEUES}) n
             union all
             select 1, 'other' || n, true, true, array['l' || n % 900]
             from generate_series(1, {OTHER_QUEUES}) n;
             insert into shared_limits (project_id, name, by_group, max_running, queues)
             select 1, name, by_group, 100,
                    (select array_agg('q' || n) from generate_series(1, {QUEUES}) n)
             from (values ('all', false), ('each', true)) as named(name, by_group)
             union all
             select 1, 'l' || n, true, 5, array['other' || n] from generate_series(1, 900) n;
             insert into jobs (project_id, id, queue, job_type, state, rank, run_at, max_attempts,
                               timeout_seconds, group_key, group_place, takes_turns)
             select 1, gen_random_uuid(), 'q' || 1 + n % {QUEUES}, 'common',
                    'pending', 0, now(), 3, 600, 'g' || n % {GROUPS}, n, true
             from generate_series(1, 2 * {GROUPS}) n;
             update jobs
             set state = 'processing', attempt = 1, lease_id = gen_random_uuid(), worker_id = 'w',
                 claimed_at = now(), lease_seconds = 300, lease_expires_at = now() + interval '300 s'
             where group_place <= {RUNNING};
             insert into job_bodies (project_id, job_id, payload) select 1, id, 'null' from jobs;
             insert into group_turns (project_id, queue, group_key, rest_until)
             select 1, 'q' || 1 + n % {QUEUES}, 'g' || n, now() + interval '1 hour'
             from generate_series(0, {GROUPS} - 1) n;
             insert into shared_limit_keys (project_id, limit_name, group_key, starts, starts_end_at)
             select 1, 'each', 'g' || n, '[]', now() + interval '1 hour'
             from generate_series(0, {GROUPS} - 1) n"
        ))
        .await;
}

#[test]
fn a_claim_reads_the_running_jobs_of_the_queues_that_share_and_the_keys_that_it_names() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    limited(async {
        let database = fresh_database().await;
        fill(&database).await;
        let pools = Pools::new(&database.url, PoolArgs::default(), None).expect("a URL");
        let conn = &mut *pools.background.acquire().await.expect("a connection");
        let names = ["all".to_owned(), "each".to_owned()];
        let locked = costs(conn, "lock of limits", 20, async |conn| {
            claimed::try_lock(conn, PROJECT, &names).await.expect("it runs").expect("locks")
        })
        .await;
        assert_eq!(locked.len(), 2);
        let limits: Vec<_> = locked.iter().collect();
        let running = costs(conn, "running jobs", 2 * (RUNNING + 4 * QUEUES), async |conn| {
            claimed::running(conn, PROJECT, &limits, None).await.expect("it runs")
        })
        .await;
        let of_all = running.iter().filter(|it| it.limit == "all").map(|it| it.running);
        assert_eq!(of_all.sum::<i64>(), RUNNING);
        let groups: Vec<_> = (0..50).map(|number| format!("g{number}")).collect();
        let groups: Vec<_> = groups.iter().map(String::as_str).collect();
        let (found, now) = costs(conn, "keys", 50 * 6, async |conn| {
            claimed::keys(conn, PROJECT, &["each"], &groups).await.expect("it runs")
        })
        .await;
        assert_eq!(found.len(), 50);
        let started = groups.iter().map(|group| StartsUnder {
            limit: "each".to_owned(),
            group: (*group).to_owned(),
            starts: vec![Handout { at: now, jobs: 1 }],
            full_until: None,
            ends_at: now + TimeDelta::hours(1),
        });
        let started: Vec<_> = started.collect();
        costs(conn, "starts", 50 * 30, async |conn| {
            claimed::keep_starts(conn, PROJECT, &started).await.expect("it runs");
        })
        .await;
        of_admission(conn).await;
        of_people(conn, PROJECT).await;
        costs(conn, "ended keys", 60, async |conn| {
            prune::prune_numbers_under_limits(conn).await.expect("it runs");
            prune::prune_shared_limit_keys(conn).await.expect("it runs");
        })
        .await;
    });
}

/// What the admission of noted groups reads.
async fn of_admission(conn: &mut PgConnection) {
    let key = |number: i64| GroupKey {
        project_id: PROJECT,
        queue: format!("q{}", 1 + (number + 1) % QUEUES),
        group: format!("g{number}"),
    };
    let noted: Vec<_> = (0..50).map(key).collect();
    let noted: Vec<_> = noted.iter().collect();
    let lined = costs(conn, "siblings", 50 * 20 * 12, async |conn| {
        turns::end_rests_of_siblings(conn, &noted).await.expect("it runs")
    })
    .await;
    assert_eq!(lined.left, 0);
}

/// What pages and settings read.
async fn of_people(conn: &mut PgConnection, project_id: ProjectId) {
    let page = costs(conn, "page of limits", 51 * 12, async |conn| {
        shared_limits::find(conn, project_id, None, ("l", 51)).await.expect("it runs")
    })
    .await;
    assert_eq!(page.len(), 51);
    let queues: Vec<_> = (1..=QUEUES).map(|number| format!("q{number}")).collect();
    let of = (project_id, "each");
    let page = costs(conn, "page of groups", 2_000, async |conn| {
        keys::list(conn, of, &queues, None, ("", 51)).await.expect("it runs")
    })
    .await;
    assert_eq!(page.len(), 51);
    let named = ["all".to_owned()];
    let limits = costs(conn, "naming", 60, async |conn| {
        shared_limits::note_naming(conn, project_id, "q1", (&named, &[])).await.expect("it runs")
    })
    .await;
    assert_eq!(limits[0].queues.len(), usize::try_from(QUEUES).expect("few"));
}
