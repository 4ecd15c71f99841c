//! `fencepost worker --exec`: any command as a worker. It polls, heartbeats and acks with the
//! fence; the command reads its payload from standard input, and its exit code is the outcome.
//!
//! One task owns the worker's state; each job has a task of its own.

mod beat;
mod job;
mod logs;
mod outcome;
mod run;
mod signals;

use clap::{Args, ValueEnum};

pub use self::run::run;

use crate::client::ClientArgs;

/// Options of `worker`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
The command gets the payload on standard input and the job's facts in FENCEPOST_* variables. Its standard \
output is the result (JSON, or else text), its standard error goes to the job's logs. Exit code 0: succeeded; \
those of --permanent-exit-codes: failed permanently; all others, such as 75, and signals: failed, retried.

SIGTERM and SIGINT drain: no more jobs, and the grace for those that run. SIGTSTP only takes no more \
jobs, SIGCONT takes them again.")]
pub struct WorkerArgs {
    #[command(flatten)]
    pub client: ClientArgs,

    /// Queue to take jobs from; may be repeated, in order of preference
    #[arg(long = "queue", required = true, value_name = "QUEUE")]
    pub queues: Vec<String>,

    /// Shell command to run for each job
    #[arg(long, value_name = "CMD")]
    pub exec: String,

    /// Only jobs of this type; may be repeated
    #[arg(long = "job-type", value_name = "TYPE")]
    pub job_types: Vec<String>,

    /// Label of this worker; may be repeated
    #[arg(long = "label", value_name = "LABEL")]
    pub labels: Vec<String>,

    /// Number of jobs to run at the same time
    #[arg(long, env = "FENCEPOST_CONCURRENCY", default_value_t = 1, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=500))]
    pub concurrency: u32,

    /// Worker id [default: host, process and random letters]
    #[arg(long, env = "FENCEPOST_WORKER_ID", value_name = "NAME")]
    pub worker_id: Option<String>,

    /// Exit codes that mean "do not retry"
    #[arg(long, value_delimiter = ',', value_name = "CODES")]
    pub permanent_exit_codes: Vec<i32>,

    /// Time for running jobs to finish after a stop signal
    #[arg(long, env = "FENCEPOST_GRACE_SECONDS", default_value_t = 25, value_name = "N",
          value_parser = clap::value_parser!(u64).range(0..=86_400))]
    pub grace_seconds: u64,

    /// What to do with jobs that still run at the end of the grace period
    #[arg(long, value_enum, default_value_t = AtGraceEnd::Release)]
    pub at_grace_end: AtGraceEnd,
}

/// What to do with jobs that still run at the end of the grace period.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AtGraceEnd {
    /// Release them: no failure is counted
    Release,
    /// Report them as failed: they are retried
    Fail,
}
