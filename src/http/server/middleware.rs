//! What every request passes through: an id, a task of its own, metrics, and one shape for errors.

use std::{
    net::IpAddr,
    panic::AssertUnwindSafe,
    sync::Arc,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use axum::{
    extract::{MatchedPath, Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode},
    middleware::Next,
    response::{IntoResponse, Response},
};
use fencepost_config::TrustedProxies;
use fencepost_domain::{
    error::Error,
    ids,
    trace::{TraceContext, trace_id_text},
};
use fencepost_signals::{limiter::Standing, telemetry, traces};
use fencepost_store::connection::deadline::{bounded, without_connections};
use fencepost_web::{
    app::App,
    auth::{CallReport, ClientAddress, client_of_request},
    wire::{
        ClientGone, RequestId,
        compressed::{self, Asked},
    },
};
use futures_util::FutureExt;
use metrics::counter;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    deprecation::{self, Deprecated},
    error,
    server::{
        answers::Answers,
        late_refusals::LateRefusals,
        least_rate::IsLarge,
        route_group, route_metrics,
        security_headers::{Policy, secure},
        undeclared,
    },
};

/// The caller's project. A proxy sends requests with the same value to one node, if clients repeat
/// it; nothing is decided by it here.
const PROJECT: HeaderName = HeaderName::from_static("fencepost-project");
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// Rate limits, in two dialects.
const LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");
const POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const BUDGET: HeaderName = HeaderName::from_static("ratelimit");
/// The header in which a proxy names its client.
const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
/// A node of this instance has sent the request, as a push or a webhook.
const OWN_CALL: Error =
    Error::Forbidden { needs: "another sender: the server does not call itself" };
/// Maximum characters of a request id chosen by the caller.
const MAX_REQUEST_ID_CHARS: usize = 128;

/// State that the requests of a node share on their way in and out.
#[derive(Clone)]
pub struct Passage(Arc<Shared>);

struct Shared {
    app: App,
    deprecated: &'static [Deprecated],
    late: LateRefusals,
    answers: Answers,
    /// Handlers with a task of their own.
    handlers: TaskTracker,
}

impl Passage {
    /// `handlers` shows when the last handler has ended.
    pub fn new(app: App, deprecated: &'static [Deprecated], handlers: TaskTracker) -> Self {
        let late = LateRefusals::new(app.accounts.limiter.clone());
        Self(Arc::new(Shared { app, deprecated, late, answers: Answers::default(), handlers }))
    }
}

impl Shared {
    fn public_url(&self) -> &str {
        &self.app.accounts.public_url
    }

    /// Names the caller's project, and counts the call for it.
    fn name_project(&self, headers: &mut HeaderMap, report: &CallReport) {
        if let Some(project_id) = report.project() {
            self.app.engine.usage.answered(project_id);
        }
        let project = report.public_id().map(|it| HeaderValue::from_str(&it.to_string()));
        if let Some(Ok(value)) = project {
            headers.insert(PROJECT, value);
        }
    }

    fn mark_deprecated(&self, it: &Deprecated, response: &mut Response, report: &CallReport) {
        if let Err(error) = it.write_headers(response.headers_mut(), self.public_url()) {
            tracing::error!(%error, "the headers of a deprecated operation were not set");
        }
        if let Some(key) = report.key() {
            self.app.used_keys.record_deprecated(key);
        }
    }
}

