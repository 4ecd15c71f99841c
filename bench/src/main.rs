//! `fencepost-bench`: measures a server over HTTP with keep-alive. It asserts nothing.

mod abuse;
mod attacks;
mod client;
mod isolation;
mod load;
mod nodes;
mod operator;
mod process;
mod server;
mod stress;

use std::{
    fmt::Write as _,
    io::Write as _,
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::Context;
use clap::Parser;
use serde::Serialize;
use sqlx::{ConnectOptions, postgres::PgConnectOptions};
use uuid::Uuid;

use self::{
    attacks::{Attack, Attacker},
    client::{SMALL_PAYLOAD_BYTES, Target},
    load::Step,
    process::{Usage, Watched},
    server::OwnServer,
};
use fencepost::dev::{self, Ready};

/// Connections of the single-job measurements.
const CONNECTIONS: usize = 64;
/// Connections of the larger yardstick.
const COMMIT_CLIENTS: usize = 32;
/// Parked polls of a noisy neighbour, and the default of parked polls on an idle server.
const IDLE_POLLS: usize = 1_000;
/// Pending jobs of the noisy neighbour.
const NEIGHBOUR_JOBS: usize = 100_000;
/// Schedules that fire in the same minute.
const SCHEDULES: u32 = 10_000;
/// How long the idle server is observed; the polls themselves wait for thirty seconds.
const IDLE_TIME: Duration = Duration::from_secs(15);

#[derive(Debug, Parser)]
#[command(
    version,
    about = "Benchmark a Fencepost server over HTTP: its own `dev`, or a running one"
)]
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

    /// Jobs of the batch lifecycle
    #[arg(long, default_value_t = 60_000, value_name = "N", value_parser = clap::value_parser!(u32).range(1_000..=10_000_000))]
    batch_jobs: u32,

    /// Instead: pickup time of a tenant beside another with a large backlog or many parked polls
    #[arg(long, conflicts_with_all = ["only", "url"])]
    noisy_neighbour: bool,

    /// Instead: time to read a queue with this many pending jobs, and lateness of schedules
    #[arg(long, value_name = "JOBS", conflicts_with_all = ["only", "url", "noisy_neighbour"])]
    operator: Option<u64>,

    /// Instead: pickup time of a poll that is parked on another node, with and without Redis
    #[arg(long, conflicts_with_all = ["only", "url", "noisy_neighbour", "operator"])]
    nodes: bool,

    /// Instead: the lifecycle in a queue with this many ready jobs, and in another queue
    #[arg(long, value_name = "JOBS", conflicts_with_all = ["only", "noisy_neighbour", "operator", "nodes"],
          value_parser = clap::value_parser!(u64).range(1_000..=100_000_000))]
    backlog: Option<u64>,

    /// Instead: the lifecycle while a snapshot is held, in six windows of --seconds
    #[arg(long, conflicts_with_all = ["only", "url", "noisy_neighbour", "operator", "nodes", "backlog"])]
    held_snapshot: bool,

    /// Instead: what one tenant notices of each attack by another
    #[arg(long, conflicts_with_all = ["data_dir", "url"])]
    isolation: bool,

    /// Instead: what one tenant notices of each attack by a stranger with a free account
    #[arg(long, conflicts_with_all = ["data_dir", "url", "isolation"])]
    abuse: bool,

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

    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// One result.
