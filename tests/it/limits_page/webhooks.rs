//! The rows about webhooks.

use fencepost_domain::{limits, outbound, webhook};
use fencepost_engine::webhooks::{MAX_REPLAYED_DELIVERIES, deliver, notify_endpoints, pusher};
use fencepost_net::outbound::{MAX_BODY_BYTES, MAX_KEPT_BYTES};
use fencepost_store::sweep::prune;

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
    ];
    rows.extend(delivery_limits());
    rows.extend(push_limits());
    rows.extend([("an answer that is a job's result", format!("{MAX_BODY_BYTES} bytes"))]);
    rows.extend(node_limits());
    rows
}

fn delivery_limits() -> [(&'static str, String); 8] {
    [
        (
            "deliveries to one endpoint that wait",
            format!(
                "{}, {} MiB, then further events are not sent to it",
                webhook::MAX_WAITING_DELIVERIES,
                webhook::MAX_WAITING_DELIVERIES_MIB
            ),
        ),
        (
            "a delivery while many wait",
            format!(
                "from {} on, {} bytes: tags, message and reason are left out if need be",
                webhook::MAX_LARGE_DELIVERIES,
                webhook::MAX_SMALL_DELIVERY_BYTES
            ),
        ),
        (
            "bytes of all deliveries that are kept",
            format!(
                "1/{} of the plan's `stored_bytes`, then further events are not sent",
                notify_endpoints::DELIVERIES_PART
            ),
        ),
        (
            "deliveries that were accepted or cancelled",
            format!("kept {} h", prune::DELIVERED_RETENTION_HOURS),
        ),
        (
            "a replay of all deliveries",
            format!(
                "refused if more than {MAX_REPLAYED_DELIVERIES} would wait in the project, or \
                 `stored_bytes` has no room"
            ),
        ),
        ("deliveries to a disabled endpoint", format!("cancelled after {} h", limits::EMPTY_HOURS)),
        ("deliveries that failed", format!("kept {} days", limits::FAILED_DELIVERY_DAYS)),
        ("an event that waits", format!("dropped after {} h", limits::EVENT_KEEP_HOURS)),
    ]
}

fn node_limits() -> [(&'static str, String); 5] {
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
        (
            "the last requests to one address",
            format!(
                "{}, for projects that have none there, and whose requests there took {} s in sum \
                 within {} s at most",
                deliver::LAST_OF_ADDRESS,
                deliver::LITTLE_USE.as_secs(),
                deliver::USE_COUNTED_FOR.as_secs()
            ),
        ),
        (
            "endpoints that one node serves",
            format!(
                "{}, those with deliveries first, then a part of its own, projects by turns",
                deliver::MAX_SERVED_ENDPOINTS
            ),
        ),
        ("endpoints, and deliveries, of one page", limits::MAX_PAGE_ENDPOINTS.to_string()),
    ]
}

fn push_limits() -> [(&'static str, String); 5] {
    [
        ("queues of one project that are pushed", limits::MAX_PROJECT_PUSHED_QUEUES.to_string()),
        (
            "queues that one node pushes",
            format!(
                "{}, queues with jobs first, then a part of its own, projects by turns",
                pusher::MAX_PUSHED_QUEUES
            ),
        ),
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
