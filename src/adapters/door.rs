//! What the doors share: ids that name an attempt, payloads as objects, and leasing jobs.

use std::{collections::HashMap, fmt, str::FromStr, sync::Arc, time::Duration};

use axum::{
    Json as Reply,
    extract::{FromRequestParts, RawPathParams},
    http::{StatusCode, request::Parts},
    response::Response,
};
use serde::Serialize;
use serde_json::value::RawValue;
use tokio_util::sync::CancellationToken;
use utoipa::ToSchema;

use crate::{
    app::App,
    auth::{Caller, Polling},
    domain::{
        job::{Outcome, StoredState},
        lease::Fence,
        limits,
    },
    engine::{
        dispatch::{self, Delivery, LeasedDelivery, PollSpec, any_queue},
        jobs::{AttemptRow, JobRow},
        workers,
    },
    error::{Class, Error},
    ids::{JobId, JobKey, ProjectId, anonymous_worker},
    wire::{
        errors,
        validate::{Check, stored_json},
    },
};

/// Where jobs wait that name no queue.
pub const DEFAULT_QUEUE: &str = "default";

/// The status of a failure on wires that have no other opinion.
#[must_use]
pub fn status(class: Class) -> StatusCode {
    match class {
        Class::Unreadable | Class::Invalid => StatusCode::BAD_REQUEST,
        Class::Unauthorized => StatusCode::UNAUTHORIZED,
        Class::Forbidden => StatusCode::FORBIDDEN,
        Class::NotFound => StatusCode::NOT_FOUND,
        Class::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
        Class::Conflict | Class::Duplicate => StatusCode::CONFLICT,
        Class::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
        Class::MediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
        Class::Timeout => StatusCode::REQUEST_TIMEOUT,
        Class::Limited => StatusCode::TOO_MANY_REQUESTS,
        Class::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        Class::Internal => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// How wires that know no codes tell of a failure: the status is all that clients look at, the text is for
/// people.
pub fn plain_face(error: &Error, _: &str, mut response: Response) -> Response {
    let body = ErrorBody { error: errors::message(error) };
    errors::write(&mut response, (status(error.class()), Reply(body)), error);
    response
}

/// The body of every answer that is not a success.
#[derive(Debug, Serialize, ToSchema)]
pub struct ErrorBody {
    /// What went wrong.
    error: String,
}

/// What a path names.
#[derive(Debug)]
pub struct Names(HashMap<String, String>);

impl Names {
    /// The parameter of this name; empty when the route has none.
    #[must_use]
    pub fn get(&self, name: &str) -> &str {
        self.0.get(name).map_or("", String::as_str)
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Names {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Error> {
        let params = RawPathParams::from_request_parts(parts, state)
            .await
            .map_err(|_| Error::NoSuchRoute)?;
        // No thing has such a name.
        if params.iter().any(|(_, value)| value.chars().any(char::is_control)) {
            return Err(Error::NoSuchRoute);
        }
        let named = params.iter().map(|(name, value)| (name.to_owned(), value.to_owned()));
        Ok(Self(named.collect()))
    }
}

/// A job and one of its attempts, for wires on which a bare id must be a fence: `job_…-2`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttemptId {
    /// Which job.
    pub job_id: JobId,
    /// Which of its attempts, counted from 1. One more than it has had: the attempt it waits for.
    pub attempt: i32,
}

impl fmt::Display for AttemptId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.job_id, self.attempt)
    }
}

impl FromStr for AttemptId {
    type Err = Error;

    /// A malformed id is no job, like any other that does not exist.
    fn from_str(text: &str) -> Result<Self, Error> {
        let (job_id, attempt) = text.rsplit_once('-').ok_or(Error::JobNotFound)?;
        let job_id = job_id.parse().map_err(|_| Error::JobNotFound)?;
        let attempt = attempt.parse().map_err(|_| Error::JobNotFound)?;
        Ok(Self { job_id, attempt })
    }
}

impl AttemptId {
    /// The job's key.
    #[must_use]
    pub fn key(self, project_id: ProjectId) -> JobKey {
        JobKey { project_id, id: self.job_id }
    }

    /// The fence that it is, with what else the caller shows. One who shows two attempts has neither.
    #[must_use]
    pub fn fence(self, worker_id: Option<String>, attempt: Option<i32>) -> Fence {
        const NO_ATTEMPT: i32 = 0;
        let agrees = attempt.is_none_or(|it| it == self.attempt);
        let attempt = Some(if agrees { self.attempt } else { NO_ATTEMPT });
        Fence { worker_id, attempt, lease_id: None }
    }
}

