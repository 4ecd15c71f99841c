//! Retrying, cancelling, pausing, resuming and replaying: one job, or all that match a search, with
//! progress.

use std::{
    io::{IsTerminal, Write},
    time::Duration,
};

use anyhow::bail;
use clap::Args;
use serde_json::{Value, json};

use super::{Output, job_view, show};
use crate::{
    cli::words::{because, encoded, word},
    client::Client,
};

/// Between two looks at a bulk operation.
const PROGRESS_PERIOD: Duration = Duration::from_millis(500);

/// One job, or those that match a search.
#[derive(Debug, Args)]
pub struct Which {
    /// Job id
    #[arg(required_unless_present = "search")]
    job_id: Option<String>,
    /// Reason, shown in the job's history
    #[arg(long, value_name = "TEXT", conflicts_with = "search")]
    reason: Option<String>,
    /// All jobs that match this search line, as in `jobs list`, instead of one
    #[arg(long, value_name = "SEARCH", conflicts_with = "job_id")]
    search: Option<String>,
    /// With --search: only count them
    #[arg(long, requires = "search", conflicts_with = "job_id")]
    dry_run: bool,
    /// With --search: maximum number of jobs, oldest first
    #[arg(long, value_name = "N", requires = "search", conflicts_with = "job_id")]
    max: Option<i64>,
    /// With --search: maximum jobs per second
    #[arg(long, value_name = "N", requires = "search", conflicts_with = "job_id")]
    rate_per_second: Option<i64>,
}

/// Does it, and prints the job, or waits for the operation and prints it.
pub(super) async fn run(
    client: &Client,
    what: &str,
    which: Which,
    output: Output,
) -> anyhow::Result<()> {
    let mut out = std::io::stdout();
    // A variable that is not set must not become all jobs.
    if which.search.as_ref().is_some_and(|it| it.trim().is_empty()) {
        bail!("--search: must not be empty");
    }
    let Some(search) = which.search else {
        let id = which.job_id.unwrap_or_default();
        let path = format!("/v1/jobs/{}/{what}", encoded(&id));
        let job = client.post(&path, &because(which.reason.as_deref())).await?;
        match output {
            Output::Json => writeln!(out, "{}", job.text)?,
            Output::Text => job_view::print(&mut out, &job, None)?,
        }
        return Ok(());
    };
    let mut request = json!({"filter": {"q": search}, "dry_run": which.dry_run});
    for (name, value) in [("max", which.max), ("rate_per_second", which.rate_per_second)] {
        if let Some(value) = value {
            request[name] = json!(value);
        }
    }
    let begun = client.post(&format!("/v1/jobs/{what}"), &request).await?.json();
    let Some(id) = begun["operation"]["id"].as_str() else {
        match output {
            Output::Json => writeln!(out, "{begun}")?,
            Output::Text => {
                let least = if begun["is_capped"] == true { "at least " } else { "" };
                writeln!(out, "{least}{} jobs match", begun["count"])?;
            }
        }
        return Ok(());
    };
    let operation = ended(client, id, &begun["count"]).await?;
    match output {
        Output::Json => writeln!(out, "{operation}")?,
        Output::Text => show(&mut out, &operation)?,
    }
    match operation["state"].as_str() {
        Some("succeeded") => Ok(()),
        _ => bail!("the operation is {}", word(&operation["state"])),
    }
}

/// Waits until an operation has ended. On a terminal it shows the progress.
async fn ended(client: &Client, id: &str, expected: &Value) -> anyhow::Result<Value> {
    let mut err = std::io::stderr();
    let is_shown = err.is_terminal();
    loop {
        let operation = client.get(&format!("/v1/operations/{id}")).await?.json();
        if is_shown {
            write!(err, "\r{} of {expected} jobs", operation["done"])?;
        }
        if operation["state"] != "running" {
            if is_shown {
                writeln!(err)?;
            }
            return Ok(operation);
        }
        tokio::time::sleep(PROGRESS_PERIOD).await;
    }
}
