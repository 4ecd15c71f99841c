//! Errors by meaning. The native API and each adapter map every error to a status and a code in one
//! exhaustive match; nothing here knows HTTP.

mod class;
mod database;
mod queue;
mod response;

use std::sync::Arc;

pub use self::{
    class::Class,
    database::{is_faulty_statement, is_lock_timeout, is_unique_violation},
    queue::QueueError,
};

use chrono::{DateTime, Utc};
use secrecy::SecretString;

use crate::{
    binding::OutOfBounds,
    ids::{BatchId, JobId, KeyId},
    job::JobState,
};

/// An error with its causes in one line, for logs.
#[must_use]
pub fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(error.source(), |it| it.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// An invalid field of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldError {
    /// Its path: `jobs[3].queue`.
    pub field: String,
    /// The rule that it breaks, with the limit.
    pub message: String,
}

impl FieldError {
    /// A rule broken by `field`.
    pub fn new(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { field: field.into(), message: message.into() }
    }
}

/// A live key whose creator is removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemainingKey {
    pub id: KeyId,
    pub name: String,
    pub scopes: Vec<String>,
    pub last_used_at: Option<DateTime<Utc>>,
}

/// The beginning of keys and tokens: a text that begins with it may be a secret.
pub const KEY_PREFIX: &str = "fp_";
/// Characters of a malformed id that an error repeats.
const MAX_SHOWN_ID_CHARS: usize = 60;

