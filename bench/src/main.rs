//! `fencepost-bench`: measures a server over HTTP with keep-alive. It asserts nothing but that each
//! job was acknowledged once.

mod abuse;
mod attacks;
mod bulk;
mod ceiling;
mod client;
mod delivery;
mod isolation;
mod large;
mod load;
mod nodes;
mod operator;
mod process;
mod report;
mod retention;
mod scrape;
mod server;
mod spread;
mod stress;
mod webhooks;

use std::{
    io::Write as _,
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::Context;
use clap::Parser;
use sqlx::{ConnectOptions, postgres::PgConnectOptions};
use uuid::Uuid;

use self::{
    attacks::{Attack, Attacker},
    ceiling::Ceiling,
    client::{SMALL_PAYLOAD_BYTES, Target},
    nodes::Stores,
    process::{Usage, Watched},
    report::{Measure, plain},
    server::OwnServer,
};
use fencepost::dev::{self, Ready};

/// The driver shares the cores with what it measures.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Connections that measure how many commits PostgreSQL alone can do.
const COMMIT_CLIENTS: usize = 32;
/// Parked polls of a noisy neighbour, and the default of parked polls on an idle server.
const IDLE_POLLS: usize = 1_000;
/// Pending jobs of the noisy neighbour.
const NEIGHBOUR_JOBS: usize = 100_000;
/// How long the idle server is observed: it must end before the first polls do, which wait for
/// thirty seconds, and thousands take seconds to arrive.
const IDLE_TIME: Duration = Duration::from_secs(8);

#[derive(Debug, Parser)]
#[command(version, about = "Benchmark a Fencepost server over HTTP: its own, or a running one")]
struct BenchArgs {
    /// Folder of a running `fencepost dev` to measure [default: start one in a temporary folder]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,

    /// URL of a remote server to measure; needs --api-key, and reports neither CPU nor commits
    #[arg(long, value_name = "URL", requires = "api_key", conflicts_with = "data_dir")]
    url: Option<String>,

    /// Key of a project on it
    #[arg(long, env = "FENCEPOST_KEY", hide_env_values = true, value_name = "KEY")]
    api_key: Option<String>,

    /// Length of each measurement except the idle one, in seconds
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=600))]
    seconds: u64,

    /// Jobs of the bulk measurement, which enqueues all before workers take them
    #[arg(long, default_value_t = 60_000, value_name = "N", value_parser = clap::value_parser!(u32).range(1_000..=10_000_000))]
    batch_jobs: u32,

    /// Instead: pickup time of a tenant beside another with a large backlog or many parked polls
    #[arg(long, conflicts_with_all = ["only", "url"])]
    noisy_neighbour: bool,

    /// Instead: time to read a queue with this many pending jobs, and lateness of schedules
    #[arg(long, value_name = "JOBS", conflicts_with_all = ["only", "url", "noisy_neighbour"])]
    operator: Option<u64>,

    /// Instead: pickup time of a poll that is parked on another node, with and without Redis, and
    /// CPU a job of three nodes behind HAProxy at three times the load of one
    #[arg(long, conflicts_with_all = ["only", "url", "noisy_neighbour", "operator"])]
    nodes: bool,

    /// Instead: enqueue, poll and ack of single jobs in a queue with this many ready jobs, and in
    /// another queue
    #[arg(long, value_name = "JOBS", conflicts_with_all = ["only", "noisy_neighbour", "operator", "nodes"],
          value_parser = clap::value_parser!(u64).range(1_000..=100_000_000))]
    backlog: Option<u64>,

    /// Instead: enqueue, poll and ack of single jobs while a snapshot is held, in six windows of
    /// --seconds
    #[arg(long, conflicts_with_all = ["only", "url", "noisy_neighbour", "operator", "nodes", "backlog"])]
    held_snapshot: bool,

    /// Instead: an idle instance, its loops and its pages, empty and then with this many projects,
    /// and 10 queues, 10 schedules and 100 finished jobs for each of them
    #[arg(long, value_name = "PROJECTS", conflicts_with_all = ["only", "data_dir", "url", "noisy_neighbour", "operator", "nodes", "backlog", "webhooks", "held_snapshot"],
          value_parser = clap::value_parser!(u32).range(1_000..=1_000_000))]
    large: Option<u32>,

    /// Instead: deliveries of webhooks a second, and the time from the end of a job to the
    /// request about it
    #[arg(long, conflicts_with_all = ["only", "url", "noisy_neighbour", "operator", "nodes", "backlog"])]
    webhooks: bool,

    /// Instead: what one tenant notices of each attack by another
    #[arg(long, conflicts_with_all = ["data_dir", "url"])]
    isolation: bool,

    /// Instead: what one tenant notices of each attack by a stranger with a free account
    #[arg(long, conflicts_with_all = ["data_dir", "url", "isolation"])]
    abuse: bool,

    /// With --isolation: without the comparison in which the victim attacks itself
    #[arg(long)]
    without_comparison: bool,

    /// One of these attacks, until this process is killed: for --isolation
    #[arg(long, hide = true, requires = "data_dir", requires = "api_key")]
    attack: Option<Attack>,

    /// Approximate payload bytes of each job
    #[arg(long, default_value_t = SMALL_PAYLOAD_BYTES as u64, value_name = "N", value_parser = clap::value_parser!(u64).range(SMALL_PAYLOAD_BYTES as u64..=250_000))]
    payload_bytes: u64,

    /// Parked polls on the idle server
    #[arg(long, default_value_t = IDLE_POLLS as u64, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=15_000))]
    idle_polls: u64,

    /// Only measurements whose name contains this
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,

    /// Times that each measurement is repeated; the median and the range are printed
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,

    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,

    /// Serve routes that keep jobs in memory, until this process is killed: the measurement
    /// `ceiling` starts it
    #[arg(long, hide = true)]
    serve_ceiling: bool,
}

