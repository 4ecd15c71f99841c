//! The rows about groups and shared limits.

use fencepost_domain::{
    limits,
    rate::MAX_GROUP_RATES,
    shared_limit::{MAX_LIMITS_OF_QUEUE, MAX_QUEUES_OF_LIMIT, MAX_SHARED_LIMITS},
    turns::{MAX_WEIGHT, MIN_WEIGHT},
};
use fencepost_store::groups;

/// The rows of "A queue" about groups and shared limits.
pub fn group_limits() -> Vec<(&'static str, String)> {
    vec![
        (
            "paused groups of a project",
            format!(
                "{}; a worker's rate limit beyond it delays its own job alone",
                limits::MAX_PAUSED_GROUPS
            ),
        ),
        (
            "pause of a group, `seconds`",
            format!("1–{} s, or until it is resumed", limits::MAX_GROUP_PAUSE_SECONDS),
        ),
        ("`groups.max_running` of a queue", format!("1–{}", limits::MAX_CONCURRENCY)),
        ("`groups.rates` of a queue", format!("{MAX_GROUP_RATES} windows, each as `rate_limit`")),
        (
            "`weight` of a group",
            format!("{MIN_WEIGHT}–{MAX_WEIGHT}, {MIN_WEIGHT} if it is not set"),
        ),
        ("groups of a project with rules of their own", limits::MAX_GROUP_OVERRIDES.to_string()),
        ("shared limits of a project", MAX_SHARED_LIMITS.to_string()),
        (
            "`shared_limits` of a queue",
            format!("{MAX_LIMITS_OF_QUEUE} names of 1–{} characters", limits::MAX_QUEUE_CHARS),
        ),
        ("queues that name one shared limit", MAX_QUEUES_OF_LIMIT.to_string()),
        (
            "groups of a project with numbers of their own under shared limits",
            limits::MAX_GROUP_OVERRIDES.to_string(),
        ),
        (
            "jobs of a group that are counted",
            format!("{0} waiting, {0} running", groups::MAX_COUNTED_JOBS),
        ),
        (
            "groups of a queue with waiting jobs among which `order=longest_wait` finds the longest \
             waits",
            format!("{}, the first by name", limits::MAX_COMPARED_GROUPS),
        ),
    ]
}
