//! Groups of routes. A histogram by route would have thousands of series on each node.

/// Routes of the server that are no part of an API.
const PLAIN: [&str; 4] = ["/", "/livez", "/readyz", "unmatched"];
/// Ends of the paths at which workers of adapters wait.
const ADAPTER_POLLS: [&str; 3] = ["/poll", "/claim", "/workers/fetch"];
/// Pages and files of the documentation.
const DOCS: [&str; 7] =
    ["/docs", "/examples", "/clients", "/llms.txt", "/favicon.ico", "/openapi", "/assets"];

/// The group of a route, as the router names it.
#[must_use]
pub fn of(route: &str, method: &str) -> &'static str {
    if route.ends_with("/stream") {
        return "stream";
    }
    if route.starts_with("/console") {
        return "console";
    }
    if DOCS.iter().any(|it| route.starts_with(it)) {
        return "docs";
    }
    if PLAIN.contains(&route) {
        return "other";
    }
    let Some(path) = route.strip_prefix("/v1") else {
        let is_poll = ADAPTER_POLLS.iter().any(|it| route.ends_with(it));
        return if is_poll { "poll" } else { "adapter" };
    };
    let path = path.strip_prefix("/projects/{project}").unwrap_or(path);
    match (method, path) {
        ("POST", "/jobs" | "/jobs/batch" | "/workflows") => "enqueue",
        (_, "/workers/poll") => "poll",
        (_, "/workers/ack" | "/workers/ack/batch") => "ack",
        (_, "/workers/heartbeat") => "heartbeat",
        ("GET" | "HEAD", _) => "read",
        _ => "change",
    }
}

/// Whether a handler runs in the task of its connection, and ends with it: one of the hot path,
/// which borrows no connection of the database. What it needs of one runs in a group commit's task
/// or in [`fencepost_store::connection::deadline::detached`].
#[must_use]
pub fn runs_in_place(route: &str, method: &str) -> bool {
    const HANDLERS: [&str; 3] = ["/jobs", "/workers/poll", "/workers/ack"];
    let Some(path) = route.strip_prefix("/v1") else { return false };
    let path = path.strip_prefix("/projects/{project}").unwrap_or(path);
    method == "POST" && HANDLERS.contains(&path)
}

/// The label of a route in counters: the pages of the documentation are one, and so are the
/// examples, and the pages of the libraries.
#[must_use]
pub fn label(route: &str) -> &str {
    match route {
        _ if route.starts_with("/docs/") => "/docs/{page}",
        _ if route.starts_with("/examples/") => "/examples/{name}",
        _ if route.starts_with("/clients/") => "/clients/{name}",
        _ => route,
    }
}

#[cfg(test)]
mod tests {
    use fencepost_signals::telemetry;

    use super::*;

    /// All groups.
    const GROUPS: [&str; 11] = [
        "enqueue",
        "poll",
        "ack",
        "heartbeat",
        "read",
        "change",
        "stream",
        "adapter",
        "console",
        "docs",
        "other",
    ];

    #[test]
    fn every_route_has_a_group() {
        for (method, route, group) in [
            ("POST", "/v1/jobs", "enqueue"),
            ("GET", "/v1/projects/{project}/jobs", "read"),
            ("POST", "/v1/projects/{project}/jobs/batch", "enqueue"),
            ("POST", "/v1/workers/poll", "poll"),
            ("POST", "/v1/workers/ack/batch", "ack"),
            ("PATCH", "/v1/queues/{queue}", "change"),
            ("GET", "/v1/events/stream", "stream"),
            ("POST", "/ojs/v1/workers/fetch", "poll"),
            ("POST", "/ojs/v1/jobs", "adapter"),
            ("GET", "/docs/errors", "docs"),
            ("GET", "/examples/bash/worker.sh", "docs"),
            ("GET", "/favicon.ico", "docs"),
            ("GET", "/openapi-project.json", "docs"),
            ("GET", "/console/p/{project}/jobs", "console"),
            ("GET", "unmatched", "other"),
        ] {
            assert_eq!(of(route, method), group, "{method} {route}");
            assert!(GROUPS.contains(&group));
        }
        let series = GROUPS.len() * (telemetry::SECONDS_BUCKETS.len() + 1);
        assert!(series <= 300, "{series} series on each node");
        assert_eq!((label("/docs/errors"), label("/v1/jobs")), ("/docs/{page}", "/v1/jobs"));
        assert_eq!(label("/examples/bash/worker.sh"), "/examples/{name}");
    }
}
