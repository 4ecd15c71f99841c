//! Traces from producer to worker and back, exported to a collector over OTLP.

use std::process::Command;

use crate::harness::{
    LoneProject, NodeProcess, TestProject, free_port, fresh_database, limited, run,
};
use axum::{Router, body::Bytes, routing};
use opentelemetry_proto::tonic::{
    collector::trace::v1::ExportTraceServiceRequest, trace::v1::Span,
};
use prost::Message;
use serde_json::json;
use tokio::{net::TcpListener, sync::mpsc};

const PRODUCER: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

/// A collector: what it is sent.
struct Collector {
    url: String,
    spans: mpsc::UnboundedReceiver<Span>,
    seen: Vec<Span>,
}

impl Collector {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let (sender, spans) = mpsc::unbounded_channel();
        let take = move |body: Bytes| {
            let request = ExportTraceServiceRequest::decode(body).expect("OTLP");
            let scopes = request.resource_spans.into_iter().flat_map(|it| it.scope_spans);
            for span in scopes.flat_map(|it| it.spans) {
                let _ = sender.send(span);
            }
            async {}
        };
        let router = Router::new().route("/v1/traces", routing::post(take));
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { url, spans, seen: Vec::new() }
    }

    /// Waits for a span of this name that fits.
    async fn span(&mut self, name: &str, fits: impl Fn(&Span) -> bool) -> Span {
        loop {
            if let Some(found) = self.seen.iter().find(|it| it.name == name && fits(it)) {
                return found.clone();
            }
            let next = self.spans.recv().await.expect("the collector listens");
            self.seen.push(next);
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|it| format!("{it:02x}")).collect()
}

/// As a `traceparent` would name it.
fn context(span: &Span) -> String {
    format!("00-{}-{}-01", hex(&span.trace_id), hex(&span.span_id))
}

#[test]
fn a_trace_goes_from_the_producer_over_the_first_lease_to_the_ack_and_a_retry_is_linked_to_it() {
    limited(async {
        let mut collector = Collector::start().await;
        let database = fresh_database().await;
        let args = ["--otlp-endpoint", &collector.url, "--trace-ratio", "0"];
        let mut node = NodeProcess::start_at(&database, free_port(), &args);
        node.until_ready().await;
        let t = LoneProject::at(&node.url(), &database, "main").await;
        let retry = json!({"strategy": "constant", "initial_seconds": 0, "jitter_seconds": 0});
        let enqueue = t
            .request(reqwest::Method::POST, "/v1/jobs")
            .header("traceparent", PRODUCER)
            .json(&json!({"job_type": "mail.send", "retry": retry}));
        assert_eq!(enqueue.send().await.expect("an answer").status(), 201);

        let first = t.wait_and_lease("w").await;
        let given = first["traceparent"].as_str().expect("a trace").to_owned();
        let stored =
            collector.span("POST /v1/jobs", |it| hex(&it.parent_span_id) == PRODUCER[36..52]).await;
        assert_eq!(hex(&stored.trace_id), PRODUCER[3..35]);
        let leased = collector.span("receive default", |it| !it.parent_span_id.is_empty()).await;
        assert_eq!(context(&leased), given, "the worker continues from the lease");
        assert_eq!(hex(&leased.parent_span_id), PRODUCER[36..52]);
        assert!(leased.start_time_unix_nano <= leased.end_time_unix_nano);

        let ack = t
            .request(reqwest::Method::POST, "/v1/workers/ack")
            .header("traceparent", &given)
            .json(&TestProject::ack_body(&first, "w", "failed"));
        assert_eq!(ack.send().await.expect("an answer").status(), 200);
        let acked = collector.span("POST /v1/workers/ack", |_| true).await;
        assert_eq!(
            (acked.trace_id, acked.parent_span_id),
            (leased.trace_id.clone(), leased.span_id)
        );

        let second = t.wait_and_lease("w").await;
        let retried = collector.span("receive default", |it| it.parent_span_id.is_empty()).await;
        assert_eq!(second["traceparent"], context(&retried));
        assert_ne!(retried.trace_id, leased.trace_id, "a trace of its own");
        let link = retried.links.first().expect("a link");
        assert_eq!(format!("00-{}-{}-01", hex(&link.trace_id), hex(&link.span_id)), PRODUCER);
        assert!(collector.seen.iter().all(|it| !it.name.starts_with("GET")), "none begins here");
    });
}

#[test]
fn without_a_collector_the_worker_gets_the_producers_own_trace() {
    run(async |t| {
        let enqueue = t.request(reqwest::Method::POST, "/v1/jobs").header("traceparent", PRODUCER);
        let sent = enqueue.json(&json!({"job_type": "test"})).send().await;
        assert_eq!(sent.expect("an answer").status(), 201);
        assert_eq!(t.lease("w").await["traceparent"], PRODUCER);
    });
}

#[test]
fn a_trace_ratio_above_one_is_refused() {
    let run = Command::new(env!("CARGO_BIN_EXE_fencepost"))
        .args(["serve", "--trace-ratio", "1.5"])
        .output()
        .expect("it runs");
    assert!(!run.status.success());
    let said = String::from_utf8_lossy(&run.stderr);
    assert!(said.contains("--trace-ratio") && said.contains("between 0 and 1"), "{said}");
}
