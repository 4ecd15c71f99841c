//! Real clients against real nodes, while nodes, PostgreSQL and Redis are killed, frozen and cut
//! off as a seed says. In the end each job's history must fit the server's book.
//!
//! A seed fixes which faults come and what clients intend. How they meet is up to the machine: a
//! violation is kept as a history, and may need several runs of its seed to come again.

mod adapters;
mod book;
mod bugs;
mod check;
mod clients;
mod database;
mod foreign;
mod history;
mod mutants;
mod nemesis;
mod page;
mod pair;
mod patroni;
mod producers;
mod proxy;
mod pushed;
mod receiver;
mod report;
mod run;
mod setup;
mod stage;

use std::{
    fs::File,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, ensure};
use clap::{Args, Parser, Subcommand};
use fencepost::dev::cluster;
use serde::Serialize;
use tokio::runtime::Runtime;

use crate::{
    nemesis::{Fault, Faults},
    producers::MAX_LOAD_PERCENT,
    report::Report,
    run::Plan,
    stage::{Planted, Programs},
};

/// Commits that fail in a run without a planted bug, in percent.
const FAIL_PERCENT: f64 = 0.5;

/// Runs clients and faults against a private server, and checks what came of it.
#[derive(Debug, Parser)]
struct Cli {
    #[command(subcommand)]
    command: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Run clients and faults once or several times
    Run {
        #[command(flatten)]
        place: Place,

        /// Decides which faults come, and what clients intend [default: a random one]
        #[arg(long)]
        seed: Option<u64>,

        /// How long faults come, in seconds
        #[arg(long, default_value_t = 60)]
        seconds: u64,

        /// Runs of the same seed, one after the other
        #[arg(long, default_value_t = 1)]
        repeat: u64,

        /// Commits that fail on purpose, in percent
        #[arg(long, default_value_t = FAIL_PERCENT)]
        fail_percent: f64,

        /// How many times longer pauses may be than their bounds, on a slow machine
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
        patience: u32,

        /// Load in percent of the full load: lower it when several runs share the machine
        #[arg(long, default_value_t = MAX_LOAD_PERCENT,
              value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_LOAD_PERCENT)))]
        load: u32,

        /// Let Patroni lead PostgreSQL, with etcd and HAProxy; its faults are others
        #[arg(long)]
        patroni: bool,

        /// Only these faults, such as node_killed,disk_full [default: all]
        #[arg(long, value_delimiter = ',', value_parser = Fault::of_name)]
        only: Vec<Fault>,

        /// The server of an earlier release, with fail points: nodes change between both
        #[arg(long)]
        previous: Option<PathBuf>,
    },
    /// Run nodes with a planted bug until it is caught, one bug after the other
    Mutants {
        #[command(flatten)]
        place: Place,

        /// Numbers of the bugs [default: all]
        #[arg(long, value_delimiter = ',')]
        only: Vec<u8>,
    },
    /// Plant all bugs in a copy of the source, which `scripts/planted.sh` then builds
    Plant {
        /// The root of the copy
        copy: PathBuf,
    },
    /// Judge a run again whose folder was kept
    Check {
        /// The folder of its history
        dir: PathBuf,

        /// How many times longer pauses may be than their bounds, on a slow machine
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
        patience: u32,
    },
    /// Write the tables of a page of the documentation from the results
    Page {
        /// The results of runs and of planted bugs, a line of JSON each
        #[arg(long)]
        results: PathBuf,

        /// The page; the tables stand between two marks
        #[arg(long)]
        page: PathBuf,
    },
}

#[derive(Debug, Args)]
struct Place {
    /// Folder for histories and logs [default: a temporary one]
    #[arg(long)]
    dir: Option<PathBuf>,

    /// The server [default: `fencepost` beside this program]
    #[arg(long)]
    program: Option<PathBuf>,

    /// File to which results are appended, a line of JSON each
    #[arg(long)]
    results: Option<PathBuf>,
}

impl Place {
    fn dir(&self) -> PathBuf {
        let temporary = || format!("fencepost-chaos-runs-{}", std::process::id());
        self.dir.clone().unwrap_or_else(|| std::env::temp_dir().join(temporary()))
    }

    fn programs(&self, previous: Option<PathBuf>) -> anyhow::Result<Programs> {
        let beside = std::env::current_exe()?.with_file_name("fencepost");
        Ok(Programs { server: self.program.clone().unwrap_or(beside), previous })
    }

