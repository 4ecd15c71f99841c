//! Why a job is not running: every condition between it and a worker, in the order in which they
//! are met.

mod group;
mod rates;
mod reason;
mod shared;
#[cfg(test)]
mod tests;
mod workers;

use chrono::{DateTime, SecondsFormat, Utc};

pub use self::{
    group::{GroupLimit, GroupLine, JobAhead},
    reason::Reason,
    shared::SharedUse,
};
use super::{
    job::{DeadLetterReason, StoredState},
    rate::RateLimit,
};

/// Facts about a job and about what it waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)] // The names say it; comments stand where they do not.
pub struct Facts {
    /// By the database's clock.
    pub now: DateTime<Utc>,
    pub state: StoredState,
    pub queue: String,
    pub job_type: String,
    pub run_at: DateTime<Utc>,
    pub failures: i32,
    pub max_attempts: i32,
    pub loss: Loss,
    pub unfinished_parents: i32,
    pub paused_at: Option<DateTime<Utc>>,
    /// What its group waits for; none: it does not wait for its group.
    pub group: Option<GroupLine>,
    /// The group that it blocks as a dead letter.
    pub blocks_group: Option<String>,
    pub labels: Vec<String>,
    pub concurrency: Option<Crowd>,
    pub queue_concurrency: Option<Crowd>,
    pub queue_paused_at: Option<DateTime<Utc>>,
    pub type_pause: Option<TypePause>,
    pub rate: Option<RateUse>,
    /// A worker has met a rate limit: nothing of the queue starts before then.
    pub rate_limited_until: Option<DateTime<Utc>>,
    /// Limits that its queue keeps together with others.
    pub shared: Vec<SharedUse>,
    pub push: Option<PushTrouble>,
    pub worker_id: Option<String>,
    pub lease_expires_at: Option<DateTime<Utc>>,
    /// The seconds for which its worker has made no call, if they are many.
    pub silent_seconds: Option<i64>,
    /// Time at which its worker is lost and the job returns, if it makes no call until then.
    pub worker_lost_at: Option<DateTime<Utc>>,
    pub cancel_requested: bool,
    pub expires_at: Option<DateTime<Utc>>,
    /// The server fails to process the job, and tries again then.
    pub next_try_at: Option<DateTime<Utc>>,
    /// Live workers that poll the queue for this type.
    pub workers: i64,
    /// Live workers that would, but were asked to take no more jobs.
    pub quiet_workers: i64,
    /// If there are none: the first types that live workers of the queue take.
    pub other_types: Vec<String>,
    /// Number of `workers` with all of the job's labels.
    pub workers_with_labels: i64,
    /// Jobs that workers with the labels run, and could run; none: one of them has not registered.
    pub slots: Option<Slots>,
    /// Jobs that they run, registered or not.
    pub slots_in_use: i64,
    /// Claimable jobs before it in its queue, or in its group if groups take turns, counted up to
    /// [`MAX_COUNTED_AHEAD`].
    pub ahead: i64,
    /// Groups whose turn comes before that of its group, counted up to the same number; none:
    /// groups take no turns.
    pub groups_ahead: Option<i64>,
}

/// Types that are named when none of a queue's workers takes that of the job.
pub const MAX_OTHER_TYPES: usize = 5;
/// Jobs ahead are counted up to this number.
pub const MAX_COUNTED_AHEAD: i64 = 1_000;

/// What is known of a job's losses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loss {
    /// Their number.
    pub total: i32,
    /// Those since the last outcome or progress.
    pub in_row: i32,
    /// Losses in a row after which it is dead-lettered.
    pub max_in_row: i32,
    /// Why it was dead-lettered, if it was.
    pub death: DeadLetterReason,
}

/// Running jobs under a limit, and the limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Crowd {
    /// The key or the queue.
    pub name: String,
    /// Running jobs.
    pub running: i64,
    /// Maximum number of running jobs.
    pub limit: i32,
}

impl Crowd {
    fn is_full(&self) -> bool {
        self.running >= i64::from(self.limit)
    }
}

/// The capacity of workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slots {
    /// Jobs that they run.
    pub in_use: i64,
    /// Jobs that they could run at the same time.
    pub all: i64,
}

/// A pause of a job type in its queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TypePause {
    /// Paused since.
    pub paused_at: DateTime<Utc>,
    /// The number of consecutive dead letters that opened the circuit breaker; none: paused by a
    /// person.
    pub dead_letters: Option<i32>,
}

/// A reason for which the jobs of a pushed queue do not reach their URL. No worker polls the queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PushTrouble {
    /// No node sends them.
    NotServed,
    /// Requests fail.
    Failing {
        /// Since the first failure after the last success.
        since: DateTime<Utc>,
        /// The last error, as `http_503`.
        error: Option<String>,
    },
}

