//! Rate limits: that of a queue, and those that its workers meet.

use super::{Condition, Facts, RateUse, Reason, second};
use crate::rate::RateLimit;

pub(super) fn of_worker(facts: &Facts) -> Option<Condition> {
    let until = facts.rate_limited_until.filter(|it| *it > facts.now)?;
    let (queue, end) = (&facts.queue, second(until));
    Some(Condition {
        reason: Reason::RateLimit,
        is_open: false,
        message: format!("a worker of queue {queue} has met a rate limit: it rests until {end}"),
        changes_at: Some(until),
    })
}

pub(super) fn of_queue(facts: &Facts, rate: &RateUse) -> Condition {
    let RateLimit { count, per_seconds } = rate.limit;
    let (used, queue) = (count - rate.left, &facts.queue);
    let is_open = rate.left > 0;
    Condition {
        reason: Reason::RateLimit,
        is_open,
        message: format!("queue {queue} has started {used} of {count} jobs in {per_seconds} s"),
        changes_at: (!is_open).then_some(rate.opens_at),
    }
}
