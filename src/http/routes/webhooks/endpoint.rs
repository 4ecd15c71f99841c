//! An endpoint, as it is shown.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use fencepost_engine::webhooks::EndpointRow;

use crate::settings::Settings;

/// State of an endpoint: events are sent to an enabled one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EndpointState {
    /// Events are sent to it.
    Enabled,
    /// New events are not sent to it, and deliveries to it wait.
    Disabled,
}

/// A URL of yours, and the events that are sent to it.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Endpoint {
    /// Id of the endpoint.
    #[schema(example = "ep_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub id: String,
    /// Where events are sent.
    #[schema(example = "https://example.com/hooks/fencepost")]
    pub url: String,
    /// Description for people.
    #[schema(required)]
    pub description: Option<String>,
    /// Types of events: single ones, those of a group (`job.*`), or all (`*`).
    #[schema(example = json!(["job.dead_lettered"]))]
    pub events: Vec<String>,
    /// Only events about jobs of these queues; none: of all.
    #[schema(example = json!([]))]
    pub queues: Vec<String>,
    /// Only events about jobs of these types, or of those that begin so (`mail.*`); none: of all.
    #[schema(example = json!(["mail.*"]))]
    pub job_types: Vec<String>,
    /// True if jobs, batches and workflows may name its URL, or one below it, as `callback_url`.
    #[serde(default)]
    #[schema(required)]
    pub callbacks: bool,
    /// Deliveries that each node sends at a time.
    #[schema(example = 5)]
    pub max_in_flight: i32,
    /// Seconds after which a try without an answer has failed.
    #[schema(example = 10)]
    pub timeout_seconds: i32,
    /// State.
    pub state: EndpointState,
    /// Why it is disabled: `by_user`; `failing`: 72 hours without a success; or `gone`: it answered
    /// with 410.
    #[schema(required)]
    pub disabled_reason: Option<String>,
    /// When it was created.
    pub created_at: DateTime<Utc>,
    /// When its settings last changed.
    pub updated_at: DateTime<Utc>,
    /// Last success, to within some seconds; null: never.
    #[schema(required)]
    pub last_success_at: Option<DateTime<Utc>>,
    /// Last failure, likewise.
    #[schema(required)]
    pub last_failure_at: Option<DateTime<Utc>>,
    /// First failure since the last success; null: the last try succeeded.
    #[schema(required)]
    pub failing_since: Option<DateTime<Utc>>,
    /// Events that were not sent to it, because 50,000 deliveries to it waited.
    #[schema(example = 0)]
    pub dropped_events: i64,
    /// Version of the settings, also in the header `ETag`. A write with it as `If-Match` is refused
    /// if they have changed since.
    #[serde(default)]
    #[schema(required, example = "\"4f0c2a9d1be87a3355d0c61e\"")]
    pub etag: String,
}

impl Settings for Endpoint {
    const FIELDS: &'static [&'static str] = &[
        "url",
        "description",
        "events",
        "queues",
        "job_types",
        "callbacks",
        "max_in_flight",
        "timeout_seconds",
        "state",
    ];

    fn etag(&mut self) -> &mut String {
        &mut self.etag
    }
}

impl From<EndpointRow> for Endpoint {
    fn from(row: EndpointRow) -> Self {
        let is_disabled = row.disabled_at.is_some();
        Self {
            id: row.id.to_string(),
            url: row.url,
            description: row.description,
            events: row.events,
            queues: row.queues,
            job_types: row.job_types,
            callbacks: row.takes_callbacks,
            max_in_flight: row.max_in_flight,
            timeout_seconds: row.timeout_seconds,
            state: if is_disabled { EndpointState::Disabled } else { EndpointState::Enabled },
            disabled_reason: row.disabled_reason,
            created_at: row.created_at,
            updated_at: row.updated_at,
            last_success_at: row.last_success_at,
            last_failure_at: row.last_failure_at,
            failing_since: row.failing_since,
            dropped_events: row.dropped_events,
            etag: String::new(),
        }
        .tagged()
    }
}

/// An endpoint with its secret, which is in this answer and nowhere else.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct EndpointWithSecret {
    /// The endpoint.
    pub endpoint: Endpoint,
    /// Signs deliveries. Libraries for Standard Webhooks take it as it is.
    #[schema(example = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYo=")]
    pub secret: String,
}
