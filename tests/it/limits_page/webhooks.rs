//! The rows about webhooks.

use fencepost_domain::{limits, outbound, webhook};
use fencepost_engine::webhooks::{deliver, notify_endpoints, push, pusher};
use fencepost_net::outbound::{MAX_BODY_BYTES, MAX_KEPT_BYTES};

/// The rows of "A webhook".
pub fn webhook_limits() -> Vec<(&'static str, String)> {
    assert_eq!(limits::MAX_PAGE_ENDPOINTS, limits::MAX_PAGE_DELIVERIES);
    let mut rows = vec![
        ("endpoints of one project", limits::MAX_ENDPOINTS.to_string()),
        ("`url`", format!("{} characters", outbound::MAX_URL_CHARS)),
        (
            "`events`, `queues` and `job_types` of one endpoint",
            format!("{} each", limits::MAX_ENDPOINT_NAMES),
        ),
        ("`description`", format!("{} characters", limits::MAX_DESCRIPTION_CHARS)),
        ("`max_in_flight`", format!("1–{}, on each node", limits::MAX_ENDPOINT_IN_FLIGHT)),
        ("`timeout_seconds`", format!("1–{} s", limits::MAX_ENDPOINT_TIMEOUT_SECONDS)),
        (
            "`overlap_seconds` of a rotated secret",
            format!("0–{} s", limits::MAX_SECRET_OVERLAP_SECONDS),
        ),
        ("tries of one delivery", webhook::MAX_DELIVERY_ATTEMPTS.to_string()),
        (
            "deliveries that lead to each other",
            format!("{}, then no endpoint is notified", webhook::MAX_HOPS),
        ),
        ("`Retry-After` that is obeyed", format!("{} s", webhook::MAX_RETRY_AFTER_SECONDS)),
        (
            "an endpoint without a success",
            format!(
                "disabled after {} h and {} failures",
                webhook::FAILING_HOURS,
                webhook::FAILING_DELIVERIES
            ),
        ),
        (
            "an error's message in an event",
            format!("{} characters, then cut", webhook::MAX_EVENT_MESSAGE_CHARS),
        ),
        (
            "a job's tags in an event",
            format!("{} bytes, then left out and marked `tags_cut`", webhook::MAX_EVENT_TAGS_BYTES),
        ),
        ("an answer's body", format!("the first {MAX_KEPT_BYTES} bytes are kept")),
        (
            "deliveries to one endpoint that wait",
            format!(
                "{}, then further events are not sent to it",
                notify_endpoints::MAX_WAITING_DELIVERIES
            ),
        ),
        ("deliveries to a disabled endpoint", format!("cancelled after {} h", limits::EMPTY_HOURS)),
        ("deliveries that failed", format!("kept {} days", limits::FAILED_DELIVERY_DAYS)),
        ("an event that waits", format!("dropped after {} h", limits::EVENT_KEEP_HOURS)),
    ];
    rows.extend(push_limits());
    rows.extend([("an answer that is a job's result", format!("{MAX_BODY_BYTES} bytes"))]);
    rows.extend(node_limits());
    rows
}

fn node_limits() -> [(&'static str, String); 4] {
    [
        (
            "requests that a node sends at a time",
            format!(
                "{}, {} of one project",
                deliver::MAX_IN_FLIGHT,
                deliver::MAX_PROJECT_IN_FLIGHT
            ),
        ),
        (
            "requests to one address at a time",
            format!(
                "{}, {} of one project",
                deliver::MAX_ADDRESS_IN_FLIGHT,
                deliver::MAX_PROJECT_ADDRESS_IN_FLIGHT
            ),
        ),
        ("endpoints that one node serves", deliver::MAX_SERVED_ENDPOINTS.to_string()),
        ("endpoints, and deliveries, of one page", limits::MAX_PAGE_ENDPOINTS.to_string()),
    ]
}

fn push_limits() -> [(&'static str, String); 5] {
    [
        ("queues of one project that are pushed", push::MAX_PROJECT_PUSHED_QUEUES.to_string()),
        ("queues that one node pushes", pusher::MAX_PUSHED_QUEUES.to_string()),
        ("a push's `timeout_seconds`", format!("1–{} s", limits::MAX_PUSH_TIMEOUT_SECONDS)),
        ("a push's `max_in_flight`", format!("1–{}, on each node", limits::MAX_PUSH_IN_FLIGHT)),
        (
            "headers of a push",
            format!(
                "{}, each with a name of {} and a value of {} characters, {} in all",
                limits::MAX_PUSH_HEADERS,
                limits::MAX_PUSH_HEADER_NAME_CHARS,
                limits::MAX_PUSH_HEADER_VALUE_CHARS,
                limits::MAX_PUSH_HEADERS_CHARS
            ),
        ),
    ]
}