/// Where an attempt is.
#[derive(Debug, Clone, Copy)]
pub enum Stage<'a> {
    /// It has not begun.
    Pending,
    /// A worker has it.
    Claimed,
    /// It succeeded.
    Completed,
    /// It ended otherwise; none: it was called off before it began.
    Failed(Option<&'a AttemptRow>),
}

/// Where one attempt of a job is; none when it has, and waits for, no such attempt.
///
/// # Errors
/// [`Error::JobNotFound`].
pub fn stage<'a>(attempt: i32, job: &JobRow, ended: &'a [AttemptRow]) -> Result<Stage<'a>, Error> {
    if let Some(row) = ended.iter().find(|it| it.attempt == attempt) {
        return Ok(Stage::Failed(Some(row)));
    }
    let is_next = attempt == job.attempt.saturating_add(1);
    let last = ended.iter().find(|it| it.attempt == job.attempt);
    let was_cancelled = last.is_some_and(|it| it.outcome == Outcome::Cancelled);
    match job.state {
        StoredState::Processing if attempt == job.attempt => Ok(Stage::Claimed),
        StoredState::Succeeded if attempt == job.attempt => Ok(Stage::Completed),
        // It was called off before it began; not when an earlier one was.
        StoredState::Cancelled if is_next && !was_cancelled => Ok(Stage::Failed(None)),
        it if it.is_waiting() && is_next => Ok(Stage::Pending),
        _ => Err(Error::JobNotFound),
    }
}

/// The attempt that a job is at, waits for, or ended with.
#[must_use]
pub fn latest_attempt(job: &JobRow, ended: &[AttemptRow]) -> i32 {
    let last = ended.iter().find(|it| it.attempt == job.attempt);
    let never_began = job.state == StoredState::Cancelled
        && last.is_none_or(|it| it.outcome != Outcome::Cancelled);
    job.attempt + i32::from(job.state.is_waiting() || never_began)
}

/// What an attempt reported, in one line.
#[must_use]
pub fn reason(ended: &AttemptRow) -> String {
    match (&ended.error_message, &ended.error_kind) {
        (Some(message), _) => message.clone(),
        (None, Some(kind)) => kind.clone(),
        (None, None) if ended.outcome == Outcome::Failed => "failed".to_owned(),
        (None, None) => ended.outcome.as_str().to_owned(),
    }
}

/// A payload or result where the wire knows objects only: the same bytes, or `{"value": …}` around them.
pub fn object(json: &str) -> Result<Box<RawValue>, Error> {
    if json.trim_start().starts_with('{') {
        return stored_json(json.to_owned());
    }
    stored_json(format!("{{\"value\":{json}}}"))
}

/// An object with one more field at its end.
///
/// # Errors
/// [`Error::Internal`] when it is no object after all.
pub fn with_field(
    object: &RawValue,
    name: &str,
    value: &impl Serialize,
) -> Result<Box<RawValue>, Error> {
    let value = serde_json::to_string(value).map_err(Error::internal)?;
    let inside = object.get().trim_end().strip_suffix('}').unwrap_or_default().trim_end();
    let comma = if inside.ends_with('{') { "" } else { "," };
    stored_json(format!("{inside}{comma}\"{name}\":{value}}}"))
}

/// What a job has made that another waited for.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct ParentResultView {
    /// Which job.
    pub job_id: String,
    /// Its name in the workflow, if they are in one.
    pub key: Option<String>,
    /// What it did.
    pub job_type: String,
    /// The bytes that its worker sent; null also when they are left out for their size.
    #[schema(value_type = serde_json::Value)]
    pub result: Option<Box<RawValue>>,
}

/// What the parents of a job have made.
///
/// # Errors
/// [`Error::Internal`] when a result is no JSON after all.
pub fn parent_results(handed: &LeasedDelivery) -> Result<Vec<ParentResultView>, Error> {
    let view = |it: &crate::engine::enqueue::dependencies::ParentResult| {
        Ok(ParentResultView {
            job_id: it.parent_id.to_string(),
            key: it.workflow_key.clone(),
            job_type: it.job_type.clone(),
            result: it.result.clone().map(stored_json).transpose()?,
        })
    };
    handed.parent_results.iter().map(view).collect()
}

/// What a worker asks for, in whichever words.
#[derive(Debug, Clone, Default)]
pub struct Ask {
    /// None: one that has no name, and is in no registry.
    pub worker_id: Option<String>,
    /// Where to look, in this order; none named: everywhere.
    pub queues: Vec<String>,
    /// Only these types; none named: any.
    pub job_types: Vec<String>,
    /// What it has; none: what it has registered.
    pub labels: Option<Vec<String>>,
    /// Only jobs that offer a command.
    pub only_commands: bool,
    /// At most so many.
    pub capacity: u32,
    /// The length of the leases.
    pub lease_seconds: i32,
    /// How long to wait for the first.
    pub wait: Duration,
}

