//! What only a socket shows: silent, slow and odd clients, and the shape of every refusal.

use std::{
    io::Write,
    time::{Duration, Instant},
};

use fencepost_domain::limits;
use fencepost_http::server;
use fencepost_web::wire::body::BODY_TIMEOUT;

use crate::harness::{Reply, TestProject, TestServer, fresh_database, limited, run, run_alone};
use flate2::{Compression, write::GzEncoder};
use reqwest::Method;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

async fn connect(t: &TestProject) -> TcpStream {
    let address = t.url.strip_prefix("http://").expect("an http URL");
    TcpStream::connect(address).await.expect("a connection")
}

/// What the server says until it closes.
async fn rest(mut stream: TcpStream) -> String {
    let mut text = String::new();
    // A reset is an end as well.
    let _ = stream.read_to_string(&mut text).await;
    text
}

#[test]
fn a_silent_socket_is_closed() {
    run(async |t| {
        let started = Instant::now();
        assert_eq!(rest(connect(t).await).await, "");
        let waited = started.elapsed();
        assert!(waited + Duration::from_millis(100) >= server::FIRST_BYTE_TIMEOUT, "{waited:?}");
        assert!(waited < server::FIRST_BYTE_TIMEOUT * 2, "{waited:?}");
    });
}

#[test]
fn a_body_that_never_comes_ends_its_request() {
    run(async |t| {
        let mut stream = connect(t).await;
        let head = format!(
            "POST /v1/jobs HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\n\
             content-type: application/json\r\ncontent-length: 100\r\nconnection: close\r\n\r\n{{",
            t.api_key
        );
        stream.write_all(head.as_bytes()).await.expect("it is sent");
        let started = Instant::now();
        let answer = rest(stream).await;
        assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
        assert!(answer.contains("request_timeout"), "{answer}");
        assert!(started.elapsed() < BODY_TIMEOUT * 2);
    });
}

#[test]
fn an_oversized_head_is_refused() {
    run(async |t| {
        let mut stream = connect(t).await;
        let head =
            format!("GET /livez HTTP/1.1\r\nhost: x\r\nx-large: {}\r\n\r\n", "x".repeat(64 * 1024));
        // The server may close before all of it is sent.
        let _ = stream.write_all(head.as_bytes()).await;
        let answer = rest(stream).await;
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer}");
        assert_eq!(t.get("/livez").await.text, "ok\n");
    });
}

#[test]
fn who_asks_whether_to_send_a_large_body_is_answered_before() {
    run(async |t| {
        let head = |length: usize| {
            format!(
                "POST /v1/jobs HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\n\
                 content-type: application/json\r\ncontent-length: {length}\r\n\
                 expect: 100-continue\r\nconnection: close\r\n\r\n",
                t.api_key
            )
        };
        let mut stream = connect(t).await;
        let large = head(limits::MAX_BODY_BYTES + 1);
        stream.write_all(large.as_bytes()).await.expect("it is sent");
        let answer = rest(stream).await;
        assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
        let mut stream = connect(t).await;
        let body = r#"{"job_type": "t"}"#;
        stream.write_all(head(body.len()).as_bytes()).await.expect("it is sent");
        let mut go_on = [0; 25];
        stream.read_exact(&mut go_on).await.expect("an answer");
        assert_eq!(&go_on, b"HTTP/1.1 100 Continue\r\n\r\n");
        stream.write_all(body.as_bytes()).await.expect("it is sent");
        let answer = rest(stream).await;
        assert!(answer.starts_with("HTTP/1.1 201"), "{answer}");
    });
}