#[derive(Debug, Clone, Serialize)]
struct Measure {
    name: String,
    value: f64,
    unit: &'static str,
    /// The value as a multiple of the commits that PostgreSQL alone did with 32 clients.
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio_to_commits: Option<f64>,
    /// CPU of server and PostgreSQL together, in microseconds per job.
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu_us_per_job: Option<f64>,
    /// Write-ahead log of PostgreSQL, in bytes per job.
    #[serde(skip_serializing_if = "Option::is_none")]
    wal_bytes_per_job: Option<f64>,
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
    if args.isolation || args.abuse {
        let time = Duration::from_secs(args.seconds);
        return isolation::run(args.only.as_deref(), args.abuse, time).await;
    }
    if let (Some(attack), Some(api_key)) = (args.attack, args.api_key.clone()) {
        let attacker = Attacker::of(&Ready::of_running(args.data_dir)?, api_key)?;
        return attacker.run(attack).await;
    }
    let own = match (&args.url, &args.data_dir) {
        (None, None) => Some(OwnServer::start(&[])?),
        _ => None,
    };
    let mut redis_url = None;
    let (url, api_key, watched) = match (args.url, args.api_key) {
        (Some(url), Some(api_key)) => (url, api_key, None),
        _ => {
            let data_dir = own.as_ref().map(|it| it.dir.clone()).or(args.data_dir);
            let ready = Ready::of_running(data_dir)?;
            redis_url = ready.redis_url;
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
        (Some(watched), ..) if args.nodes => bench.elsewhere(watched, redis_url.as_deref()).await?,
        (Some(watched), true, _) => bench.beside_a_neighbour(watched).await?,
        (Some(watched), _, Some(jobs)) => bench.operate(watched, jobs).await?,
        (Some(watched), ..) if args.held_snapshot => bench.while_held(watched).await?,
        _ => match args.backlog {
            Some(jobs) => bench.beside_a_backlog(usize::try_from(jobs)?).await?,
            None => bench.measure().await?,
        },
    };
    drop(own);
    let text = if args.json {
        format!("{:#}\n", serde_json::json!({ "measures": measures }))
    } else {
        table(&measures)
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

    async fn measure(&self) -> anyhow::Result<Vec<Measure>> {
        let mut measures = Vec::new();
        // First: sessions report their transactions up to ten seconds after they have become idle.
        if let Some(watched) = self.watched.as_ref().filter(|_| self.wants("idle")) {
            measures.extend(self.idle(watched).await?);
        }
        let mut commits = None;
        if let Some(Watched { database_url, .. }) = &self.watched {
            let alone = load::commits(database_url, 1, self.time).await?;
            let together = load::commits(database_url, COMMIT_CLIENTS, self.time).await?;
            measures.push(plain("commits, 1 client", alone, "rows/s"));
            measures.push(plain("commits, 32 clients (C1)", together, "rows/s"));
            commits = Some(together);
        }
        let steps = [
            ("enqueue", Step::Enqueue),
            ("lifecycle", Step::Lifecycle),
            ("acks-that-poll", Step::ShortLifecycle),
            ("limited-by-key", Step::LimitedByKey),
            ("limited-by-queue", Step::Lifecycle),
        ];
        for (name, step) in steps {
            if self.wants(name) {
                let queue = self.queue(name);
                if name == "limited-by-queue" {
                    load::limit_queue(&self.target, &queue).await?;
                }
                let rate = load::rate(&self.target, step, &queue, CONNECTIONS, self.time);
                let (rate, used) = self.using(rate).await?;
                let jobs = rate * self.time.as_secs_f64();
                measures.push(compared(plain(name, rate, "jobs/s"), commits, used, jobs));
            }
        }
        if self.wants("batch") {
            let queue = self.queue("batch");
            let batch = load::batch(&self.target, &queue, self.batch_jobs);
            let (batch, used) = self.using(batch).await?;
            measures.push(plain("batch enqueue", batch.enqueue, "jobs/s"));
            measures.push(plain("batch drain", batch.drain, "jobs/s"));
            let lifecycle = plain("batch lifecycle", batch.lifecycle, "jobs/s");
            measures.push(compared(lifecycle, commits, used, self.batch_jobs as f64));
        }
        if self.wants("pickup") {
            let queue = self.queue("pickup");
            let (p50, p99) = load::pickup(&self.target, &self.target, &queue, self.time).await?;
            measures.push(plain("pickup p50", p50, "ms"));
            measures.push(plain("pickup p99", p99, "ms"));
        }
        Ok(measures)
    }

    /// The pickup time of one tenant: alone, beside a backlog of another, and beside another's
    /// parked polls.
    async fn beside_a_neighbour(&self, watched: &Watched) -> anyhow::Result<Vec<Measure>> {
        let neighbour = Target {
            authority: self.target.authority.clone(),
            api_key: self.neighbours_key(&watched.database_url).await?,
            payload_bytes: self.target.payload_bytes,
        };
        let target = &self.target;
        let pickup = async |name| load::pickup(target, target, &self.queue(name), self.time).await;
        let alone = pickup("alone").await?;
        load::fill(&neighbour, &self.queue("backlog"), NEIGHBOUR_JOBS).await?;
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
    async fn elsewhere(
        &self,
        watched: &Watched,
        redis_url: Option<&str>,
    ) -> anyhow::Result<Vec<Measure>> {
        let (key, queue) = (&self.target.api_key, self.queue("elsewhere"));
        let database_url = &watched.database_url;
        let [with, without] =
            nodes::pickups(database_url, redis_url, key, &queue, self.time).await?;
        Ok(vec![
            plain("pickup on another node, p50", with.0, "ms"),
            plain("pickup on another node, p99", with.1, "ms"),
            plain("the same without Redis, p50", without.0, "ms"),
            plain("the same without Redis, p99", without.1, "ms"),
        ])
    }

    /// The lifecycle with a backlog in its queue, and beside one.
    async fn beside_a_backlog(&self, jobs: usize) -> anyhow::Result<Vec<Measure>> {
        let queue = self.queue("backlog");
        let seen = stress::backlog(&self.target, &queue, jobs, CONNECTIONS, self.time).await?;
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
        let (before, held) =
            stress::held_snapshot(&self.target, url, &queue, CONNECTIONS, time).await?;
        let mut measures = vec![plain("lifecycle before", before, "jobs/s")];
        for (window, rate) in held.iter().enumerate() {
            let until = (window as u64 + 1) * time.as_secs();
            measures.push(plain(format!("snapshot held for {until} s"), *rate, "jobs/s"));
        }
        let last = held.last().copied().unwrap_or_default();
        measures.push(plain("the last, to before", last / before, "times"));
        Ok(measures)
    }

    /// Reading a deep queue, and schedules of one minute.
    async fn operate(&self, watched: &Watched, jobs: u64) -> anyhow::Result<Vec<Measure>> {
        let database_url = &watched.database_url;
        let queue = self.queue("schedules");
        let late = operator::fire(&self.target, database_url, &queue, SCHEDULES).await?;
        let queue = self.queue("large");
        let read = operator::read_queue(&self.target, database_url, &queue, jobs).await?;
        Ok(vec![
            plain("10,000 schedules of a minute: late, p50", late.0, "ms"),
            plain("10,000 schedules of a minute: late, p99", late.1, "ms"),
            plain("read a queue with many jobs, p50", read.0, "ms"),
            plain("read a queue with many jobs, p99", read.1, "ms"),
        ])
    }

    /// A key of a project created for this run.
    async fn neighbours_key(&self, database_url: &str) -> anyhow::Result<String> {
        let options: PgConnectOptions = database_url.parse()?;
        let mut conn = options.connect().await?;
        let name = format!("bench-neighbour-{}", self.run);
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

/// Adds the multiple of C1 and the CPU per job, where they are known.
fn compared(measure: Measure, commits: Option<f64>, used: Option<Usage>, jobs: f64) -> Measure {
    Measure {
        ratio_to_commits: commits.map(|it| measure.value / it),
        cpu_us_per_job: used.map(|it| cpu_us(it, jobs)),
        wal_bytes_per_job: used.map(|it| it.wal_bytes / jobs),
        ..measure
    }
}

fn plain(name: impl Into<String>, value: f64, unit: &'static str) -> Measure {
    Measure {
        name: name.into(),
        value,
        unit,
        ratio_to_commits: None,
        cpu_us_per_job: None,
        wal_bytes_per_job: None,
    }
}

fn cpu_us(used: Usage, jobs: f64) -> f64 {
    (used.server_seconds + used.postgres_seconds) * 1e6 / jobs
}

fn table(measures: &[Measure]) -> String {
    let mut text = format!(
        "{:<38} {:>10} {:<16} {:>6} {:>11} {:>9}\n",
        "measure", "value", "unit", "× C1", "CPU µs/job", "WAL B/job"
    );
    for it in measures {
        let digits = if it.value < 100.0 { 2 } else { 0 };
        let optional =
            |it: Option<f64>, digits| it.map_or(String::new(), |it| format!("{it:.digits$}"));
        let _ = writeln!(
            text,
            "{:<38} {:>10.digits$} {:<16} {:>6} {:>11} {:>9}",
            it.name,
            it.value,
            it.unit,
            optional(it.ratio_to_commits, 2),
            optional(it.cpu_us_per_job, 0),
            optional(it.wal_bytes_per_job, 0),
        );
    }
    text
}
