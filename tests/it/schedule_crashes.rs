//! Three processes on one database fire the schedules of every second while one of them is killed
//! and started again, at random. Whatever happens, the ticks in the books are exactly those that
//! were due.
//!
//! A short form runs with all tests; `make soak` runs the long one.

use std::{
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use crate::harness::{Database, fresh_database, run_for};
use rand::{Rng, RngExt};

const PROGRAM: &str = env!("CARGO_BIN_EXE_fencepost");
const NODES: usize = 3;
/// How long the books may be behind the clock at the end, with a node killed a moment ago.
const SLACK_SECONDS: i64 = 3;

/// Nodes that are killed with their test.
struct Nodes(Vec<Child>);

impl Drop for Nodes {
    fn drop(&mut self) {
        for node in &mut self.0 {
            let _ = node.kill();
            let _ = node.wait();
        }
    }
}

fn start(database: &Database) -> Child {
    Command::new(PROGRAM)
        .args(["serve", "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"])
        .env("FENCEPOST_CANARY_SECONDS", "0")
        .env("FENCEPOST_DATABASE_URL", &database.url)
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts")
}

async fn duel(schedules: u32, seconds: u64) {
    let database = fresh_database().await;
    let mut nodes = Nodes((0..NODES).map(|_| start(&database)).collect());
    database
        .execute(&format!(
            "insert into recurring_schedules (project_id, id, job_type, cron_expression, last_tick)
             select 1, 'rjob_' || n, 'tick', '* * * * * *', now()
             from generate_series(1, {schedules}) n"
        ))
        .await;
    let mut dice = rand::rng();
    let started = Instant::now();
    while started.elapsed() < Duration::from_secs(seconds) {
        // The kill falls anywhere between two statements.
        tokio::time::sleep(Duration::from_millis(dice.random_range(100..1_500))).await;
        let victim = (dice.next_u32() as usize) % NODES;
        nodes.0[victim].kill().expect("it is killed");
        nodes.0[victim].wait().expect("it ends");
        nodes.0[victim] = start(&database);
    }
    drop(nodes);
    // A statement whose client was killed may still be at its end.
    while database
        .number(
            "select count(*) from pg_stat_activity
             where datname = current_database() and pid <> pg_backend_pid()",
        )
        .await
        > 0
    {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let torn = database
        .number(
            "select count(*) from (
                 select from schedule_fires group by schedule_id
                 having count(*) <> extract(epoch from max(tick) - min(tick)) + 1
             ) torn",
        )
        .await;
    assert_eq!(torn, 0, "a tick was left out");
    let number = async |sql: &str| database.number(sql).await;
    assert_eq!(
        number("select count(distinct schedule_id) from schedule_fires").await,
        i64::from(schedules)
    );
    assert_eq!(number("select count(*) from schedule_fires where outcome <> 'fired'").await, 0);
    let fired = number("select count(*) from schedule_fires").await;
    assert_eq!(number("select count(*) from jobs").await, fired, "one job a tick");
    assert_eq!(number("select count(distinct job_id) from schedule_fires").await, fired);
    let counts = "select (coalesce((select sum(active) from queue_counts), 0)
                          + coalesce((select sum(active) from queue_deltas), 0))::bigint";
    assert_eq!(number(counts).await, fired, "the counters agree");
    let expected = i64::from(schedules) * (i64::try_from(seconds).expect("few") - SLACK_SECONDS);
    assert!(fired >= expected, "{fired} ticks of {expected} or more");
}

#[test]
fn nodes_that_are_killed_at_random_fire_each_tick_once() {
    let seconds = std::env::var("FENCEPOST_DUEL_SECONDS").ok().and_then(|it| it.parse().ok());
    let rounds = std::env::var("FENCEPOST_DUEL_ROUNDS").ok().and_then(|it| it.parse().ok());
    let seconds = seconds.unwrap_or(8);
    for _ in 0..rounds.unwrap_or(1) {
        run_for(Duration::from_secs(seconds + 60), duel(200, seconds));
    }
}
