//! `Idempotency-Key`: a repeated request gets the first answer and has no further effect. Each new
//! request gets a seed from which the ids of what it creates are derived. A request that was
//! interrupted runs again from the same seed, and finds what exists already.

mod answer;
mod lost;

use std::future::Future;

use axum::{
    extract::{FromRequest, FromRequestParts, Request},
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, request::Parts},
    response::Response,
};
use fencepost_domain::{
    error::Error,
    ids::{BatchId, JobId, OperationId, ScheduleId, WorkflowId},
    limits::MAX_IDEMPOTENCY_KEY_CHARS,
};
use fencepost_store::{
    faults,
    idempotency::{self, Presented, StoredAnswer, StoredBody},
};
use fencepost_web::{
    app::App,
    auth::{Caller, CallerKind},
    wire::extract::{BarePath, Fingerprinted, RequestBody},
};
use sha2::{Digest, Sha256};
use utoipa::IntoParams;
use uuid::Uuid;

pub use self::answer::Answer;
use self::lost::Lock;
use crate::error;

/// See [`faults::FAIL_POINTS`].
const FAIL_POINT: &str = "idempotency";
const HEADER: &str = "Idempotency-Key";
const REPLAY_HEADER: HeaderName = HeaderName::from_static("idempotent-replay");

/// The seed of the ids that a request creates.
#[derive(Debug, Clone, Copy)]
pub struct Ids(Option<Uuid>);

impl Ids {
    /// The id of the job with this index.
    #[must_use]
    pub fn job(self, number: usize) -> JobId {
        self.0.map_or_else(JobId::generate, |seed| JobId::derived(seed, number as u64))
    }

    /// The id of the schedule.
    #[must_use]
    pub fn schedule(self) -> ScheduleId {
        self.0.map_or_else(ScheduleId::generate, ScheduleId::derived)
    }

    /// The id of the operation.
    #[must_use]
    pub fn operation(self) -> OperationId {
        self.0.map_or_else(OperationId::generate, OperationId::derived)
    }

    /// The id of the batch.
    #[must_use]
    pub fn batch(self) -> BatchId {
        self.0.map_or_else(BatchId::generate, BatchId::derived)
    }

    /// The id of the workflow.
    #[must_use]
    pub fn workflow(self) -> WorkflowId {
        self.0.map_or_else(WorkflowId::generate, WorkflowId::derived)
    }
}

/// The header of the key.
#[derive(Debug, IntoParams)]
#[expect(dead_code, reason = "it describes the header in the OpenAPI document")]
#[into_params(parameter_in = Header)]
pub struct Header {
    /// A request repeated with the same key within 24 hours gets the first answer.
    #[param(rename = "Idempotency-Key", max_length = 200)]
    key: Option<String>,
}

/// The identity of a repeated request: its key, if it has one, and its fingerprint.
#[derive(Debug)]
pub struct Repeat {
    key: Option<String>,
    fingerprint: [u8; 32],
    /// `/v1/projects/{project}`, if its path begins so.
    project_path: Option<String>,
}

/// A request with a body, that may be repeated.
#[derive(Debug)]
pub struct Once<T> {
    /// The body, read.
    pub request: T,
    /// How to run it once.
    pub repeat: Repeat,
}

impl<T: RequestBody, S: Send + Sync> FromRequest<S> for Once<T> {
    type Rejection = Error;

    async fn from_request(request: Request, state: &S) -> Result<Self, Error> {
        let key = header_key(request.headers());
        let project_path = project_path(request.uri().path());
        let Fingerprinted { request, fingerprint } =
            Fingerprinted::from_request(request, state).await?;
        Ok(Self { request, repeat: Repeat { key: key?, fingerprint, project_path } })
    }
}

/// A request without a body.
impl<S: Send + Sync> FromRequestParts<S> for Repeat {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Error> {
        let BarePath(fingerprint) = BarePath::from_request_parts(parts, state).await?;
        let project_path = project_path(parts.uri.path());
        Ok(Self { key: header_key(&parts.headers)?, fingerprint, project_path })
    }
}

impl Repeat {
    /// Whether there is a key, which is stored.
    #[must_use]
    pub fn has_key(&self) -> bool {
        self.key.is_some()
    }

