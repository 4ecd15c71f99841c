//! Which queues need attention, and why: pure, so that the order is predictable at 3 am.

use fencepost_domain::explain::Reason;

use fencepost_http::routes::queues::{LONG_WAIT_SECONDS, Queue};

/// A failure rate of the last hour, in percent, from which it is a problem.
const MANY_FAILURES_PERCENT: i64 = 10;
/// Fewer failures than this are ignored.
const FEW_FAILURES: i64 = 5;

/// The problem of a queue; the most urgent first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Trouble {
    /// Jobs wait, but its limit of 0 lets none run.
    Closed,
    /// Jobs are ready, but no live worker polls.
    NoWorkers,
    /// The oldest ready job waits too long, and nothing that runs will take it.
    Unserved(Reason),
    /// The oldest ready job waits too long; none: it is not known why.
    Waits(Option<Reason>),
    /// Running jobs have workers that make no calls; none of its workers does.
    AllSilent,
    Failing,
    /// Running jobs have workers that make no calls; others do.
    Silent,
    /// It is paused, and jobs wait.
    Paused,
    /// The circuit breaker, or a person, has paused types.
    TypesPaused,
}

impl Trouble {
    /// Whether it keeps jobs from running, unless a setting of the project does, or they are only
    /// many.
    pub fn is_urgent(self) -> bool {
        match self {
            Self::Closed | Self::NoWorkers | Self::Unserved(_) | Self::AllSilent => true,
            Self::Waits(reason) => matches!(reason, None | Some(Reason::WorkersBusy)),
            Self::Failing | Self::Silent | Self::Paused | Self::TypesPaused => false,
        }
    }

    pub fn words(self) -> &'static str {
        match self {
            Self::Closed => "its concurrency limit is 0",
            Self::NoWorkers => "jobs are ready and no worker takes them",
            Self::Unserved(reason) | Self::Waits(Some(reason)) => wait_words(reason),
            Self::Waits(None) => "jobs wait too long",
            Self::AllSilent | Self::Silent => "running jobs have workers that make no calls",
            Self::Failing => "many attempts fail",
            Self::Paused => "paused while jobs wait",
            Self::TypesPaused => "job types are paused",
        }
    }
}

/// Why jobs wait too long.
fn wait_words(reason: Reason) -> &'static str {
    match reason {
        Reason::Ready => "jobs wait though workers poll",
        Reason::NoWorkers => "no worker takes its oldest job",
        Reason::Labels => "no worker has the labels of its oldest job",
        Reason::WorkersBusy => "all workers are busy",
        Reason::CircuitBreaker => "the circuit breaker has paused a job type",
        Reason::TypePaused => "a job type is paused",
        Reason::Concurrency => "a concurrency limit is reached",
        Reason::RateLimit => "the rate limit is reached",
        Reason::PushFailing => "requests to its URL fail",
        Reason::PushNotServed => "no node sends its jobs to its URL",
        Reason::OtherJobs => "jobs wait behind many others",
        Reason::QueuePaused
        | Reason::JobPaused
        | Reason::GroupHeld
        | Reason::Group
        | Reason::Parents
        | Reason::Backoff
        | Reason::RunAt => "jobs wait",
    }
}

/// Jobs that a worker could claim.
pub fn ready(queue: &Queue) -> i64 {
    (queue.counts.pending - queue.counts.backoff).max(0)
}

/// The problem of a queue, if it has one.
pub fn trouble(queue: &Queue) -> Option<Trouble> {
    let ready = ready(queue);
    let (failed, succeeded) = (queue.rates.failed.last_hour, queue.rates.succeeded.last_hour);
    let waits = queue.oldest_ready_age_seconds.unwrap_or(0);
    if queue.paused_at.is_some() {
        return (queue.counts.pending > 0).then_some(Trouble::Paused);
    }
    if ready > 0 && queue.max_concurrency == Some(0) {
        return Some(Trouble::Closed);
    }
    if ready > 0 && queue.workers == 0 {
        return Some(Trouble::NoWorkers);
    }
    if ready > 0 && waits > LONG_WAIT_SECONDS {
        return Some(match queue.oldest_ready_reason {
            Some(
                reason @ (Reason::NoWorkers
                | Reason::Labels
                | Reason::PushFailing
                | Reason::PushNotServed),
            ) => Trouble::Unserved(reason),
            reason => Trouble::Waits(reason),
        });
    }
    if queue.silent.is_some() && queue.workers == 0 {
        return Some(Trouble::AllSilent);
    }
    if failed >= FEW_FAILURES && failed * 100 >= (failed + succeeded) * MANY_FAILURES_PERCENT {
        return Some(Trouble::Failing);
    }
    if queue.silent.is_some() {
        return Some(Trouble::Silent);
    }
    (!queue.paused_types.is_empty()).then_some(Trouble::TypesPaused)
}