/// Gives the request its id, runs its handler, measures it, and writes the body of its error if it
/// has one. One layer for all of it: each layer of a router costs every request several
/// allocations.
pub async fn pass(
    State(Passage(shared)): State<Passage>,
    mut request: Request,
    next: Next,
) -> Response {
    let started = Instant::now();
    let request_id = chosen_id(&request).unwrap_or_else(ids::request_id);
    request.extensions_mut().insert(RequestId(request_id.clone()));
    let report = CallReport::default();
    request.extensions_mut().insert(report.clone());
    let client = find_client(&mut request, &request_id);
    let is_large = request.extensions().get::<IsLarge>().cloned();
    let policy = Policy::of(request.uri().path());
    let (asked, as_problem) = (Asked::by(&request), error::is_problem(request.headers()));
    let (method, is_read) = (method_label(request.method()), request.method().is_safe());
    let route = request.extensions().get::<MatchedPath>().cloned();
    let matched = route.as_ref().map(MatchedPath::as_str);
    let caller = request.headers().get(TRACEPARENT).and_then(|it| it.to_str().ok());
    let parent = caller.and_then(TraceContext::parse);
    let trace = traces::begin(caller);
    let mut response = match (undeclared::check(&request, matched), matched) {
        _ if shared.app.outbound.is_own(request.headers()) => OWN_CALL.into_response(),
        (Err(refused), _) => refused.into_response(),
        (Ok(()), Some(it)) if route_group::runs_in_place(it, method) => {
            run_in_place(request, next).await
        }
        (Ok(()), _) => detach(&shared.handlers, request, next).await,
    };
    let is_large_list = compressed::is_large_list(&response);
    response = shared.answers.hold(response, is_read, report.project(), is_large.as_ref());
    if is_large_list && response.extensions().get::<Error>().is_none() {
        response = asked.give(response);
    }
    let failure =
        error::render_unrendered(&mut response, &request_id, shared.public_url(), as_problem);
    if let Ok(value) = HeaderValue::from_str(&request_id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    shared.name_project(response.headers_mut(), &report);
    if let Some((budget, standing)) = report.charged() {
        write_limits(response.headers_mut(), budget, standing);
    }
    secure(response.headers_mut(), policy);
    let route = matched.unwrap_or("unmatched");
    if let Some(it) = deprecation::find(shared.deprecated, method, route) {
        shared.mark_deprecated(it, &mut response, &report);
    }
    let status = response.status();
    route_metrics::record(route, method, status, started.elapsed());
    if let Some(own) = trace {
        traces::request(&traces::Answered {
            own,
            parent,
            project: report.project(),
            method: if method == "other" { "_OTHER" } else { method },
            route: matched,
            status: status.as_u16(),
            took: started.elapsed(),
            request_id: &request_id,
        });
    }
    let trace_id = trace.or(parent).map(trace_id_text);
    let about = About { route, method, status, started, request_id: &request_id, trace_id };
    log(&about, failure.as_ref());
    if let Some(refusal) = &failure {
        shared.late.hold(refusal, report.project(), &client).await;
    }
    response
}

/// Runs the handler in a task of its own, so that a client that disconnects cannot stop it in the
/// middle of a statement. Its work completes, and [`ClientGone`] reaches handlers that wait. Only a
/// database that does not answer ends it.
async fn detach(handlers: &TaskTracker, mut request: Request, next: Next) -> Response {
    let gone = CancellationToken::new();
    let guard = gone.clone().drop_guard();
    request.extensions_mut().insert(ClientGone(gone));
    let answered = handlers.spawn(bounded(next.run(request))).await;
    guard.disarm();
    match answered {
        Ok(Ok(response)) => response,
        Ok(Err(overdue)) => Error::from(overdue).into_response(),
        Err(panic) => panicked(panic),
    }
}

/// Runs a handler that borrows no connection itself: it is dropped when its client disconnects, so
/// nothing needs to report it.
async fn run_in_place(mut request: Request, next: Next) -> Response {
    request.extensions_mut().insert(ClientGone(CancellationToken::new()));
    match AssertUnwindSafe(without_connections(next.run(request))).catch_unwind().await {
        Ok(response) => response,
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().map(|it| (*it).to_owned());
            let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
            panicked(std::io::Error::other(text.unwrap_or_default()))
        }
    }
}

fn panicked(panic: impl std::error::Error + Send + Sync + 'static) -> Response {
    counter!(telemetry::PANICS).increment(1);
    Error::internal(panic).into_response()
}

/// Proxies that are believed about the address of a client.
#[derive(Debug, Clone)]
pub struct Proxies(Arc<TrustedProxies>);

impl Default for Proxies {
    fn default() -> Self {
        Self::new(TrustedProxies::Networks(Vec::new()))
    }
}

impl Proxies {
    /// These are believed.
    #[must_use]
    pub fn new(trusted: TrustedProxies) -> Self {
        Self(trusted.into())
    }