#[test]
fn what_http_forbids_is_refused() {
    run(async |t| {
        for (version, headers, status) in [
            ("1.1", "", "400"),
            ("1.1", "host: a\r\nhost: b\r\n", "400"),
            ("1.1", "host: a b\r\n", "400"),
            ("1.1", "host: a\r\ntransfer-encoding: gzip, chunked\r\n", "400"),
            ("1.1", "host: a\r\n", "200"),
            ("1.1", "host: [::1]:80\r\n", "200"),
            ("1.0", "", "200"),
        ] {
            let mut stream = connect(t).await;
            let request = format!(
                "GET /v1/limits HTTP/{version}\r\n{headers}authorization: Bearer {}\r\n\
                 connection: close\r\n\r\n",
                t.api_key
            );
            stream.write_all(request.as_bytes()).await.expect("it is sent");
            let answer = rest(stream).await;
            assert_eq!(answer.get(9..12), Some(status), "{headers}: {answer}");
        }
    });
}

#[test]
fn a_part_that_would_be_ignored_is_refused() {
    run(async |t| {
        let job = t.enqueue(json!({})).await;
        let all = json!({"filter": {}});
        t.post("/v1/jobs/cancel?dry_run=true", all.clone()).await.refuses("dry_run");
        t.post("/v1/projects/any/jobs/cancel?dry_run", all).await.refuses("dry_run");
        t.post("/v1/jobs?x=1", json!({"job_type": "t"})).await.refuses("x");
        t.get("/v1/limits?limit=1").await.refuses("limit");
        t.get("/v1/jobs?queue=%ff").await.refuses("query");
        let twice = t.get("/v1/jobs?limit=1&limit=2").await.refuses("limit");
        assert_eq!(twice, "is sent more than once");
        assert_eq!(t.job(&job).await["state"], "pending");
        let push = t.request(Method::DELETE, "/v1/queues/default/push").header("if-match", "\"x\"");
        Reply::of(push.send().await.expect("an answer")).await.refuses("if-match");
    });
}

#[test]
fn a_connection_is_used_again_and_again() {
    run(async |t| {
        let mut stream = connect(t).await;
        for _ in 0..3 {
            stream.write_all(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n").await.expect("it is sent");
            let mut answer = [0; 512];
            let bytes = stream.read(&mut answer).await.expect("an answer");
            assert!(answer[..bytes].starts_with(b"HTTP/1.1 200"));
        }
    });
}

#[test]
fn a_node_that_stops_does_not_wait_for_half_a_request() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project("main").await;
        let mut first = connect(&t).await;
        first.write_all(b"POST /v1/jobs HTTP/1.1\r\nhost: x\r\nauth").await.expect("it is sent");
        let mut second = connect(&t).await;
        second.write_all(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n").await.expect("it is sent");
        let mut answer = [0; 512];
        assert!(second.read(&mut answer).await.expect("an answer") > 0);
        second.write_all(b"GET /li").await.expect("it is sent");
        let mut third = connect(&t).await;
        let head = format!(
            "POST /v1/jobs HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\n\
             content-type: application/json\r\ncontent-length: 100\r\n\r\n{{",
            t.api_key
        );
        third.write_all(head.as_bytes()).await.expect("it is sent");
        // What was sent before this answer has been read.
        t.get("/v1/jobs").await.is(200);
        let started = Instant::now();
        server.stop().await;
        assert!(started.elapsed() < BODY_TIMEOUT / 2, "{:?}", started.elapsed());
        assert_eq!((rest(first).await, rest(second).await), (String::new(), String::new()));
        let answer = rest(third).await;
        assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
        assert!(answer.contains("the node is stopping"), "{answer}");
    });
}

#[test]
fn a_connection_closes_after_a_request_with_two_lengths() {
    run(async |t| {
        let mut stream = connect(t).await;
        let head = "GET /livez HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\
                    transfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /livez HTTP/1.1\r\n\
                    host: x\r\n\r\n";
        stream.write_all(head.as_bytes()).await.expect("it is sent");
        let answer = rest(stream).await;
        assert_eq!(answer.matches("HTTP/1.1").count(), 1, "{answer}");
    });
}

