//! Push: jobs of a queue are sent to a URL, and its answers are their acks.

use std::{collections::BTreeMap, process::Stdio, time::Duration};

use axum::http::{StatusCode, header};
use fencepost_engine::webhooks::deliver::MAX_PROJECT_ADDRESS_IN_FLIGHT;
use reqwest::Method;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::Command,
};

use super::{endpoint, path};
use crate::{
    docs::read,
    guides::blocks,
    harness::{
        Reply, Sink, TestProject, TestServer, eventually, free_port, fresh_database, limited, run,
        run_alone, run_for, until,
    },
    libraries::{build, typescript_folder},
};

pub(super) const PUSH: &str = "/v1/queues/functions/push";
/// Serves a function of the guide as its platform would.
const PLATFORM: &str = "
import { createServer } from 'node:http';
import handle from './push.js';
createServer(async (request, response) => {
  const body = [];
  for await (const piece of request) body.push(piece);
  const { method, headers } = request;
  const sent = new Request('http://here/', { method, headers, body: Buffer.concat(body) });
  const answer = await handle(sent);
  response.writeHead(answer.status, Object.fromEntries(answer.headers));
  response.end(Buffer.from(await answer.arrayBuffer()));
}).listen(process.env.PORT, '127.0.0.1', () => console.log('listens'));
";

async fn push(t: &TestProject, sink: &Sink, more: Value) -> Value {
    let mut body = json!({"url": sink.url});
    body.as_object_mut().expect("an object").extend(more.as_object().expect("one").clone());
    t.put(PUSH, body).await.is(201)
}

pub(super) async fn enqueue(t: &TestProject, more: Value) -> String {
    let mut job = json!({"queue": "functions", "payload": {"name": "Ada"}});
    job.as_object_mut().expect("an object").extend(more.as_object().expect("one").clone());
    t.enqueue(job).await
}

