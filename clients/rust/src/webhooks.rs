//! Checking that a webhook comes from the server.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use reqwest::header::HeaderMap;
use ring::hmac;
use serde::Deserialize;

/// How much the clocks of two machines may differ, and how old a webhook may be.
pub const WEBHOOK_TOLERANCE: Duration = Duration::from_secs(300);

/// A shorter secret is none: as when the variable that should hold it is empty.
const MIN_SECRET_BYTES: usize = 24;

/// An event as it is sent to an endpoint.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct WebhookEvent {
    /// Such as `job.dead_lettered`. Others come later: ignore those that you do not know.
    #[serde(rename = "type")]
    pub kind: String,
    /// When it happened, as RFC 3339.
    pub timestamp: String,
    /// What it is about.
    pub data: serde_json::Value,
}

/// The request was not signed with this secret, or is too old.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InvalidWebhook(&'static str);

impl std::fmt::Display for InvalidWebhook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for InvalidWebhook {}

/// Seconds since 1970, by this machine's clock.
#[allow(clippy::disallowed_methods)] // A library has no database whose clock it could ask.
fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Checks a request, and returns its event. `secret` is the endpoint's, `whsec_…`; the body is as
/// it came.
///
/// # Errors
/// [`InvalidWebhook`].
pub fn verify_webhook(
    secret: &str,
    headers: &HeaderMap,
    body: &[u8],
) -> Result<WebhookEvent, InvalidWebhook> {
    let header = |name| {
        let value = headers.get(name).and_then(|it| it.to_str().ok());
        value.ok_or(InvalidWebhook("no signed webhook"))
    };
    let (id, timestamp) = (header("webhook-id")?, header("webhook-timestamp")?);
    let seconds: u64 = timestamp.parse().map_err(|_| InvalidWebhook("no signed webhook"))?;
    if unix_seconds().abs_diff(seconds) > WEBHOOK_TOLERANCE.as_secs() {
        return Err(InvalidWebhook("it is too old, or the clocks differ"));
    }
    let key = secret.strip_prefix("whsec_").unwrap_or(secret);
    let key = BASE64_STANDARD.decode(key).ok().filter(|it| it.len() >= MIN_SECRET_BYTES);
    let key = key.ok_or(InvalidWebhook("the secret is not one"))?;
    let key = hmac::Key::new(hmac::HMAC_SHA256, &key);
    let signed = [id.as_bytes(), b".", timestamp.as_bytes(), b".", body].concat();
    let fits = |signature: &str| {
        let sent = signature.strip_prefix("v1,").and_then(|it| BASE64_STANDARD.decode(it).ok());
        sent.is_some_and(|it| hmac::verify(&key, &signed, &it).is_ok())
    };
    if !header("webhook-signature")?.split(' ').any(fits) {
        return Err(InvalidWebhook("no signature is made with this secret"));
    }
    serde_json::from_slice(body).map_err(|_| InvalidWebhook("the body is no event"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    const BODY: &str = r#"{"type":"job.succeeded","timestamp":"2026-01-31T12:00:00Z","data":{}}"#;

    fn signed(age: u64) -> HeaderMap {
        let timestamp = (unix_seconds() - age).to_string();
        let key = BASE64_STANDARD.decode(&SECRET["whsec_".len()..]).expect("base64");
        let key = hmac::Key::new(hmac::HMAC_SHA256, &key);
        let made = hmac::sign(&key, format!("evt_1.{timestamp}.{BODY}").as_bytes());
        // As while a secret is rotated: one signature of two is ours.
        let signature = format!("v1,AAAA v1,{}", BASE64_STANDARD.encode(made));
        let headers = [
            ("webhook-id", "evt_1".to_owned()),
            ("webhook-timestamp", timestamp),
            ("webhook-signature", signature),
        ];
        let header = |(name, value): (&'static str, String)| {
            (name.parse().expect("a name"), value.parse().expect("a value"))
        };
        headers.map(header).into_iter().collect()
    }

    #[test]
    fn a_signed_webhook_is_accepted_and_any_other_refused() {
        let event = verify_webhook(SECRET, &signed(0), BODY.as_bytes()).expect("an event");
        assert_eq!(event.kind, "job.succeeded");
        assert!(verify_webhook(SECRET, &signed(0), b"{}").is_err());
        assert!(verify_webhook("", &signed(0), BODY.as_bytes()).is_err());
        assert!(verify_webhook("whsec_AAAA", &signed(0), BODY.as_bytes()).is_err());
        assert!(verify_webhook(SECRET, &signed(400), BODY.as_bytes()).is_err());
        assert!(verify_webhook(SECRET, &HeaderMap::new(), BODY.as_bytes()).is_err());
    }
}