#[test]
fn a_body_may_be_compressed_with_gzip() {
    run(async |t| {
        let post = async |path: &str, coding: &'static str, body: Vec<u8>| {
            let request = t.request(Method::POST, path).header("content-encoding", coding);
            let request = request.header("content-type", "application/json").body(body);
            Reply::of(request.send().await.expect("an answer")).await
        };
        let gzip = |content: &[u8]| {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
            encoder.write_all(content).expect("it is compressed");
            encoder.finish().expect("it is compressed")
        };
        let job = json!({"job_type": "t", "payload": "x".repeat(100_000)}).to_string();
        let stored = post("/v1/jobs", "gzip", gzip(job.as_bytes())).await.is(201);
        assert_eq!(stored["payload"].as_str().map(str::len), Some(100_000));
        post("/v1/jobs", "identity", job.into_bytes()).await.is(201);
        let bomb = gzip(&vec![b' '; limits::MAX_BODY_BYTES + 1]);
        post("/v1/jobs", "gzip", bomb).await.is_error(413, "payload_too_large");
        let small = json!({"job_type": "t"}).to_string().into_bytes();
        let wrong = post("/v1/jobs", "gzip", small.clone()).await;
        let error = wrong.is_error(400, "invalid_request");
        assert_eq!(error["message"], "the body is not valid gzip");
        for coding in ["br", "deflate"] {
            let refused = post("/v1/jobs", coding, small.clone()).await;
            refused.is_error(415, "unsupported_media_type");
            assert_eq!(refused.headers["accept-encoding"], "gzip");
        }
    });
}

#[test]
fn what_is_not_there_is_refused_in_the_same_shape() {
    run(async |t| {
        t.get("/v1/nope").await.is_error(404, "not_found");
        t.get("/nope").await.is_error(404, "not_found");
        t.get("/v1/projects/main/nope").await.is_error(404, "not_found");
        for (method, path) in [
            (Method::DELETE, "/v1/jobs"),
            (Method::GET, "/v1/workers/poll"),
            (Method::PUT, "/v1/jobs/job_x"),
            (Method::from_bytes(b"BREW").expect("a method"), "/v1/jobs"),
        ] {
            let reply = Reply::of(t.request(method, path).send().await.expect("an answer")).await;
            reply.is_error(405, "method_not_allowed");
            assert!(reply.headers.contains_key("allow"), "{path}");
        }
    });
}

#[test]
fn a_refused_key_is_explained_as_far_as_it_is_no_secret() {
    run(async |t| {
        let reported = async |name: &str, value: &str| {
            let request = t.client.get(format!("{}/v1/jobs", t.url)).header(name, value);
            let reply = Reply::of(request.send().await.expect("an answer")).await;
            let error = reply.is_error(401, "unauthorized");
            let message = error["message"].as_str().expect("text").to_owned();
            // Where none was sent, there is nothing to say of it.
            let was_sent = !message.contains("the header");
            let challenge = if was_sent { "Bearer error=\"invalid_token\"" } else { "Bearer" };
            assert_eq!(reply.headers["www-authenticate"], challenge, "{message}");
            message
        };
        assert!(reported("x-other", "").await.starts_with("no API key was sent"));
        let key = &t.api_key;
        assert!(reported("authorization", key).await.contains("`Bearer` is missing"));
        assert!(reported("authorization", &format!("Token {key}")).await.contains("must be `Auth"));
        let cut = &key[..key.len() - 3];
        for (name, value) in
            [("authorization", format!("Bearer {cut}")), ("x-api-key", cut.to_owned())]
        {
            assert!(reported(name, &value).await.contains("checksum does not match"));
        }
        assert!(reported("x-api-key", "secret").await.starts_with("this is not an API key"));
        let unknown = fencepost_identity::accounts::key::generate("live");
        assert!(reported("x-api-key", &unknown).await.contains("unknown, revoked or expired"));
    });
}