#[test]
fn a_job_is_sent_signed_and_its_answer_is_the_result() {
    run(async |t| {
        let sink = Sink::start().await;
        let made = push(t, &sink, json!({})).await;
        let json = [(header::CONTENT_TYPE, "application/json; charset=utf-8")];
        sink.answer_with((json, r#"{"greeting": "Hello, Ada!"}"#));
        let id = enqueue(t, json!({"job_type": "greet ä"})).await;
        let sent = sink.next().await;
        assert!(sent.is_signed_with(made["secret"].as_str().expect("a secret")));
        assert_eq!(sent.text, r#"{"name":"Ada"}"#, "the payload, byte for byte");
        assert_eq!(sent.header("fencepost-job-id"), id);
        assert_eq!(sent.header("fencepost-job-type"), "greet %C3%A4");
        assert_eq!(
            (sent.header("fencepost-queue"), sent.header("fencepost-attempt")),
            ("functions", "1")
        );
        assert_eq!(sent.header("webhook-id"), sent.header("fencepost-lease-id"));
        let done = t.job_becomes(&id, "succeeded").await;
        assert_eq!(done["result"], json!({"greeting": "Hello, Ada!"}));
        // Something else is no result.
        sink.answer([(200, "thank you")]);
        let id = enqueue(t, json!({})).await;
        assert_eq!(t.job_becomes(&id, "succeeded").await["result"], Value::Null);
        let shown = t.get(PUSH).await.is(200);
        assert_eq!((&shown["url"], &shown["paused"]), (&json!(sink.url), &json!(false)));
        assert_eq!(shown.get("secret"), None);
    });
}

#[test]
fn answers_end_attempts_as_the_guide_says() {
    run(async |t| {
        let sink = Sink::start().await;
        push(t, &sink, json!({})).await;
        sink.answer([(422, "no such template")]);
        let id = enqueue(t, json!({})).await;
        let dead = t.job_becomes(&id, "dead_letter").await;
        assert_eq!(dead["last_error"]["type"], "http_422");
        assert_eq!(dead["last_error"]["message"], "no such template");
        let last = [(header::HeaderName::from_static("fencepost-retryable"), "false")];
        sink.answer_with((StatusCode::INTERNAL_SERVER_ERROR, last, "broken"));
        let id = enqueue(t, json!({})).await;
        assert_eq!(t.job_becomes(&id, "dead_letter").await["last_error"]["type"], "http_500");
        sink.answer([(500, "again")]);
        let id = enqueue(t, json!({"retry": {"initial_seconds": 0, "jitter_seconds": 0}})).await;
        let done = t.job_becomes(&id, "succeeded").await;
        assert_eq!(
            (&done["attempt"], &done["attempts"][0]["error"]["type"]),
            (&json!(2), &json!("http_500"),)
        );
    });
}

#[test]
fn a_url_that_asks_for_less_gets_its_jobs_back_later_without_a_failure() {
    run(async |t| {
        let sink = Sink::start().await;
        push(t, &sink, json!({})).await;
        let later = [(header::RETRY_AFTER, "1")];
        sink.answer_with((StatusCode::TOO_MANY_REQUESTS, later, "later"));
        let id = enqueue(t, json!({"max_attempts": 1})).await;
        sink.next().await;
        let begun = std::time::Instant::now();
        let again = sink.next().await;
        assert_eq!(again.header("fencepost-attempt"), "2");
        // Less by how long the first answer may have been under way.
        assert!(begun.elapsed() >= Duration::from_millis(900), "it rested");
        let done = t.job_becomes(&id, "succeeded").await;
        assert_eq!(done["failures"], 0);
    });
}

#[test]
fn a_url_that_names_the_end_of_its_maintenance_costs_a_job_no_failure() {
    run(async |t| {
        let sink = Sink::start().await;
        // It has just ended, by a date as RFC 9110 also allows.
        let ends = [(header::RETRY_AFTER, "Fri, 27 Nov 2020 10:00:00 GMT")];
        sink.answer_with((StatusCode::SERVICE_UNAVAILABLE, ends, ""));
        push(t, &sink, json!({})).await;
        let id = enqueue(t, json!({"max_attempts": 1})).await;
        let done = t.job_becomes(&id, "succeeded").await;
        assert_eq!((&done["failures"], &done["attempt"]), (&json!(0), &json!(2)));
        assert_eq!(done["attempts"][0]["outcome"], "released");
    });
}

#[test]
fn a_handler_that_takes_a_job_acks_it_itself() {
    run(async |t| {
        let sink = Sink::start().await;
        push(t, &sink, json!({})).await;
        sink.answer([(202, "")]);
        let id = enqueue(t, json!({})).await;
        let sent = sink.next().await;
        let ack = json!({
            "job_id": id, "worker_id": sent.header("fencepost-worker-id"),
            "attempt": sent.header("fencepost-attempt").parse::<i64>().expect("a number"),
            "lease_id": sent.header("fencepost-lease-id"), "status": "succeeded", "result": 7,
        });
        t.post("/v1/workers/ack", ack).await.is(200);
        assert_eq!(t.job_becomes(&id, "succeeded").await["result"], 7);
    });
}

#[test]
fn a_paused_push_leaves_the_jobs_to_workers_and_an_ended_one_is_gone() {
    run_alone(async |t| {
        let sink = Sink::start().await;
        push(t, &sink, json!({"paused": true})).await;
        let id = enqueue(t, json!({})).await;
        let poll = json!({"worker_id": "w", "queues": ["functions"], "wait_seconds": 10});
        let job = t.polled(poll).await.pop().expect("a job");
        assert_eq!(job["id"], id.as_str());
        t.ack(&job, "w", "succeeded").await.is(200);
        let changed = t.put(PUSH, json!({"url": sink.url})).await.is(200);
        assert_eq!((&changed["secret"], &changed["push"]["paused"]), (&Value::Null, &json!(false)));
        let id = enqueue(t, json!({})).await;
        assert_eq!(sink.next().await.header("fencepost-job-id"), id);
        let rotated = t.post("/v1/queues/functions/push/secret/rotate", json!({})).await.is(200);
        assert_ne!(rotated["secret"], Value::Null);
        t.delete(PUSH).await.is_empty(204);
        t.get(PUSH).await.is_error(404, "push_not_found");
        t.delete(PUSH).await.is_error(404, "push_not_found");
        let left = t.database.number("select count(*) from queue_pushes").await;
        assert_eq!(left, 0);
    });
}

#[test]
fn a_push_is_checked_and_belongs_to_its_project() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let (t, other) = (server.project("main").await, server.project("other").await);
        let sink = Sink::start().await;
        push(&t, &sink, json!({})).await;
        other.get(PUSH).await.is_error(404, "push_not_found");
        other.delete(PUSH).await.is_error(404, "push_not_found");
        let with = |body: Value| t.put(PUSH, body);
        with(json!({"url": "http://10.0.0.1/"})).await.refuses("url");
        with(json!({"url": sink.url, "timeout_seconds": 601})).await.refuses("timeout_seconds");
        with(json!({"url": sink.url, "max_in_flight": 0})).await.refuses("max_in_flight");
        with(json!({"url": sink.url, "header": {}})).await.refuses("header");
        for bad in [
            "Host",
            "proxy-authorization",
            "Webhook-Id",
            "X-Forwarded-For",
            "Cookie",
            "two words",
            "",
        ] {
            let headers = json!({"url": sink.url, "headers": {bad: "x"}});
            with(headers).await.refuses(&format!("headers.{bad}"));
        }
        with(json!({"url": sink.url, "headers": {"X": "a\nb"}})).await.refuses("headers.X");
        with(json!({"url": sink.url, "headers": {"X": "1", "x": "2"}})).await.refuses("headers.x");
        let eleven: serde_json::Map<_, _> =
            (0..11).map(|it| (format!("x-{it}"), json!("1"))).collect();
        with(json!({"url": sink.url, "headers": eleven})).await.refuses("headers");
        with(json!({})).await.refuses("url");
        let key = json!({"name": "k", "scopes": ["manage", "read"]});
        let key = t.post("/v1/keys", key).await.is(201)["secret"].as_str().expect("one").to_owned();
        let lesser = t.with_key(key);
        lesser.get(PUSH).await.is_error(403, "forbidden");
        lesser.put(PUSH, json!({"url": sink.url})).await.is_error(403, "forbidden");
        // Who sends jobs somewhere reads payloads and settles jobs.
        for scopes in [["webhooks", "manage"], ["webhooks", "work"], ["manage", "work"]] {
            let key = t.post("/v1/keys", json!({"name": "k", "scopes": scopes})).await.is(201);
            let api_key = key["secret"].as_str().expect("one").to_owned();
            let lesser = t.with_key(api_key);
            lesser.put(PUSH, json!({"url": sink.url})).await.is_error(403, "forbidden");
        }
        // The other project's jobs of a queue with this name are not sent.
        let foreign = enqueue(&other, json!({})).await;
        let own = enqueue(&t, json!({})).await;
        assert_eq!(sink.next().await.header("fencepost-job-id"), own);
        assert_eq!(other.job(&foreign).await["state"], "pending");
        server.stop().await;
    });
}

