//! What can go wrong, by meaning. Each wire gives every meaning a status and a code of its own in
//! one exhaustive match; nothing here knows HTTP.

use std::sync::Arc;

use crate::{domain::job::JobState, ids::JobId};

/// An error and what has caused it, in one line: for logs.
#[must_use]
pub fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(error.source(), |it| it.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// A field of a request that breaks a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldError {
    /// Where it is, as a path: `jobs[3].queue`.
    pub field: String,
    /// Which rule it breaks, with the bound.
    pub message: String,
}

impl FieldError {
    /// A rule broken by `field`.
    pub fn new(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { field: field.into(), message: message.into() }
    }
}

/// The text never repeats the source: `source()` carries it, and the boundary that answers the
/// request logs the whole chain, once.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The request cannot be read at all.
    #[error("{0}")]
    Unreadable(String),

    /// The request was read, and fields of it break rules.
    #[error("the request is not valid")]
    Invalid(Vec<FieldError>),

    /// No key or session, or one that is malformed, unknown, revoked or over: all look the same.
    #[error("a live API key or session is needed: `Authorization: Bearer fp_live_…`")]
    Unauthorized,

    /// Whoever calls is known, and may not.
    #[error("this needs {needs}")]
    Forbidden {
        /// What is missing.
        needs: &'static str,
    },

    /// Too many calls. The caller may repeat the request after a pause.
    #[error("too many requests: try again in {retry_after_seconds} s")]
    RateLimited {
        /// The pause, in seconds.
        retry_after_seconds: u32,
    },

    /// Address and password, or a refresh token, do not prove who somebody is.
    #[error("these credentials are not valid")]
    InvalidCredentials,

    /// What was mailed is unknown, was used, or is too old.
    #[error("this token is unknown, was used, or is too old")]
    InvalidLink,

    /// Nobody may sign up here, or nobody who is not invited.
    #[error("signing up is not open here, or needs an invitation")]
    SignupClosed,

    /// Another account has verified the address.
    #[error("another account has this address: reset its password instead")]
    EmailTaken,

    /// Another project has the slug.
    #[error("no free short name was found that is like this name: choose another")]
    SlugTaken,

    /// A project would be left without an owner.
    #[error(
        "a project would be left without an owner: make somebody else an owner first, or delete it"
    )]
    LastOwner,

    /// Nobody gives or takes more than they have.
    #[error("nobody gives or takes a role or scope that they do not have themselves")]
    RoleExceedsCaller,

    /// The project has no such key.
    #[error("API key not found")]
    KeyNotFound,

    /// The project has no such member.
    #[error("member not found")]
    MemberNotFound,

    /// The project has no such invitation.
    #[error("invitation not found")]
    InvitationNotFound,

    /// The account has no such session.
    #[error("session not found")]
    SessionNotFound,

    #[error("no such route")]
    NoSuchRoute,

    /// The route exists, but not for this method.
    #[error("this route does not answer this method")]
    MethodNotAllowed,

    /// No project of that name for this key.
    #[error("project not found")]
    ProjectNotFound,

    /// The project has no such job.
    #[error("job not found")]
    JobNotFound,

    /// The job's state does not allow it: nobody is working on it, or somebody is, or it has ended.
    #[error("the job's state does not allow this")]
    InvalidState(JobStatus),

    /// Another worker holds the job.
    #[error("the job is held by another worker")]
    WorkerMismatch(JobStatus),

    /// This worker's lease is over: a newer attempt decides, or nobody does yet.
    #[error("the lease is over")]
    StaleLease(JobStatus),

    /// A parent has ended without success: its children would wait for ever.
    #[error("a parent of the job has ended without success")]
    ParentTerminal(Vec<FieldError>),

    /// A live job has the unique key already.
    #[error("a live job has this unique key")]
    UniqueConflict {
        /// The key's field, as a path.
        field: String,
        /// Who has it, if that is known.
        holder: Option<JobId>,
    },

    /// The idempotency key came with another request before.
    #[error("this idempotency key came with another request before")]
    IdempotencyKeyReuse,

    /// The first request with this idempotency key is still running.
    #[error("the first request with this idempotency key is still running")]
    IdempotencyInProgress,

    /// The project has no such workflow.
    #[error("workflow not found")]
    WorkflowNotFound,

    /// The project has no such queue.
    #[error("queue not found: nobody uses it")]
    QueueNotFound,

    /// The project has no such operation.
    #[error("operation not found")]
    OperationNotFound,

    /// The project has no such recurring schedule.
    #[error("recurring schedule not found")]
    ScheduleNotFound,

    /// Another job type has the id of this recurring schedule.
    #[error("another job type has a recurring schedule of this id")]
    ScheduleTypeConflict,

    /// A cron expression cannot be read, never fires, or fires too often.
    #[error("the cron expression is not valid")]
    InvalidCron(FieldError),

    /// No time zone has this name.
    #[error("the time zone is not valid")]
    InvalidTimezone(FieldError),

    /// The project has no such worker.
    #[error("worker not found")]
    WorkerNotFound,

    /// There would be more of something than there may be. The caller may repeat the request when some are gone.
    #[error("more than {max} {what} are not allowed here")]
    QuotaExceeded {
        what: &'static str,
        /// How many it may have.
        max: i64,
    },

    /// The body is larger than the route accepts.
    #[error("the body is larger than {limit_bytes} bytes")]
    BodyTooLarge {
        /// The bound, in bytes.
        limit_bytes: usize,
    },

    /// One field is larger than it may be.
    #[error("{field} is larger than {limit_bytes} bytes")]
    FieldTooLarge {
        /// Where it is, as a path.
        field: String,
        /// The bound, in bytes.
        limit_bytes: usize,
    },

    /// The body did not arrive in time.
    #[error("the body did not arrive in time")]
    BodyTimeout,

    /// The body is not declared to be JSON.
    #[error("the body must be JSON, with `Content-Type: application/json`")]
    UnsupportedMediaType,

    /// A bounded queue is full. The caller may repeat the request after a pause.
    #[error("too much at once, try again")]
    Overloaded,

    /// The store did not answer. The caller may repeat the request after a pause.
    #[error("temporarily unavailable")]
    Unavailable(#[source] Arc<sqlx::Error>),

    /// The connection was lost in the middle, and nobody knows whether it was done.
    #[error("the outcome is unknown: look before you try again")]
    InDoubt,

    /// This node does not serve now: it is stopping, or its schema is too old.
    #[error("{0}")]
    NotReady(&'static str),

    /// A mistake of ours.
    #[error("internal error")]
    Internal(#[source] Arc<dyn std::error::Error + Send + Sync>),
}

/// What kind of failure it is, for wires that have few words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// The request cannot be read.
    Unreadable,
    /// It breaks a rule.
    Invalid,
    /// Nobody knows who calls.
    Unauthorized,
    /// Whoever calls may not.
    Forbidden,
    /// There is no such thing here.
    NotFound,
    /// The thing is there, but not for this method.
    MethodNotAllowed,
    /// The state of something does not allow it.
    Conflict,
    /// Something else has the name already.
    Duplicate,
    /// The request, or a part of it, is too large.
    TooLarge,
    /// It is not JSON.
    MediaType,
    /// It did not arrive in time.
    Timeout,
    /// Too many calls, or too much of something.
    Limited,
    /// Not now.
    Unavailable,
    /// A mistake of ours.
    Internal,
}

impl Error {
    /// What kind of failure it is. No `_`: a new meaning must be sorted in.
    #[must_use]
    pub fn class(&self) -> Class {
        match self {
            Self::Unreadable(_) => Class::Unreadable,
            Self::Invalid(_)
            | Self::InvalidLink
            | Self::InvalidCron(_)
            | Self::InvalidTimezone(_) => Class::Invalid,
            Self::Unauthorized | Self::InvalidCredentials => Class::Unauthorized,
            Self::Forbidden { .. } | Self::SignupClosed | Self::RoleExceedsCaller => {
                Class::Forbidden
            }
            Self::NoSuchRoute
            | Self::ProjectNotFound
            | Self::JobNotFound
            | Self::WorkflowNotFound
            | Self::QueueNotFound
            | Self::OperationNotFound
            | Self::ScheduleNotFound
            | Self::WorkerNotFound
            | Self::KeyNotFound
            | Self::MemberNotFound
            | Self::InvitationNotFound
            | Self::SessionNotFound => Class::NotFound,
            Self::MethodNotAllowed => Class::MethodNotAllowed,
            Self::InvalidState(_)
            | Self::WorkerMismatch(_)
            | Self::StaleLease(_)
            | Self::ParentTerminal(_)
            | Self::LastOwner
            | Self::IdempotencyKeyReuse
            | Self::IdempotencyInProgress => Class::Conflict,
            Self::UniqueConflict { .. }
            | Self::ScheduleTypeConflict
            | Self::EmailTaken
            | Self::SlugTaken => Class::Duplicate,
            Self::BodyTooLarge { .. } | Self::FieldTooLarge { .. } => Class::TooLarge,
            Self::UnsupportedMediaType => Class::MediaType,
            Self::BodyTimeout => Class::Timeout,
            Self::RateLimited { .. } | Self::QuotaExceeded { .. } => Class::Limited,
            Self::Overloaded | Self::Unavailable(_) | Self::InDoubt | Self::NotReady(_) => {
                Class::Unavailable
            }
            Self::Internal(_) => Class::Internal,
        }
    }
}

/// Where a job stands, told to a worker that lost it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobStatus {
    /// The job's state.
    pub state: JobState,
    /// The job's latest attempt; 0 before the first.
    pub attempt: i32,
}

