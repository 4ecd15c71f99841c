//! Commands for people on call, over the API: queues, dead letters, workers, schedules, workflows,
//! and why a job waits. Each is one request; lists are tables.

mod commands;
mod table;

use std::{io::Write, time::Duration};

use clap::{Args, Subcommand};
use reqwest::Method;
use serde_json::{Value, json};

pub use self::commands::{DeadLetters, Queues, Schedules, Workers, Workflows};
use super::jobs::{Output, encoded, show, word};
use crate::client::{Client, ClientArgs};

/// Between two requests of `--watch`.
const WATCH_PERIOD: Duration = Duration::from_secs(2);

/// Options of a group of commands.
#[derive(Debug, Args)]
pub struct ApiArgs<C: Subcommand> {
    #[command(flatten)]
    client: ClientArgs,

    /// Output format
    #[arg(short, long, value_enum, default_value_t = Output::Text, global = true)]
    output: Output,

    /// Ask again every two seconds, until interrupted
    #[arg(long, global = true)]
    watch: bool,

    #[command(subcommand)]
    command: C,
}

/// Options of `explain` and `logs`.
#[derive(Debug, Args)]
pub struct JobArgs {
    #[command(flatten)]
    client: ClientArgs,

    /// Output format
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    output: Output,

    /// Job id
    job_id: String,
}

/// Options of `logs`.
#[derive(Debug, Args)]
pub struct LogsArgs {
    #[command(flatten)]
    job: JobArgs,

    /// Print new lines until the job has ended
    #[arg(short, long)]
    follow: bool,
}

/// One request, and how people see its answer.
pub struct Call {
    method: Method,
    path: String,
    body: Option<Value>,
    /// The field with the rows, and the columns: head and place of each. None: one thing.
    columns: Option<(&'static str, table::Columns)>,
}

impl Call {
    fn list(path: String, rows: &'static str, columns: table::Columns) -> Self {
        Self { method: Method::GET, path, body: None, columns: Some((rows, columns)) }
    }

    fn get(path: String) -> Self {
        Self { method: Method::GET, path, body: None, columns: None }
    }

    fn post(path: String, body: Value) -> Self {
        Self { method: Method::POST, path, body: Some(body), columns: None }
    }

    async fn run(&self, client: &Client, output: Output) -> anyhow::Result<()> {
        let reply = match &self.body {
            Some(body) if self.method == Method::POST => client.post(&self.path, body).await?,
            _ => client.get(&self.path).await?,
        };
        let mut out = std::io::stdout();
        match (output, &self.columns) {
            (Output::Json, _) => writeln!(out, "{}", reply.text)?,
            (Output::Text, Some((rows, columns))) => {
                let page = reply.json();
                table::print(&mut out, &page[*rows], columns)?;
                if page["has_more"] == true {
                    writeln!(out, "there are more: see --limit")?;
                }
            }
            (Output::Text, None) if reply.text.is_empty() => (),
            (Output::Text, None) => show(&mut out, &reply.json())?,
        }
        Ok(())
    }
}

/// Runs a command of a group, once or again and again.
pub async fn run<C: Subcommand + Into<Call>>(args: ApiArgs<C>) -> anyhow::Result<()> {
    let client = Client::new(&args.client)?;
    let call: Call = args.command.into();
    loop {
        call.run(&client, args.output).await?;
        if !args.watch || call.method != Method::GET {
            return Ok(());
        }
        tokio::time::sleep(WATCH_PERIOD).await;
        if args.output == Output::Text {
            // Clears the screen, and begins at its top.
            write!(std::io::stdout(), "\x1b[2J\x1b[H")?;
        }
    }
}

/// Says why a job is where it is: each condition, and whether it is met.
pub async fn explain(args: JobArgs) -> anyhow::Result<()> {
    let client = Client::new(&args.client)?;
    let reply = client.get(&format!("/v1/jobs/{}/explain", encoded(&args.job_id))).await?;
    let mut out = std::io::stdout();
    if args.output == Output::Json {
        writeln!(out, "{}", reply.text)?;
        return Ok(());
    }
    let explained = reply.json();
    writeln!(out, "{}: {}", word(&explained["state"]), word(&explained["summary"]))?;
    for gate in explained["gates"].as_array().into_iter().flatten() {
        let mark = if gate["open"] == true { "met" } else { "waits" };
        writeln!(out, "  {mark:<6} {:<14} {}", word(&gate["gate"]), word(&gate["message"]))?;
    }
    if let Some(at) = explained["next_change_at"].as_str() {
        writeln!(out, "next change at {at}")?;
    }
    Ok(())
}

/// Prints a job's logs.
pub async fn logs(args: LogsArgs) -> anyhow::Result<()> {
    let client = Client::new(&args.job.client)?;
    let path = format!("/v1/jobs/{}/logs", encoded(&args.job.job_id));
    let mut out = std::io::stdout();
    let mut print = |chunk: &Value| match args.job.output {
        Output::Json => writeln!(out, "{chunk}"),
        Output::Text => write!(out, "{}", chunk["data"].as_str().unwrap_or_default()),
    };
    if args.follow {
        return client.events(&format!("{path}/stream"), |chunk| Ok(print(chunk)?)).await;
    }
    let mut cursor = String::new();
    loop {
        let page = client.get(&format!("{path}{cursor}")).await?.json();
        for chunk in page["logs"].as_array().into_iter().flatten() {
            print(chunk)?;
        }
        match page["next_cursor"].as_str() {
            Some(next) => cursor = format!("?cursor={}", encoded(next)),
            None => return Ok(()),
        }
    }
}

/// A body that names a job type, if one is given.
fn of_type(job_type: Option<String>) -> Value {
    job_type.map_or_else(|| json!({}), |it| json!({"job_type": it}))
}
