//! What admission and the lists of groups read: the heads of the noted groups, and neither what
//! waits behind them nor other groups.

use fencepost_store::{
    groups::{self, GroupKey, Listed},
    jobs::enqueue::Extras,
    sweep::groups::{
        admission,
        noted::{self, NotedGroup},
        rooms, walks,
    },
};

use super::*;

/// Groups of a queue with strict order, each with waiting jobs.
const GROUPS: i64 = 20_000;
/// Further jobs that wait in one group, and behind the dead letter of another.
const BEHIND: i64 = 50_000;

async fn fill_groups(database: &Database) {
    database
        .execute(&format!(
            "insert into projects (public_id, slug, name, plan, mode)
             values (gen_random_uuid(), 'p', 'p', 'unlimited', 'live');
             insert into queues (project_id, name, group_order, has_gate)
             values (1, 'default', 'strict', true);
             insert into jobs (project_id, id, queue, job_type, state, rank, run_at, max_attempts,
                               timeout_seconds, group_key, group_place, waits_for_group,
                               unfinished_parents)
             select 1, gen_random_uuid(), 'default', 'common', 'scheduled', 0, now(), 3, 600,
                    'g' || n % {GROUPS}, n, true, 1
             from generate_series(1, 4 * {GROUPS}) n
             union all
             select 1, gen_random_uuid(), 'default', 'common', 'scheduled', 0, now(), 3, 600, behind,
                    10 * {GROUPS} + n, true, 1
             from generate_series(1, {BEHIND}) n, unnest('{{g1,g10000}}'::text[]) behind;
             insert into jobs (project_id, id, queue, job_type, state, rank, run_at, max_attempts,
                               timeout_seconds, completed_at, group_key, group_place)
             select 1, gen_random_uuid(), 'default', 'common', 'dead_letter', 0, now(), 3, 600,
                    now(), 'g' || n, 0
             from generate_series(10000, 11000) n;
             insert into group_notes (project_id, queue, group_key)
             select 1, 'default', 'g' || n from generate_series(1, 100) n
             union all select 1, 'default', 'g10000'
             union all select 1, 'default', 'without jobs ' || n from generate_series(1, 50) n"
        ))
        .await;
}

fn job_of_group(group: &str) -> NewJob {
    let extras = Extras { group: Some(group.to_owned()), ..Extras::default() };
    NewJob { extras: Some(Box::new(extras)), ..new_job() }
}

/// One pass of admission. Returns how many jobs it opened.
async fn admit(conn: &mut PgConnection, noted: &[NotedGroup]) -> usize {
    let (all, keys): (Vec<_>, Vec<_>) = noted.iter().map(|it| (it, &it.key)).unzip();
    admission::forget(conn, &all).await.expect("it runs");
    let closed = admission::close(conn, &keys, &vec![None; keys.len()]).await.expect("it runs");
    assert!(closed.is_empty(), "nothing is to be closed");
    admission::open(conn, &keys, &vec![false; all.len()]).await.expect("it runs").opened
}

/// What an alarm, metrics and a list read of a queue whose groups all wait.
pub(super) async fn longest_waits(conn: &mut PgConnection) {
    let longest = costs(conn, "longest waits", 100 * 60, async |conn| {
        groups::longest_waiting(conn, PROJECT, "default", 100, 50).await.expect("it runs")
    })
    .await;
    assert!(!longest.is_empty(), "of the first by name, dead letters block many");
}

