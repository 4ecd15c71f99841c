//! What a claim reads where groups take turns: the groups that are next, and the best jobs of each.

use fencepost_store::{
    claims::{
        QueueClaim,
        limited_claims::{ClaimLimits, GroupLimits},
        turn_claims::{self, GroupInLine, Page},
    },
    groups::{
        GroupKey,
        turns::{self, TurnChanges},
    },
    sweep::groups::{turns as lines, walks},
};

use super::*;

/// Groups in line, each with a few jobs, and others that rest.
const GROUPS: i64 = 20_000;
/// Further jobs of the first group.
const BEHIND: i64 = 100_000;

async fn fill(database: &Database) {
    database
        .execute(&format!(
            "insert into projects (public_id, slug, name, plan, mode)
             values (gen_random_uuid(), 'p', 'p', 'unlimited', 'live');
             insert into queues (project_id, name, group_fair, has_gate)
             values (1, 'default', true, true);
             insert into jobs (project_id, id, queue, job_type, state, rank, run_at, max_attempts,
                               timeout_seconds, group_key, group_place, takes_turns)
             select 1, gen_random_uuid(), 'default', 'common', 'pending', 0, now(), 3, 600,
                    'g' || n % {GROUPS}, n, true
             from generate_series(1, 4 * {GROUPS}) n
             union all
             select 1, gen_random_uuid(), 'default', 'common', 'pending', -1, now(), 3, 600, 'g1',
                    10 * {GROUPS} + n, true
             from generate_series(1, {BEHIND}) n;
             insert into job_bodies (project_id, job_id, payload)
             select 1, id, 'null' from jobs;
             insert into group_turns (project_id, queue, group_key, turn)
             select 1, 'default', 'g' || n, n from generate_series(0, {GROUPS} - 1) n;
             insert into group_turns (project_id, queue, group_key, turn, rest_until)
             select 1, 'default', 'resting ' || n, 0, now() + interval '1 hour'
             from generate_series(1, {GROUPS}) n"
        ))
        .await;
}

async fn page(conn: &mut PgConnection, claim: &QueueClaim<'_>) -> Vec<GroupInLine> {
    let after = (f64::NEG_INFINITY, "");
    let wanted = Page {
        after,
        groups: 36,
        jobs: 10,
        job_types: &[],
        paused_types: &[],
        after_key: Uuid::nil(),
        in_line: GROUPS,
    };
    turn_claims::page(conn, claim, wanted).await.expect("it runs")
}

fn key(number: i32) -> GroupKey {
    GroupKey { project_id: PROJECT, queue: "default".to_owned(), group: format!("g{number}") }
}

/// What a claim counts.
async fn counts(conn: &mut PgConnection) {
    let counted = costs(conn, "groups in line", 1_200, async |conn| {
        turn_claims::count_in_line(conn, PROJECT, "default").await.expect("it runs")
    })
    .await;
    assert_eq!(counted, 1_000, "no more are counted");
    let are_few = costs(conn, "few jobs", 60, async |conn| {
        turn_claims::are_few(conn, PROJECT, "default", 10).await.expect("it runs")
    })
    .await;
    assert!(!are_few);
    super::groups::longest_waits(conn).await;
}

#[test]
fn a_claim_reads_the_groups_that_are_next_and_the_best_jobs_of_each() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    limited(async {
        let database = fresh_database().await;
        fill(&database).await;
        let pools = Pools::new(&database.url, PoolArgs::default(), None).expect("a URL");
        let conn = &mut *pools.background.acquire().await.expect("a connection");
        let claim = look("default", &[], 10);
        // The first plan of a connection reads more.
        page(conn, &claim).await;
        let line =
            costs(conn, "page of turns", 37 * 60, async |conn| page(conn, &claim).await).await;
        assert_eq!(line.len(), 36);
        assert_eq!((line[1].group.as_str(), line[1].jobs.len()), ("g1", 10));
        counts(conn).await;
        let types = ["common".to_owned()];
        let of_types = costs(conn, "jobs of types", 200 * 30, async |conn| {
            turn_claims::of_types(conn, &claim, &types).await.expect("it runs")
        })
        .await;
        assert_eq!(of_types[0].group, "g1", "the best 200 are of one group");
        let chosen: Vec<_> = line.iter().take(10).map(|it| it.jobs[0].id).collect();
        let limits = ClaimLimits {
            constraint_keys: &[],
            job_types: None,
            max_concurrency: None,
            groups: &GroupLimits::default(),
            default_lease_seconds: None,
            max_jobs: 10,
        };
        let (jobs, selected) = costs(conn, "lease in turn", 10 * 60, async |conn| {
            turn_claims::lease(conn, &claim, limits, &chosen).await.expect("it runs")
        })
        .await;
        assert_eq!((jobs.len(), selected), (10, 10));
        let turns = line.iter().take(10).map(|it| (it.group.clone(), it.turn + 1.0)).collect();
        let changes = TurnChanges { turns, ..TurnChanges::default() };
        costs(conn, "turns", 10 * 40, async |conn| {
            turns::keep(conn, (PROJECT, "default"), &changes).await.expect("it runs");
        })
        .await;
        let keys: Vec<_> = (0..50).map(key).collect();
        let keys: Vec<_> = keys.iter().collect();
        costs(conn, "line up", 50 * 40, async |conn| {
            lines::line_up(conn, &keys).await.expect("it runs")
        })
        .await;
        costs(conn, "ends of rests", 40, async |conn| {
            lines::end_rests(conn).await.expect("it runs")
        })
        .await;
        database
            .execute(
                "update queues set group_walk_at = now(), group_walks = 2,
                     group_walk_job = '00000000-0000-0000-0000-000000000000'",
            )
            .await;
        let walk = walks::find_due(conn).await.expect("it runs").expect("a walk");
        costs(conn, "walk over jobs", 1_000 * 3, async |conn| {
            walks::step_over_jobs(conn, &walk).await.expect("it runs");
        })
        .await;
    });
}
