//! Why a waiting job has not started, in one word for programs.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::job::WaitingFor;

/// Why a waiting job has not started. The most urgent first: those that need a person, then those
/// that a person has asked for, then those that end by themselves.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "snake_case")]
#[schema(as = WaitingReason)]
pub enum Reason {
    /// Nothing keeps it: it starts as soon as a worker polls.
    Ready,
    /// No live worker polls its queue for its type.
    NoWorkers,
    /// No live worker has its labels.
    Labels,
    /// Its queue is pushed to a URL, and requests fail.
    PushFailing,
    /// No node sends the jobs of its pushed queue: more queues are pushed than the nodes can serve,
    /// or they cannot use its URL or secret.
    PushNotServed,
    /// All slots of the workers are in use.
    WorkersBusy,
    /// The circuit breaker has paused its type.
    CircuitBreaker,
    /// A person has paused it.
    JobPaused,
    /// Its queue is paused.
    QueuePaused,
    /// A person has paused its type.
    TypePaused,
    /// The concurrency limit of its key or queue is reached.
    Concurrency,
    /// The rate limit of its queue is reached.
    RateLimit,
    /// Other jobs of its queue come first.
    OtherJobs,
    /// Its group is paused, or a dead letter blocks it.
    GroupHeld,
    /// Its parents.
    Parents,
    /// Jobs ahead of it in its group.
    Group,
    /// Its backoff.
    Backoff,
    /// Its `run_at`.
    RunAt,
}

impl Reason {
    /// All reasons of jobs that could be claimed.
    pub const OF_READY_JOBS: [Self; 12] = [
        Self::Ready,
        Self::NoWorkers,
        Self::Labels,
        Self::PushFailing,
        Self::PushNotServed,
        Self::WorkersBusy,
        Self::CircuitBreaker,
        Self::QueuePaused,
        Self::TypePaused,
        Self::Concurrency,
        Self::RateLimit,
        Self::OtherJobs,
    ];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::NoWorkers => "no_workers",
            Self::Labels => "labels",
            Self::PushFailing => "push_failing",
            Self::PushNotServed => "push_not_served",
            Self::WorkersBusy => "workers_busy",
            Self::CircuitBreaker => "circuit_breaker",
            Self::JobPaused => "job_paused",
            Self::QueuePaused => "queue_paused",
            Self::TypePaused => "type_paused",
            Self::Concurrency => "concurrency",
            Self::RateLimit => "rate_limit",
            Self::OtherJobs => "other_jobs",
            Self::GroupHeld => "group_held",
            Self::Parents => "parents",
            Self::Group => "group",
            Self::Backoff => "backoff",
            Self::RunAt => "run_at",
        }
    }

    /// Which worker a job lacks, beside its state in a list; none: it waits for something else.
    #[must_use]
    pub const fn lacking(self) -> Option<&'static str> {
        match self {
            Self::NoWorkers => Some("no worker polls its queue for its type"),
            Self::Labels => Some("no worker has its labels"),
            _ => None,
        }
    }

    /// The condition's kind.
    #[must_use]
    pub const fn waits_for(self) -> WaitingFor {
        match self {
            Self::Ready
            | Self::NoWorkers
            | Self::Labels
            | Self::PushFailing
            | Self::PushNotServed
            | Self::WorkersBusy
            | Self::OtherJobs => WaitingFor::Worker,
            Self::JobPaused => WaitingFor::JobPaused,
            Self::QueuePaused => WaitingFor::QueuePaused,
            Self::CircuitBreaker | Self::TypePaused => WaitingFor::TypePaused,
            Self::Concurrency => WaitingFor::Concurrency,
            Self::RateLimit => WaitingFor::RateLimit,
            Self::Parents => WaitingFor::Parents,
            Self::GroupHeld | Self::Group => WaitingFor::Group,
            Self::Backoff => WaitingFor::Backoff,
            Self::RunAt => WaitingFor::RunAt,
        }
    }
}
