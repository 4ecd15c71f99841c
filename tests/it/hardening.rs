//! What strangers on the network meet: headers, bounds on connections, logs that reveal no secrets;
//! and what shows an operator that something is wrong.

use std::{
    io::{Read, Write},
    net::TcpStream,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use fencepost_http::server::late_refusals::{CALM_REFUSALS, LATENESS};
use fencepost_identity::{
    accounts::{LOOKUPS_PER_ADDRESS, key},
    credentials::{CREDENTIAL_TTL, bodies::MAX_PROJECT_BODY_KIB},
};

use crate::{
    harness::{
        LoneProject, Proxy, Reply, Stage, TestProject, TestServer, eventually, fresh_database,
        limited, redis_url, repeatedly, run, run_alone, until, until_ready,
    },
    people::{PASSWORD, post_from},
};
use serde_json::{Value, json};
use tokio::task::JoinSet;

const PROGRAM: &str = env!("CARGO_BIN_EXE_fencepost");

#[test]
fn every_answer_has_headers_that_restrict_browsers() {
    run(async |t| {
        let get = async |path: &str| {
            let request = t.client.get(format!("{}{path}", t.url)).bearer_auth(&t.api_key);
            Reply::of(request.send().await.expect("an answer")).await
        };
        for path in ["/v1/jobs", "/v1/nowhere", "/livez", "/openapi.json", "/docs/", "/docs/errors"]
        {
            let headers = get(path).await.headers;
            let value = |name: &str| {
                headers.get(name).and_then(|it| it.to_str().ok()).unwrap_or("").to_owned()
            };
            assert_eq!(value("x-content-type-options"), "nosniff", "{path}");
            assert_eq!(value("referrer-policy"), "no-referrer", "{path}");
            assert_eq!(value("strict-transport-security"), "max-age=31536000", "{path}");
            assert_eq!(value("cross-origin-opener-policy"), "same-origin", "{path}");
            let scripts = value("content-security-policy");
            let scripts = scripts.split(';').find(|it| it.trim().starts_with("script-src"));
            assert!(scripts.is_none_or(|it| it.trim() == "script-src 'self'"), "{path}");
            assert!(value("content-security-policy").contains("frame-ancestors 'none'"), "{path}");
            assert!(
                headers.get("server").is_none()
                    && headers.get("access-control-allow-origin").is_none()
            );
            let is_page = path.starts_with("/docs");
            assert_eq!(
                value("content-security-policy").starts_with("default-src 'none'"),
                !is_page,
                "{path}"
            );
            assert!(is_page || value("cache-control") == "no-store", "{path}");
            assert_eq!(value("cross-origin-resource-policy") == "same-origin", is_page, "{path}");
            assert_eq!(value("permissions-policy").contains("camera=()"), is_page, "{path}");
        }
    });
}

#[test]
fn connections_of_one_address_are_bounded() {
    limited(async {
        const MAX: u32 = 5;
        let stage = Stage { connections: MAX, trusts_proxy: false, ..Stage::default() };
        let server = TestServer::start_as(fresh_database().await, stage).await;
        let address = server.url.trim_start_matches("http://").to_owned();
        let talk = async || {
            let address = address.clone();
            let talked = tokio::task::spawn_blocking(move || {
                let mut stream = TcpStream::connect(address).expect("a connection");
                stream.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout");
                let _ = stream.write_all(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n");
                let mut answer = [0; 12];
                let is_answered = stream.read(&mut answer).is_ok_and(|it| it > 0);
                (stream, is_answered)
            });
            talked.await.expect("no panic")
        };
        let mut open = Vec::new();
        for _ in 0..MAX {
            let (stream, is_answered) = talk().await;
            assert!(is_answered);
            open.push(stream);
        }
        assert!(!talk().await.1, "one too many");
        drop(open.pop());
        // The server notices that the connection is closed.
        until("the server to notice the closed connection", async || talk().await.1).await;
        drop(open);
        server.stop().await;
    });
}

#[test]
fn large_bodies_of_one_project_wait_for_each_other_and_for_no_other_project() {
    limited(async {
        const BODIES: usize = 2;
        const BYTES: usize = MAX_PROJECT_BODY_KIB * 1024 / BODIES;
        let server = TestServer::start(fresh_database().await).await;
        let (greedy, other) = (server.project("greedy").await, server.project("other").await);
        let address = server.url.trim_start_matches("http://").to_owned();
        // All but the last byte, or nothing but the announced length.
        let hold = |sent: usize| {
            let key = &greedy.api_key;
            let head = format!(
                "POST /v1/jobs/batch HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n\
                 content-type: application/json\r\ncontent-length: {BYTES}\r\n\r\n"
            );
            let mut stream = TcpStream::connect(&address).expect("a connection");
            stream.write_all(head.as_bytes()).expect("a head");
            stream.write_all(&vec![b' '; sent]).expect("a part of a body");
            stream
        };
        let job = json!({"job_type": "a", "payload": "x".repeat(100_000)});
        let large = json!({"jobs": vec![job; 4]});
        let announced: Vec<_> = (0..BODIES * 4).map(|_| hold(0)).collect();
        greedy.post("/v1/jobs/batch", large.clone()).await.is(201);
        drop(announced);
        let held: Vec<_> = (0..BODIES).map(|_| hold(BYTES - 1)).collect();
        // Until the server has read them.
        let refused = eventually("the bodies of the greedy project to be too many", async || {
            let reply = greedy.post("/v1/jobs/batch", large.clone()).await;
            (reply.status != 201).then_some(reply)
        })
        .await;
        refused.is_error(503, "overloaded");
        other.post("/v1/jobs/batch", large.clone()).await.is(201);
        greedy.enqueue(json!({"job_type": "small"})).await;
        drop(held);
        until("room for the bodies of the greedy project", async || {
            greedy.post("/v1/jobs/batch", large.clone()).await.status == 201
        })
        .await;
        server.stop().await;
    });
}

/// A node in a process of its own that says everything it has to say, until it is asked to stop.
struct Talkative {
    child: std::process::Child,
    url: String,
    /// Reads what it says all the while: a full pipe would hold it up.
    reading: std::thread::JoinHandle<String>,
}

async fn talkative(database_url: &str) -> Talkative {
    let free = std::net::TcpListener::bind("127.0.0.1:0")
        .expect("a port")
        .local_addr()
        .expect("an address");
    let mut child = Command::new(PROGRAM)
        .args(["serve", "--listen", &free.to_string(), "--metrics-listen", "127.0.0.1:0"])
        .args(["--log", "trace,sqlx=trace", "--signup", "open", "--linger-seconds", "0"])
        .env("FENCEPOST_DATABASE_URL", database_url)
        .env("FENCEPOST_REDIS_URL", redis_url())
        .env("FENCEPOST_CANARY_SECONDS", "0")
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut pipe = child.stderr.take().expect("a pipe");
    let reading = std::thread::spawn(move || {
        let mut text = String::new();
        pipe.read_to_string(&mut text).expect("text");
        text
    });
    let url = format!("http://{free}");
    until("the node to be ready", async || {
        crate::harness::client()
            .get(format!("{url}/readyz"))
            .send()
            .await
            .is_ok_and(|answer| answer.status() == 200)
    })
    .await;
    Talkative { child, url, reading }
}

#[test]
fn lookups_that_the_database_did_not_answer_are_no_guesses() {
    limited(async {
        let database = fresh_database().await;
        let proxy = Proxy::start(&database).await;
        let server = proxy.server().await;
        until_ready(&server.url).await;
        let t = LoneProject::at(&server.url, &database, "main").await;
        proxy.cut(true);
        let mut calls = JoinSet::new();
        for _ in 0..=LOOKUPS_PER_ADDRESS.count {
            let t = t.clone();
            calls.spawn(async move { t.get("/v1/limits").await.status.as_u16() });
        }
        let statuses = calls.join_all().await;
        assert!(statuses.iter().all(|it| *it == 503), "{statuses:?}");
        proxy.cut(false);
        let answered = eventually("the database to answer again", async || {
            let reply = t.get("/v1/limits").await;
            (reply.status != 503).then_some(reply)
        })
        .await;
        answered.is(200);
        server.stop().await;
    });
}

#[test]
fn a_neighbour_who_tries_keys_keeps_no_known_client_out() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project("main").await;
        let mut others = Vec::new();
        for place in 0..5 {
            others.push(server.project(&format!("other{place}")).await);
        }
        t.get("/v1/limits").await.is(200);
        let limited_junk = async || {
            let junk = t.with_key(key::generate("live"));
            (junk.get("/v1/limits").await.status != 401).then_some(())
        };
        repeatedly("the junk to be limited", limited_junk).await;
        // Long enough for its key to be looked up again and again.
        let end = Instant::now() + CREDENTIAL_TTL * 2;
        while Instant::now() < end {
            t.get("/v1/limits").await.is(200);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        // A key that is not known yet waits with the others of its address, a second at a time.
        let mut refused = 0;
        for other in others {
            repeatedly("the junk to be limited again", limited_junk).await;
            refused += u32::from(other.get("/v1/limits").await.status == 429);
        }
        assert!(refused > 0, "look-ups of unknown keys are counted");
    });
}