    fn keep(&self, result: &impl Serialize) -> anyhow::Result<()> {
        let Some(path) = &self.results else { return Ok(()) };
        let mut file = File::options().create(true).append(true).open(path)?;
        // In one write: runs beside each other append to the same file.
        file.write_all(format!("{}\n", serde_json::to_string(result)?).as_bytes())?;
        Ok(())
    }

    /// Deletes a run's folder, unless it was asked for.
    fn clean(&self, dir: &Path) -> anyhow::Result<()> {
        if self.dir.is_none() {
            std::fs::remove_dir_all(dir)?;
        }
        Ok(())
    }
}

fn main() -> anyhow::Result<()> {
    fencepost_net::tls::install();
    // What the main thread has started ends with it: it does not change.
    let runtime = Runtime::new()?;
    match Cli::parse().command {
        Task::Run {
            place,
            seed,
            seconds,
            repeat,
            fail_percent,
            patience,
            load,
            patroni,
            only,
            previous,
        } => {
            let programs = place.programs(previous)?;
            let seed = seed.unwrap_or_else(|| u64::from(rand::random::<u32>()));
            let planted = Planted { bug: None, fail_percent };
            ensure!(
                only.iter().all(|it| it.is_possible(patroni)),
                "--only names a fault that cannot come in this run"
            );
            for number in 0..repeat {
                let dir = place.dir().join(format!("seed-{seed}-{number}"));
                let (planted, drain) = (planted.clone(), run::DRAIN);
                let faults = Faults {
                    seed,
                    during: Duration::from_secs(seconds),
                    under_patroni: patroni,
                    only: only.clone(),
                    // From then on, a node has another release than the others.
                    first: programs.previous.is_some().then_some(Fault::NodeStopped),
                };
                let plan = Plan { faults, planted, drain, patience, load_percent: load };
                runtime.block_on(run_once((&place, &programs), &dir, &plan))?;
            }
        }
        Task::Mutants { place, only } => {
            let programs = place.programs(None)?;
            for bug in mutants::asked(&only)? {
                let found = runtime.block_on(mutants::hunt(&place.dir(), &programs, &bug))?;
                place.keep(&page::Entry::Mutant(found))?;
            }
        }
        Task::Plant { copy } => bugs::plant(&copy)?,
        Task::Check { dir, patience } => finish(&run::judge_again(&dir, patience)?, &dir)?,
        Task::Page { results, page } => page::write(&results, &page)?,
    }
    Ok(())
}

async fn run_once(
    (place, programs): (&Place, &Programs),
    dir: &Path,
    plan: &Plan,
) -> anyhow::Result<()> {
    let seed = plan.faults.seed;
    let report = run::run(dir, programs.clone(), plan).await;
    let report = report.with_context(|| format!("seed {seed}"))?;
    place.keep(&page::Entry::Run(report.clone()))?;
    finish(&report, dir)?;
    place.clean(dir)
}

/// Prints the result of a run.
///
/// # Errors
/// When there are violations, or the run was too easy.
fn finish(report: &Report, dir: &Path) -> anyhow::Result<()> {
    report.print();
    let violations = report.violations.len();
    let (missing, seconds) = (report.too_easy(), report.seconds);
    ensure!(violations == 0, "{violations} violations: see {}", dir.display());
    ensure!(
        seconds < report::MIN_DURATION.as_secs() || missing.is_empty(),
        "the run was too easy, these never happened: {}",
        missing.join("; ")
    );
    Ok(())
}

/// A command that runs as PostgreSQL does, which refuses to run as root, and ends with this
/// program.
///
/// # Errors
/// When it is not known who runs this program.
fn as_postgres(program: &str) -> anyhow::Result<Command> {
    let mut command = Command::new("setpriv");
    if cluster::is_root()? {
        command.args(["--reuid=postgres", "--regid=postgres", "--clear-groups"]);
    }
    command.args(["--pdeathsig", "INT", "--", program]);
    Ok(command)
}

/// A command that is killed when this program ends, even if a signal ends it: a node that is left
/// takes ports and time from later runs. To be started from the main thread.
fn killed_with_this(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program);
    command
}

/// Signals processes.
fn signal(name: &str, pids: &[&str]) {
    // A process may have ended in this moment.
    let mut command = Command::new("kill");
    let _ = command.arg(format!("-{name}")).args(pids).stderr(Stdio::null()).status();
}
