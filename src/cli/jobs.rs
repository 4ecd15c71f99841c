//! `fencepost enqueue` and `fencepost jobs`.

use std::io::{IsTerminal, Read, Write};

use anyhow::Context;
use clap::{Args, Subcommand, ValueEnum};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::client::{Client, ClientArgs, Reply};

/// Options of `enqueue`.
#[derive(Debug, Args)]
pub struct EnqueueArgs {
    #[command(flatten)]
    client: ClientArgs,

    /// Job type: the kind of work
    #[arg(long, value_name = "TYPE")]
    job_type: String,

    /// Payload as JSON; `-` reads it from standard input
    #[arg(long, default_value = "null", value_name = "JSON")]
    payload: String,

    /// Queue
    #[arg(long, default_value = "default", value_name = "QUEUE")]
    queue: String,

    /// Priority from -100 to 100; higher runs first
    #[arg(long, default_value_t = 0, allow_hyphen_values = true, value_name = "N")]
    priority: i16,

    /// Seconds until it may run
    #[arg(long, value_name = "N")]
    delay_seconds: Option<i64>,

    /// Failures after which it is dead-lettered
    #[arg(long, value_name = "N")]
    max_attempts: Option<i32>,

    /// Timeout of one attempt, in seconds
    #[arg(long, value_name = "N")]
    timeout_seconds: Option<i32>,

    /// Batch to add the job to
    #[arg(long, value_name = "BATCH")]
    batch_id: Option<String>,

    /// Label that its worker must have; may be repeated
    #[arg(long = "label", value_name = "LABEL")]
    labels: Vec<String>,

    /// Tag for your own use, as name=value; may be repeated
    #[arg(long = "tag", value_name = "NAME=VALUE")]
    tags: Vec<String>,

    /// Idempotency key: repeating the command with the same key stores the job once
    #[arg(long, value_name = "KEY")]
    idempotency_key: Option<String>,

    /// Seconds to wait until it has ended; exits with 1 if it fails, with 6 if it has not ended
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=30))]
    wait_seconds: Option<u32>,

    /// Output format
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    output: Output,
}

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
    /// List jobs, newest first
    List {
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
        /// Number of jobs, from 1 to 200
        #[arg(long, default_value_t = 50, value_name = "N")]
        limit: u32,
    },
    /// Show a job
    Get {
        /// Job id
        job_id: String,
        /// Seconds to wait until it has ended; exits with 1 if it fails, with 6 if it has not ended
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=30))]
        wait_seconds: Option<u32>,
    },
    /// Retry a dead letter or a cancelled job
    Retry {
        /// Job id
        job_id: String,
    },
    /// Cancel a job
    Cancel {
        /// Job id
        job_id: String,
    },
}

/// Stores a job and prints its id, or the whole job.
pub async fn enqueue(args: EnqueueArgs) -> anyhow::Result<()> {
    let payload = if args.payload == "-" {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).context("cannot read standard input")?;
        text
    } else {
        args.payload
    };
    let payload: Box<serde_json::value::RawValue> =
        serde_json::from_str(payload.trim()).context("--payload: not valid JSON")?;
    let mut tags = Map::new();
    for tag in &args.tags {
        let (name, value) = tag.split_once('=').context("--tag: must be name=value")?;
        tags.insert(name.to_owned(), json!(value));
    }
    let mut job = json!({
        "job_type": args.job_type, "queue": args.queue, "priority": args.priority,
        "labels": args.labels, "tags": tags,
    });
    let optional = [
        ("delay_seconds", args.delay_seconds.map(|it| json!(it))),
        ("max_attempts", args.max_attempts.map(|it| json!(it))),
        ("timeout_seconds", args.timeout_seconds.map(|it| json!(it))),
        ("batch_id", args.batch_id.map(|it| json!(it))),
    ];
    for (field, value) in optional {
        if let Some(value) = value {
            job[field] = value;
        }
    }
    // The payload is sent as it is, byte for byte.
    let job = job.to_string();
    let open = job.strip_suffix('}').unwrap_or(&job);
    let body = format!("{open},\"payload\":{}}}", payload.get());
    let client = Client::new(&args.client)?;
    let mut job = client.post_once("/v1/jobs", args.idempotency_key.as_deref(), body).await?;
    if let Some(seconds) = args.wait_seconds {
        let id = job.json()["id"].as_str().unwrap_or_default().to_owned();
        job = client.get(&format!("/v1/jobs/{id}?wait_seconds={seconds}")).await?;
    }
    let mut out = std::io::stdout();
    match args.output {
        Output::Json => writeln!(out, "{}", job.text)?,
        Output::Text if args.wait_seconds.is_some() => show(&mut out, &job.json())?,
        Output::Text => writeln!(out, "{}", word(&job.json()["id"]))?,
    }
    match args.wait_seconds {
        Some(_) => succeeded(&job),
        None => Ok(()),
    }
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