/// How much of a rate limit is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RateUse {
    /// The limit.
    pub limit: RateLimit,
    /// Jobs that may start immediately.
    pub left: i32,
    /// When the next job may start.
    pub opens_at: DateTime<Utc>,
}

/// A condition that must be met before the job can run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condition {
    /// Why the job waits, if it is not met.
    pub reason: Reason,
    /// Whether it is met.
    pub is_open: bool,
    /// The state of the condition with numbers, for people.
    pub message: String,
    /// Time of the next change of the condition, if it is known.
    pub changes_at: Option<DateTime<Utc>>,
}

/// The explanation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// The first condition that is not met, or what the job does instead of waiting.
    pub summary: String,
    /// The same for programs; none: the job does not wait.
    pub reason: Option<Reason>,
    /// All conditions; empty if the job does not wait.
    pub conditions: Vec<Condition>,
    /// The next time at which a condition changes by itself.
    pub next_change_at: Option<DateTime<Utc>>,
}

/// Explains a job.
#[must_use]
pub fn explain(facts: &Facts) -> Explanation {
    let conditions = if facts.state.is_waiting() { conditions(facts) } else { Vec::new() };
    let closed = conditions.iter().find(|it| !it.is_open);
    let reason = facts.state.is_waiting().then(|| closed.map_or(Reason::Ready, |it| it.reason));
    let summary = match closed {
        _ if facts.next_try_at.is_some() && is_live(facts.state) => {
            "the server failed to process it, and tries again: contact the operator".to_owned()
        }
        Some(condition) => condition.message.clone(),
        None if facts.state.is_waiting() => "ready: it starts as soon as a worker polls".to_owned(),
        None => not_waiting(facts),
    };
    let times = conditions.iter().filter(|it| !it.is_open).filter_map(|it| it.changes_at);
    let expiry = facts.expires_at.filter(|_| facts.state.is_waiting());
    let lease = facts.lease_expires_at.filter(|_| facts.state == StoredState::Processing);
    let lost = facts.worker_lost_at.filter(|_| facts.state == StoredState::Processing);
    let times = times.chain(expiry).chain(lease).chain(lost).chain(facts.next_try_at);
    let next_change_at = times.filter(|it| *it > facts.now).min();
    Explanation { summary, reason, conditions, next_change_at }
}

fn is_live(state: StoredState) -> bool {
    state.is_waiting() || state == StoredState::Processing
}

fn not_waiting(facts: &Facts) -> String {
    match facts.state {
        StoredState::Processing if facts.cancel_requested => format!(
            "worker {} is asked to stop with its next heartbeat",
            facts.worker_id.as_deref().unwrap_or("unknown")
        ),
        StoredState::Processing => {
            let worker = facts.worker_id.as_deref().unwrap_or("unknown");
            match (facts.silent_seconds, facts.worker_lost_at) {
                (None, None) => format!("worker {worker} runs it"),
                (None, Some(at)) => format!(
                    "worker {worker} runs it: if it makes no call, the job returns at {}",
                    second(at)
                ),
                (Some(seconds), _) => format!(
                    "worker {worker} has it, and has made no call for {seconds} s: the job returns \
                     when its lease ends, or when you take it back"
                ),
            }
        }
        StoredState::DeadLetter if facts.loss.death == DeadLetterReason::Lost => format!(
            "dead-lettered because its workers were lost {} times, {} in a row at most: {}",
            facts.loss.total,
            facts.loss.max_in_row,
            group::remedy(facts)
        ),
        StoredState::DeadLetter if facts.loss.death == DeadLetterReason::Claims => format!(
            "dead-lettered because it was claimed too often without an end: {}",
            group::remedy(facts)
        ),
        StoredState::DeadLetter if facts.failures < facts.max_attempts => format!(
            "dead-lettered by failure {} of {}, which no retry can mend, as its worker or its retry \
             policy says: {}",
            facts.failures,
            facts.max_attempts,
            group::remedy(facts)
        ),
        StoredState::DeadLetter => format!(
            "dead-lettered after {} of {} failures: {}",
            facts.failures,
            facts.max_attempts,
            group::remedy(facts)
        ),
        StoredState::Cancelled => "cancelled: retry it manually".to_owned(),
        _ => "done".to_owned(),
    }
}

