//! `fencepost api`: any request, with the server and the key of all commands.

use std::io::{Read, Write};

use anyhow::{Context, bail};
use clap::Args;
use reqwest::Method;

use crate::client::{Client, ClientArgs};

/// Options of `api`.
#[derive(Debug, Args)]
pub struct RequestArgs {
    #[command(flatten)]
    client: ClientArgs,

    /// Method
    #[arg(value_name = "METHOD", value_parser = ["GET", "POST", "PUT", "PATCH", "DELETE"])]
    method: String,

    /// Path with its query, such as /v1/queues
    #[arg(value_name = "PATH")]
    path: String,

    /// Body as JSON; `-` reads it from standard input
    #[arg(value_name = "JSON")]
    body: Option<String>,

    /// Idempotency key
    #[arg(long, value_name = "KEY")]
    idempotency_key: Option<String>,
}

/// Sends the request and prints its answer as it came.
pub async fn run(args: RequestArgs) -> anyhow::Result<()> {
    if !args.path.starts_with('/') {
        bail!("PATH: must begin with a slash: /v1/queues");
    }
    let body = match args.body.as_deref() {
        Some("-") => {
            let mut text = String::new();
            std::io::stdin().read_to_string(&mut text).context("cannot read standard input")?;
            Some(text)
        }
        body => body.map(str::to_owned),
    };
    let method: Method = args.method.parse()?;
    let client = Client::new(&args.client)?;
    let key = args.idempotency_key.as_deref();
    let reply = client.call(method, &args.path, key, body).await?;
    if !reply.text.is_empty() {
        writeln!(std::io::stdout(), "{}", reply.text)?;
    }
    Ok(())
}
