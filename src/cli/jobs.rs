//! `fencepost jobs`.

mod bulk;
pub(super) mod job_view;

use std::io::Write;

use anyhow::Context;
use clap::{Args, Subcommand, ValueEnum};
use fencepost_domain::{explain::Reason, limits};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use self::bulk::Which;
use super::{
    table::{self, Columns, Page},
    words::{coloured, encoded, word},
};
use crate::client::{Client, ClientArgs, Reply};

const COLUMNS: Columns = &[
    ("JOB", "/id"),
    ("STATE", "/state"),
    ("ATTEMPT", "/attempt"),
    ("AGE", "/age"),
    ("QUEUE", "/queue"),
    ("TYPE", "/job_type"),
    ("LAST ERROR", "/error"),
];

/// Options of `jobs`.
#[derive(Debug, Args)]
pub struct JobsArgs {
    #[command(flatten)]
    client: ClientArgs,

    /// Output format
    #[arg(short, long, value_enum, default_value_t = Output::Text, global = true)]
    output: Output,

    #[command(subcommand)]
    command: Command,
}

/// Output format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Output {
    /// Text for people
    Text,
    /// JSON for programs
    Json,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List jobs
    List {
        /// Search line: state:pending queue:mail type:send tag:customer=3 label:gpu batch:…
        /// error:refused, or an id, its start or its end
        #[arg(value_name = "SEARCH")]
        search: Vec<String>,
        /// Only jobs in this state
        #[arg(long, value_name = "STATE")]
        state: Option<String>,
        /// Only jobs of this queue
        #[arg(long, value_name = "QUEUE")]
        queue: Option<String>,
        /// Only jobs of this type
        #[arg(long, value_name = "TYPE")]
        job_type: Option<String>,
        /// Only jobs with this tag: name=value, or name
        #[arg(long, value_name = "TAG")]
        tag: Option<String>,
        /// Only jobs of this batch
        #[arg(long, value_name = "BATCH")]
        batch_id: Option<String>,
        /// Those that were stored first come first
        #[arg(long)]
        oldest_first: bool,
        #[command(flatten)]
        page: Page<{ limits::MAX_PAGE_JOBS }>,
    },
    /// Show a job: where it is and why, its attempts, its payload and its result
    #[command(visible_alias = "show")]
    Get {
        /// Job id
        job_id: String,
        /// Seconds to wait until it has ended; exits with 1 if it fails, with 6 if it has not ended
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=30))]
        wait_seconds: Option<u32>,
    },
    /// Retry a dead letter or a cancelled job, or all that match a search
    Retry(Which),
    /// Cancel a job, or all that match a search
    Cancel(Which),
    /// Pause a waiting job, or all that match a search
    Pause(Which),
    /// Resume a paused job, or all that match a search
    Resume(Which),
    /// Enqueue an ended job again as a new one, or all that match a search
    Replay(Which),
}

/// A job that was waited for has not succeeded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotSucceeded {
    /// It has ended otherwise.
    #[error("the job has not succeeded: it is {0}")]
    Failed(String),
    /// The time is up.
    #[error("the job has not ended in this time: it is {0}")]
    Unfinished(String),
}

pub(super) fn succeeded(reply: &Reply) -> anyhow::Result<()> {
    /// Nothing else is read: its payload or result may be readable only by its program.
    #[derive(Deserialize)]
    struct Stateful {
        state: String,
    }
    let Stateful { state } = serde_json::from_str(&reply.text).context("the answer is no job")?;
    match state.as_str() {
        "succeeded" => Ok(()),
        "dead_letter" | "cancelled" => Err(NotSucceeded::Failed(state).into()),
        _ => Err(NotSucceeded::Unfinished(state).into()),
    }
}

