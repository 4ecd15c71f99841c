//! `fencepost enqueue`: every field of a job that may stand alone.

use std::{
    collections::BTreeMap,
    io::{Read, Write},
};

use anyhow::Context;
use clap::Args;
use serde_json::{Map, json, value::RawValue};

use super::{
    jobs::{Output, job_view, succeeded},
    words::word,
};
use crate::client::{Client, ClientArgs};

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
    #[arg(long, value_name = "N", conflicts_with = "run_at")]
    delay_seconds: Option<i64>,

    /// When it may run, as 2026-01-31T12:00:00Z
    #[arg(long, value_name = "TIME")]
    run_at: Option<String>,

    /// Cancelled if it has not started by this time
    #[arg(long, value_name = "TIME")]
    expires_at: Option<String>,

    /// Failures after which it is dead-lettered
    #[arg(long, value_name = "N")]
    max_attempts: Option<i32>,

    /// Losses in a row after which it is dead-lettered
    #[arg(long, value_name = "N")]
    max_losses: Option<i32>,

    /// Timeout of one attempt, in seconds
    #[arg(long, value_name = "N")]
    timeout_seconds: Option<i32>,

    /// Retry policy as JSON, as in the API
    #[arg(long, value_name = "JSON")]
    retry: Option<String>,

    /// Jobs with the same key run one at a time, or as many as --concurrency-limit allows
    #[arg(long, value_name = "KEY")]
    concurrency_key: Option<String>,

    /// With --concurrency-key: starts only while fewer of them run
    #[arg(long, value_name = "N", requires = "concurrency_key")]
    concurrency_limit: Option<i32>,

    /// Group within the queue, such as a customer
    #[arg(long, value_name = "GROUP")]
    group: Option<String>,

    /// Makes it the only live job with this key
    #[arg(long, value_name = "KEY")]
    unique_key: Option<String>,

    /// With --unique-key, if a live job has it: reject, return_existing or replace
    #[arg(long, value_name = "CHOICE", requires = "unique_key")]
    on_conflict: Option<String>,

    /// Job that must succeed first; may be repeated
    #[arg(long = "depends-on", value_name = "JOB")]
    depends_on: Vec<String>,

    /// Job to enqueue when it succeeds, as JSON
    #[arg(long, value_name = "JSON")]
    on_success: Option<String>,

    /// Job to enqueue when it is dead-lettered or cancelled, as JSON
    #[arg(long, value_name = "JSON")]
    on_failure: Option<String>,

    /// Job to enqueue when it ends, in whatever way, as JSON
    #[arg(long, value_name = "JSON")]
    on_complete: Option<String>,

    /// Batch to add the job to
    #[arg(long, value_name = "BATCH")]
    batch_id: Option<String>,

    /// Refuse a payload that does not fit the schema of the job type
    #[arg(long)]
    check_payload: bool,

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

/// Stores a job and prints its id, or the whole job.
pub async fn run(args: EnqueueArgs) -> anyhow::Result<()> {
    let client = Client::new(&args.client)?;
    let body = serde_json::to_string(&fields(&args)?)?;
    let mut job = client.post_once("/v1/jobs", args.idempotency_key.as_deref(), body).await?;
    if let Some(seconds) = args.wait_seconds {
        let id = job.json()["id"].as_str().unwrap_or_default().to_owned();
        job = client.get(&format!("/v1/jobs/{id}?wait_seconds={seconds}")).await?;
    }
    let mut out = std::io::stdout();
    match args.output {
        Output::Json => writeln!(out, "{}", job.text)?,
        Output::Text if args.wait_seconds.is_some() => job_view::print(&mut out, &job, None)?,
        Output::Text => writeln!(out, "{}", word(&job.json()["id"]))?,
    }
    match args.wait_seconds {
        Some(_) => succeeded(&job),
        None => Ok(()),
    }
}

/// The fields of the request. JSON that was given is sent as it is, byte for byte.
fn fields(args: &EnqueueArgs) -> anyhow::Result<BTreeMap<&'static str, Box<RawValue>>> {
    let mut tags = Map::new();
    for tag in &args.tags {
        let (name, value) = tag.split_once('=').context("--tag: must be name=value")?;
        tags.insert(name.to_owned(), json!(value));
    }
    let unique = args.unique_key.as_ref().map(|key| match &args.on_conflict {
        Some(choice) => json!({"key": key, "on_conflict": choice}),
        None => json!({"key": key}),
    });
    let depends_on = Some(&args.depends_on).filter(|it| !it.is_empty());
    let plain = [
        ("job_type", Some(json!(args.job_type))),
        ("queue", Some(json!(args.queue))),
        ("priority", Some(json!(args.priority))),
        ("labels", Some(json!(args.labels))),
        ("check_payload", args.check_payload.then_some(json!(true))),
        ("tags", Some(json!(tags))),
        ("delay_seconds", args.delay_seconds.map(|it| json!(it))),
        ("run_at", args.run_at.as_ref().map(|it| json!(it))),
        ("expires_at", args.expires_at.as_ref().map(|it| json!(it))),
        ("max_attempts", args.max_attempts.map(|it| json!(it))),
        ("max_losses", args.max_losses.map(|it| json!(it))),
        ("timeout_seconds", args.timeout_seconds.map(|it| json!(it))),
        ("concurrency_key", args.concurrency_key.as_ref().map(|it| json!(it))),
        ("concurrency_limit", args.concurrency_limit.map(|it| json!(it))),
        ("group", args.group.as_ref().map(|it| json!(it))),
        ("unique", unique),
        ("depends_on", depends_on.map(|it| json!(it))),
        ("batch_id", args.batch_id.as_ref().map(|it| json!(it))),
    ];
    let mut fields = BTreeMap::new();
    for (name, value) in plain {
        if let Some(value) = value {
            fields.insert(name, serde_json::value::to_raw_value(&value)?);
        }
    }
    let mut from_stdin = String::new();
    if args.payload == "-" {
        std::io::stdin().read_to_string(&mut from_stdin).context("cannot read standard input")?;
    }
    let payload = if args.payload == "-" { &from_stdin } else { &args.payload };
    let given = [
        ("payload", "--payload", Some(payload)),
        ("retry", "--retry", args.retry.as_ref()),
        ("on_success", "--on-success", args.on_success.as_ref()),
        ("on_failure", "--on-failure", args.on_failure.as_ref()),
        ("on_complete", "--on-complete", args.on_complete.as_ref()),
    ];
    for (name, flag, text) in given {
        if let Some(text) = text {
            let json = RawValue::from_string(text.trim().to_owned());
            fields.insert(name, json.with_context(|| format!("{flag}: not valid JSON"))?);
        }
    }
    Ok(fields)
}
