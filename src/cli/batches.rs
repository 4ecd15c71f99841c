//! `fencepost batches`.

use std::io::Write;

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::{
    jobs::{Output, show},
    words::{coloured, encoded, word},
};
use crate::client::{Client, ClientArgs};

/// Options of `batches`.
#[derive(Debug, Args)]
pub struct BatchesArgs {
    #[command(flatten)]
    client: ClientArgs,

    /// Output format
    #[arg(short, long, value_enum, default_value_t = Output::Text, global = true)]
    output: Output,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Create a batch and print its id; add jobs with `enqueue --batch-id`
    Create {
        /// Display name
        #[arg(long, value_name = "NAME")]
        name: Option<String>,
        /// Idempotency key: repeating the command with the same key creates the batch once
        #[arg(long, value_name = "KEY")]
        idempotency_key: Option<String>,
    },
    /// Seal a batch: it completes when all of its jobs have ended
    Seal {
        /// Batch id
        batch_id: String,
    },
    /// Show a batch
    Get {
        /// Batch id
        batch_id: String,
    },
    /// List batches, newest first
    List {
        /// Number of batches, from 1 to 50
        #[arg(long, default_value_t = 20, value_name = "N")]
        limit: u32,
    },
}

/// Runs the command.
pub async fn run(args: BatchesArgs) -> anyhow::Result<()> {
    let client = Client::new(&args.client)?;
    let mut out = std::io::stdout();
    let (reply, is_new) = match args.command {
        Command::Create { name, idempotency_key } => {
            let body = name.map_or_else(|| json!({}), |it| json!({"name": it})).to_string();
            (client.post_once("/v1/batches", idempotency_key.as_deref(), body).await?, true)
        }
        Command::Seal { batch_id } => {
            let path = format!("/v1/batches/{}/seal", encoded(&batch_id));
            (client.post(&path, &json!({})).await?, false)
        }
        Command::Get { batch_id } => {
            (client.get(&format!("/v1/batches/{}", encoded(&batch_id))).await?, false)
        }
        Command::List { limit } => {
            let page = client.get(&format!("/v1/batches?limit={limit}")).await?;
            if args.output == Output::Text {
                return list(&mut out, &page.json());
            }
            (page, false)
        }
    };
    match args.output {
        Output::Json => writeln!(out, "{}", reply.text)?,
        Output::Text if is_new => writeln!(out, "{}", word(&reply.json()["id"]))?,
        Output::Text => show(&mut out, &reply.json())?,
    }
    Ok(())
}

/// Number of the batch's jobs that are dead letters, or were cancelled.
fn failed(batch: &Value) -> i64 {
    let count = |field: &str| batch[field].as_i64().unwrap_or_default();
    count("dead_letter_jobs") + count("cancelled_jobs")
}

fn list(out: &mut impl Write, page: &Value) -> anyhow::Result<()> {
    writeln!(
        out,
        "{:<33} {:<12} {:>9} {:>9} {:>9} NAME",
        "BATCH", "STATE", "JOBS", "OPEN", "FAILED"
    )?;
    for batch in page["batches"].as_array().into_iter().flatten() {
        writeln!(
            out,
            "{:<33} {} {:>9} {:>9} {:>9} {}",
            word(&batch["id"]),
            coloured(&word(&batch["state"])),
            word(&batch["total_jobs"]),
            word(&batch["open_jobs"]),
            failed(batch),
            batch["name"].as_str().unwrap_or("-"),
        )?;
    }
    if page["has_more"] == true {
        writeln!(out, "there are more; --limit is at most 50")?;
    }
    Ok(())
}
