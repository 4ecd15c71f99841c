//! Requests to the API: enqueue, read and cancel jobs.

use std::{
    fmt,
    sync::{Arc, OnceLock},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use reqwest::{
    Method, StatusCode,
    header::{self, HeaderValue},
    redirect::Policy,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use crate::{codes::ErrorCode, job::Job};

/// A request without an answer after this time has failed.
const TIMEOUT: Duration = Duration::from_secs(15);
/// Longest wait of one request: the server's limit.
const MAX_WAIT: Duration = Duration::from_secs(30);
/// The pause before the first retry; it doubles up to the next.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const MAX_PAUSE: Duration = Duration::from_secs(10);
/// How long a request is retried.
const RETRY_TIME: Duration = Duration::from_secs(60);
/// A `Retry-After` beyond this is cut.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(60);

const PROJECT: &str = "fencepost-project";

tokio::task_local! {
    /// The trace of the job whose handler runs in this task; jobs that it enqueues continue it.
    pub(crate) static TRACEPARENT: Option<String>;
    /// The job whose handler runs in this task. It makes the idempotency keys of what it enqueues:
    /// another attempt that enqueues the same makes no second job.
    pub(crate) static CURRENT_JOB: Job;
}

/// Why a call failed.
#[derive(Debug)]
pub enum Error {
    /// The server refused it.
    Api(Box<ApiError>),
    /// The server was not reached, or its answer was lost.
    Http(reqwest::Error),
    /// The answer is no JSON: something between has changed it.
    Answer(serde_json::Error),
    /// A value cannot be written as JSON, or the answer has another shape than was asked for.
    Json(serde_json::Error),
    /// The client or the worker is not set up: what is missing.
    Setup(&'static str),
}

impl Error {
    /// Whether the same request may succeed later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Api(error) => {
                error.status.is_server_error()
                    || [StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_MANY_REQUESTS]
                        .contains(&error.status)
                    || error.code == ErrorCode::IdempotencyInProgress
            }
            Self::Http(error) => !error.is_builder(),
            Self::Answer(_) => true,
            Self::Json(_) | Self::Setup(_) => false,
        }
    }

    /// True if a queue is full, or a quota is used up.
    #[must_use]
    pub fn is_no_room(&self) -> bool {
        matches!(self, Self::Api(it)
            if [ErrorCode::QueueFull, ErrorCode::QuotaExceeded].contains(&it.code))
    }

    /// True if the request was invalid because of this field.
    pub(crate) fn refuses(&self, field: &str) -> bool {
        matches!(self, Self::Api(it) if it.status == StatusCode::BAD_REQUEST
            && it.details.iter().any(|it| it.field == field))
    }

    pub(crate) fn status(&self) -> Option<StatusCode> {
        match self {
            Self::Api(error) => Some(error.status),
            Self::Http(_) | Self::Answer(_) | Self::Json(_) | Self::Setup(_) => None,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Api(it) => {
                write!(f, "{} ({:?}, request {})", it.message, it.code, it.request_id)
            }
            Self::Http(error) => error.fmt(f),
            Self::Answer(error) | Self::Json(error) => error.fmt(f),
            Self::Setup(missing) => f.write_str(missing),
        }
    }
}

impl std::error::Error for Error {}

impl From<reqwest::Error> for Error {
    fn from(error: reqwest::Error) -> Self {
        Self::Http(error)
    }
}

impl From<serde_json::Error> for Error {
    fn from(error: serde_json::Error) -> Self {
        Self::Json(error)
    }
}

/// Why the server refused a request.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct ApiError {
    #[serde(skip)]
    pub status: StatusCode,
    pub code: ErrorCode,
    pub message: String,
    pub request_id: String,
    /// Invalid fields.
    pub details: Vec<ErrorDetail>,
    /// In a 409 about a job: its state.
    pub job_state: Option<String>,
    /// In a 409 `unique_conflict`: the job that has the key.
    pub existing_job_id: Option<String>,
}

/// An invalid field.
#[derive(Debug, Clone, Deserialize)]
pub struct ErrorDetail {
    pub field: String,
    pub message: String,
}