#[test]
fn no_log_reveals_a_secret_at_any_level() {
    limited(async {
        let database = fresh_database().await;
        let mut node = talkative(&database.url).await;
        let t = TestProject {
            url: node.url.clone(),
            id: String::new(),
            slug: String::new(),
            api_key: String::new(),
            client: crate::harness::client(),
        };
        let mut secrets = vec![PASSWORD.to_owned()];
        let body = json!({"email": "canary-mail@example.com", "password": PASSWORD});
        let made = post_from(&t, "/v1/auth/signup", body.clone(), "192.0.2.77").await.is(201);
        let session = post_from(&t, "/v1/auth/login", body, "192.0.2.77").await.is(200);
        let text = |it: &Value| it.as_str().expect("a text").to_owned();
        let (access, refresh) = (text(&session["access_token"]), text(&session["refresh_token"]));
        let refreshed =
            post_from(&t, "/v1/auth/refresh", json!({"refresh_token": refresh}), "192.0.2.77")
                .await
                .is(200);
        secrets.extend([
            access.clone(),
            refresh,
            text(&refreshed["access_token"]),
            text(&refreshed["refresh_token"]),
        ]);
        let wrong =
            json!({"email": "canary-mail@example.com", "password": "canary-wrong-password"});
        post_from(&t, "/v1/auth/login", wrong, "192.0.2.78")
            .await
            .is_error(401, "invalid_credentials");
        let t = t.with_key(text(&made["api_key"]["secret"]));
        secrets.push(t.api_key.clone());
        let person = t.with_key(access);
        let keys = format!("/v1/projects/{}/keys", text(&made["project"]["slug"]));
        let key = person.post(&keys, json!({"name": "k"})).await.is(201);
        secrets.push(text(&key["secret"]));
        t.post("/v1/keys/report", json!({"key": key["secret"]})).await.is_empty(204);
        t.enqueue(json!({"payload": {"card": "canary-payload"}, "tags": {"a": "b"}})).await;
        t.post(
            "/v1/jobs",
            json!({"job_type": "t", "payload": "canary-refused", "nonsense": "canary-field"}),
        )
        .await
        .refuses("nonsense");
        let job = t.lease("w").await;
        t.ack_with(&job, "w", "succeeded", json!({"result": "canary-result"})).await.is(200);
        t.enqueue(json!({"payload": 1, "max_attempts": 1})).await;
        let job = t.lease("w").await;
        let error = json!({"error": {"message": "canary-error", "stack_trace": "canary-stack"}});
        t.ack_with(&job, "w", "failed", error).await.is(200);
        let bad = t.client.get(format!("{}/v1/jobs", t.url)).header("x-api-key", "canary-bad-key");
        Reply::of(bad.send().await.expect("an answer")).await.is_error(401, "unauthorized");
        Command::new("kill").arg(node.child.id().to_string()).status().expect("kill runs");
        node.child.wait().expect("it ends");
        has_none_of(&node.reading.join().expect("no panic"), &secrets);
    });
}

