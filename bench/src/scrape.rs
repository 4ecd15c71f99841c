//! Reading the server's own metrics.

use anyhow::Context;

use super::client::{Client, Target};

/// The series of a metric: their labels, as they are written, and their values.
///
/// # Errors
/// When the server does not answer.
pub async fn lines(metrics_url: &str, metric: &str) -> anyhow::Result<Vec<(String, f64)>> {
    let metrics = metrics_url.strip_prefix("http://").context("the address of the metrics")?;
    let (authority, path) = metrics.split_once('/').unwrap_or((metrics, ""));
    let target =
        Target { authority: authority.to_owned(), api_key: String::new(), payload_bytes: 0 };
    let reply = Client::connect(&target).await?.get(&format!("/{path}")).await?;
    let text = String::from_utf8(reply.to_vec())?;
    let found = text.lines().filter_map(|line| {
        let (name, value) = line.rsplit_once(' ')?;
        let labels = name.strip_prefix(metric)?;
        let is_whole = labels.is_empty() || labels.starts_with('{');
        is_whole.then_some((labels.to_owned(), value.parse().ok()?))
    });
    Ok(found.collect())
}
