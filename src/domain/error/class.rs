//! Errors by class.

use super::Error;

/// The class of an error, for protocols with few error codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Invalid request.
    Unreadable,
    /// Fields break rules.
    Invalid,
    /// No valid credential.
    Unauthorized,
    /// A missing permission.
    Forbidden,
    /// Not found, or of another project.
    NotFound,
    /// The route exists, but not for this method.
    MethodNotAllowed,
    /// The state of something does not allow it.
    Conflict,
    /// The name or key is taken.
    Duplicate,
    /// The request, or a part of it, is too large.
    TooLarge,
    /// Not JSON.
    MediaType,
    /// The body did not arrive in time.
    Timeout,
    /// A rate limit or quota.
    Limited,
    /// Temporarily unavailable.
    Unavailable,
    /// A defect of the server.
    Internal,
}

impl Error {
    /// The class of this error. No `_`: a new error must be classified.
    #[must_use]
    pub fn class(&self) -> Class {
        match self {
            Self::Unreadable(_) => Class::Unreadable,
            Self::Invalid(_) | Self::InvalidLink => Class::Invalid,
            Self::InvalidCron(_) | Self::InvalidTimezone(_) => Class::Invalid,
            Self::Unauthorized
            | Self::NoCredential(_)
            | Self::MalformedCredential(_)
            | Self::InvalidCredentials
            | Self::InvalidCode
            | Self::PasskeyRefused(_)
            | Self::TokenRefused(_) => Class::Unauthorized,
            Self::Forbidden { .. }
            | Self::OutOfBounds(_)
            | Self::Suspended { .. }
            | Self::SignupClosed
            | Self::RoleExceedsCaller
            | Self::EmailNotVerified
            | Self::CodeRequired(_)
            | Self::StepUpRequired => Class::Forbidden,
            Self::NoSuchRoute
            | Self::ProjectNotFound
            | Self::JobNotFound
            | Self::NoJobId(_)
            | Self::UnknownRoute { .. }
            | Self::WorkflowNotFound
            | Self::BatchNotFound
            | Self::QueueNotFound
            | Self::OperationNotFound
            | Self::ScheduleNotFound
            | Self::WorkerNotFound
            | Self::EndpointNotFound
            | Self::DeliveryNotFound
            | Self::AlarmNotFound
            | Self::PushNotFound
            | Self::KeyNotFound
            | Self::MemberNotFound
            | Self::InvitationNotFound
            | Self::SessionNotFound
            | Self::IdentityNotFound
            | Self::PasskeyNotFound => Class::NotFound,
            Self::MethodNotAllowed | Self::WrongMethod { .. } => Class::MethodNotAllowed,
            Self::InvalidState(_)
            | Self::WorkerMismatch(_)
            | Self::StaleLease(_)
            | Self::FenceRequired(_)
            | Self::ParentTerminal(_)
            | Self::BatchCompleted(_)
            | Self::PreconditionFailed
            | Self::LastOwner
            | Self::KeysRemain(_)
            | Self::IdempotencyKeyReuse
            | Self::IdempotencyInProgress => Class::Conflict,
            Self::UniqueConflict { .. }
            | Self::ScheduleTypeConflict
            | Self::EmailTaken
            | Self::SlugTaken => Class::Duplicate,
            Self::BodyTooLarge { .. } | Self::FieldTooLarge { .. } => Class::TooLarge,
            Self::UnsupportedMediaType | Self::UnsupportedCoding => Class::MediaType,
            Self::BodyTimeout => Class::Timeout,
            Self::RateLimited { .. } | Self::QueueFull { .. } => Class::Limited,
            Self::QuotaExceeded { .. } => Class::Limited,
            Self::Overloaded | Self::JobLocked | Self::InDoubt => Class::Unavailable,
            Self::Unavailable(_) | Self::NotReady(_) => Class::Unavailable,
            Self::OfQueue(it) => it.class(),
            Self::Internal(_) => Class::Internal,
        }
    }
}
