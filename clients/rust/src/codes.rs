//! Codes of errors.

use serde::Deserialize;

/// The stable code of an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ErrorCode {
    InvalidRequest,
    InvalidCronExpression,
    InvalidTimezone,
    Unauthorized,
    InvalidCredentials,
    InvalidCode,
    PasskeyRefused,
    TokenRefused,
    InvalidToken,
    Forbidden,
    Suspended,
    RoleExceedsCaller,
    EmailNotVerified,
    CodeRequired,
    StepUpRequired,
    SignupClosed,
    NotFound,
    KeyNotFound,
    AccountNotFound,
    InvitationNotFound,
    SessionNotFound,
    IdentityNotFound,
    PasskeyNotFound,
    EmailTaken,
    SlugTaken,
    CannotRemoveOwner,
    KeysRemain,
    RateLimitExceeded,
    ProjectNotFound,
    JobNotFound,
    WorkflowNotFound,
    BatchNotFound,
    WorkerNotFound,
    QueueNotFound,
    OperationNotFound,
    RecurringJobNotFound,
    MethodNotAllowed,
    RequestTimeout,
    InvalidState,
    WorkerMismatch,
    StaleLease,
    FenceRequired,
    ParentTerminal,
    BatchCompleted,
    UniqueConflict,
    RecurringJobTypeConflict,
    IdempotencyKeyReuse,
    IdempotencyInProgress,
    QuotaExceeded,
    QueueFull,
    PayloadTooLarge,
    UnsupportedMediaType,
    Internal,
    Overloaded,
    Unavailable,
    /// No code, or one of a later server.
    #[default]
    #[serde(other)]
    Unknown,
}