#[test]
fn the_function_in_typescript_of_the_guide_is_a_whole_worker() {
    run_for(Duration::from_secs(180), async {
        let dir = typescript_folder();
        let page = blocks(&read("docs/guides/push.md"));
        let function = &page.iter().find(|it| it.0 == "ts").expect("a function").1;
        std::fs::write(dir.join("push.ts"), function).expect("it is written");
        let options = ["tsc", "--target", "es2022", "--module", "nodenext", "--strict"];
        build(dir, "npx", &[&options[..], &["--types", "node", "push.ts"]].concat());
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project("main").await;
        let port = free_port();
        let to = json!({"url": format!("http://127.0.0.1:{port}/")});
        let made = t.put(PUSH, to).await.is(201);
        let mut serving = Command::new("node");
        serving.args(["--input-type=module", "--eval", PLATFORM]).current_dir(dir);
        serving.env("PORT", port.to_string());
        serving.env("PUSH_SECRET", made["secret"].as_str().expect("a secret"));
        let mut serving = serving.stdout(Stdio::piped()).kill_on_drop(true).spawn().expect("it");
        let said = serving.stdout.take().expect("its output");
        let line = BufReader::new(said).lines().next_line().await.expect("a line");
        assert_eq!(line.as_deref(), Some("listens"));
        let id = enqueue(&t, json!({})).await;
        let done = t.job_becomes(&id, "succeeded").await;
        assert_eq!(done["result"], json!({"greeting": "Hello, Ada!"}));
        server.stop().await;
    });
}

#[test]
fn pushes_and_webhooks_share_the_bound_on_requests_to_one_address() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let (t, other) = (server.project("main").await, server.project("other").await);
        let (pushed, reported) = (Sink::start().await, Sink::start().await);
        let other_reported = Sink::start().await;
        let made = endpoint(&t, &reported, json!({})).await;
        let others = endpoint(&other, &other_reported, json!({})).await;
        pushed.hold(true);
        push(&t, &pushed, json!({"max_in_flight": MAX_PROJECT_ADDRESS_IN_FLIGHT + 5})).await;
        for _ in 0..MAX_PROJECT_ADDRESS_IN_FLIGHT + 5 {
            enqueue(&t, json!({})).await;
        }
        for _ in 0..MAX_PROJECT_ADDRESS_IN_FLIGHT {
            pushed.next().await;
        }
        t.act(&path(&made, "/test")).await.is(202);
        other.act(&path(&others, "/test")).await.is(202);
        other_reported.next().await;
        assert!(!reported.has_more().await && !pushed.has_more().await, "there is no turn");
        pushed.hold(false);
        reported.next().await;
        server.stop().await;
    });
}

