//! OpenTelemetry spans over OTLP; off unless a collector is configured. One span for each request,
//! and one for each lease of a job that has a trace context: from ready to leased. No payload, key
//! or address is in any of them.
//!
//! Spans are built by hand, not with `tracing`, because a lease's span begins in the past and
//! belongs to a trace of another process.

use std::{
    collections::HashMap,
    sync::{Mutex, OnceLock, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use anyhow::Context;
use chrono::{DateTime, Utc};
use fencepost_config::TraceArgs;
use fencepost_domain::{
    ids::ProjectId,
    trace::{AttemptTrace, TraceContext},
};
use metrics::counter;
use opentelemetry::{
    InstrumentationScope, KeyValue, SpanId, TraceFlags, TraceId,
    trace::{Link, SpanContext, SpanKind, Status, TraceState},
};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig};
use opentelemetry_sdk::{
    Resource,
    trace::{BatchSpanProcessor, SpanData, SpanEvents, SpanLinks, SpanProcessor},
};

use crate::telemetry;

/// Timeout of the last export.
pub const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(3);

/// Spans of one project that one node exports in a second; more are dropped. Callers decide which
/// of their traces are recorded, and the exporter's queue is shared.
pub const MAX_PROJECT_SPANS_PER_SECOND: u32 = 200;

static TRACES: OnceLock<Traces> = OnceLock::new();

struct Traces {
    processor: BatchSpanProcessor,
    /// Sampling ratio (0–1) of traces started here.
    ratio: f64,
    /// The same of callers' traces that are sampled by them.
    caller_ratio: f64,
    shares: ProjectShares,
}

/// Spans of each project in the current second.
#[derive(Debug, Default)]
struct ProjectShares(Mutex<Option<(Instant, HashMap<ProjectId, u32>)>>);

impl ProjectShares {
    /// Whether the project may have one more span in this second.
    fn admits(&self, project_id: ProjectId, now: Instant) -> bool {
        let mut counted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_old = |since: Instant| now.duration_since(since) >= Duration::from_secs(1);
        if counted.as_ref().is_none_or(|it| is_old(it.0)) {
            *counted = Some((now, HashMap::new()));
        }
        let Some((_, spans)) = &mut *counted else { return false };
        let spans = spans.entry(project_id).or_default();
        *spans += 1;
        *spans <= MAX_PROJECT_SPANS_PER_SECOND
    }
}

/// Whether a trace is in this share (0–1) of all: the same on every node, since trace ids are
/// random.
fn is_in_share(trace_id: u128, share: f64) -> bool {
    const RANDOM_BITS: u32 = 56;
    let random = trace_id & ((1 << RANDOM_BITS) - 1);
    (random as f64) < share * (1_u64 << RANDOM_BITS) as f64
}

/// Starts exporting spans, if a collector is configured. Call it once, before the first request.
///
/// # Errors
/// When the endpoint cannot be read.
pub fn install(args: &TraceArgs) -> anyhow::Result<()> {
    let Some(endpoint) = &args.otlp_endpoint else { return Ok(()) };
    let exporter = SpanExporter::builder()
        .with_http()
        .with_protocol(Protocol::HttpBinary)
        .with_endpoint(url(endpoint))
        .build()
        .context("--otlp-endpoint cannot be used")?;
    let mut processor = BatchSpanProcessor::builder(exporter).build();
    let resource = Resource::builder()
        .with_service_name("fencepost")
        .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")));
    processor.set_resource(&resource.build());
    let _ = TRACES.set(Traces {
        processor,
        ratio: args.trace_ratio,
        caller_ratio: args.caller_trace_ratio,
        shares: ProjectShares::default(),
    });
    Ok(())
}

/// The path of a collector for spans.
#[must_use]
pub fn url(endpoint: &str) -> String {
    format!("{}/v1/traces", endpoint.trim_end_matches('/'))
}

/// Whether spans are exported.
#[must_use]
pub fn is_on() -> bool {
    TRACES.get().is_some()
}

/// Exports what is buffered. Blocks for a moment.
pub fn finish() {
    if let Some(traces) = TRACES.get()
        && let Err(error) = traces.processor.shutdown_with_timeout(SHUTDOWN_TIMEOUT)
    {
        tracing::warn!(%error, "final span export failed");
    }
}

/// The span of a new request: below the caller's if it has one, else the root of a trace; none:
/// spans are not exported.
#[must_use]
pub fn begin(caller: Option<&str>) -> Option<TraceContext> {
    let traces = TRACES.get()?;
    let span_id = rand::random::<u64>().max(1);
    Some(match caller.and_then(TraceContext::parse) {
        Some(caller) => caller.child(span_id),
        None => {
            let trace_id = rand::random::<u128>().max(1);
            TraceContext { trace_id, span_id, is_sampled: rand::random_bool(traces.ratio) }
        }
    })
}

/// An answered request.
pub struct Answered<'a> {
    pub own: TraceContext,
    pub parent: Option<TraceContext>,
    /// None: the caller is not known.
    pub project: Option<ProjectId>,
    pub method: &'static str,
    /// The route's pattern, not the path; none: no route matched.
    pub route: Option<&'a str>,
    pub status: u16,
    pub took: Duration,
    pub request_id: &'a str,
}