#[tokio::main]
async fn main() -> ExitCode {
    // Thousands of parked polls need as many file descriptors; the usual limit is a thousand.
    let _ = rlimit::increase_nofile_limit(u64::MAX);
    match run(BenchArgs::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("fencepost-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Measures and prints.
async fn run(args: BenchArgs) -> anyhow::Result<()> {
    if args.serve_ceiling {
        return ceiling::serve().await;
    }
    if args.isolation || args.abuse {
        let (only, is_compared) = (args.only.as_deref(), !args.without_comparison);
        let selection = isolation::Selection { only, is_abuse: args.abuse, is_compared };
        return isolation::run(&selection, Duration::from_secs(args.seconds)).await;
    }
    if let (Some(attack), Some(api_key)) = (args.attack, args.api_key.clone()) {
        let attacker = Attacker::of(&Ready::of_running(args.data_dir)?, api_key)?;
        return attacker.run(attack).await;
    }
    let own = match (&args.url, &args.data_dir) {
        (None, None) => Some(OwnServer::start(&["--outbound-allow", "127.0.0.0/8"])?),
        _ => None,
    };
    let (mut stores, mut metrics_url) = (None, String::new());
    let (url, api_key, watched) = match (args.url, args.api_key) {
        (Some(url), Some(api_key)) => (url, api_key, None),
        _ => {
            let data_dir = own.as_ref().map(|it| it.dir.clone()).or(args.data_dir);
            let ready = Ready::of_running(data_dir.clone())?;
            stores = Some(Stores::of(&ready, data_dir));
            metrics_url = ready.metrics_url;
            let watched = Watched { server_pid: ready.pid, database_url: ready.database_url };
            (ready.url, ready.api_key, Some(watched))
        }
    };
    let authority = url.strip_prefix("http://").context("--url: must begin with http://")?;
    let authority = authority.trim_end_matches('/').to_owned();
    let bench = Bench {
        target: Target { authority, api_key, payload_bytes: usize::try_from(args.payload_bytes)? },
        watched,
        time: Duration::from_secs(args.seconds),
        batch_jobs: args.batch_jobs as usize,
        idle_polls: usize::try_from(args.idle_polls)?,
        only: args.only,
        run: Uuid::now_v7(),
    };
    let measures = match (&bench.watched, args.noisy_neighbour, args.operator) {
        (Some(watched), ..) if args.nodes => {
            bench.elsewhere(watched, &stores.context("the server is remote")?).await?
        }
        (Some(watched), true, _) => bench.beside_a_neighbour(watched).await?,
        (Some(watched), _, Some(jobs)) => {
            let queues = ["schedules", "large"].map(|it| bench.queue(it));
            operator::measure(&bench.target, &watched.database_url, &queues, jobs).await?
        }
        (Some(_), ..) if args.webhooks => {
            webhooks::measure(&bench.target, |name| bench.queue(name), bench.time).await?
        }
        (Some(watched), ..) if args.held_snapshot => bench.while_held(watched).await?,
        (watched, ..) => match (args.backlog, args.large, watched) {
            (Some(jobs), ..) => bench.beside_a_backlog(usize::try_from(jobs)?).await?,
            (None, Some(projects), Some(watched)) => {
                large::measure(&bench.target, watched, &metrics_url, projects).await?
            }
            _ => bench.measure_in_rounds(args.rounds).await?,
        },
    };
    drop(own);
    let text = if args.json {
        format!("{:#}\n", serde_json::json!({ "measures": measures }))
    } else {
        report::table(&measures)
    };
    std::io::stdout().write_all(text.as_bytes())?;
    Ok(())
}

struct Bench {
    target: Target,
    /// None: the server is remote.
    watched: Option<Watched>,
    time: Duration,
    batch_jobs: usize,
    idle_polls: usize,
    only: Option<String>,
    /// A suffix that is unique to this run.
    run: Uuid,
}

impl Bench {
    fn wants(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|it| name.contains(it.as_str()))
    }

    /// A queue of this run alone: jobs of an aborted run must not be measured.
    fn queue(&self, measure: &str) -> String {
        format!("bench-{measure}-{}", self.run)
    }

    async fn measure_in_rounds(&self, rounds: u32) -> anyhow::Result<Vec<Measure>> {
        let mut measured = Vec::new();
        // First: sessions report their transactions up to ten seconds after they have become idle.
        if let Some(watched) = self.watched.as_ref().filter(|_| self.wants("idle")) {
            measured.push(self.idle(watched).await?);
        }
        for round in 1..=rounds {
            measured.push(self.measure(round).await?);
        }
        Ok(report::medians(measured))
    }

    async fn measure(&self, round: u32) -> anyhow::Result<Vec<Measure>> {
        let mut measures = Vec::new();
        let queue = |name: &str| self.queue(&format!("{name}-{round}"));
        let mut commits = None;
        if let Some(Watched { database_url, .. }) = &self.watched {
            let alone = load::commits(database_url, 1, self.time).await?;
            let together = load::commits(database_url, COMMIT_CLIENTS, self.time).await?;
            measures.push(plain("commits, 1 client", alone, "rows/s"));
            measures.push(plain("commits, 32 clients (C1)", together, "rows/s"));
            commits = Some(together);
        }
        if self.wants("ceiling") {
            measures.push(self.ceiling().await?);
        }
        for (name, step, setting) in load::MEASUREMENTS {
            if self.wants(name) {
                let queue = queue(name);
                if let Some(setting) = setting {
                    load::set(&self.target, &queue, setting).await?;
                }
                let targets = std::slice::from_ref(&self.target);
                let rate = load::rate(targets, step, &queue, self.time);
                let ((rate, ledger), used) = self.using(rate).await?;
                ledger.check(&self.target, &queue).await?;
                let jobs = rate * self.time.as_secs_f64();
                measures.push(plain(name, rate, "jobs/s").compared(commits, used, jobs));
            }
        }
        if self.wants("batch") {
            let queue = queue("batch");
            let phases = bulk::phases(&self.target, &queue, self.batch_jobs);
            let ((phases, ledger), used) = self.using(phases).await?;
            ledger.check(&self.target, &queue).await?;
            measures.push(plain("batch enqueue", phases.enqueue, "jobs/s"));
            measures.push(plain("batch drain", phases.drain, "jobs/s"));
            let lifecycle = plain("batch lifecycle", phases.lifecycle, "jobs/s");
            measures.push(lifecycle.compared(commits, used, self.batch_jobs as f64));
        }
        if self.wants("bulk") {
            let queue = queue("bulk");
            let at_once = bulk::at_once(&self.target, &queue, self.batch_jobs);
            let ((rate, ledger), used) = self.using(at_once).await?;
            ledger.check(&self.target, &queue).await?;
            let bulk = plain("bulk, enqueue and drain at once", rate, "jobs/s");
            measures.push(bulk.compared(commits, used, self.batch_jobs as f64));
        }
        if self.wants("refused") {
            measures.extend(self.refused(&queue("refused")).await?);
        }
        if self.wants("pickup") {
            let queue = queue("pickup");
            let (p50, p99) = load::pickup(&self.target, &self.target, &queue, self.time).await?;
            measures.push(plain("pickup p50", p50, "ms"));
            measures.push(plain("pickup p99", p99, "ms"));
            let (target, parked) = (&self.target, format!("{queue}-parked"));
            let pickup = load::pickup(target, target, &queue, self.time);
            let (p50, p99) = load::parked(target, &parked, self.idle_polls, pickup).await?;
            let polls = self.idle_polls;
            measures.push(plain(format!("pickup beside {polls} parked polls, p50"), p50, "ms"));
            measures.push(plain(format!("pickup beside {polls} parked polls, p99"), p99, "ms"));
        }
        Ok(measures)
    }

    /// The lifecycle over routes that keep jobs in memory.
    async fn ceiling(&self) -> anyhow::Result<Measure> {
        let ceiling = Ceiling::start()?;
        let target = Target { authority: ceiling.authority.clone(), ..self.target.clone() };
        let before = process::cpu_seconds(ceiling.pid());
        let lifecycle = load::lifecycle(&target, "ceiling", self.time).await?;
        let server_seconds = process::cpu_seconds(ceiling.pid()) - before;
        let jobs = lifecycle * self.time.as_secs_f64();
        let mut measure = plain("ceiling: lifecycle in memory", lifecycle, "jobs/s");
        measure.server_us_per_job = Some(server_seconds * 1e6 / jobs);
        Ok(measure)
    }

    /// What acks of a stale attempt cost, in batches, and what accepted ones do.
    async fn refused(&self, queue: &str) -> anyhow::Result<Vec<Measure>> {
        let leased = bulk::Leased::new(&self.target, queue).await?;
        let mut measures = Vec::new();
        for (name, is_stale) in [("acks refused, 50 a request", true), ("acks accepted", false)] {
            let (rate, used) = self.using(leased.ack(is_stale)).await?;
            let jobs = bulk::REFUSED_JOBS as f64;
            measures.push(plain(name, rate, "acks/s").compared(None, used, jobs));
        }
        Ok(measures)
    }

    /// The pickup time of one tenant: alone, beside a backlog of another, and beside another's
    /// parked polls.
    async fn beside_a_neighbour(&self, watched: &Watched) -> anyhow::Result<Vec<Measure>> {
        let neighbour = Target {
            authority: self.target.authority.clone(),
            api_key: self.key_of(&watched.database_url, "neighbour").await?,
            payload_bytes: self.target.payload_bytes,
        };
        let target = &self.target;
        let pickup = async |name| load::pickup(target, target, &self.queue(name), self.time).await;
        let alone = pickup("alone").await?;
        bulk::fill(&neighbour, &self.queue("backlog"), NEIGHBOUR_JOBS).await?;
        let backlog = pickup("beside-backlog").await?;
        let polls = self.queue("polls");
        let beside_polls =
            load::parked(&neighbour, &polls, IDLE_POLLS, pickup("beside-polls")).await?;
        Ok(vec![
            plain("pickup alone, p50", alone.0, "ms"),
            plain("pickup alone, p99", alone.1, "ms"),
            plain("beside 100,000 pending jobs, p50", backlog.0, "ms"),
            plain("beside 100,000 pending jobs, p99", backlog.1, "ms"),
            plain("beside 1,000 parked polls, p50", beside_polls.0, "ms"),
            plain("beside 1,000 parked polls, p99", beside_polls.1, "ms"),
            plain("p99 beside jobs, to p99 alone", backlog.1 / alone.1, "times"),
            plain("p99 beside polls, to p99 alone", beside_polls.1 / alone.1, "times"),
        ])
    }

    /// The pickup time of jobs that are stored on another node.
    async fn elsewhere(&self, watched: &Watched, stores: &Stores) -> anyhow::Result<Vec<Measure>> {
        let (key, queue) = (&self.target.api_key, self.queue("elsewhere"));
        let [with, without] = nodes::pickups(stores, key, &queue, self.time).await?;
        let mut keys = Vec::new();
        for number in 0..spread::PROJECTS {
            keys.push(self.key_of(&watched.database_url, &format!("spread-{number}")).await?);
        }
        let queue = self.queue("spread");
        let mut measures = spread::measure(watched, stores, &keys, &queue, self.time).await?;
        measures.extend([
            plain("pickup on another node, p50", with.0, "ms"),
            plain("pickup on another node, p99", with.1, "ms"),
            plain("the same without Redis, p50", without.0, "ms"),
            plain("the same without Redis, p99", without.1, "ms"),
        ]);
        Ok(measures)
    }

    /// The lifecycle with a backlog in its queue, and beside one.
    async fn beside_a_backlog(&self, jobs: usize) -> anyhow::Result<Vec<Measure>> {
        let queue = self.queue("backlog");
        let seen = stress::backlog(&self.target, &queue, jobs, self.time).await?;
        Ok(vec![
            plain("lifecycle, no backlog", seen.before, "jobs/s"),
            plain(format!("lifecycle, {jobs} ready in its queue"), seen.same, "jobs/s"),
            plain(format!("lifecycle, {jobs} ready in another"), seen.other, "jobs/s"),
            plain("in its queue, to no backlog", seen.same / seen.before, "times"),
            plain("beside another, to no backlog", seen.other / seen.before, "times"),
        ])
    }

    /// The lifecycle while a snapshot is held.
    async fn while_held(&self, watched: &Watched) -> anyhow::Result<Vec<Measure>> {
        let (queue, time) = (self.queue("held"), self.time);
        let url = &watched.database_url;
        let (before, held) = stress::held_snapshot(&self.target, url, &queue, time).await?;
        let mut measures = vec![plain("lifecycle before", before, "jobs/s")];
        for (window, rate) in held.iter().enumerate() {
            let until = (window as u64 + 1) * time.as_secs();
            measures.push(plain(format!("snapshot held for {until} s"), *rate, "jobs/s"));
        }
        let last = held.last().copied().unwrap_or_default();
        measures.push(plain("the last, to before", last / before, "times"));
        Ok(measures)
    }

    /// A key of a project created for this run.
    async fn key_of(&self, database_url: &str, name: &str) -> anyhow::Result<String> {
        let options: PgConnectOptions = database_url.parse()?;
        let mut conn = options.connect().await?;
        let name = format!("bench-{name}-{}", self.run);
        let (_, api_key) = dev::make_project(&mut conn, &name, "bench").await?;
        Ok(api_key)
    }

    /// Does the work, and reports its cost where that is known.
    async fn using<T>(
        &self,
        work: impl Future<Output = anyhow::Result<T>>,
    ) -> anyhow::Result<(T, Option<Usage>)> {
        let Some(watched) = &self.watched else { return Ok((work.await?, None)) };
        let before = watched.usage().await?;
        let done = work.await?;
        Ok((done, Some(watched.usage().await?.since(before))))
    }

    /// The cost of parked polls on an idle server.
    async fn idle(&self, watched: &Watched) -> anyhow::Result<Vec<Measure>> {
        let before = watched.usage().await?;
        let resting = async {
            // The polls' arrival does not count.
            tokio::time::sleep(load::REPORTING).await;
            let parked = watched.usage().await?;
            let started = Instant::now();
            tokio::time::sleep(IDLE_TIME).await;
            let used = watched.usage().await?.since(parked);
            Ok((parked.since(before).server_bytes, used, started.elapsed().as_secs_f64()))
        };
        let queue = self.queue("idle");
        let (grown, used, seconds) =
            load::parked(&self.target, &queue, self.idle_polls, resting).await?;
        let cpu_percent = (used.server_seconds + used.postgres_seconds) / seconds * 100.0;
        // Three statements of the measurement itself.
        const OWN_TRANSACTIONS: f64 = 3.0;
        let transactions = (used.transactions - OWN_TRANSACTIONS).max(0.0) / seconds;
        let each_kib = grown / self.idle_polls as f64 / 1024.0;
        let polls = self.idle_polls;
        Ok(vec![
            plain(format!("idle, {polls} parked polls: CPU"), cpu_percent, "% of a core"),
            plain(
                format!("idle, {polls} parked polls: PostgreSQL"),
                transactions,
                "transactions/s",
            ),
            plain(format!("idle, {polls} parked polls: memory"), each_kib, "KiB each"),
        ])
    }
}
