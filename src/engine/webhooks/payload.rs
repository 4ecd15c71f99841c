//! The payload of a delivery's job: the id of its event, and the body that is sent.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use fencepost_domain::{ids::EventId, webhook::WebhookEvent};

/// See above.
#[derive(Debug, Serialize, Deserialize)]
pub struct Payload {
    /// The same for all endpoints and tries.
    pub event_id: String,
    /// When the event happened.
    pub at: DateTime<Utc>,
    /// Number of deliveries that have led to this one, itself included.
    #[serde(default = "first_hop")]
    pub hop: i16,
    /// The URL that a job or batch has named, below that of the endpoint. Null: the endpoint's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// Sent byte for byte.
    pub body: Box<RawValue>,
}

impl Payload {
    /// As JSON.
    pub fn of(
        id: EventId,
        event: &WebhookEvent,
        hop: i16,
        url: Option<String>,
    ) -> sqlx::Result<String> {
        let undecodable = |error: serde_json::Error| sqlx::Error::Decode(error.into());
        let body = serde_json::value::to_raw_value(event).map_err(undecodable)?;
        let payload = Self { event_id: id.to_string(), at: event.timestamp, hop, url, body };
        serde_json::to_string(&payload).map_err(undecodable)
    }

    /// The payload of one event, as JSON: whole, and, if that is larger than this many bytes, a
    /// second time without what the job shows, too.
    pub fn long_and_short(
        event: WebhookEvent,
        hop: i16,
        url: Option<String>,
        bytes: usize,
    ) -> sqlx::Result<[Option<String>; 2]> {
        let id = EventId::generate();
        let long = Self::of(id, &event, hop, url.clone())?;
        let short = match long.len() > bytes {
            true => Some(Self::of(id, &event.shortened(), hop, url)?),
            false => None,
        };
        Ok([Some(long), short])
    }

    /// Of a job.
    pub fn read(payload: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(payload)
    }
}

/// That of events which no delivery has led to.
pub const fn first_hop() -> i16 {
    1
}

/// The result of a delivery's job: what the endpoint answered.
#[derive(Debug, Serialize, Deserialize)]
pub struct Delivered {
    pub status: u16,
    /// The beginning of the answer's body.
    pub text: String,
}
