//! `/v1/queues/{queue}/push`: a queue whose jobs are sent to a URL.

use std::collections::{BTreeMap, BTreeSet};

use axum::{Json as Reply, extract::State, http::StatusCode};
use chrono::{DateTime, Utc};
use fencepost_domain::{error::Error, limits, outbound, push::header_problem, webhook};
use fencepost_engine::webhooks::push::{self, PushRow, PushSettings};
use fencepost_web::{
    app::App,
    auth::{Caller, Pushing, Webhooks},
    wire::{
        extract::{Json, NameInPath, RequestBody},
        openapi::{chars, range},
        validate::Check,
    },
};
use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::ToSchema;

use crate::{
    error::ErrorBody,
    routes::{
        audit::{self, NewAuditEntry},
        webhooks::{RotateSecretRequest, read_url},
    },
};

const DEFAULT_TIMEOUT_SECONDS: i32 = 30;
const DEFAULT_IN_FLIGHT: i32 = 10;

/// Where a queue's jobs are sent.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Push {
    /// The queue.
    pub queue: String,
    /// Where its jobs are sent.
    #[schema(example = "https://example.com/jobs")]
    pub url: String,
    /// Longest time of a request, in seconds; a job with a shorter `timeout_seconds` has that.
    #[schema(example = 30)]
    pub timeout_seconds: i32,
    /// Jobs that each node sends at a time, at most.
    #[schema(example = 10)]
    pub max_in_flight: i32,
    /// Names of the headers that requests carry besides the server's; their values are not shown.
    pub header_names: Vec<String>,
    /// True if its jobs wait for workers instead.
    pub paused: bool,
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
    /// First failure since the last success; null: the last request succeeded.
    #[schema(required)]
    pub failing_since: Option<DateTime<Utc>>,
    /// The last error: `http_` and a status, `timeout`, `not_connected`, `no_address`,
    /// `address_refused`, `broken_answer`, `headers_too_large` or `no_turn`.
    #[schema(required, example = "http_503")]
    pub last_error: Option<String>,
    /// True if no node sends its jobs although it is not paused: more queues are pushed than the
    /// nodes can serve, or they cannot use its URL or secret. To within a minute.
    pub not_served: bool,
}

impl From<PushRow> for Push {
    fn from(row: PushRow) -> Self {
        Self {
            queue: row.queue,
            url: row.url,
            timeout_seconds: row.timeout_seconds,
            max_in_flight: row.max_in_flight,
            header_names: row.header_names,
            paused: row.paused_at.is_some(),
            created_at: row.created_at,
            updated_at: row.updated_at,
            last_success_at: row.last_success_at,
            last_failure_at: row.last_failure_at,
            failing_since: row.failing_since,
            last_error: row.last_error,
            not_served: row.is_unserved,
        }
    }
}

/// A push, with its secret if that is new.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct PushWithSecret {
    /// The push.
    pub push: Push,
    /// Signs requests, and is in this answer and nowhere else. Null: the push keeps its earlier
    /// one.
    #[schema(required, example = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYo=")]
    pub secret: Option<String>,
}

/// Where to send a queue's jobs.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"url": "https://example.com/jobs", "timeout_seconds": 30}))]
pub struct PutPushRequest {
    /// `https://`, a host on the public internet, and the port 443 or one from 1024 on.
    #[schema(extensions(("bounds" = json!(chars(1, outbound::MAX_URL_CHARS)))))]
    url: String,
    /// Longest time of a request, in seconds. Default: 30.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_PUSH_TIMEOUT_SECONDS)))))]
    timeout_seconds: Option<i32>,
    /// Jobs that each node sends at a time. Default: 10.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_PUSH_IN_FLIGHT)))))]
    max_in_flight: Option<i32>,
    /// At most 10 headers that requests carry besides the server's, such as `Authorization`, with
    /// 4,096 characters in all. Values are secrets: they are not shown again. Default: as before,
    /// if the URL keeps its scheme, host and port; else none.
    #[schema(value_type = Option<BTreeMap<String, String>>,
             example = json!({"Authorization": "Bearer …"}))]
    headers: Option<BTreeMap<String, SecretString>>,
    /// True lets the jobs wait for workers instead. Default: false.
    paused: Option<bool>,
}

impl RequestBody for PutPushRequest {}

/// Read a queue's push.
#[utoipa::path(
    get, path = "/queues/{queue}/push", tag = "queues", operation_id = "queues_get_push",
    security(("api_key" = ["webhooks"]), ("session" = ["admin"])),
    params(("queue" = String, Path, description = "The queue.", example = "default")),
    responses(
        (status = 200, description = "Where its jobs are sent.", body = Push),
        (status = 404, description = "Its jobs are not sent to a URL.", body = ErrorBody),
    ),
)]
pub async fn get(
    caller: Caller<Webhooks>,
    State(app): State<App>,
    NameInPath(queue): NameInPath,
) -> Result<Reply<Push>, Error> {
    Ok(Reply(push::find(&app.engine, caller.project_id, &queue).await?.into()))
}