#[test]
fn admission_reads_the_heads_of_noted_groups_alone() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    limited(async {
        let database = fresh_database().await;
        fill_groups(&database).await;
        let pools = Pools::new(&database.url, PoolArgs::default(), None).expect("a URL");
        let conn = &mut *pools.background.acquire().await.expect("a connection");
        // Those of the 101 groups with jobs, and of 50 without: each is looked up once.
        let noted = costs(conn, "noted groups", 151 * 20, async |conn| {
            noted::find_and_forget(conn, 0).await.expect("it runs")
        })
        .await;
        assert_eq!((noted.groups.len(), noted.forgotten), (101, 50));
        let found = noted.groups;
        // The first plan of a connection reads more.
        let first = admit(conn, &found[..50]).await;
        let rest =
            costs(conn, "admission", 51 * 60, async |conn| admit(conn, &found[50..]).await).await;
        assert_eq!(first + rest, 100, "the head of each that no dead letter blocks");
        assert_eq!(
            noted::find_and_forget(conn, 0).await.expect("it runs").groups.len(),
            0,
            "the notes are gone"
        );
        let new: Vec<_> = (0..50).map(|it| job_of_group(&format!("new {it}"))).collect();
        let new: Vec<_> = new.iter().collect();
        let stored = costs(conn, "enqueue in order", 50 * 40, async |conn| {
            let (latest, alone) = (vec![None; 50], vec![true; 50]);
            enqueue::insert_jobs(conn, &new, &latest, &[], &alone).await.expect("it runs")
        })
        .await;
        assert!(stored.iter().all(|it| !it.waits_for_group), "each is the first of its group");
        let blocked = Listed { blocked: true, ..Listed::default() };
        for listed in [blocked, Listed { waiting: true, ..Listed::default() }] {
            let names = costs(conn, "names of groups", 51 * 30, async |conn| {
                groups::names(conn, PROJECT, "default", listed, "", 50).await.expect("it runs")
            })
            .await;
            assert_eq!(names.len(), 50);
            // What is counted is bounded.
            let max = 50 * 40 + groups::MAX_COUNTED_JOBS * 3;
            let rows = costs(conn, "groups", max, async |conn| {
                groups::find(conn, PROJECT, "default", &names).await.expect("it runs")
            })
            .await;
            assert_eq!(rows.len(), 50);
        }
        longest_waits(conn).await;
        database.execute("update queues set group_walk_at = now(), group_walks = 2").await;
        let walk = walks::find_due(conn).await.expect("it runs").expect("a walk");
        costs(conn, "walk", 501 * 30, async |conn| {
            assert!(walks::step(conn, &walk).await.expect("it runs"), "there are more");
        })
        .await;
    });
}

/// Groups of a queue that limits how many of their jobs run: twenty wait in each, and many in one.
async fn fill_limited(database: &Database) {
    database
        .execute(&format!(
            "insert into projects (public_id, slug, name, plan, mode)
             values (gen_random_uuid(), 'p', 'p', 'unlimited', 'live');
             insert into queues (project_id, name, group_max_running, has_gate)
             values (1, 'default', 5, true);
             insert into jobs (project_id, id, queue, job_type, state, rank, run_at, max_attempts,
                               timeout_seconds, group_key, group_place, waits_for_group,
                               unfinished_parents)
             select 1, gen_random_uuid(), 'default', 'common', 'scheduled', 0, now(), 3, 600,
                    'g' || n % 5000, n, true, 1
             from generate_series(1, 100000) n
             union all
             select 1, gen_random_uuid(), 'default', 'common', 'scheduled', 0, now(), 3, 600, 'g1',
                    200000 + n, true, 1
             from generate_series(1, {BEHIND}) n"
        ))
        .await;
}

#[test]
fn room_in_groups_is_filled_without_reading_what_waits_behind() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    limited(async {
        let database = fresh_database().await;
        fill_limited(&database).await;
        let pools = Pools::new(&database.url, PoolArgs::default(), None).expect("a URL");
        let conn = &mut *pools.background.acquire().await.expect("a connection");
        let key = |it: i64| GroupKey {
            project_id: PROJECT,
            queue: "default".to_owned(),
            group: format!("g{it}"),
        };
        let open = async |conn: &mut PgConnection, from: i64| {
            let keys: Vec<_> = (from..from + 50).map(key).collect();
            let keys: Vec<_> = keys.iter().collect();
            rooms::open_limited(conn, &keys, &[false; 50], &[None; 50])
                .await
                .expect("it runs")
                .opened
        };
        // The first plan of a connection reads more.
        assert_eq!(open(conn, 100).await, 250, "five of each");
        let opened = costs(conn, "room", 50 * 200, async |conn| open(conn, 0).await).await;
        assert_eq!(opened, 250);
        let again = costs(conn, "no room", 50 * 150, async |conn| open(conn, 0).await).await;
        assert_eq!(again, 0, "they are open already");
        let keys: Vec<_> = (0..50).map(key).collect();
        let keys: Vec<_> = keys.iter().collect();
        let queues = costs(conn, "queues with open jobs", 50 * 8, async |conn| {
            rooms::queues_with_open(conn, &keys).await.expect("it runs")
        })
        .await;
        assert_eq!(queues.len(), 1);
        let new: Vec<_> = (0..50).map(|it| job_of_group(&format!("new {it}"))).collect();
        let new: Vec<_> = new.iter().collect();
        let stored = costs(conn, "enqueue with a limit", 50 * 40, async |conn| {
            let (latest, alone) = (vec![None; 50], vec![true; 50]);
            enqueue::insert_jobs(conn, &new, &latest, &[], &alone).await.expect("it runs")
        })
        .await;
        assert!(stored.iter().all(|it| !it.waits_for_group), "there is room in each");
    });
}