/// Runs the command.
pub async fn run(args: JobsArgs) -> anyhow::Result<()> {
    let client = Client::new(&args.client)?;
    let output = args.output;
    match args.command {
        Command::List { search, state, queue, job_type, tag, batch_id, oldest_first, page } => {
            let search = Some(search.join(" ")).filter(|it| !it.is_empty());
            let filters = [
                ("q", search),
                ("state", state),
                ("queue", queue),
                ("job_type", job_type),
                ("tag", tag.map(|it| it.replacen('=', ":", 1))),
                ("batch_id", batch_id),
                ("order", oldest_first.then(|| "oldest".to_owned())),
            ];
            let mut path = format!("/v1/jobs?limit={}", page.limit);
            for (name, value) in filters.into_iter().filter_map(|(name, it)| Some((name, it?))) {
                path.push_str(&format!("&{name}={}", encoded(&value)));
            }
            list(&client, &path, page.cursor, output).await
        }
        Command::Get { job_id, wait_seconds } => get(&client, &job_id, wait_seconds, output).await,
        Command::Retry(which) => bulk::run(&client, "retry", which, output).await,
        Command::Cancel(which) => bulk::run(&client, "cancel", which, output).await,
        Command::Pause(which) => bulk::run(&client, "pause", which, output).await,
        Command::Resume(which) => bulk::run(&client, "resume", which, output).await,
        Command::Replay(which) => bulk::run(&client, "replay", which, output).await,
    }
}

async fn get(
    client: &Client,
    job_id: &str,
    wait_seconds: Option<u32>,
    output: Output,
) -> anyhow::Result<()> {
    let path = format!("/v1/jobs/{}", encoded(job_id));
    let wait = wait_seconds.map(|it| format!("?wait_seconds={it}")).unwrap_or_default();
    let job = client.get(&format!("{path}{wait}")).await?;
    let mut out = std::io::stdout();
    match output {
        Output::Json => writeln!(out, "{}", job.text)?,
        Output::Text => {
            let why = client.get(&format!("{path}/explain")).await?.json();
            job_view::print(&mut out, &job, why["summary"].as_str())?;
        }
    }
    if wait_seconds.is_some() { succeeded(&job) } else { Ok(()) }
}

/// Pages without a job that are read before a filter counts as matching none.
const MAX_EMPTY_PAGES: usize = 20;

/// The first page that has jobs: a page examines a bounded number of them.
async fn first_jobs(client: &Client, path: &str, cursor: Option<String>) -> anyhow::Result<Value> {
    let mut page = client.get(&from(path, cursor.as_deref())).await?.json();
    for _ in 0..MAX_EMPTY_PAGES {
        let is_empty = page["jobs"].as_array().is_some_and(Vec::is_empty);
        let Some(cursor) = page["next_cursor"].as_str().filter(|_| is_empty) else { break };
        page = client.get(&from(path, Some(cursor))).await?.json();
    }
    Ok(page)
}

/// A path from a cursor on.
fn from(path: &str, cursor: Option<&str>) -> String {
    cursor.map_or_else(|| path.to_owned(), |it| format!("{path}&cursor={}", encoded(it)))
}

/// Prints a page of jobs.
async fn list(
    client: &Client,
    path: &str,
    cursor: Option<String>,
    output: Output,
) -> anyhow::Result<()> {
    let mut out = std::io::stdout();
    if output == Output::Json {
        writeln!(out, "{}", client.get(&from(path, cursor.as_deref())).await?.text)?;
        return Ok(());
    }
    let mut page = first_jobs(client, &format!("{path}&payloads=false"), cursor).await?;
    let now = job_view::now();
    for job in page["jobs"].as_array_mut().into_iter().flatten() {
        job["age"] = json!(job_view::since(now, &job["created_at"]));
        let reason = Reason::deserialize(&job["waiting_reason"]).ok();
        let lacking = reason.and_then(Reason::lacking).map(|it| format!(": {it}"));
        let state = coloured(&word(&job["state"]));
        job["state"] = json!(format!("{state}{}", lacking.unwrap_or_default()));
        let error = job["last_error"].as_object();
        let error = error.and_then(|it| it["message"].as_str().or_else(|| it["type"].as_str()));
        job["error"] = json!(error.unwrap_or_default().lines().next());
    }
    table::print(&mut out, table::rows(&page, "jobs")?, COLUMNS)?;
    Ok(table::say_more(&page)?)
}

/// One line for each field with a value.
pub(super) fn show(out: &mut impl Write, job: &Value) -> anyhow::Result<()> {
    for (field, value) in job.as_object().into_iter().flatten() {
        let is_empty = value.is_null()
            || value.as_array().is_some_and(Vec::is_empty)
            || value.as_object().is_some_and(Map::is_empty);
        if !is_empty {
            writeln!(out, "{field:<18} {}", word(value))?;
        }
    }
    Ok(())
}