impl Ask {
    /// Checks it against the bounds of all polls.
    pub fn check(&self, check: &mut Check, queues: &str, job_types: &str) {
        check.optional_name("worker_id", self.worker_id.as_deref(), limits::MAX_WORKER_ID_CHARS);
        check.names(queues, &self.queues, limits::MAX_POLL_QUEUES, limits::MAX_QUEUE_CHARS);
        let (max, max_chars) = (limits::MAX_POLL_JOB_TYPES, limits::MAX_JOB_TYPE_CHARS);
        check.names(job_types, &self.job_types, max, max_chars);
        let labels = self.labels.as_deref().unwrap_or_default();
        check.names("labels", labels, limits::MAX_LABELS, limits::MAX_LABEL_CHARS);
    }
}

/// Waits for jobs and leases them.
///
/// # Errors
/// Those of [`dispatch::poll`].
pub async fn lease(
    app: &App,
    caller: &Caller<Polling>,
    ask: Ask,
    gone: &CancellationToken,
) -> Result<Delivery, Error> {
    let worker_id: Arc<str> = ask.worker_id.clone().unwrap_or_else(anonymous_worker).into();
    let sorted = |mut names: Vec<String>| -> Arc<[String]> {
        names.sort();
        names.dedup();
        names.into()
    };
    let mut queues: Vec<Arc<str>> = Vec::with_capacity(ask.queues.len());
    for queue in ask.queues {
        if !queues.iter().any(|it| **it == *queue) {
            queues.push(queue.into());
        }
    }
    let mut spec = PollSpec {
        project_id: caller.project_id,
        queues,
        job_types: sorted(ask.job_types),
        labels: sorted(ask.labels.clone().unwrap_or_default()),
        only_commands: ask.only_commands,
        worker_id: Arc::clone(&worker_id),
        capacity: ask.capacity,
        lease_seconds: Some(ask.lease_seconds),
        poll_id: None,
    };
    if ask.worker_id.is_some() {
        let worker = (caller.project_id, worker_id);
        let facts = workers::facts(&app.engine, &worker).await?;
        app.engine.registry.record_seen(&worker, &spec.queues, &spec.job_types);
        if let Some(facts) = facts.filter(|_| ask.labels.is_none()) {
            spec.labels = facts.labels.as_slice().into();
        }
    }
    let revoked = caller.until_revoked(app);
    if spec.queues.is_empty() {
        return any_queue::poll(&app.engine, spec, ask.wait, gone, revoked).await;
    }
    dispatch::poll(&app.engine, spec, ask.wait, gone.cancelled(), revoked).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attempts_id_reads_back_as_it_was_written() {
        let id = AttemptId { job_id: JobId::generate(), attempt: 12 };
        assert_eq!(id.to_string().parse::<AttemptId>().ok(), Some(id));
        for odd in ["", "job_x-1", "-", &id.job_id.to_string(), &format!("{}-x", id.job_id)] {
            assert!(odd.parse::<AttemptId>().is_err(), "{odd}");
        }
    }

    #[test]
    fn an_attempt_shown_twice_must_be_the_same() {
        let id = AttemptId { job_id: JobId::generate(), attempt: 2 };
        assert_eq!(id.fence(None, None).attempt, Some(2));
        assert_eq!(id.fence(None, Some(2)).attempt, Some(2));
        assert_eq!(id.fence(None, Some(1)).attempt, Some(0));
    }

    #[test]
    fn what_is_no_object_is_put_into_one() {
        let shown = |json: &str| object(json).expect("JSON").get().to_owned();
        assert_eq!(shown(r#"{"a": 1.50}"#), r#"{"a": 1.50}"#);
        assert_eq!(shown("[1, 2]"), r#"{"value":[1, 2]}"#);
        assert_eq!(shown("null"), r#"{"value":null}"#);
    }

    #[test]
    fn a_field_is_added_to_an_object_without_touching_the_others() {
        let added = |json: &str| {
            let object = RawValue::from_string(json.to_owned()).expect("JSON");
            with_field(&object, "b", &[1]).expect("JSON").get().to_owned()
        };
        assert_eq!(added("{}"), r#"{"b":[1]}"#);
        assert_eq!(added(r#"{ "a" : 1.50 }"#), r#"{ "a" : 1.50,"b":[1]}"#);
    }
}