/// Push a queue.
///
/// Sends the queue's jobs to a URL, from now on: a request is an attempt, and its answer is the
/// ack. Workers that poll the queue get jobs as well. The queue need not exist.
#[utoipa::path(
    put, path = "/queues/{queue}/push", tag = "queues", operation_id = "queues_put_push",
    security(("api_key" = ["webhooks", "manage", "work"]), ("session" = ["admin"])),
    params(("queue" = String, Path, description = "The queue.", example = "default")),
    request_body = PutPushRequest,
    responses(
        (status = 200, description = "It is changed.", body = PushWithSecret),
        (status = 201, description = "It is created. Its secret is shown only once.", body = PushWithSecret),
    ),
)]
pub async fn put(
    caller: Caller<Pushing>,
    State(app): State<App>,
    NameInPath(queue): NameInPath,
    Json(request): Json<PutPushRequest>,
) -> Result<(StatusCode, Reply<PushWithSecret>), Error> {
    let mut check = Check::default();
    check.name("queue", &queue, limits::MAX_QUEUE_CHARS);
    let url = match read_url(&app, &request.url) {
        Ok(url) => String::from(url),
        Err(message) => {
            check.refuse("url", message);
            request.url
        }
    };
    let settings = PushSettings {
        url,
        timeout_seconds: request.timeout_seconds.unwrap_or(DEFAULT_TIMEOUT_SECONDS),
        max_in_flight: request.max_in_flight.unwrap_or(DEFAULT_IN_FLIGHT),
        is_paused: request.paused.unwrap_or(false),
    };
    let max = limits::MAX_PUSH_TIMEOUT_SECONDS;
    check.range("timeout_seconds", settings.timeout_seconds, 1, max);
    check.range("max_in_flight", settings.max_in_flight, 1, limits::MAX_PUSH_IN_FLIGHT);
    check_headers(request.headers.as_ref(), &mut check);
    check.finish()?;
    app.accounts.addresses.require_verified(caller.project_id).await?;
    caller.require_step_up(&app).await?;
    let keys = &app.accounts.master_keys;
    let headers = request.headers.as_ref();
    let (row, secret) =
        push::put(&app.engine, caller.tenant(), keys, &queue, &settings, headers).await?;
    let after = json!({"timeout_seconds": row.timeout_seconds, "max_in_flight": row.max_in_flight,
                       "paused": row.paused_at.is_some(), "header_names": row.header_names});
    let entry = NewAuditEntry {
        after: Some(after.to_string()),
        ..NewAuditEntry::to("queue.push_changed", queue)
    };
    audit::note(&app, &caller, entry).await;
    let status = if secret.is_some() { StatusCode::CREATED } else { StatusCode::OK };
    let secret = secret.map(|it| webhook::secret_text(&it));
    Ok((status, Reply(PushWithSecret { push: row.into(), secret })))
}

fn check_headers(headers: Option<&BTreeMap<String, SecretString>>, check: &mut Check) {
    let Some(headers) = headers else { return };
    let (count, max) = (headers.len(), limits::MAX_PUSH_HEADERS);
    if count > max {
        check.refuse("headers", format!("must have at most {max} entries, has {count}"));
        return;
    }
    let chars = |it: &str| it.chars().count();
    let sent: usize =
        headers.iter().map(|(name, value)| chars(name) + chars(value.expose_secret())).sum();
    let max = limits::MAX_PUSH_HEADERS_CHARS;
    if sent > max {
        check.refuse("headers", format!("must have at most {max} characters, has {sent}"));
        return;
    }
    let mut known = BTreeSet::new();
    for (name, value) in headers {
        let problem = match known.insert(name.to_ascii_lowercase()) {
            true => header_problem(name, value.expose_secret()),
            false => Some("is named twice".to_owned()),
        };
        if let Some(problem) = problem {
            let field = format!("headers.{}", name.escape_default());
            check.refuse(&field, problem);
        }
    }
}

/// End a queue's push.
///
/// Its jobs wait for workers. Requests that are under way are answered.
#[utoipa::path(
    delete, path = "/queues/{queue}/push", tag = "queues", operation_id = "queues_delete_push",
    security(("api_key" = ["webhooks"]), ("session" = ["admin"])),
    params(("queue" = String, Path, description = "The queue.", example = "default")),
    responses(
        (status = 204, description = "It has ended."),
        (status = 404, description = "Its jobs are not sent to a URL.", body = ErrorBody),
    ),
)]
pub async fn delete(
    caller: Caller<Webhooks>,
    State(app): State<App>,
    NameInPath(queue): NameInPath,
) -> Result<StatusCode, Error> {
    push::delete(&app.engine, caller.project_id, &queue).await?;
    audit::note(&app, &caller, NewAuditEntry::to("queue.push_ended", queue)).await;
    Ok(StatusCode::NO_CONTENT)
}

/// Rotate the secret of a queue's push.
///
/// Until the overlap ends, each request has two signatures, one with each secret.
#[utoipa::path(
    post, path = "/queues/{queue}/push/secret/rotate", tag = "queues",
    operation_id = "queues_rotate_push_secret",
    security(("api_key" = ["webhooks"]), ("session" = ["admin"])),
    params(("queue" = String, Path, description = "The queue.", example = "default")),
    request_body = RotateSecretRequest,
    responses(
        (status = 200, description = "The push. Its new secret is shown only once.", body = PushWithSecret),
        (status = 404, description = "Its jobs are not sent to a URL.", body = ErrorBody),
    ),
)]
pub async fn rotate(
    caller: Caller<Webhooks>,
    State(app): State<App>,
    NameInPath(queue): NameInPath,
    Json(request): Json<RotateSecretRequest>,
) -> Result<Reply<PushWithSecret>, Error> {
    let overlap = request.overlap_seconds()?;
    caller.require_step_up(&app).await?;
    let (keys, key) = (&app.accounts.master_keys, (caller.project_id, queue.as_str()));
    let secret = push::rotate(&app.engine, keys, key, overlap).await?;
    let row = push::find(&app.engine, caller.project_id, &queue).await?;
    audit::note(&app, &caller, NewAuditEntry::to("queue.push_secret_rotated", queue)).await;
    let secret = Some(webhook::secret_text(&secret));
    Ok(Reply(PushWithSecret { push: row.into(), secret }))
}