fn succeeded(reply: &Reply) -> anyhow::Result<()> {
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
    let mut out = std::io::stdout();
    let mut is_awaited = false;
    let reply = match args.command {
        Command::List { state, queue, job_type, tag, batch_id, limit } => {
            let filters = [
                ("state", state),
                ("queue", queue),
                ("job_type", job_type),
                ("tag", tag.map(|it| it.replacen('=', ":", 1))),
                ("batch_id", batch_id),
            ];
            let mut path = format!("/v1/jobs?limit={limit}");
            for (name, value) in filters.into_iter().filter_map(|(name, it)| Some((name, it?))) {
                path.push_str(&format!("&{name}={}", encoded(&value)));
            }
            if args.output == Output::Text {
                path.push_str("&payloads=false");
                return list(&mut out, &first_jobs(&client, &path).await?);
            }
            client.get(&path).await?
        }
        Command::Get { job_id, wait_seconds } => {
            is_awaited = wait_seconds.is_some();
            let wait = wait_seconds.map(|it| format!("?wait_seconds={it}")).unwrap_or_default();
            client.get(&format!("/v1/jobs/{}{wait}", encoded(&job_id))).await?
        }
        Command::Retry { job_id } => {
            client.post(&format!("/v1/jobs/{}/retry", encoded(&job_id)), &json!({})).await?
        }
        Command::Cancel { job_id } => {
            client.post(&format!("/v1/jobs/{}/cancel", encoded(&job_id)), &json!({})).await?
        }
    };
    match args.output {
        Output::Json => writeln!(out, "{}", reply.text)?,
        Output::Text => show(&mut out, &reply.json())?,
    }
    if is_awaited {
        succeeded(&reply)?;
    }
    Ok(())
}

/// A value as part of a path or query.
pub(super) fn encoded(text: &str) -> String {
    let plain = |it: u8| it.is_ascii_alphanumeric() || b"_-.~".contains(&it);
    text.bytes()
        .map(|it| if plain(it) { char::from(it).to_string() } else { format!("%{it:02X}") })
        .collect()
}

/// Pages without a job that are read before a filter counts as matching none.
const MAX_EMPTY_PAGES: usize = 20;

/// The first page that has jobs: a page examines a bounded number of them.
async fn first_jobs(client: &Client, path: &str) -> anyhow::Result<Value> {
    let mut page = client.get(path).await?.json();
    for _ in 0..MAX_EMPTY_PAGES {
        let is_empty = page["jobs"].as_array().is_some_and(Vec::is_empty);
        let Some(cursor) = page["next_cursor"].as_str().filter(|_| is_empty) else { break };
        page = client.get(&format!("{path}&cursor={}", encoded(cursor))).await?.json();
    }
    Ok(page)
}

fn list(out: &mut impl Write, page: &Value) -> anyhow::Result<()> {
    writeln!(out, "{:<31} {:<12} {:>7} {:<16} TYPE", "JOB", "STATE", "ATTEMPT", "QUEUE")?;
    for job in page["jobs"].as_array().into_iter().flatten() {
        writeln!(
            out,
            "{:<31} {} {:>7} {:<16} {}",
            word(&job["id"]),
            coloured(&word(&job["state"])),
            word(&job["attempt"]),
            word(&job["queue"]),
            word(&job["job_type"])
        )?;
    }
    if page["has_more"] == true {
        let until = page["scanned_until"].as_str();
        let until = until.map_or(String::new(), |it| format!(" from before {it}"));
        writeln!(
            out,
            "there may be more{until}: narrow with --state, --queue, --job-type or --tag"
        )?;
    }
    Ok(())
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

pub(super) fn word(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// The state in twelve columns; coloured on a terminal, unless `NO_COLOR` is set (no-color.org).
pub(super) fn coloured(state: &str) -> String {
    let padded = format!("{state:<12}");
    let is_plain = !std::io::stdout().is_terminal()
        || std::env::var_os("NO_COLOR").is_some_and(|it| !it.is_empty());
    let colour = match state {
        _ if is_plain => return padded,
        "succeeded" => 32,
        "dead_letter" => 31,
        "cancelled" => 90,
        "processing" => 36,
        _ => 33,
    };
    format!("\x1b[{colour}m{padded}\x1b[0m")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_person_types_is_fit_for_a_url() {
        assert_eq!(encoded("a b/c?ä"), "a%20b%2Fc%3F%C3%A4");
    }
}