#[test]
fn typical_mistakes_are_answered_with_what_was_probably_meant() {
    run(async |t| {
        let id = t.enqueue(json!({"unique": {"key": "k"}})).await;
        let missing = "job not found: `123` is not the id of a job: job_ and 26 of 0–9 and a–z without i, l, o, u";
        let minute = "cron_expression: the minute cannot be `61`: it must be within 0 to 59";
        let ack = |status: &str, attempt: i32| json!({"job_id": id, "worker_id": "w", "status": status, "attempt": attempt});
        let job = json!({"type": "a"});
        let reported = async |path: &str, body: Value| {
            let reply = t.post(path, body).await;
            let body: Value = serde_json::from_str(&reply.text).expect("JSON");
            body["error"].clone()
        };
        let of_field = "type: is not a field here: did you mean `job_type`?";
        assert_eq!(reported("/v1/jobs", job).await["message"], of_field);
        let of_status = "status: must be one of `succeeded`, `failed`, `released`, `rate_limited`, is `success`: did you mean `succeeded`?";
        assert_eq!(reported("/v1/workers/ack", ack("success", 1)).await["message"], of_status);
        let poll = json!({"worker_id": "w", "queues": "default"});
        let of_list = "queues: must be a list, is a string";
        assert_eq!(reported("/v1/workers/poll", poll).await["message"], of_list);
        assert_eq!(reported("/v1/jobs/123/cancel", json!({})).await["message"], missing);
        let recurring = json!({"job_type": "t", "cron_expression": "61 * * * *"});
        let reply = t.put("/v1/recurring/often", recurring).await;
        assert_eq!(reply.is_error(400, "invalid_cron_expression")["message"], minute);
        let taken = json!({"job_type": "t", "unique": {"key": "k"}});
        assert_eq!(reported("/v1/jobs", taken).await["existing_job_id"], id);
        let job = t.lease("w").await;
        let stale = reported("/v1/workers/ack", ack("succeeded", 9)).await;
        assert!(stale["message"].as_str().expect("text").contains("the current attempt is 1;"));
        t.ack(&job, "w", "succeeded").await.is(200);
        let cancel = reported(&format!("/v1/jobs/{id}/cancel"), json!({})).await;
        let message = "the job is succeeded: its state does not allow this operation";
        assert_eq!(cancel["message"], message);
        let route = t.get("/v1/job").await.is_error(404, "not_found");
        assert_eq!(route["message"], "no such route: did you mean /v1/jobs?");
        for path in ["/v1/jobs", "/v1/projects/main/jobs"] {
            let delete = t.delete(path).await.is_error(405, "method_not_allowed");
            assert_eq!(delete["message"], "method not allowed: this route answers GET, POST only");
        }
    });
}

#[test]
fn a_key_that_is_not_strict_may_send_more_than_this_api_knows() {
    run(async |t| {
        let lenient = json!({"name": "old clients", "strict": false});
        let made = t.post("/v1/keys", lenient).await.is(201);
        assert_eq!(made["key"]["strict"], false);
        let secret = made["secret"].as_str().expect("a key").to_owned();
        let lenient = t.with_key(secret);
        let job = json!({"job_type": "a", "payload": {"x": 1.50, "y": {}}, "sdk": {"v": [1]},
            "retry": {"initial_seconds": 0, "sdk": 1}});
        t.post("/v1/jobs", job.clone()).await.refuses("retry.sdk");
        let job = lenient.post("/v1/jobs", job).await.is(201);
        assert_eq!(
            (&job["payload"], &job["retry"]["initial_seconds"]),
            (&json!({"x": 1.50, "y": {}}), &json!(0))
        );
        let batch = json!({"jobs": [{"job_type": "a", "sdk": 1}]});
        lenient.post("/v1/jobs/batch", batch).await.is(201);
        let poll = json!({"worker_id": "w", "queues": ["default"], "sdk": "x",
            "wait_seconds": 0});
        let leased = lenient.post("/v1/workers/poll", poll).await.is(200);
        let ack = json!({"job_id": leased["jobs"][0]["id"], "attempt": 1, "worker_id": "w",
            "status": "failed", "error": {"type": "E", "message": "m", "code": 7}});
        lenient.post("/v1/workers/ack", ack).await.is(200);
        // What is known is checked, and a misspelt filter never selects everything.
        lenient.post("/v1/jobs", json!({"job_type": 5, "sdk": 1})).await.refuses("job_type");
        let all = json!({"filter": {"queu": "x"}});
        lenient.post("/v1/jobs/cancel", all.clone()).await.refuses("filter.queu");
        lenient.post("/v1/jobs/replay", all).await.refuses("filter.queu");
        let cut = r#"{"job_type": "a", "sdk": 1}{"job_type": "b"}"#;
        let cut = lenient.request(Method::POST, "/v1/jobs").body(cut);
        let cut = cut.header("content-type", "application/json").send().await.expect("an answer");
        Reply::of(cut).await.is_error(400, "invalid_request");
    });
}