/// One request with its retries.
#[derive(Debug, Clone)]
pub struct Request<'a> {
    pub method: Method,
    pub path: &'a str,
    pub body: Option<Value>,
    pub headers: Vec<(&'static str, String)>,
    /// How long the server may wait before it answers.
    pub wait: Duration,
    /// How long one try may take beside the wait.
    pub timeout: Duration,
    /// How long it is retried.
    pub retry_time: Duration,
    /// Whether a full queue or a used-up quota is retried, too; else it is an error at once.
    pub waits_for_room: bool,
}

impl<'a> Request<'a> {
    /// A GET.
    #[must_use]
    pub fn get(path: &'a str) -> Self {
        Self {
            method: Method::GET,
            path,
            body: None,
            headers: Vec::new(),
            wait: Duration::ZERO,
            timeout: TIMEOUT,
            retry_time: RETRY_TIME,
            waits_for_room: path.starts_with("/v1/workers/"),
        }
    }

    /// A POST of JSON, with an idempotency key: what is sent again is done once.
    #[must_use]
    pub fn post(path: &'a str, body: Value) -> Self {
        let is_repeatable = !path.starts_with("/v1/workers/");
        let key = || (IDEMPOTENCY_KEY, Uuid::new_v4().to_string());
        let headers = is_repeatable.then(key).into_iter().collect();
        Self { method: Method::POST, body: Some(body), headers, ..Self::get(path) }
    }
}

const IDEMPOTENCY_KEY: &str = "idempotency-key";

/// Enqueues jobs and reads them. Cheap to clone.
#[derive(Clone)]
pub struct Client {
    http: reqwest::Client,
    url: String,
    key: String,
    /// As the server named it: a proxy can keep the requests of a project on one node.
    project: Arc<OnceLock<HeaderValue>>,
}

/// No log shows the key.
impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("url", &self.url).finish_non_exhaustive()
    }
}

impl Client {
    /// A client of this server.
    ///
    /// # Errors
    /// When TLS cannot be set up.
    pub fn new(url: &str, key: &str) -> Result<Self, Error> {
        // Another one may be installed already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        // A redirect would turn a POST into a GET.
        let http = reqwest::Client::builder().redirect(Policy::none()).build()?;
        // A secret that was read from a file ends with a line feed.
        let key = key.trim().to_owned();
        let url = url.trim_end_matches('/').to_owned();
        Ok(Self { http, url, key, project: Arc::default() })
    }

    /// The client that `FENCEPOST_URL` and `FENCEPOST_KEY` name.
    ///
    /// # Errors
    /// When there is no `FENCEPOST_KEY`.
    pub fn from_env() -> Result<Self, Error> {
        let url = std::env::var("FENCEPOST_URL");
        let key = std::env::var("FENCEPOST_KEY");
        let key = key.map_err(|_| Error::Setup("an API key is needed in FENCEPOST_KEY"))?;
        Self::new(url.as_deref().unwrap_or("http://127.0.0.1:7070"), &key)
    }