    /// The body may name the key, too.
    ///
    /// # Errors
    /// [`Error::Invalid`] when it is malformed, or differs from the header.
    pub fn or_key(mut self, in_body: Option<String>) -> Result<Self, Error> {
        self.key = match (self.key, in_body) {
            (Some(one), Some(other)) if one != other => {
                return Err(Error::invalid(HEADER, "must be the same as idempotency_key"));
            }
            (None, Some(key)) => Some(checked_key("idempotency_key", &key)?),
            (key, _) => key,
        };
        Ok(self)
    }

    /// Runs a request once for its key, and repeats the answer afterwards.
    ///
    /// # Errors
    /// [`Error::IdempotencyKeyReuse`] when the key came with another request, and
    /// [`Error::IdempotencyInProgress`] while the first one runs; and those of the request itself.
    pub async fn once<Running>(
        self,
        app: &App,
        caller: &Caller<impl CallerKind>,
        run: impl FnOnce(Ids) -> Running,
    ) -> Result<Response, Error>
    where
        Running: Future<Output = Result<Answer, Error>>,
    {
        let Self { key, mut fingerprint, project_path } = self;
        if let Some(binding) = caller.who.binding() {
            // The answer to a bound key is for keys with its binding alone.
            let both = [&fingerprint[..], binding.mark().as_bytes()].concat();
            fingerprint = Sha256::digest(both).into();
        }
        let (answer, is_replay) = match key {
            None => (run(Ids(None)).await?, false),
            // Boxed: most requests have no key, and its bytes would be part of each.
            Some(key) => Box::pin(Keyed { key, fingerprint }.once(app, caller, run)).await?,
        };
        let mut response = answer.into_response(caller, project_path.as_deref())?;
        if is_replay {
            response.headers_mut().insert(REPLAY_HEADER, HeaderValue::from_static("true"));
        }
        Ok(response)
    }
}

/// A request with a key.
struct Keyed {
    key: String,
    fingerprint: [u8; 32],
}

impl Keyed {
    /// The answer, and whether it is the first one again.
    async fn once<Running>(
        self,
        app: &App,
        caller: &Caller<impl CallerKind>,
        run: impl FnOnce(Ids) -> Running,
    ) -> Result<(Answer, bool), Error>
    where
        Running: Future<Output = Result<Answer, Error>>,
    {
        let Self { key, fingerprint } = self;
        let project_id = caller.project_id;
        let presented = Presented { project_id, key: &key, fingerprint: &fingerprint };
        let mut lock = Lock::new(app, project_id, &key);
        let (seed, is_first) = match begin(app, presented, &mut lock).await? {
            Begun::Run { seed, is_first } => (seed, is_first),
            Begun::Answered(answer) => return Ok((answer, true)),
        };
        let result = run(Ids(Some(seed))).await;
        // Not one of the project's share: the request is done, and only its key waits.
        let mut conn = app.engine.pools.enqueue.acquire().await?;
        match &result {
            Ok(answer) => {
                let (status, location) = (answer.status.as_u16(), answer.location.as_deref());
                let (body, key) = (answer.stored()?, (key.as_str(), lock.id));
                let finishing =
                    idempotency::finish(&mut conn, project_id, key, status, location, &body);
                faults::around_commit(FAIL_POINT, finishing).await?;
            }
            // Nothing was stored, not by an earlier try either: a better request may use the key.
            Err(refusal) if is_first && is_before_storing(error::status(refusal)) => {
                idempotency::forget(&mut conn, project_id, &key, lock.id).await?;
            }
            Err(_) => _ = idempotency::unlock(&mut conn, project_id, &key, lock.id).await?,
        }
        lock.freed();
        Ok((result?, false))
    }
}

/// True if a refusal with this status comes before anything is stored. A 404 may be about a job
/// that was deleted after others were stored beside it.
fn is_before_storing(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::BAD_REQUEST
            | StatusCode::CONFLICT
            | StatusCode::PAYLOAD_TOO_LARGE
            | StatusCode::TOO_MANY_REQUESTS
    )
}

fn project_path(path: &str) -> Option<String> {
    const PROJECTS: &str = "/v1/projects/";
    let project = path.strip_prefix(PROJECTS)?.split('/').next()?;
    Some(format!("{PROJECTS}{project}"))
}