fn conditions(facts: &Facts) -> Vec<Condition> {
    let mut conditions = Vec::from_iter(facts.paused_at.map(job_pause));
    conditions.push(parents(facts));
    conditions.extend(facts.group.as_ref().map(|line| group::condition(facts, line)));
    conditions.extend([due(facts), queue_pause(facts)]);
    conditions.extend(facts.type_pause.as_ref().map(|pause| type_pause(facts, pause)));
    let crowds = [("key", &facts.concurrency), ("queue", &facts.queue_concurrency)];
    for (what, crowd) in crowds {
        if let Some(crowd) = crowd {
            let Crowd { name, running, limit } = crowd;
            let state = if crowd.is_full() { "busy" } else { "in use" };
            let message = match limit {
                0 => format!("{what} {name} allows no job: its limit is 0"),
                _ => format!("{what} {name} {running}/{limit} {state}"),
            };
            conditions.push(Condition {
                reason: Reason::Concurrency,
                is_open: !crowd.is_full(),
                message,
                changes_at: None,
            });
        }
    }
    conditions.extend(facts.rate.as_ref().map(|rate| rates::of_queue(facts, rate)));
    conditions.extend(rates::of_worker(facts));
    conditions.extend(facts.shared.iter().map(|it| shared::condition(facts, it)));
    conditions.extend(facts.push.as_ref().map(|it| push_trouble(facts, it)));
    conditions.push(workers::condition(facts));
    conditions
}

fn push_trouble(facts: &Facts, trouble: &PushTrouble) -> Condition {
    let queue = &facts.queue;
    let (reason, message) = match trouble {
        PushTrouble::NotServed => {
            let message = format!(
                "no node sends the jobs of the pushed queue {queue}: more queues are pushed than \
                 the nodes can serve, or they cannot use its URL or secret"
            );
            (Reason::PushNotServed, message)
        }
        PushTrouble::Failing { since, error } => {
            let (since, error) = (second(*since), error.as_deref().unwrap_or("unknown"));
            let message =
                format!("requests of the pushed queue {queue} fail since {since}: {error}");
            (Reason::PushFailing, message)
        }
    };
    Condition { reason, is_open: false, message, changes_at: None }
}

fn job_pause(at: DateTime<Utc>) -> Condition {
    let message = format!("it is paused since {}: resume it", second(at));
    Condition { reason: Reason::JobPaused, is_open: false, message, changes_at: None }
}

fn queue_pause(facts: &Facts) -> Condition {
    let message = match facts.queue_paused_at {
        None => format!("queue {} is not paused", facts.queue),
        Some(at) => format!("queue {} is paused since {}", facts.queue, second(at)),
    };
    let is_open = facts.queue_paused_at.is_none();
    Condition { reason: Reason::QueuePaused, is_open, message, changes_at: None }
}

fn type_pause(facts: &Facts, pause: &TypePause) -> Condition {
    let why = match pause.dead_letters {
        None => "paused manually".to_owned(),
        Some(many) => {
            format!("paused by the circuit breaker after {many} consecutive dead letters")
        }
    };
    let Facts { job_type, queue, .. } = facts;
    let since = second(pause.paused_at);
    Condition {
        reason: if pause.dead_letters.is_some() {
            Reason::CircuitBreaker
        } else {
            Reason::TypePaused
        },
        is_open: false,
        message: format!("{job_type} is paused in queue {queue} since {since}: {why}"),
        changes_at: None,
    }
}

fn second(time: DateTime<Utc>) -> String {
    time.to_rfc3339_opts(SecondsFormat::Secs, true)
}

fn parents(facts: &Facts) -> Condition {
    let open = facts.unfinished_parents;
    let message = match open {
        0 => "all parents have ended as this job waits for".to_owned(),
        1 => "it waits for the end of 1 parent".to_owned(),
        more => format!("it waits for the ends of {more} parents"),
    };
    Condition { reason: Reason::Parents, is_open: open == 0, message, changes_at: None }
}

fn due(facts: &Facts) -> Condition {
    let is_open = facts.state == StoredState::Pending || facts.run_at <= facts.now;
    let reason = if facts.state == StoredState::Backoff { Reason::Backoff } else { Reason::RunAt };
    let message = match (is_open, reason) {
        (true, _) => "it is due".to_owned(),
        (false, Reason::Backoff) => {
            let seconds = (facts.run_at - facts.now).num_seconds().max(1);
            let failed = match (facts.failures, facts.loss.in_row) {
                (_, losses @ 1..) => format!("lost {losses} times in a row"),
                (0, _) => "no failure is counted".to_owned(),
                (failures, _) => format!("failure {failures} of {}", facts.max_attempts),
            };
            format!("{failed}: retried in {seconds} s")
        }
        (false, _) => {
            let seconds = (facts.run_at - facts.now).num_seconds().max(1);
            format!("its run_at is {seconds} s ahead")
        }
    };
    Condition { reason, is_open, message, changes_at: (!is_open).then_some(facts.run_at) }
}

fn things(number: i64, name: &str) -> String {
    format!("{number} {name}{}", if number == 1 { "" } else { "s" })
}