    /// Any call of the API. Retries what may pass: the network, 408, 429 and 5xx.
    ///
    /// # Errors
    /// Those of the last try.
    pub async fn request<T: DeserializeOwned>(&self, it: Request<'_>) -> Result<T, Error> {
        let deadline = Instant::now() + it.retry_time;
        let mut pause = FIRST_PAUSE;
        loop {
            let (error, after) = match self.send(&it).await {
                Ok(answer) => return Ok(answer),
                Err(failed) => failed,
            };
            // Half of it by chance, so that clients do not come back together.
            let chance = Uuid::new_v4().as_u128() % 1_000;
            let chance = u32::try_from(chance).unwrap_or_default();
            let wait = (pause / 2 + pause / 2 * chance / 1_000).max(after.min(MAX_RETRY_AFTER));
            let is_final = !error.is_retryable() || error.is_no_room() && !it.waits_for_room;
            if is_final || Instant::now() + wait > deadline {
                return Err(error);
            }
            if pause == FIRST_PAUSE {
                tracing::warn!(url = self.url, %error, "a request failed, trying again");
            }
            sleep(wait).await;
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }

    /// One try. With an error, how long the server asks to wait.
    async fn send<T: DeserializeOwned>(&self, it: &Request<'_>) -> Result<T, (Error, Duration)> {
        let no_wait = |error| (Error::Http(error), Duration::ZERO);
        let mut request = self
            .http
            .request(it.method.clone(), format!("{}{}", self.url, it.path))
            .bearer_auth(&self.key)
            .timeout(it.timeout + it.wait);
        if let Some(project) = self.project.get() {
            request = request.header(PROJECT, project);
        }
        for (name, value) in &it.headers {
            request = request.header(*name, value);
        }
        if let Some(body) = &it.body {
            request = request.json(body);
        }
        let reply = request.send().await.map_err(no_wait)?;
        let status = reply.status();
        if let Some(project) = reply.headers().get(PROJECT) {
            self.project.get_or_init(|| project.clone());
        }
        let after = reply.headers().get(header::RETRY_AFTER).and_then(|it| it.to_str().ok());
        let after = after.map(|it| retry_after(it, now())).unwrap_or_default();
        let body = reply.bytes().await.map_err(no_wait)?;
        if status.is_success() {
            let text = if body.is_empty() { &b"null"[..] } else { &body };
            let answer: Value = serde_json::from_slice(text)
                .map_err(|error| (Error::Answer(error), Duration::ZERO))?;
            return T::deserialize(answer).map_err(|error| (Error::Json(error), Duration::ZERO));
        }
        #[derive(Deserialize)]
        struct Body {
            error: ApiError,
        }
        // What is between may answer in its own words.
        let error = serde_json::from_slice(&body).map(|it: Body| it.error).unwrap_or_default();
        Err((Error::Api(Box::new(ApiError { status, ..error })), after))
    }

    /// Stores a job once, however often the request must be sent, and returns it. In the task of a
    /// handler, another attempt that enqueues the same stores no second job.
    ///
    /// # Errors
    /// When the server refuses it, or does not answer for a minute. At once if the queue is full,
    /// see [`Error::is_no_room`].
    pub async fn enqueue(&self, job_type: &str, payload: impl Serialize) -> Result<Value, Error> {
        self.enqueue_with(job_type, payload, json!({})).await
    }

    /// The same with other fields of `POST /v1/jobs`: `{"queue": "mail", "max_attempts": 5}`.
    /// `idempotency_key` replaces the key that each call makes. `retry_seconds` waits for room in a
    /// full queue, and bounds all retries.
    ///
    /// # Errors
    /// As for [`Self::enqueue`].
    pub async fn enqueue_with(
        &self,
        job_type: &str,
        payload: impl Serialize,
        mut fields: Value,
    ) -> Result<Value, Error> {
        fields["job_type"] = json!(job_type);
        fields["payload"] = serde_json::to_value(payload)?;
        let mut own = |name: &str| fields.as_object_mut().and_then(|it| it.remove(name));
        let (own_key, patience) = (own("idempotency_key"), own("retry_seconds"));
        let own_key = own_key.as_ref().and_then(Value::as_str).map(str::to_owned);
        let mut request = enqueuing("/v1/jobs", fields, own_key);
        if let Some(patience) = patience {
            let refused = Error::Setup("retry_seconds must be a whole number");
            request.retry_time = Duration::from_secs(patience.as_u64().ok_or(refused)?);
            request.waits_for_room = true;
        }
        if let Ok(Some(trace)) = TRACEPARENT.try_with(Clone::clone) {
            request.headers.push(("traceparent", trace));
        }
        self.request(request).await
    }

    /// Stores all of these jobs, or none. Each has `job_type`, `payload` and the other fields of
    /// `POST /v1/jobs`.
    ///
    /// # Errors
    /// As for [`Self::enqueue`].
    pub async fn enqueue_many(&self, jobs: &[Value]) -> Result<Vec<Value>, Error> {
        #[derive(Deserialize)]
        struct Stored {
            jobs: Vec<Value>,
        }
        let body = json!({"jobs": jobs});
        let stored: Stored = self.request(enqueuing("/v1/jobs/batch", body, None)).await?;
        Ok(stored.jobs)
    }

    /// One page of a list, and its `next_cursor`, which the next call takes; none: it was the last
    /// one. `page("/v1/jobs?q=state:pending", None)` is the first.
    ///
    /// # Errors
    /// When the server refuses it, or does not answer for a minute.
    pub async fn page(
        &self,
        path: &str,
        cursor: Option<&str>,
    ) -> Result<(Vec<Value>, Option<String>), Error> {
        let begins = if path.contains('?') { '&' } else { '?' };
        let at = cursor.map(|it| format!("{begins}cursor={it}")).unwrap_or_default();
        let mut page: Map<String, Value> =
            self.request(Request::get(&format!("{path}{at}"))).await?;
        let next = page.remove("next_cursor").and_then(|it| it.as_str().map(str::to_owned));
        let items = page.into_iter().find_map(|(_, it)| match it {
            Value::Array(items) => Some(items),
            _ => None,
        });
        Ok((items.unwrap_or_default(), next))
    }

    /// The job as it is now.
    ///
    /// # Errors
    /// When there is none, or the server does not answer for a minute.
    pub async fn job(&self, id: &str) -> Result<Value, Error> {
        self.request(Request::get(&job_path(id))).await
    }

    /// The job when it has ended: its `state` is `succeeded`, `dead_letter` or `cancelled`. Bound
    /// the wait by `tokio::time::timeout`.
    ///
    /// # Errors
    /// As for [`Self::job`].
    pub async fn wait(&self, id: &str) -> Result<Value, Error> {
        let path = format!("{}?wait_seconds={}", job_path(id), MAX_WAIT.as_secs());
        loop {
            let job: Value =
                self.request(Request { wait: MAX_WAIT, ..Request::get(&path) }).await?;
            if ["succeeded", "dead_letter", "cancelled"].iter().any(|it| job["state"] == *it) {
                return Ok(job);
            }
        }
    }

    /// Cancels a job; a running one is asked to stop.
    ///
    /// # Errors
    /// When it has ended, or the server does not answer for a minute.
    pub async fn cancel(&self, id: &str) -> Result<Value, Error> {
        self.request(Request::post(&format!("{}/cancel", job_path(id)), json!({}))).await
    }
}

/// A request that enqueues, under the key of its caller, or of the job whose handler runs here.
fn enqueuing(path: &str, body: Value, own_key: Option<String>) -> Request<'_> {
    let of_job = || CURRENT_JOB.try_with(|job| job.child_key(&body)).ok();
    let key = own_key.or_else(of_job);
    let mut request = Request::post(path, body);
    if let Some(key) = key {
        request.headers = vec![(IDEMPOTENCY_KEY, key)];
    }
    request
}