#[test]
fn a_request_keeps_the_id_it_came_with_if_it_is_sane() {
    run(async |t| {
        let answered = async |id: &str| {
            let request = t.request(Method::GET, "/v1/nope").header("x-request-id", id);
            let reply = Reply::of(request.send().await.expect("an answer")).await;
            reply.is_error(404, "not_found")["request_id"].as_str().expect("text").to_owned()
        };
        assert_eq!(answered("trace-1.a_B").await, "trace-1.a_B");
        for odd in ["a b", "a\"b", &"x".repeat(129)] {
            assert!(answered(odd).await.starts_with("req_"));
        }
    });
}

#[test]
fn the_documentation_is_served_without_a_key_and_loads_nothing_from_elsewhere() {
    run(async |t| {
        let get = async |path: &str| {
            let response =
                t.client.get(format!("{}{path}", t.url)).send().await.expect("an answer");
            assert_eq!(response.status().as_u16(), 200, "{path}");
            response.text().await.expect("a body")
        };
        let document = get("/openapi.json").await;
        assert!(document.contains("jobs_create"));
        let page = get("/docs/").await;
        for line in page.lines().filter(|it| it.contains("src=") || it.contains("href=")) {
            assert!(!line.contains("http"), "{line}");
        }
        assert!(get("/docs/errors").await.contains("## job_not_found"));
        assert!(get("/").await.contains("Log in"), "the front door leads to the console");
    });
}

#[test]
fn a_node_is_ready_until_it_stops() {
    limited(async {
        let linger = Duration::from_secs(2);
        let server = TestServer::start_lingering(fresh_database().await, linger).await;
        let t = server.project("main").await;
        assert_eq!(t.get("/livez").await.text, "ok\n");
        assert_eq!(t.get("/readyz").await.text, "ok\n");
        t.stopping.cancel();
        // A load balancer that connects now sees it, and requests that still come are served.
        let fresh = crate::harness::client().get(format!("{}/readyz", t.url)).send().await;
        let reply = Reply::of(fresh.expect("an answer")).await;
        reply.is_error(503, "unavailable");
        assert_eq!(reply.headers["retry-after"], "1");
        t.enqueue(json!({})).await;
        server.stop().await;
    });
}

#[test]
fn a_node_whose_schema_is_too_old_is_not_ready() {
    run_alone(async |t| {
        t.database.execute("delete from _sqlx_migrations").await;
        t.get("/readyz").await.is_error(503, "unavailable");
    });
}

#[test]
fn a_request_under_way_is_finished_when_the_server_stops() {
    run_alone(async |t| {
        t.database
            .execute(
                "create function slow() returns trigger language plpgsql as
                     $$ begin perform pg_sleep(1); return new; end $$;
                 create trigger slow before insert on jobs for each row execute function slow()",
            )
            .await;
        let enqueuing = tokio::spawn({
            let t = t.clone();
            async move { t.post("/v1/jobs", json!({"job_type": "t"})).await }
        });
        // The insert is under way by then, and not over.
        tokio::time::sleep(Duration::from_millis(500)).await;
        t.stopping.cancel();
        enqueuing.await.expect("no panic").is(201);
    });
}
