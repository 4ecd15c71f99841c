//! The certificate of an address.

use std::time::Duration;

use anyhow::Context;
use reqwest::{redirect::Policy, tls::TlsInfo};
use x509_parser::parse_x509_certificate;

/// Longest time for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// The end of the certificate of a URL, since 1970; none, if the URL is not `https`.
///
/// # Errors
/// When it is not valid, or nothing answers.
pub(super) async fn end(url: &str) -> anyhow::Result<Option<Duration>> {
    if !url.starts_with("https://") {
        return Ok(None);
    }
    let client = reqwest::Client::builder().timeout(ANSWER_TIMEOUT).tls_info(true);
    // The answer to a redirect would show the certificate of another host.
    let client = client.redirect(Policy::none()).build()?;
    let answer = client.head(url).send().await?;
    let shown = answer.extensions().get::<TlsInfo>().and_then(TlsInfo::peer_certificate);
    let (_, certificate) = parse_x509_certificate(shown.context("it shows no certificate")?)
        .context("its certificate cannot be read")?;
    let seconds = certificate.validity().not_after.timestamp();
    Ok(Some(Duration::from_secs(u64::try_from(seconds).unwrap_or(0))))
}