/// The key in the header. Quotes around it are removed.
fn header_key(headers: &HeaderMap) -> Result<Option<String>, Error> {
    let mut values = headers.get_all(HEADER).iter();
    let value = match (values.next(), values.next()) {
        (_, Some(_)) => return Err(Error::invalid(HEADER, "must be sent once")),
        (None, None) => return Ok(None),
        (Some(value), None) => value,
    };
    let value = value.to_str().map_err(|_| Error::invalid(HEADER, "must be printable ASCII"))?;
    let bare = value.strip_prefix('"').and_then(|it| it.strip_suffix('"'));
    checked_key(HEADER, bare.unwrap_or(value)).map(Some)
}

fn checked_key(field: &str, key: &str) -> Result<String, Error> {
    let is_printable = key.bytes().all(|it| (b' '..=b'~').contains(&it));
    if key.is_empty() || key.len() > MAX_IDEMPOTENCY_KEY_CHARS || !is_printable {
        let max = MAX_IDEMPOTENCY_KEY_CHARS;
        let message = format!("must be 1 to {max} printable ASCII characters");
        return Err(Error::invalid(field, message));
    }
    Ok(key.to_owned())
}

enum Begun {
    /// `is_first`: no earlier try may have stored something.
    Run {
        seed: Uuid,
        is_first: bool,
    },
    Answered(Answer),
}

async fn begin(app: &App, presented: Presented<'_>, lock: &mut Lock<'_>) -> Result<Begun, Error> {
    let Presented { project_id, key, fingerprint } = presented;
    let mut conn = app.engine.pools.enqueue.acquire_for(project_id).await?;
    let seed = Uuid::now_v7();
    let run = (app.bus.node(), lock.id);
    lock.taking();
    let beginning = idempotency::begin(&mut conn, presented, seed, run);
    if faults::around_commit(FAIL_POINT, beginning).await? {
        return Ok(Begun::Run { seed, is_first: true });
    }
    lock.freed();
    let kept = idempotency::find(&mut conn, project_id, key).await?;
    // None: it was pruned at this very moment.
    let Some(StoredAnswer { fingerprint: first, status, location, body, has_payloads }) = kept
    else {
        return Err(Error::IdempotencyInProgress);
    };
    if first != fingerprint {
        return Err(Error::IdempotencyKeyReuse);
    }
    let status = status.and_then(|it| StatusCode::from_u16(it.cast_unsigned()).ok());
    if let (Some(status), Some(text)) = (status, body) {
        // Reading takes a connection of its own.
        drop(conn);
        let body = StoredBody { text, has_payloads };
        let answer = Answer::read(app, project_id, (status, location), body).await?;
        return Ok(Begun::Answered(answer));
    }
    lock.taking();
    let taking = idempotency::take_over(&mut conn, project_id, key, run);
    let Some(seed) = faults::around_commit(FAIL_POINT, taking).await? else {
        lock.freed();
        return Err(Error::IdempotencyInProgress);
    };
    Ok(Begun::Run { seed, is_first: false })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(header: Option<&str>, body: Option<&str>) -> Result<Option<String>, ()> {
        let mut headers = HeaderMap::new();
        if let Some(header) = header {
            headers.insert(HEADER, HeaderValue::from_str(header).expect("a value"));
        }
        let key = header_key(&headers).map_err(|_| ())?;
        let repeat = Repeat { key, fingerprint: [0; 32], project_path: None };
        repeat.or_key(body.map(str::to_owned)).map(|it| it.key).map_err(|_| ())
    }

    #[test]
    fn a_key_may_be_quoted_or_bare_or_in_the_body() {
        let abc = Ok(Some("abc".to_owned()));
        assert_eq!(read(Some("abc"), None), abc);
        assert_eq!(read(Some("\"abc\""), None), abc);
        assert_eq!(read(None, Some("abc")), abc);
        assert_eq!(read(Some("abc"), Some("abc")), abc);
        assert_eq!(read(None, None), Ok(None));
    }

    #[test]
    fn a_key_that_cannot_be_kept_is_refused() {
        assert!(read(Some("abc"), Some("abd")).is_err());
        assert!(read(Some(""), None).is_err());
        assert!(read(None, Some("ä")).is_err());
        assert!(read(Some(&"x".repeat(MAX_IDEMPOTENCY_KEY_CHARS + 1)), None).is_err());
        assert!(read(Some(&"x".repeat(MAX_IDEMPOTENCY_KEY_CHARS)), None).is_ok());
    }
}