/// The text never repeats the source: `source()` carries it, and the boundary that answers the
/// request logs the whole chain, once.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Unreadable(String),

    /// The request was read, and its fields break rules.
    #[error("the request is not valid")]
    Invalid(Vec<FieldError>),

    /// The credential is unknown, revoked or expired: all look the same.
    #[error("the API key or session is unknown, revoked or expired")]
    Unauthorized,

    /// No credential was sent, or not where it is expected.
    #[error("{0}")]
    NoCredential(&'static str),

    /// The credential cannot be a live one, whatever the database says.
    #[error("{0}")]
    MalformedCredential(&'static str),

    /// The caller is known, but lacks a permission.
    #[error("this operation requires {needs}")]
    Forbidden {
        /// The missing permission.
        needs: &'static str,
    },

    /// The key is bound to other queues or job types.
    #[error("this API key is not for the {} `{}`", .0.what, .0.name)]
    OutOfBounds(OutOfBounds),

    #[error("queue {queue} would have more than {max} jobs that wait or run, its max_waiting")]
    QueueFull { queue: String, max: i64 },

    /// The operator has suspended the project or account.
    #[error("the operator of this server has suspended the {what}")]
    Suspended {
        /// `project` or `account`.
        what: &'static str,
    },

    #[error("too many requests: try again in {retry_after_seconds} s")]
    RateLimited {
        /// The pause, in seconds.
        retry_after_seconds: u32,
    },

    #[error("invalid credentials")]
    InvalidCredentials,

    /// The password is right, and the account has a second factor. The token is that of the login.
    #[error("a code is needed: send it with the login_token to /v1/auth/login/code")]
    CodeRequired(SecretString),

    /// A code of an authenticator app, or a recovery code.
    #[error("the code is wrong, was used, or is not valid any more")]
    InvalidCode,

    /// The session must prove first who its person is.
    #[error("prove first that it is you: send your password or a code to /v1/auth/step-up")]
    StepUpRequired,

    #[error("the passkey is refused: {0}")]
    PasskeyRefused(&'static str),

    /// A token of a CI service or a cluster.
    #[error("the token is refused: {0}")]
    TokenRefused(String),

    #[error("token is unknown, used or expired, or belongs to another account")]
    InvalidLink,

    #[error("sign-up is closed, or needs an invitation")]
    SignupClosed,

    /// Another account has verified the address.
    #[error("another account has this address: reset its password instead")]
    EmailTaken,

    #[error("no free slug could be derived from this name: choose another name")]
    SlugTaken,

    #[error(
        "a project would be left without an owner: make another member an owner first, or delete the project"
    )]
    LastOwner,

    #[error("you cannot grant or revoke a role or scope that you do not have")]
    RoleExceedsCaller,

    #[error("verify the e-mail address of your account first: its mail has the link")]
    EmailNotVerified,

    /// Live keys that a removed member or key has created.
    #[error(
        "live keys remain, see keys: send revoke_keys=true to revoke them, or false to keep them"
    )]
    KeysRemain(Vec<RemainingKey>),

    #[error("API key not found")]
    KeyNotFound,

    #[error("member not found")]
    MemberNotFound,

    #[error("invitation not found")]
    InvitationNotFound,

    #[error("session not found")]
    SessionNotFound,

    #[error("identity not found")]
    IdentityNotFound,

    #[error("passkey not found")]
    PasskeyNotFound,

    #[error("endpoint not found")]
    EndpointNotFound,

    #[error("alarm or incident not found")]
    AlarmNotFound,

    #[error(
        "does not exist, was changed meanwhile, or exists already (If-Match, If-None-Match): read it again"
    )]
    PreconditionFailed,

    #[error("delivery not found")]
    DeliveryNotFound,

    #[error("the queue's jobs are not pushed")]
    PushNotFound,

    #[error("no such route")]
    NoSuchRoute,

    /// A path that no route has, and a similar one that has.
    #[error("no such route: did you mean {meant}?")]
    UnknownRoute {
        /// Its path.
        meant: String,
    },

    #[error("method not allowed")]
    MethodNotAllowed,

    #[error("method not allowed: this route answers {allowed} only")]
    WrongMethod {
        /// Methods.
        allowed: String,
    },

    #[error("project not found")]
    ProjectNotFound,

    #[error("job not found")]
    JobNotFound,

    #[error(
        "job not found: `{0}` is not the id of a job: job_ and 26 of 0–9 and a–z without i, l, o, u"
    )]
    NoJobId(String),

    /// The job's state does not allow this operation.
    #[error("the job is {}: its state does not allow this operation", .0.state.as_str())]
    InvalidState(JobStatus),

    #[error("another worker holds the job")]
    WorkerMismatch(JobStatus),

    /// This worker's lease has ended: a newer attempt may be running.
    #[error(
        "the lease has ended, or is not the one that the request names: the current attempt is {}; \
         stop working on this one",
        .0.attempt
    )]
    StaleLease(JobStatus),

    /// The worker showed no attempt, and may mean one that it lost.
    #[error(
        "this worker lost an earlier attempt of the job, or a checkpoint needs its attempt: send \
         `attempt` or `lease_id`"
    )]
    FenceRequired(JobStatus),

    /// A parent failed or was cancelled: its children would wait forever.
    #[error("a parent of the job failed or was cancelled")]
    ParentTerminal(Vec<FieldError>),

    #[error("a live job has this unique key")]
    UniqueConflict {
        /// The key's field, as a path.
        field: String,
        /// The job that has it, if that is known.
        holder: Option<JobId>,
    },

    #[error("this idempotency key was used with another request")]
    IdempotencyKeyReuse,

    #[error("the first request with this idempotency key is still running")]
    IdempotencyInProgress,

    #[error("workflow not found")]
    WorkflowNotFound,

    #[error("batch not found")]
    BatchNotFound,

    /// Its callbacks are enqueued: a new job would not be counted.
    #[error("all jobs of this batch have ended: it takes no more")]
    BatchCompleted(BatchId),

    #[error("queue not found")]
    QueueNotFound,

    /// About a queue or its groups.
    #[error("{0}")]
    OfQueue(#[from] QueueError),

    #[error("operation not found")]
    OperationNotFound,

    #[error("recurring schedule not found")]
    ScheduleNotFound,

    #[error("another job type has a recurring schedule of this id")]
    ScheduleTypeConflict,

    /// The cron expression is invalid, never fires, or fires too often.
    #[error("the cron expression is not valid")]
    InvalidCron(FieldError),

    #[error("the time zone is not valid")]
    InvalidTimezone(FieldError),

    #[error("worker not found")]
    WorkerNotFound,

    /// The project has the maximum number already. The caller may repeat the request when there are
    /// fewer.
    #[error("at most {max} {what} are allowed")]
    QuotaExceeded {
        what: &'static str,
        /// How many it may have.
        max: i64,
    },

    #[error("the body is larger than {limit_bytes} bytes")]
    BodyTooLarge {
        /// The bound, in bytes.
        limit_bytes: usize,
    },

    #[error("{field} is larger than {limit_bytes} bytes")]
    FieldTooLarge {
        /// Where it is, as a path.
        field: String,
        /// The bound, in bytes.
        limit_bytes: usize,
    },

    #[error("the body did not arrive in time")]
    BodyTimeout,

    #[error("the body must be JSON, with `Content-Type: application/json`")]
    UnsupportedMediaType,

    #[error("the body must be sent as it is, or with `Content-Encoding: gzip`")]
    UnsupportedCoding,

    /// A bounded queue is full. The caller may repeat the request after a pause.
    #[error("the server is overloaded: try again")]
    Overloaded,

    /// Another transaction holds the job: nothing was written. The caller may repeat the request
    /// after a pause.
    #[error("another transaction holds the job, and nothing was written: try again")]
    JobLocked,

    /// The database did not answer. The caller may repeat the request after a pause.
    #[error("temporarily unavailable")]
    Unavailable(#[source] Arc<sqlx::Error>),

    /// The connection was lost during the commit: it may have happened.
    #[error("the outcome is unknown: check before you retry")]
    InDoubt,

    /// The node is stopping, or its schema is too old.
    #[error("{0}")]
    NotReady(&'static str),

    /// A defect of the server.
    #[error("internal error")]
    Internal(#[source] Arc<dyn std::error::Error + Send + Sync>),
}

/// The state of a job, for a worker that lost it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobStatus {
    /// The job's state.
    pub state: JobState,
    /// The job's latest attempt; 0 before the first.
    pub attempt: i32,
}

impl Error {
    /// True if the request has no credential of a live key or session: the console asks for a login
    /// then.
    #[must_use]
    pub const fn is_without_credential(&self) -> bool {
        matches!(self, Self::Unauthorized | Self::NoCredential(_) | Self::MalformedCredential(_))
    }

    /// A request with one invalid field.
    pub fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Invalid(vec![FieldError::new(field, message)])
    }

    /// The same error, of fields below `path`, such as `acks[1].`.
    #[must_use]
    pub fn below(self, path: &str) -> Self {
        let Self::Invalid(mut broken) = self else { return self };
        broken.iter_mut().for_each(|it| it.field.insert_str(0, path));
        Self::Invalid(broken)
    }

    /// Says of an id that does not exist if it cannot be one. A key that was sent in its place is
    /// not repeated: errors are logged.
    #[must_use]
    pub fn naming(self, id: &str) -> Self {
        match self {
            Self::JobNotFound if !id.contains(KEY_PREFIX) => {
                Self::NoJobId(id.chars().take(MAX_SHOWN_ID_CHARS).collect())
            }
            other => other,
        }
    }

    /// A defect of the server, found by `source`.
    pub fn internal(source: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self::Internal(Arc::new(source))
    }
}

impl From<OutOfBounds> for Error {
    fn from(out: OutOfBounds) -> Self {
        Self::OutOfBounds(out)
    }
}
