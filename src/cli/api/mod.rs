//! Commands for people on call, over the API: queues, dead letters, workers, schedules, workflows,
//! API keys, and why a job waits. Each is one request; lists are tables.

mod commands;
mod groups;
mod keys;
pub mod request;
mod shared_limits;

use std::{
    io::{IsTerminal, Write},
    time::{Duration, Instant},
};

use anyhow::bail;
use clap::{Args, Subcommand};
use reqwest::Method;
use serde_json::{Value, json};

pub use self::{
    commands::{DeadLetters, Queues, Schedules, Workers, Workflows},
    groups::Groups,
    keys::ApiKeys,
    shared_limits::SharedLimits,
};
use super::{
    jobs::{Output, show},
    table,
    words::{encoded, word},
};
use crate::client::{Client, ClientArgs, Failure};

/// Between two requests of `--watch`.
const WATCH_PERIOD: Duration = Duration::from_secs(2);

/// Before a stream is opened again.
const RECONNECT_PAUSE: Duration = Duration::from_secs(1);
/// A stream is opened again for this long after the last answer.
const MAX_OUTAGE: Duration = Duration::from_secs(60);

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

    fn put(path: String, body: Value) -> Self {
        Self { method: Method::PUT, path, body: Some(body), columns: None }
    }

    fn delete(path: String) -> Self {
        Self { method: Method::DELETE, path, body: None, columns: None }
    }

    async fn run(&self, client: &Client, output: Output) -> anyhow::Result<()> {
        let body = self.body.as_ref().map(Value::to_string);
        let reply = client.call(self.method.clone(), &self.path, None, body).await?;
        let mut out = std::io::stdout();
        match (output, &self.columns) {
            (Output::Json, _) => writeln!(out, "{}", reply.text)?,
            (Output::Text, Some((rows, columns))) => {
                let page = reply.json();
                table::print(&mut out, table::rows(&page, rows)?, columns)?;
                table::say_more(&page)?;
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
    if args.watch && call.method != Method::GET {
        bail!("--watch is for commands that only read");
    }
    loop {
        match call.run(&client, args.output).await {
            // A node that restarts must not end the view.
            Err(error) if args.watch && Failure::is_passing(&error) => {
                writeln!(std::io::stderr(), "{error}; asking again")?;
            }
            result => result?,
        }
        if !args.watch {
            return Ok(());
        }
        tokio::time::sleep(WATCH_PERIOD).await;
        let mut out = std::io::stdout();
        if out.is_terminal() {
            // Clears the screen, and begins at its top.
            write!(out, "\x1b[2J\x1b[H")?;
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
    let job = format!("/v1/jobs/{}", encoded(&args.job.job_id));
    let mut out = std::io::stdout();
    let is_terminal = out.is_terminal();
    let mut print = |chunk: &Value| match (args.job.output, chunk["data"].as_str()) {
        (Output::Json, _) => writeln!(out, "{chunk}"),
        (Output::Text, None) => writeln!(out, "[this key may not read logs: payload:read]"),
        (Output::Text, Some(text)) if is_terminal => write!(out, "{}", printable(text)),
        (Output::Text, Some(text)) => write!(out, "{text}"),
    };
    if args.follow {
        return follow(&client, &job, |chunk| Ok(print(chunk)?)).await;
    }
    let mut cursor = String::new();
    loop {
        let page = client.get(&format!("{job}/logs{cursor}")).await?.json();
        for chunk in table::rows(&page, "logs")?.as_array().into_iter().flatten() {
            print(chunk)?;
        }
        match page["next_cursor"].as_str() {
            Some(next) => cursor = format!("?cursor={}", encoded(next)),
            None => return Ok(()),
        }
    }
}

/// Follows a job's logs until the job has ended. A stream that ends earlier, as when a node stops,
/// is opened again.
async fn follow(
    client: &Client,
    job: &str,
    mut print: impl FnMut(&Value) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let (mut last, mut answered) = (None, Instant::now());
    loop {
        let seen = async {
            client.events(&format!("{job}/logs/stream"), &mut last, &mut print).await?;
            Ok(client.get(job).await?.json()["completed_at"].is_string())
        };
        match seen.await {
            Ok(true) => return Ok(()),
            Ok(false) => answered = Instant::now(),
            Err(error) if Failure::is_passing(&error) && answered.elapsed() < MAX_OUTAGE => (),
            Err(error) => return Err(error),
        }
        tokio::time::sleep(RECONNECT_PAUSE).await;
    }
}

/// A text without control characters that could change the terminal.
pub fn printable(text: &str) -> String {
    let is_harmless = |it: &char| !it.is_control() || matches!(it, '\n' | '\t');
    text.chars().filter(is_harmless).collect()
}

/// A body that names a job type, if one is given.
fn of_type(job_type: Option<String>) -> Value {
    job_type.map_or_else(|| json!({}), |it| json!({"job_type": it}))
}