impl Error {
    /// A request with one bad field.
    pub fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Invalid(vec![FieldError::new(field, message)])
    }

    /// A mistake of ours, found by `source`.
    pub fn internal(source: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self::Internal(Arc::new(source))
    }
}

/// Whether a unique key was the reason of a refusal.
#[must_use]
pub fn is_unique_violation(error: &sqlx::Error) -> bool {
    matches!(error, sqlx::Error::Database(it) if it.is_unique_violation())
}

/// SQLSTATE classes in which the statement itself is at fault, not the store: data (22), integrity
/// (23), syntax and access (42).
const FAULTY_STATEMENT_CLASSES: [&str; 3] = ["22", "23", "42"];

/// Whether the store refused this very statement, so that repeating it cannot help.
#[must_use]
pub fn is_faulty_statement(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Database(it) => it
            .code()
            .is_some_and(|code| FAULTY_STATEMENT_CLASSES.iter().any(|it| code.starts_with(it))),
        sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_) | sqlx::Error::Encode(_) => true,
        _ => false,
    }
}

impl From<sqlx::Error> for Error {
    fn from(error: sqlx::Error) -> Self {
        if is_faulty_statement(&error) {
            return Self::internal(error);
        }
        Self::Unavailable(Arc::new(error))
    }
}
