//! One run: clients and faults, then everything is healed, all jobs end, and the book is checked.

use std::{
    collections::BTreeMap,
    path::Path,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use sqlx::{Connection, PgConnection};
use tokio::{
    net::TcpListener,
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::{
    adapters::Protocol,
    book::Book,
    check::{Invariant, Violation},
    clients::{CALL_TIMEOUT, Client, ORDERED_QUEUE, PAUSED_GROUP, PAUSED_QUEUE, QUEUES, World},
    foreign::{self, Foreign},
    history::{self, Event, History},
    nemesis::{self, Faults},
    pushed, receiver,
    report::Report,
    setup,
    stage::{Planted, Programs, Stage},
};

/// Producers and workers of each tenant.
const PRODUCERS: u64 = 3;
const WORKERS: u64 = 6;
/// Makes the choices of producers differ from those of workers.
const PRODUCER_SEEDS: u64 = 1 << 63;
const PROBE_SEEDS: u64 = 1 << 62;
const ADAPTER_SEEDS: u64 = 1 << 61;
const PAUSE_SEEDS: u64 = 1 << 60;
const ORDER_SEEDS: u64 = 1 << 59;
const LIMIT_SEEDS: u64 = 1 << 58;
/// Groups of each tenant with a strict order, each with a producer.
const ORDERED_GROUPS: u64 = 4;
/// The same of groups with limits.
const LIMITED_GROUPS: u64 = 2;
/// How long it may take until all jobs have ended and all is reported, once nothing is broken. The
/// longest lease is one of Mobius, 90 s; a delivery that failed five times comes again after 405 s.
pub const DRAIN: Duration = Duration::from_secs(450);

const LOOK_PERIOD: Duration = Duration::from_millis(50);

/// What a run leaves in its folder.
const HISTORY: &str = "history.jsonl";
const BOOK: &str = "book.json";
const REPORT: &str = "report.json";

/// What a run does.
pub struct Plan {
    pub faults: Faults,
    pub planted: Planted,
    /// The longest wait for the ends of all jobs.
    pub drain: Duration,
    /// How many times longer pauses may be than their bounds.
    pub patience: u32,
    /// How many jobs producers send, in percent of the full load.
    pub load_percent: u32,
}

/// Runs it in a new folder. To be called from the main thread.
///
/// # Errors
/// When something does not start, or the API does not answer in the end.
pub async fn run(dir: &Path, programs: Programs, plan: &Plan) -> anyhow::Result<Report> {
    std::fs::create_dir_all(dir)?;
    let faults = &plan.faults;
    let previous = programs.previous.as_deref().map(version).transpose()?;
    let mut stage = Stage::start(dir, programs, plan.planted.clone(), faults.under_patroni).await?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let protocols = Protocol::of_run(faults.during);
    let world = Arc::new(World {
        history: History::new(&dir.join(HISTORY))?,
        urls: stage.urls(),
        queues: QUEUES
            .into_iter()
            .chain(foreign::installed())
            .chain(protocols.iter().map(|it| it.name()))
            .chain([pushed::QUEUE, ORDERED_QUEUE])
            .collect(),
        tenants: stage.tenants.clone(),
        load_percent: plan.load_percent,
        // Nodes of an earlier release refuse them.
        has_checkpoints: previous.is_none(),
        client: reqwest::Client::builder().timeout(CALL_TIMEOUT).build()?,
        is_healing: AtomicBool::new(false),
        has_ended: AtomicBool::new(false),
    });
    receiver::start(listener, Arc::clone(&world));
    // Nodes of an earlier release do not know an order.
    let has_order = previous.is_none();
    let schedules = setup::set_up(&world, address, has_order).await?;
    let made_at = history::now();
    let (mut producers, mut workers) = start_clients(&world, protocols, faults.seed);
    if has_order {
        start_ordered(&world, faults.seed, &mut producers);
    }
    let mut foreign = Foreign::start(&world, dir)?;
    nemesis::inject((&mut stage, &mut foreign), &world.history, faults).await?;
    foreign.heal()?;
    let healed = Instant::now();
    let paused_at = setup::pause(&world, &schedules).await?;
    world.is_healing.store(true, Ordering::Relaxed);
    let sent_all = async { while producers.join_next().await.is_some() {} };
    let are_accepted = timeout(plan.drain, sent_all).await.is_ok();
    producers.abort_all();
    setup::resume(&world, has_order).await?;
    let drained = drain(&stage, healed, plan.drain).await;
    world.has_ended.store(true, Ordering::Relaxed);
    while workers.join_next().await.is_some() {}
    drop(foreign);
    let mut book = Book::read(&world, &schedules).await?;
    book.schedules_ran = Some((made_at, paused_at));
    book.counts_losses = world.has_checkpoints;
    let logs = read_logs(&stage, &world.history)?;
    ensure!(
        plan.planted.fail_percent == 0.0 || !logs.is_empty(),
        "the server has no fail points: build the whole workspace, without --release"
    );
    nemesis::note_dead_nodes(&mut stage, &world.history);
    ensure!(stage.is_migrated(), "no node has changed to this code");
    drop(stage);
    let lines = world.history.end()?;
    let mut report = Report { previous, fail_points: logs, ..report_of(plan, drained) };
    if !are_accepted {
        report.violations.push(not_in_time("a request was never accepted"));
    }
    std::fs::write(dir.join(BOOK), serde_json::to_vec(&book)?)?;
    std::fs::write(dir.join(REPORT), serde_json::to_vec(&report)?)?;
    Ok(report.judged(&lines, &book, plan.patience))
}

fn not_in_time(what: &str) -> Violation {
    Violation { invariant: Invariant::EndsInTime, detail: what.to_owned() }
}

/// What is known of a run before it is judged.
fn report_of(plan: &Plan, Drained { took, last_open }: Drained) -> Report {
    let violations = match &took {
        Ok(_) => Vec::new(),
        Err(error) => vec![not_in_time(&format!("not all had ended in time: {error:#}"))],
    };
    Report {
        commit: commit(),
        day: history::now_utc().format("%Y-%m-%d").to_string(),
        seed: plan.faults.seed,
        seconds: plan.faults.during.as_secs(),
        load_percent: plan.load_percent,
        under_patroni: plan.faults.under_patroni,
        last_open,
        drained_ms: took.ok().and_then(|it| u64::try_from(it.as_millis()).ok()),
        violations,
        ..Report::default()
    }
}

/// Judges a run again whose folder was kept.
///
/// # Errors
/// When its files cannot be read.
pub fn judge_again(dir: &Path, patience: u32) -> anyhow::Result<Report> {
    let read = |name: &str| std::fs::read(dir.join(name)).context(name.to_owned());
    let report: Report = serde_json::from_slice(&read(REPORT)?)?;
    let book = serde_json::from_slice(&read(BOOK)?)?;
    Ok(report.judged(&history::read(&dir.join(HISTORY))?, &book, patience))
}

fn start_ordered(world: &Arc<World>, seed: u64, producers: &mut JoinSet<()>) {
    for tenant in 0..world.tenants.len() {
        for number in 0..ORDERED_GROUPS {
            let seed = seed ^ ORDER_SEEDS ^ ((tenant as u64) << 32) ^ (number << 40);
            let group = format!("group-{number}");
            producers.spawn(Client::new(world, tenant, seed).produce_in_order(group));
        }
        for number in 0..LIMITED_GROUPS {
            let seed = seed ^ LIMIT_SEEDS ^ ((tenant as u64) << 32) ^ (number << 40);
            let group = format!("limited-{number}");
            producers.spawn(Client::new(world, tenant, seed).produce_in_limits(group));
        }
        let seed = seed ^ PAUSE_SEEDS ^ ORDER_SEEDS ^ ((tenant as u64) << 32);
        let pauser = Client::new(world, tenant, seed);
        producers.spawn(pauser.pause_now_and_then(ORDERED_QUEUE, Some(PAUSED_GROUP.to_owned())));
    }
}

fn start_clients(
    world: &Arc<World>,
    protocols: Vec<Protocol>,
    seed: u64,
) -> (JoinSet<()>, JoinSet<()>) {
    let (mut producers, mut workers) = (JoinSet::new(), JoinSet::new());
    for tenant in 0..world.tenants.len() {
        for number in 0..PRODUCERS {
            let seed = seed ^ PRODUCER_SEEDS ^ ((tenant as u64) << 32) ^ (number << 40);
            producers.spawn(Client::new(world, tenant, seed).produce());
        }
        for number in 0..WORKERS {
            let seed = seed ^ ((tenant as u64) << 32) ^ (number << 40);
            let name = format!("worker-{tenant}-{number}");
            workers.spawn(Client::new(world, tenant, seed).work(name));
        }
    }
    for tenant in 0..world.tenants.len() {
        let seed = seed ^ PAUSE_SEEDS ^ ((tenant as u64) << 32);
        producers.spawn(Client::new(world, tenant, seed).pause_now_and_then(PAUSED_QUEUE, None));
    }
    for (number, protocol) in protocols.into_iter().enumerate() {
        for tenant in 0..world.tenants.len() {
            let seed = seed ^ ADAPTER_SEEDS ^ ((tenant as u64) << 32) ^ ((number as u64) << 40);
            workers.spawn(Client::new(world, tenant, seed).work_over(protocol));
        }
    }
    for node in 0..world.urls.len() {
        let seed = seed ^ PROBE_SEEDS ^ ((node as u64) << 40);
        producers.spawn(Client::of_node(world, node, seed).probe());
    }
    (producers, workers)
}

/// How jobs ended once nothing was broken.
struct Drained {
    took: anyhow::Result<Duration>,
    /// Up to five of the jobs that were open when it was last looked.
    last_open: String,
}

/// Waits until every job has ended, and endpoints were notified.
async fn drain(stage: &Stage, healed: Instant, longest: Duration) -> Drained {
    let mut last_open = String::new();
    let ended = async {
        let mut conn = stage.database.connect().await?;
        while let Some(open) = look(&mut conn, &mut last_open).await? {
            ensure!(healed.elapsed() < longest, "{open} are open");
            sleep(LOOK_PERIOD).await;
        }
        conn.close().await?;
        Ok(healed.elapsed())
    };
    let took = ended.await;
    Drained { took, last_open }
}

/// How much is open, if anything is.
async fn look(conn: &mut PgConnection, last_open: &mut String) -> sqlx::Result<Option<i64>> {
    let named = "select string_agg(format('%s %s, attempt %s', queue, state, attempt), '; ')
                 from (select * from jobs where completed_at is null limit 5) it";
    if let Some(named) = sqlx::query_scalar(named).fetch_one(&mut *conn).await? {
        *last_open = named;
    }
    // Ends of jobs that lead on, events and deliveries are rows, too: deliveries are jobs.
    let sql = "select (select count(*) from jobs where completed_at is null)
                   + (select count(*) from outbound_events) + (select count(*) from job_ends)
                   + (select count(*) from ended_parents)";
    let open: i64 = sqlx::query_scalar(sql).fetch_one(conn).await?;
    Ok((open > 0).then_some(open))
}

/// Fail points that were hit. Panics are noted in the history.
fn read_logs(stage: &Stage, history: &History) -> anyhow::Result<BTreeMap<String, u64>> {
    const MARK: &str = "fail point ";
    let mut hit = BTreeMap::new();
    for log in stage.logs() {
        let text = std::fs::read_to_string(log)?;
        for line in text.lines() {
            if let Some((_, after)) = line.split_once(MARK) {
                let name: String = after
                    .chars()
                    .take_while(|it| it.is_alphanumeric() || "._".contains(*it))
                    .collect();
                *hit.entry(name).or_default() += 1;
            }
            if line.contains("panicked at") {
                let (call, text) = ("node".to_owned(), line.to_owned());
                history.note(Event::Strange { call, status: 0, text });
            }
        }
    }
    Ok(hit)
}

/// What a program says of itself.
fn version(program: &Path) -> anyhow::Result<String> {
    let reported = Command::new(program).arg("--version").output();
    let reported = reported.with_context(|| program.display().to_string())?;
    Ok(String::from_utf8_lossy(&reported.stdout).trim().to_owned())
}

/// The commit of the code, with a mark if it was changed since. Results are written into `docs`,
/// which is no code.
fn commit() -> String {
    let git = |arguments: &[&str]| Command::new("git").args(arguments).output().ok();
    let described = git(&["describe", "--always"]).filter(|it| it.status.success());
    let Some(described) = described else { return String::new() };
    let name = String::from_utf8_lossy(&described.stdout).trim().to_owned();
    let difference = git(&["diff", "--quiet", "HEAD", "--", ":/", ":(top,exclude)docs"]);
    let is_same = difference.is_some_and(|it| it.status.success());
    if is_same { name } else { format!("{name}-dirty") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_judged_again_from_its_folder() -> anyhow::Result<()> {
        let dir =
            std::env::temp_dir().join(format!("fencepost-chaos-again-{}", std::process::id()));
        std::fs::create_dir_all(&dir)?;
        let history = History::new(&dir.join(HISTORY))?;
        let (key, queue, job) = ("k".to_owned(), "q0".to_owned(), Some("job_a".to_owned()));
        history.note(Event::Enqueued { tenant: 0, key, queue, job });
        history.end()?;
        let counts = [(0, [("q0".to_owned(), BTreeMap::new())].into())].into();
        let book = Book { counts, ..Book::default() };
        let report = Report { seed: 7, violations: vec![not_in_time("late")], ..Report::default() };
        std::fs::write(dir.join(BOOK), serde_json::to_vec(&book)?)?;
        std::fs::write(dir.join(REPORT), serde_json::to_vec(&report)?)?;
        let again = judge_again(&dir, 1)?;
        std::fs::remove_dir_all(&dir)?;
        let broken: Vec<_> = again.violations.iter().map(|it| it.invariant).collect();
        assert_eq!(broken, [Invariant::EveryJobEnds, Invariant::EndsInTime]);
        assert_eq!((again.seed, again.operations["enqueue, accepted"]), (7, 1));
        Ok(())
    }
}