#[test]
fn a_url_that_takes_no_connection_costs_a_job_no_failure() {
    run(async |t| {
        let body = json!({"url": format!("http://127.0.0.1:{}/", free_port())});
        t.put(PUSH, body).await.is(201);
        let id = enqueue(t, json!({"max_attempts": 1})).await;
        until("the push to fail", async || {
            t.get(PUSH).await.is(200)["last_error"] == "not_connected"
        })
        .await;
        let job = t.job(&id).await;
        assert_eq!((&job["state"], &job["failures"]), (&json!("pending"), &json!(0)));
    });
}

#[test]
fn both_secrets_sign_while_one_is_replaced() {
    run(async |t| {
        let sink = Sink::start().await;
        let made = push(t, &sink, json!({})).await;
        enqueue(t, json!({})).await;
        sink.next().await;
        let rotate = "/v1/queues/functions/push/secret/rotate";
        let rotated = t.post(rotate, json!({})).await.is(200);
        enqueue(t, json!({})).await;
        let sent = sink.next().await;
        assert!(sent.is_signed_with(made["secret"].as_str().expect("a secret")));
        assert!(sent.is_signed_with(rotated["secret"].as_str().expect("a secret")));
    });
}

#[test]
fn a_change_of_a_push_counts_for_the_next_job() {
    run(async |t| {
        let (old, new) = (Sink::start().await, Sink::start().await);
        let made = push(t, &old, json!({})).await;
        enqueue(t, json!({})).await;
        assert!(old.next().await.is_signed_with(made["secret"].as_str().expect("a secret")));
        let rotated = t.post(&format!("{PUSH}/secret/rotate"), json!({"overlap_seconds": 0})).await;
        let rotated = rotated.is(200)["secret"].as_str().expect("a secret").to_owned();
        enqueue(t, json!({})).await;
        let sent = old.next().await;
        assert!(sent.is_signed_with(&rotated));
        assert!(!sent.is_signed_with(made["secret"].as_str().expect("a secret")), "it is dead");
        t.put(PUSH, json!({"url": new.url})).await.is(200);
        let id = enqueue(t, json!({})).await;
        assert_eq!(new.next().await.header("fencepost-job-id"), id);
        t.put(PUSH, json!({"url": new.url, "paused": true})).await.is(200);
        let id = enqueue(t, json!({})).await;
        let poll = json!({"worker_id": "w", "queues": ["functions"], "wait_seconds": 0});
        assert_eq!(t.polled(poll.clone()).await[0]["id"], json!(id));
        t.put(PUSH, json!({"url": new.url, "paused": false})).await.is(200);
        t.delete(PUSH).await.is_empty(204);
        let id = enqueue(t, json!({})).await;
        assert_eq!(t.polled(poll).await[0]["id"], json!(id));
    });
}

#[test]
fn a_job_is_explained_by_its_failing_push_unless_a_worker_polls() {
    run(async |t| {
        let sink = Sink::start().await;
        let later = [(header::RETRY_AFTER, "600")];
        sink.answer_with((StatusCode::SERVICE_UNAVAILABLE, later, ""));
        push(t, &sink, json!({})).await;
        let first = enqueue(t, json!({})).await;
        sink.next().await;
        let explained = async |id: &str| t.get(&format!("/v1/jobs/{id}/explain")).await.is(200);
        let explanation = eventually("the push to be shown as failing", async || {
            let explanation = explained(&first).await;
            (explanation["reason"] == "push_failing").then_some(explanation)
        })
        .await;
        let summary = explanation["summary"].as_str().expect("a text");
        assert!(summary.ends_with(": http_503"), "{summary}");
        assert_eq!(explanation["waiting_for"], "worker");
        let second = enqueue(t, json!({})).await;
        let poll = json!({"worker_id": "w", "queues": ["functions"], "capacity": 1});
        let taken = t.polled(poll).await.remove(0);
        let left = if taken["id"] == first.as_str() { &second } else { &first };
        until("the job to have another reason", async || {
            explained(left).await["reason"] != "push_failing"
        })
        .await;
    });
}

