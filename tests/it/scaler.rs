//! `fencepost scaler`, called as KEDA calls it: by gRPC, with the messages of its
//! `externalscaler.proto`.

use std::{collections::HashMap, process::Command, time::Duration};

use axum::body::{Body, Bytes};
use http_body_util::BodyExt;
use hyper::{Request, Response, body::Incoming, client::conn::http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message;
use serde_json::json;
use tokio::{net::TcpStream, time::timeout};

use crate::harness::{Process, TestProject, eventually, free_port, run};

/// Length of what is before each message: a flag, and four bytes of its length.
const PREFIX_BYTES: usize = 5;
/// Without a hint, the server looks again after 15 s.
const AT_ONCE: Duration = Duration::from_secs(10);
/// The codes of gRPC.
const OK: &str = "0";
const INVALID_ARGUMENT: &str = "3";
const UNIMPLEMENTED: &str = "12";
const UNAUTHENTICATED: &str = "16";

#[derive(Clone, PartialEq, Message)]
struct Reference {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    namespace: String,
    #[prost(map = "string, string", tag = "3")]
    metadata: HashMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
struct MetricsAsked {
    #[prost(message, optional, tag = "1")]
    reference: Option<Reference>,
    #[prost(string, tag = "2")]
    metric: String,
}

#[derive(Clone, PartialEq, Message)]
struct Activity {
    #[prost(bool, tag = "1")]
    result: bool,
}

/// A specification of a metric, or its value: both have a name and a number first.
#[derive(Clone, PartialEq, Message)]
struct Metric {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(int64, tag = "2")]
    number: i64,
    #[prost(double, tag = "3")]
    float: f64,
}

#[derive(Clone, PartialEq, Message)]
struct Metrics {
    #[prost(message, repeated, tag = "1")]
    metrics: Vec<Metric>,
}

/// A trigger of these queues.
fn trigger(queues: &str) -> Reference {
    let metadata = [("scalerAddress", "scaler:7072"), ("queues", queues), ("jobsPerWorker", "20")];
    let metadata = metadata.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    Reference { name: "workers".to_owned(), namespace: "jobs".to_owned(), metadata }
}

/// A running scaler, and KEDA's connection to it.
struct Scaler {
    _process: Process,
    calls: http2::SendRequest<Body>,
}

impl Scaler {
    async fn start(t: &TestProject) -> Self {
        let address = format!("127.0.0.1:{}", free_port());
        let process = Process::start(
            Command::new(env!("CARGO_BIN_EXE_fencepost"))
                .args(["scaler", "--scaler-listen", &address])
                .env("FENCEPOST_URL", &t.url)
                .env("FENCEPOST_KEY", &t.api_key),
        );
        let socket = eventually("it to listen", async || TcpStream::connect(&address).await.ok());
        let connected = http2::handshake(TokioExecutor::new(), TokioIo::new(socket.await)).await;
        let (calls, connection) = connected.expect("HTTP/2");
        tokio::spawn(connection);
        Self { _process: process, calls }
    }

    async fn call(&self, method: &str, message: &impl Message) -> Response<Incoming> {
        let message = message.encode_to_vec();
        let length = u32::try_from(message.len()).expect("it is short").to_be_bytes();
        let framed = [&[0], &length[..], &message].concat();
        let call = Request::post(format!("http://scaler/externalscaler.ExternalScaler/{method}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(Body::from(framed))
            .expect("a request");
        self.calls.clone().send_request(call).await.expect("an answer")
    }

    /// The message and the code of a call.
    async fn answer<T: Message + Default>(
        &self,
        method: &str,
        asked: &impl Message,
    ) -> (T, String) {
        let answer = self.call(method, asked).await;
        let code = |it: &hyper::HeaderMap| it.get("grpc-status")?.to_str().ok().map(str::to_owned);
        let at_once = code(answer.headers());
        let body = answer.into_body().collect().await.expect("a body");
        let code = body.trailers().and_then(code).or(at_once).expect("a code");
        let bytes = body.to_bytes();
        let message = T::decode(bytes.get(PREFIX_BYTES..).unwrap_or_default());
        (message.expect("a message"), code)
    }
}

/// The next message of a stream, within this time.
async fn next(stream: &mut Incoming, limit: Duration) -> bool {
    let frame = timeout(limit, stream.frame()).await.expect("in time");
    let data: Bytes = frame.expect("one more").expect("a frame").into_data().expect("a message");
    Activity::decode(&data[PREFIX_BYTES..]).expect("an activity").result
}

#[test]
fn keda_reads_the_backlog_of_several_queues() {
    run(async |t| {
        let scaler = Scaler::start(t).await;
        let of_both = trigger("mail, reports");
        let (activity, code) = scaler.answer::<Activity>("IsActive", &of_both).await;
        assert_eq!((activity.result, &*code), (false, OK), "no job waits");
        for queue in ["mail", "reports", "reports", "other"] {
            t.enqueue(json!({"queue": queue})).await;
        }
        let (activity, _) = scaler.answer::<Activity>("IsActive", &of_both).await;
        assert!(activity.result);
        let (spec, _) = scaler.answer::<Metrics>("GetMetricSpec", &of_both).await;
        let [spec] = &spec.metrics[..] else { panic!("one metric") };
        assert_eq!((&*spec.name, spec.number, spec.float), ("backlog", 20, 20.0));
        let asked = MetricsAsked { reference: Some(of_both), metric: spec.name.clone() };
        let (values, code) = scaler.answer::<Metrics>("GetMetrics", &asked).await;
        let [value] = &values.metrics[..] else { panic!("one metric") };
        assert_eq!((&*value.name, value.number, &*code), ("backlog", 3, OK));
    });
}

#[test]
fn keda_learns_of_the_first_job_at_once_and_of_the_end_of_work() {
    run(async |t| {
        let scaler = Scaler::start(t).await;
        let mut stream = scaler.call("StreamIsActive", &trigger("mail,reports")).await.into_body();
        assert!(!next(&mut stream, AT_ONCE).await, "no job waits");
        t.enqueue(json!({"queue": "reports"})).await;
        assert!(next(&mut stream, AT_ONCE).await, "by a hint");
        let poll = json!({"worker_id": "w", "queues": ["reports"], "wait_seconds": 0});
        let job = t.polled(poll).await.remove(0);
        t.ack(&job, "w", "succeeded").await.is(200);
        assert!(!next(&mut stream, 2 * AT_ONCE).await, "the work is done");
    });
}

#[test]
fn a_call_that_cannot_be_answered_says_why() {
    run(async |t| {
        let scaler = Scaler::start(t).await;
        for (method, queues, code) in [
            ("IsActive", "", INVALID_ARGUMENT),
            ("GetMetricSpec", "mail,,reports", INVALID_ARGUMENT),
            ("StreamIsActive", "a\u{1}b", INVALID_ARGUMENT),
            ("StreamMetricSpec", "mail", UNIMPLEMENTED),
        ] {
            let (_, answered) = scaler.answer::<Activity>(method, &trigger(queues)).await;
            assert_eq!(answered, code, "{method} of {queues:?}");
        }
        let stranger = Scaler::start(&t.with_key("fp_live_unknown")).await;
        for method in ["IsActive", "StreamIsActive"] {
            let (_, answered) = stranger.answer::<Activity>(method, &trigger("mail")).await;
            assert_eq!(answered, UNAUTHENTICATED, "{method}");
        }
    });
}