    /// Whether this address is one of them.
    #[must_use]
    pub fn has(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        match &*self.0 {
            TrustedProxies::Networks(networks) => networks.iter().any(|it| it.contains(&address)),
            // Nodes are reached through proxies only.
            TrustedProxies::Hops(_) => true,
        }
    }

    /// The client's address: that of the connection, or, if it is a trusted proxy, the last
    /// forwarded address that is not one. Behind a fixed number of proxies, what the first of them
    /// has added.
    #[must_use]
    pub fn client(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        if !self.has(peer) {
            return peer;
        }
        let forwarded = headers.get_all(FORWARDED_FOR).iter().map(|it| it.to_str().unwrap_or(""));
        let forwarded: Vec<&str> = forwarded.flat_map(|it| it.split(',')).collect();
        // From the right: entries further left come from the client itself. An unreadable entry
        // ends the search.
        let mut read = forwarded.into_iter().rev().map_while(read_address);
        let client = match &*self.0 {
            TrustedProxies::Networks(_) => read.find(|it| !self.has(*it)),
            TrustedProxies::Hops(hops) => read.nth(usize::from(hops.get()) - 1),
        };
        client.unwrap_or(peer)
    }
}

/// An address, with or without a port.
fn read_address(text: &str) -> Option<IpAddr> {
    let text = text.trim();
    let socket = || text.parse::<std::net::SocketAddr>().ok().map(|it| it.ip());
    let bracketed = || text.strip_prefix('[')?.strip_suffix(']')?.parse().ok();
    text.parse().ok().or_else(socket).or_else(bracketed)
}

/// Finds the [`fencepost_identity::accounts::Client`] of a request. Returns its address.
fn find_client(request: &mut Request, request_id: &str) -> Arc<str> {
    let proxies = request.extensions().get::<Proxies>().cloned().unwrap_or_default();
    if let Some(ClientAddress(peer)) = request.extensions().get().copied() {
        let client = proxies.client(peer, request.headers());
        request.extensions_mut().insert(ClientAddress(client));
    }
    let client = client_of_request(request.extensions(), request.headers(), request_id);
    let address = Arc::clone(&client.address);
    request.extensions_mut().insert(client);
    address
}

/// `X-RateLimit-*` with the reset as Unix time, as clients of those names read it; and `RateLimit`
/// with `RateLimit-Policy` as in draft-ietf-httpapi-ratelimit-headers-10.
fn write_limits(headers: &mut HeaderMap, budget: &str, standing: Standing) {
    let Standing { rate, remaining, reset_seconds } = standing;
    let mut set = |name: HeaderName, value: String| {
        if let Ok(value) = HeaderValue::from_str(&value) {
            headers.insert(name, value);
        }
    };
    let (count, window) = (rate.count, rate.window_seconds);
    set(LIMIT, count.to_string());
    set(REMAINING, remaining.to_string());
    set(RESET, unix_time_in(reset_seconds).to_string());
    let policy = format!("\"{budget}\";q={count};w={window}");
    set(POLICY, policy);
    let limit = format!("\"{budget}\";r={remaining};t={reset_seconds}");
    set(BUDGET, limit);
}

/// The Unix time in this many seconds, by this node's clock.
#[expect(clippy::disallowed_methods, reason = "for clients only: nothing is decided by it")]
fn unix_time_in(seconds: u32) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.as_secs() + u64::from(seconds)
}

fn chosen_id(request: &Request) -> Option<String> {
    let id = request.headers().get(REQUEST_ID)?.to_str().ok()?;
    let is_sane = !id.is_empty()
        && id.len() <= MAX_REQUEST_ID_CHARS
        && id.bytes().all(|it| it.is_ascii_alphanumeric() || b"_-.".contains(&it));
    is_sane.then(|| id.to_owned())
}

/// A client may invent methods; no metric has a label whose values a client can invent.
fn method_label(method: &Method) -> &'static str {
    match method.as_str() {
        "GET" => "GET",
        "HEAD" => "HEAD",
        "POST" => "POST",
        "PUT" => "PUT",
        "PATCH" => "PATCH",
        "DELETE" => "DELETE",
        "OPTIONS" => "OPTIONS",
        _ => "other",
    }
}