#[test]
fn the_server_never_calls_itself() {
    run(async |t| {
        for path in ["", "/v1/jobs", "/hook?x=1"] {
            let own = format!("{}{path}", t.url);
            let endpoint = json!({"url": own, "events": ["job.*"]});
            t.post("/v1/webhooks", endpoint).await.refuses("url");
            t.put(PUSH, json!({"url": own})).await.refuses("url");
        }
    });
}

#[test]
fn a_server_refuses_what_it_has_sent_itself_under_any_name() {
    run_alone(async |t| {
        let sink = Sink::start().await;
        endpoint(t, &sink, json!({"events": ["job.cancelled"]})).await;
        let id = t.enqueue(json!({})).await;
        t.post(&format!("/v1/jobs/{id}/cancel"), json!({})).await.is(200);
        let sent = sink.next().await;
        let instance = sent.header("sender-instance").to_owned();
        let call = async |instance: &str| {
            let call = t.request(Method::GET, "/v1/jobs").header("sender-instance", instance);
            Reply::of(call.send().await.expect("an answer")).await
        };
        call(&instance).await.is_error(403, "forbidden");
        call("another one").await.is(200);
    });
}

#[test]
fn the_headers_that_describe_a_job_are_signed() {
    run(async |t| {
        let sink = Sink::start().await;
        let made = push(t, &sink, json!({})).await;
        enqueue(t, json!({"job_type": "a \"b\" \\ é 100%"})).await;
        let sent = sink.next().await;
        let headers: BTreeMap<_, _> =
            sent.headers.keys().map(|it| (it.as_str(), sent.header(it.as_str()))).collect();
        let page = blocks(&read("docs/guides/push.md"));
        let function = &page.iter().find(|it| it.0 == "py").expect("a function").1;
        let check = async |changed: (&str, &str)| {
            let mut headers = headers.clone();
            headers.insert(changed.0, changed.1);
            let given = json!([made["secret"], headers]).to_string();
            let call = format!(
                "{function}\nimport sys\nprint(verified_headers(*json.loads(sys.argv[1])))"
            );
            let mut python = Command::new("python3");
            python.args(["-c", &call, &given]).env("PYTHONPATH", "clients/python");
            python.output().await.expect("it runs").status.success()
        };
        assert!(check(("x-of-a-proxy", "1")).await);
        assert!(!check(("fencepost-attempt", "7")).await);
        assert!(!check(("fencepost-queue", "other")).await);
        assert!(!check(("webhook-id", "other")).await);
        assert!(!check(("fencepost-signature", sent.header("webhook-signature"))).await);
    });
}

#[test]
fn headers_of_the_user_are_sent_and_never_shown_and_go_to_no_other_host() {
    run_alone(async |t| {
        let (sink, other) = (Sink::start().await, Sink::start().await);
        let headers = json!({"Authorization": "Bearer hidden", "X-Region": "eu"});
        let made = push(t, &sink, json!({"headers": headers})).await;
        let names = json!(["Authorization", "X-Region"]);
        assert_eq!(made["push"]["header_names"], names);
        assert!(!t.get(PUSH).await.text.contains("hidden"));
        enqueue(t, json!({})).await;
        let sent = sink.next().await;
        let seen =
            ["authorization", "x-region", "content-type"].map(|it| sent.header(it).to_owned());
        assert_eq!(seen, ["Bearer hidden", "eu", "application/json"]);
        // They stay with the host.
        let elsewhere = format!("{}/other", sink.url);
        let moved = t.put(PUSH, json!({"url": elsewhere})).await.is(200);
        assert_eq!(moved["push"]["header_names"], names);
        let moved = t.put(PUSH, json!({"url": other.url})).await.is(200);
        assert_eq!(moved["push"]["header_names"], json!([]));
        let stored = "select count(*) from queue_pushes where headers is not null";
        assert_eq!(t.database.number(stored).await, 0);
        let back = t.put(PUSH, json!({"url": sink.url, "headers": {"X": "1"}})).await.is(200);
        assert_eq!(back["push"]["header_names"], json!(["X"]));
        let none = t.put(PUSH, json!({"url": sink.url, "headers": {}})).await.is(200);
        assert_eq!(none["push"]["header_names"], json!([]));
    });
}