fn has_none_of(log: &str, secrets: &[String]) {
    assert!(log.len() > 10_000, "it was talkative: {} bytes", log.len());
    for secret in secrets {
        assert!(!log.contains(secret), "{secret} is in the log");
    }
    let canary = log.lines().find(|it| it.contains("canary-"));
    assert_eq!(canary, None);
}

fn check(environment: &[(&str, &str)]) -> (bool, String) {
    let done = Command::new(PROGRAM)
        .args(["check", "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"])
        .env_remove("DATABASE_URL")
        .envs(environment.iter().copied())
        .output()
        .expect("it runs");
    (done.status.success(), String::from_utf8_lossy(&done.stdout).into_owned())
}

#[test]
fn check_says_what_is_wrong_and_how_to_mend_it() {
    limited(async {
        let database = fresh_database().await;
        let redis = redis_url();
        let database_url = ("FENCEPOST_DATABASE_URL", database.url.as_str());
        // The tests' PostgreSQL is quick because it is not safe: that is found.
        let (_, reported) = check(&[database_url, ("FENCEPOST_REDIS_URL", &redis)]);
        assert!(reported.contains("ok       database  PostgreSQL 1"), "{reported}");
        assert!(reported.contains("ok       redis"), "{reported}");
        assert!(reported.contains("ok       schema"), "{reported}");
        assert!(
            reported.contains("WRONG    database  fsync=off loses acknowledged jobs"),
            "{reported}"
        );
        assert!(reported.contains("warning  mail"), "{reported}");
        let (is_good, reported) = check(&[]);
        assert!(!is_good && reported.contains("WRONG    database  no database"), "{reported}");
        let (is_good, reported) =
            check(&[database_url, ("FENCEPOST_REDIS_URL", "redis://user:canary@127.0.0.1:1")]);
        assert!(!is_good && reported.contains("WRONG    redis"), "{reported}");
        assert!(!reported.contains("canary"), "{reported}");
        let (is_good, reported) = check(&[database_url, ("FENCEPOST_DEFAULT_PLAN", "gold")]);
        assert!(!is_good && reported.contains("no such plan: `gold`"), "{reported}");
        let proxies = [("canary", "must be a URL"), ("http://u:canary@127.0.0.1:1", "refused")];
        for (proxy, problem) in proxies {
            let (is_good, reported) = check(&[database_url, ("FENCEPOST_OUTBOUND_PROXY", proxy)]);
            assert!(!is_good && reported.contains("WRONG    webhooks"), "{reported}");
            assert!(reported.contains(problem) && !reported.contains("canary"), "{reported}");
        }
    });
}

#[test]
fn a_client_that_is_refused_again_and_again_is_answered_late() {
    run_alone(async |t| {
        let refused = async || {
            let began = Instant::now();
            let request = t.client.get(format!("{}/v1/jobs", t.url)).bearer_auth("junk");
            let request = request.header("x-forwarded-for", "192.0.2.77");
            assert_eq!(request.send().await.expect("an answer").status(), 401);
            began.elapsed()
        };
        // More at once than a node refuses without pausing.
        let many = (0..2 * CALM_REFUSALS.count).map(|_| refused());
        let took = futures_util::future::join_all(many).await;
        assert!(took.iter().any(|it| *it >= LATENESS), "none was late");
    });
}