/// Whatever an id is, it stays in its part of the path.
fn job_path(id: &str) -> String {
    let plain = |it: u8| it.is_ascii_alphanumeric() || it == b'_';
    let encoded = id.bytes().map(|it| match plain(it) {
        true => char::from(it).to_string(),
        false => format!("%{it:02X}"),
    });
    format!("/v1/jobs/{}", encoded.collect::<String>())
}

/// The pause that a `Retry-After` asks for: seconds, or until a date, as a proxy may send it.
fn retry_after(value: &str, now: SystemTime) -> Duration {
    if let Ok(seconds) = value.parse() {
        return Duration::from_secs(seconds);
    }
    let at = httpdate::parse_http_date(value).ok();
    at.and_then(|it| it.duration_since(now).ok()).unwrap_or_default()
}

/// Milliseconds since 1970, by the clock of this machine: logs show when a worker wrote them.
pub(crate) fn now_ms() -> u64 {
    let now = now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

#[expect(clippy::disallowed_methods, reason = "no decision about jobs depends on it")]
fn now() -> SystemTime {
    SystemTime::now()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_is_read_in_seconds_or_as_a_date() {
        let now = httpdate::parse_http_date("Fri, 27 Nov 2026 10:00:00 GMT").expect("a date");
        let check = |value: &str, seconds| {
            assert_eq!(retry_after(value, now), Duration::from_secs(seconds), "{value}");
        };
        check("7", 7);
        check("Fri, 27 Nov 2026 10:00:30 GMT", 30);
        check("Fri, 27 Nov 2026 09:00:00 GMT", 0);
        check("soon", 0);
    }
}