/// Records the span of an answered request.
#[expect(clippy::disallowed_methods, reason = "for display only: nothing is decided by it")]
pub fn request(it: &Answered<'_>) {
    let ended_at = SystemTime::now();
    let mut attributes = vec![
        KeyValue::new("http.request.method", it.method),
        KeyValue::new("http.response.status_code", i64::from(it.status)),
        KeyValue::new("request.id", it.request_id.to_owned()),
    ];
    if let Some(route) = it.route {
        attributes.push(KeyValue::new("http.route", route.to_owned()));
    }
    let is_failure = it.status >= 500;
    if is_failure {
        attributes.push(KeyValue::new("error.type", it.status.to_string()));
    }
    let status = if is_failure { Status::error("") } else { Status::Unset };
    export(Span {
        project: it.project,
        own: it.own,
        parent: it.parent,
        link: None,
        kind: SpanKind::Server,
        name: it.route.map_or(it.method.to_owned(), |route| format!("{} {route}", it.method)),
        from: ended_at - it.took,
        to: ended_at,
        attributes,
        status,
    });
}

/// A leased job.
pub struct Leased<'a> {
    /// The attempt's spans.
    pub trace: AttemptTrace,
    pub project: ProjectId,
    pub queue: &'a str,
    pub job_id: String,
    pub job_type: &'a str,
    pub attempt: i32,
    /// When it became ready.
    pub ready_at: DateTime<Utc>,
    pub claimed_at: DateTime<Utc>,
}

/// Records the span of a leased job: how long it has waited.
pub fn lease(it: &Leased<'_>) {
    let attributes = vec![
        KeyValue::new("messaging.system", "fencepost"),
        KeyValue::new("messaging.operation.name", "receive"),
        KeyValue::new("messaging.operation.type", "receive"),
        KeyValue::new("messaging.destination.name", it.queue.to_owned()),
        KeyValue::new("messaging.message.id", it.job_id.clone()),
        KeyValue::new("job.type", it.job_type.to_owned()),
        KeyValue::new("job.attempt", i64::from(it.attempt)),
    ];
    export(Span {
        project: Some(it.project),
        own: it.trace.own,
        parent: it.trace.parent,
        link: it.trace.link,
        kind: SpanKind::Consumer,
        name: format!("receive {}", it.queue),
        from: it.ready_at.min(it.claimed_at).into(),
        to: it.claimed_at.into(),
        attributes,
        status: Status::Unset,
    });
}

struct Span {
    project: Option<ProjectId>,
    own: TraceContext,
    parent: Option<TraceContext>,
    link: Option<TraceContext>,
    kind: SpanKind,
    name: String,
    from: SystemTime,
    to: SystemTime,
    attributes: Vec<KeyValue>,
    status: Status,
}

fn export(span: Span) {
    let Some(traces) = TRACES.get().filter(|_| span.own.is_sampled) else { return };
    let is_callers = span.parent.or(span.link).is_some();
    if is_callers && !is_in_share(span.own.trace_id, traces.caller_ratio) {
        return;
    }
    // Requests without a known caller share one limit.
    let project = span.project.unwrap_or(ProjectId(0));
    if !traces.shares.admits(project, Instant::now()) {
        counter!(telemetry::SPANS_DROPPED).increment(1);
        return;
    }
    let mut links = SpanLinks::default();
    links.links.extend(span.link.map(|it| Link::new(context(it, true), Vec::new(), 0)));
    traces.processor.on_end(SpanData {
        span_context: context(span.own, false),
        parent_span_id: SpanId::from(span.parent.map_or(0, |it| it.span_id)),
        parent_span_is_remote: span.parent.is_some(),
        span_kind: span.kind,
        name: span.name.into(),
        start_time: span.from,
        end_time: span.to,
        attributes: span.attributes,
        dropped_attributes_count: 0,
        events: SpanEvents::default(),
        links,
        status: span.status,
        instrumentation_scope: InstrumentationScope::builder("fencepost").build(),
    });
}

fn context(it: TraceContext, is_remote: bool) -> SpanContext {
    let flags = if it.is_sampled { TraceFlags::SAMPLED } else { TraceFlags::default() };
    let (trace_id, span_id) = (TraceId::from(it.trace_id), SpanId::from(it.span_id));
    SpanContext::new(trace_id, span_id, flags, is_remote, TraceState::default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_project_has_a_share_of_the_spans_of_a_second() {
        let (shares, now) = (ProjectShares::default(), Instant::now());
        let admitted = |id, now| (0..1_000).filter(|_| shares.admits(ProjectId(id), now)).count();
        assert_eq!(admitted(1, now), MAX_PROJECT_SPANS_PER_SECOND as usize);
        assert_eq!(admitted(2, now), MAX_PROJECT_SPANS_PER_SECOND as usize);
        assert_eq!(admitted(1, now + Duration::from_millis(900)), 0);
        let later = now + Duration::from_secs(1);
        assert_eq!(admitted(1, later), MAX_PROJECT_SPANS_PER_SECOND as usize);
    }

    #[test]
    fn a_share_of_traces_is_chosen_by_their_ids() {
        let ids =
            (0..10_000_u128).map(|it| it.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835));
        let ids: Vec<_> = ids.collect();
        let chosen = |share| ids.iter().filter(|it| is_in_share(**it, share)).count();
        assert_eq!((chosen(0.0), chosen(1.0)), (0, ids.len()));
        assert!((2_300..2_700).contains(&chosen(0.25)), "{}", chosen(0.25));
    }
}
