//! `fencepost ready`: asks a node whether it is ready. For health checks without curl.

use std::{io::Write, time::Duration};

use anyhow::{Context, ensure};

use crate::client::Failure;

/// A node that does not answer within this time is not ready.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Prints the node's answer.
///
/// # Errors
/// When it is not ready, with the reason, or does not answer.
pub async fn run(url: &str) -> anyhow::Result<()> {
    let client = reqwest::Client::builder().timeout(ANSWER_TIMEOUT).build()?;
    let asked = client.get(format!("{}/readyz", url.trim_end_matches('/'))).send().await;
    let answer = asked.map_err(Failure::Unreachable).with_context(|| url.to_owned())?;
    let status = answer.status();
    let said = answer.text().await.unwrap_or_default();
    ensure!(status.is_success(), "{url} is not ready: {}", said.trim());
    Ok(write!(std::io::stdout(), "{said}")?)
}