/// Fields of a request for logs.
struct About<'a> {
    route: &'a str,
    method: &'static str,
    status: StatusCode,
    started: Instant,
    request_id: &'a str,
    trace_id: Option<String>,
}

/// One line per request: server errors as errors, client errors and refusals for want of a turn as
/// information, successes only at debug level, because there are thousands per second.
fn log(about: &About<'_>, failure: Option<&Error>) {
    let About { route, method, request_id, .. } = *about;
    let trace_id = about.trace_id.as_deref();
    let duration_ms = about.started.elapsed().as_millis() as u64;
    let status = about.status.as_u16();
    match failure {
        Some(error) if status >= 500 && !matches!(error, Error::Overloaded) => tracing::error!(
            request.id = request_id,
            trace_id,
            http.route = route,
            http.method = method,
            http.status = status,
            duration_ms,
            error = fencepost_domain::error::chain(error),
            "request failed"
        ),
        Some(error) => tracing::info!(
            request.id = request_id,
            trace_id,
            http.route = route,
            http.method = method,
            http.status = status,
            duration_ms,
            reason = %error,
            "request refused"
        ),
        None => tracing::debug!(
            request.id = request_id,
            trace_id,
            http.route = route,
            http.method = method,
            http.status = status,
            duration_ms,
            "request answered"
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU8;

    use super::*;

    #[test]
    fn only_a_trusted_proxy_is_believed_about_its_client() {
        let networks =
            |text: &str| Proxies::new(TrustedProxies::Networks(vec![text.parse().expect("one")]));
        let proxies = networks("10.0.0.1/32");
        let client = |peer: &str, forwarded: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(FORWARDED_FOR, HeaderValue::from_str(forwarded).expect("a value"));
            proxies.client(peer.parse().expect("an address"), &headers).to_string()
        };
        assert_eq!(client("192.0.2.9", "198.51.100.1"), "192.0.2.9");
        assert_eq!(client("10.0.0.1", "198.51.100.1"), "198.51.100.1");
        // Entries to the left come from the client itself.
        assert_eq!(client("10.0.0.1", "203.0.113.7, 198.51.100.1"), "198.51.100.1");
        assert_eq!(client("10.0.0.1", "198.51.100.1, 10.0.0.1"), "198.51.100.1");
        assert_eq!(client("10.0.0.1", "nonsense"), "10.0.0.1");
        assert_eq!(client("10.0.0.1", "203.0.113.7, nonsense"), "10.0.0.1");
        assert_eq!(client("10.0.0.1", "203.0.113.7, 198.51.100.1:4711"), "198.51.100.1");
        assert_eq!(client("10.0.0.1", "203.0.113.7, [2001:db8::1]:80"), "2001:db8::1");
        assert_eq!(client("::ffff:10.0.0.1", "198.51.100.1"), "198.51.100.1");
        let network = networks("10.0.0.0/8");
        assert!(network.has("10.200.3.4".parse().expect("an address")));
        assert!(!network.has("11.0.0.1".parse().expect("an address")));
    }

    #[test]
    fn behind_a_number_of_proxies_only_what_they_added_is_believed() {
        let client = |hops: u8, forwarded: Option<&str>| {
            let hops = NonZeroU8::new(hops).expect("a number");
            let proxies = Proxies::new(TrustedProxies::Hops(hops));
            let forwarded =
                forwarded.map(|it| (FORWARDED_FOR, HeaderValue::from_str(it).expect("a value")));
            let headers = HeaderMap::from_iter(forwarded);
            proxies.client("10.0.0.1".parse().expect("an address"), &headers).to_string()
        };
        // A client in the network of the proxies cannot choose its address.
        assert_eq!(client(1, Some("203.0.113.7, 10.2.3.4")), "10.2.3.4");
        assert_eq!(client(2, Some("203.0.113.7, 198.51.100.1, 10.2.3.4")), "198.51.100.1");
        // A proxy less than expected: the address of the connection is no worse.
        assert_eq!(client(2, Some("198.51.100.1")), "10.0.0.1");
        assert_eq!(client(1, None), "10.0.0.1");
        assert_eq!(client(2, Some("198.51.100.1, nonsense")), "10.0.0.1");
    }
}
