//! Clients that ask for large answers and do not read them, and long streams.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use fencepost_domain::limits;
use fencepost_http::server::answers::MAX_PROJECT_KIB;
use serde_json::json;
use socket2::{Domain, Socket, Type};

use crate::{
    events::Stream,
    harness::{TestProject, TestServer, fresh_database, limited, run, until},
};

/// Bytes that the reader's kernel takes for it: else it would take a whole answer.
const RECEIVED_BYTES: usize = 4 * 1024;

/// Asks for a page, and reads no more than its status.
async fn ask(t: &TestProject) -> (TcpStream, u16) {
    let request = format!(
        "GET /v1/jobs?limit=200 HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\n\r\n",
        t.api_key
    );
    send(t, request).await
}

/// Polls for as many jobs as it may, and reads no more than the status.
async fn poll(t: &TestProject) -> (TcpStream, u16) {
    let capacity = limits::MAX_POLL_CAPACITY;
    let body = json!({"worker_id": "slow", "queues": ["default"], "capacity": capacity});
    let body = body.to_string();
    let request = format!(
        "POST /v1/workers/poll HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        t.api_key,
        body.len()
    );
    send(t, request).await
}

async fn send(t: &TestProject, request: String) -> (TcpStream, u16) {
    let address: SocketAddr = t.url.trim_start_matches("http://").parse().expect("an address");
    let asked = tokio::task::spawn_blocking(move || {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        socket.set_recv_buffer_size(RECEIVED_BYTES).expect("a size");
        socket.connect(&address.into()).expect("a connection");
        let mut stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout");
        stream.write_all(request.as_bytes()).expect("sent");
        let mut status = [0; 12];
        stream.read_exact(&mut status).expect("a status");
        let status = std::str::from_utf8(&status[9..]).expect("text").parse().expect("a number");
        (stream, status)
    });
    asked.await.expect("no panic")
}

#[test]
fn readers_that_do_not_read_hold_a_bounded_number_of_bytes_of_one_project() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let (one, other) = (server.project("one").await, server.project("other").await);
        let text = "x".repeat(limits::MAX_PAYLOAD_BYTES - 100);
        for t in [&one, &other] {
            for _ in 0..limits::MAX_PAGE_BYTES / limits::MAX_PAYLOAD_BYTES {
                t.enqueue(json!({"payload": text})).await;
            }
        }
        // Each answer is a little longer than its payloads.
        let fitting = MAX_PROJECT_KIB * 1024 / limits::MAX_PAGE_BYTES - 1;
        let mut held = Vec::new();
        for _ in 0..fitting {
            let (stream, status) = ask(&one).await;
            assert_eq!(status, 200, "after {}", held.len());
            held.push(stream);
        }
        assert_eq!(ask(&one).await.1, 503);
        one.get("/v1/jobs?payloads=false").await.is(200);
        assert_eq!(ask(&other).await.1, 200, "another project is not concerned");
        drop(held);
        // The server notices that the connections are closed.
        until("room for the answers of the project", async || ask(&one).await.1 == 200).await;
        server.stop().await;
    });
}

#[test]
fn a_long_history_is_streamed_in_parts_without_a_gap() {
    run(async |t| {
        let id = t.enqueue(json!({})).await;
        let job = t.lease("w").await;
        let text = "x".repeat(16_000);
        for some in (0..200).collect::<Vec<_>>().chunks(50) {
            let payload = |n: &u32| json!({"n": n, "text": text});
            let event =
                |n| json!({"job_id": id, "attempt": 1, "type": "step", "payload": payload(n)});
            let body =
                json!({"worker_id": "w", "events": some.iter().map(event).collect::<Vec<_>>()});
            t.post("/v1/workers/events", body).await.is(200);
        }
        t.ack(&job, "w", "succeeded").await.is(200);
        let path = format!("/v1/jobs/{id}/events/stream");
        let mut stream = Stream::open(t, &path, None).await;
        assert_eq!(stream.kinds(2).await, ["fencepost.enqueued", "fencepost.claimed"]);
        let mut middle = String::new();
        for number in 0..200 {
            let (_, id, event) = stream.next().await.expect("an event");
            assert_eq!(event["payload"]["n"], number);
            if number == 90 {
                middle = id;
            }
        }
        assert_eq!(stream.kinds(1).await, ["fencepost.succeeded"]);
        assert!(stream.next().await.is_none());
        let mut again = Stream::open(t, &path, Some(&middle)).await;
        let (_, _, event) = again.next().await.expect("an event");
        assert_eq!(event["payload"]["n"], 91);
    });
}

#[test]
fn a_poll_that_would_hold_too_many_bytes_is_refused_and_its_jobs_are_released() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project("one").await;
        let text = "x".repeat(limits::MAX_PAYLOAD_BYTES - 100);
        let of_a_poll = limits::MAX_POLL_CAPACITY as usize;
        let fitting = MAX_PROJECT_KIB * 1024 / (of_a_poll * limits::MAX_PAYLOAD_BYTES);
        for _ in 0..(fitting + 1) * of_a_poll {
            t.enqueue(json!({"payload": text})).await;
        }
        let mut held = Vec::new();
        for _ in 0..fitting {
            let (stream, status) = poll(&t).await;
            assert_eq!(status, 200, "after {}", held.len());
            held.push(stream);
        }
        assert_eq!(poll(&t).await.1, 503);
        let other = json!({"worker_id": "other", "queues": ["default"], "wait_seconds": 10});
        let released = t.post("/v1/workers/poll", other).await.is(200);
        assert_eq!(released["jobs"][0]["failures"], 0, "{}", released["jobs"][0]["id"]);
        drop(held);
        server.stop().await;
    });
}

#[test]
fn a_plan_bounds_the_streams_of_a_project() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project_with("main", "free", json!({"streams": 2})).await;
        let open = async || Stream::open(&t, "/v1/events/stream", None).await;
        let held = [open().await, open().await];
        let refused = t.get("/v1/events/stream").await.is_error(429, "quota_exceeded");
        let message = refused["message"].as_str().expect("words");
        assert!(message.contains("2 event streams on one node"), "{message}");
        let limits = t.get("/v1/limits").await.is(200)["limits"].clone();
        let mut limits = limits.as_array().expect("limits").iter();
        let streams = limits.find(|it| it["name"] == "streams").expect("it is listed").clone();
        assert_eq!((&streams["limit"], &streams["used"]), (&json!(2), &json!(2)));
        drop(held);
        server.stop().await;
    });
}