/// Queues with problems first, the most urgent at the top, then by waiting time, then by name.
pub fn sort(queues: &mut [Queue]) {
    queues.sort_by_cached_key(|queue| {
        let trouble = trouble(queue);
        let waits = queue.oldest_ready_age_seconds.unwrap_or(0);
        (trouble.is_none(), trouble, std::cmp::Reverse(waits), queue.queue.clone())
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(name: &str, change: impl FnOnce(&mut serde_json::Value)) -> Queue {
        let rate = serde_json::json!({"last_minute": 0, "last_hour": 0});
        let mut value = serde_json::json!({
            "queue": name, "paused_at": null, "paused_types": [],
            "counts": {"scheduled": 0, "pending": 0, "backoff": 0, "processing": 0, "dead_letter": 0,
                       "succeeded": 0, "cancelled": 0},
            "oldest_ready_at": null, "oldest_ready_job_id": null, "oldest_ready_age_seconds": null,
            "oldest_ready_reason": null, "oldest_ready_summary": null,
            "rates": {"enqueued": rate, "succeeded": rate, "failed": rate}, "workers": 1,
            "max_concurrency": null, "rate_limit": null, "default_lease_seconds": null, "retention_days": 7,
            "default_max_attempts": null, "default_retry": null, "brake_after": null, "max_waiting": null, "updated_at": null,
        });
        change(&mut value);
        serde_json::from_value(value).expect("a queue")
    }

    #[test]
    fn a_queue_is_in_trouble_for_one_reason_the_most_urgent() {
        let check = |change: fn(&mut serde_json::Value), expected| {
            assert_eq!(trouble(&queue("q", change)), expected);
        };
        check(|_| (), None);
        check(|q| q["counts"]["pending"] = 3.into(), None);
        check(
            |q| {
                q["counts"]["pending"] = 3.into();
                q["workers"] = 0.into();
            },
            Some(Trouble::NoWorkers),
        );
        check(
            |q| {
                q["counts"]["pending"] = 3.into();
                q["max_concurrency"] = 0.into();
            },
            Some(Trouble::Closed),
        );
        // Jobs in backoff need no worker.
        check(
            |q| {
                q["counts"]["pending"] = 3.into();
                q["counts"]["backoff"] = 3.into();
                q["workers"] = 0.into();
            },
            None,
        );
        check(
            |q| {
                q["counts"]["pending"] = 1.into();
                q["oldest_ready_age_seconds"] = 61.into();
            },
            Some(Trouble::Waits(None)),
        );
        check(
            |q| {
                q["counts"]["pending"] = 1.into();
                q["oldest_ready_age_seconds"] = 61.into();
                q["oldest_ready_reason"] = "circuit_breaker".into();
            },
            Some(Trouble::Waits(Some(Reason::CircuitBreaker))),
        );
        check(
            |q| {
                q["rates"]["failed"]["last_hour"] = 5.into();
                q["rates"]["succeeded"]["last_hour"] = 45.into();
            },
            Some(Trouble::Failing),
        );
        check(
            |q| {
                q["rates"]["failed"]["last_hour"] = 5.into();
                q["rates"]["succeeded"]["last_hour"] = 46.into();
            },
            None,
        );
        check(|q| q["paused_at"] = "2026-01-01T00:00:00Z".into(), None);
        check(
            |q| {
                q["paused_at"] = "2026-01-01T00:00:00Z".into();
                q["counts"]["pending"] = 1.into();
                q["workers"] = 0.into();
            },
            Some(Trouble::Paused),
        );
    }

    #[test]
    fn silent_workers_are_a_trouble_and_urgent_if_all_are() {
        let silent = |workers: i64| {
            let held = serde_json::json!({
                "jobs": 3, "workers": 2, "return_by": "2026-01-01T00:00:00Z",
            });
            trouble(&queue("q", |q| {
                q["silent"] = held;
                q["workers"] = workers.into();
            }))
        };
        assert_eq!(silent(0), Some(Trouble::AllSilent));
        assert_eq!(silent(1), Some(Trouble::Silent));
    }

    #[test]
    fn queues_with_trouble_come_first() {
        let mut queues = vec![
            queue("a", |_| ()),
            queue("b", |q| {
                q["paused_at"] = "2026-01-01T00:00:00Z".into();
                q["counts"]["pending"] = 1.into();
            }),
            queue("c", |q| {
                q["counts"]["pending"] = 1.into();
                q["workers"] = 0.into();
            }),
            queue("d", |q| q["oldest_ready_age_seconds"] = 5.into()),
            queue("backlog", |q| {
                q["counts"]["pending"] = 9_000.into();
                q["oldest_ready_age_seconds"] = 900.into();
                q["oldest_ready_reason"] = "ready".into();
            }),
            queue("stuck", |q| {
                q["counts"]["pending"] = 1.into();
                q["oldest_ready_age_seconds"] = 61.into();
                q["oldest_ready_reason"] = "labels".into();
            }),
        ];
        sort(&mut queues);
        let names: Vec<_> = queues.iter().map(|it| it.queue.as_str()).collect();
        assert_eq!(names, ["c", "stuck", "backlog", "b", "d", "a"]);
        let is_urgent = |it: &Queue| trouble(it).is_some_and(Trouble::is_urgent);
        assert_eq!(queues.iter().filter(|it| is_urgent(it)).count(), 2);
    }
}
