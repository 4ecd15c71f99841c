//! Webhooks: endpoints, what they are sent and when, and what becomes of deliveries.

mod callbacks;
mod crashes;
mod destinations;
mod proxies;
mod push;
mod push_requests;
mod settings;
mod storage;
mod turns;
mod verifiers;

use std::collections::BTreeMap;

use crate::harness::{
    LoneProject, Reply, Sink, Stage, TestProject, TestServer, eventually, fresh_database, limited,
    run, run_alone, until,
};
use fencepost_domain::outbound::Allowed;
use fencepost_net::outbound::Outbound;
use reqwest::header::{LOCATION, RETRY_AFTER};
use serde_json::{Value, json};

/// Creates an endpoint at a sink, and answers with it and its secret.
async fn endpoint(t: &TestProject, sink: &Sink, more: Value) -> Value {
    let mut body = json!({"url": sink.url, "events": ["job.*"]});
    body.as_object_mut().expect("an object").extend(more.as_object().expect("one").clone());
    merged(t.post("/v1/webhooks", body).await.is(201), "endpoint")
}

/// The fields of an object beside those that contain it.
fn merged(mut whole: Value, part: &str) -> Value {
    let fields = whole.as_object_mut().expect("an object");
    if let Some(Value::Object(part)) = fields.remove(part) {
        fields.extend(part);
    }
    whole
}

fn path(endpoint: &Value, below: &str) -> String {
    format!("/v1/webhooks/{}{below}", endpoint["id"].as_str().expect("an id"))
}

/// Waits until the newest delivery of an endpoint is in this state.
async fn delivery_becomes(t: &TestProject, endpoint: &Value, state: &str) -> Value {
    eventually(format!("a delivery that is {state}"), async || {
        let list = t.get(&path(endpoint, "/deliveries")).await.is(200);
        let newest = Some(&list["deliveries"][0]).filter(|newest| newest["state"] == state)?;
        let id = newest["id"].as_str().expect("an id");
        let shown = t.get(&path(endpoint, &format!("/deliveries/{id}"))).await.is(200);
        Some(merged(shown, "delivery"))
    })
    .await
}

/// Waits until an endpoint is in this state.
async fn endpoint_becomes(t: &TestProject, endpoint: &Value, state: &str) -> Value {
    eventually(format!("the endpoint to be {state}"), async || {
        let now = t.get(&path(endpoint, "")).await.is(200);
        (now["state"] == state).then_some(now)
    })
    .await
}

/// Tries that wait are due now.
async fn hurry(t: &LoneProject) {
    t.database.execute("update jobs set run_at = now() where state = 'backoff'").await;
}

#[test]
fn webhook_events_are_sent_once_with_a_signature_that_fits() {
    run_alone(async |t| {
        let sink = Sink::start().await;
        let made = endpoint(t, &sink, json!({"description": "orders"})).await;
        assert_eq!(made["state"], "enabled");
        let id = t.enqueue(json!({"tags": {"customer": "7"}, "payload": {"secret": 1}})).await;
        let job = t.lease("w").await;
        t.ack(&job, "w", "succeeded").await.is(200);
        let reported = sink.next().await;
        assert!(reported.is_signed_with(made["secret"].as_str().expect("a secret")));
        assert!(!reported.text.contains("secret"), "no payload is sent: {}", reported.text);
        assert_eq!(reported.header("content-type"), "application/json");
        assert!(reported.header("user-agent").starts_with("Fencepost/"));
        let body = reported.body();
        assert_eq!(body["type"], "job.succeeded");
        assert_eq!(body["data"]["project"], json!({"id": t.id, "slug": "main"}));
        let reported_job = &body["data"]["job"];
        assert_eq!(reported_job["id"], id.as_str());
        assert_eq!(reported_job["queue"], "default");
        assert_eq!(
            (&reported_job["attempt"], &reported_job["tags"]),
            (&json!(1), &json!({"customer": "7"}))
        );
        assert_eq!(body["data"]["error"], Value::Null);
        let delivery = delivery_becomes(t, &made, "delivered").await;
        assert_eq!(delivery["id"], reported.header("fencepost-delivery"));
        assert_eq!(delivery["event_id"], reported.header("webhook-id"));
        assert_eq!((&delivery["status"], &delivery["answer"]), (&json!(200), &json!("ok")));
        assert_eq!(delivery["body"], body);
        assert!(!sink.has_more().await);
        let events = t.database.number("select count(*) from outbound_events").await;
        assert_eq!(events, 0);
    });
}

#[test]
fn webhook_events_leave_out_tags_that_are_large() {
    run(async |t| {
        let sink = Sink::start().await;
        endpoint(t, &sink, json!({})).await;
        for (tags, is_cut) in [(1, false), (9, true)] {
            let tags: BTreeMap<_, _> =
                (0..tags).map(|it| (format!("t{it}"), "x".repeat(500))).collect();
            t.enqueue(json!({"tags": tags})).await;
            t.ack(&t.lease("w").await, "w", "succeeded").await.is(200);
            let job = sink.next().await.body()["data"]["job"].clone();
            assert_eq!((&job["tags_cut"], job["tags"].is_null()), (&json!(is_cut), is_cut));
        }
    });
}

#[test]
fn webhook_events_of_failures_and_dead_letters_have_their_error() {
    run(async |t| {
        let sink = Sink::start().await;
        endpoint(t, &sink, json!({})).await;
        t.enqueue(json!({"max_attempts": 1})).await;
        let job = t.lease("w").await;
        let error = json!({"error": {"type": "Refused", "message": "no such customer"}});
        t.ack_with(&job, "w", "failed", error).await.is(200);
        let mut reported = [sink.next().await.body(), sink.next().await.body()];
        reported.sort_by_key(|it| it["type"].to_string());
        assert_eq!(
            (&reported[0]["type"], &reported[1]["type"]),
            (&json!("job.attempt_failed"), &json!("job.dead_lettered"),)
        );
        for it in &reported {
            let error = &it["data"]["error"];
            assert_eq!(error["type"], "Refused");
            assert_eq!(error["message"], "no such customer");
            assert_eq!((&error["outcome"], &error["retry_at"]), (&json!("failed"), &Value::Null));
        }
        let waiting = t.enqueue(json!({})).await;
        t.act(&format!("/v1/jobs/{waiting}/cancel")).await.is(200);
        let reported = sink.next().await.body();
        assert_eq!(reported["type"], "job.cancelled");
        assert_eq!(
            (&reported["data"]["job"]["id"], &reported["data"]["job"]["attempt"]),
            (&json!(waiting), &json!(0),)
        );
    });
}

#[test]
fn an_endpoint_gets_the_events_that_it_asked_for_alone() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let (t, other) = (server.project("main").await, server.project("other").await);
        let (sink, foreign) = (Sink::start().await, Sink::start().await);
        let asked = json!({
            "events": ["job.succeeded"], "queues": ["default"], "job_types": ["mail.*", "last"],
        });
        endpoint(&t, &sink, asked).await;
        endpoint(&other, &foreign, json!({})).await;
        for (job_type, queue) in
            [("mail", "default"), ("mail.send", "other"), ("mail.send", "default")]
        {
            let id = t.enqueue(json!({"job_type": job_type, "queue": queue})).await;
            let poll = json!({"worker_id": "w", "queues": [queue]});
            let job = t.polled(poll).await.pop().expect("a job");
            assert_eq!(job["id"], id.as_str());
            t.ack(&job, "w", "succeeded").await.is(200);
        }
        let reported = sink.next().await.body();
        assert_eq!(reported["data"]["job"]["job_type"], "mail.send");
        assert_eq!(reported["data"]["job"]["queue"], "default");
        // Ends are reported in their order, so nothing else was sent before this one.
        t.enqueue(json!({"job_type": "last"})).await;
        let job = t.lease("w").await;
        t.ack(&job, "w", "succeeded").await.is(200);
        assert_eq!(sink.next().await.body()["data"]["job"]["job_type"], "last");
        assert!(!sink.has_more().await && !foreign.has_more().await);
        server.stop().await;
    });
}

#[test]
fn a_refused_delivery_is_tried_again_with_the_same_event_id() {
    run_alone(async |t| {
        let sink = Sink::start().await;
        let made = endpoint(t, &sink, json!({})).await;
        sink.answer_with((
            axum::http::StatusCode::SERVICE_UNAVAILABLE,
            [(RETRY_AFTER, "600")],
            "later",
        ));
        sink.answer_with((
            axum::http::StatusCode::FOUND,
            [(LOCATION, sink.url.clone())],
            "elsewhere",
        ));
        t.act(&path(&made, "/test")).await.is(202);
        let first = sink.next().await;
        let waits = delivery_becomes(t, &made, "waiting").await;
        assert_eq!(waits["failed_tries"][0]["error_type"], "http_503");
        assert_eq!(waits["failed_tries"][0]["message"], "later");
        let wait =
            "select (extract(epoch from run_at - now()))::bigint from jobs where state = 'backoff'";
        assert!((580..=600).contains(&t.database.number(wait).await), "as it asked");
        hurry(t).await;
        let second = sink.next().await;
        hurry_until(t, &made, 2).await;
        let third = sink.next().await;
        assert_eq!(first.text, third.text);
        assert_eq!(first.header("webhook-id"), third.header("webhook-id"));
        let attempts =
            [&first, &second, &third].map(|it| it.header("fencepost-attempt").to_owned());
        assert_eq!(attempts, ["1", "2", "3"]);
        let done = delivery_becomes(t, &made, "delivered").await;
        let kinds = done["failed_tries"].as_array().expect("tries").iter();
        let kinds: Vec<_> = kinds.map(|it| it["error_type"].clone()).collect();
        assert_eq!(kinds, ["http_503", "http_302"], "a redirect is not followed");
    });
}

/// Waits until a delivery has had this many tries, and makes its next try due.
async fn hurry_until(t: &LoneProject, endpoint: &Value, tries: i64) {
    until(format!("{tries} tries"), async || {
        delivery_becomes(t, endpoint, "waiting").await["tries"] == tries
    })
    .await;
    hurry(t).await;
}

#[test]
fn an_endpoint_that_is_gone_is_disabled_and_can_be_enabled_again() {
    run_alone(async |t| {
        let sink = Sink::start().await;
        let made = endpoint(t, &sink, json!({})).await;
        sink.answer([(410, "moved on")]);
        t.act(&path(&made, "/test")).await.is(202);
        sink.next().await;
        let gone = endpoint_becomes(t, &made, "disabled").await;
        assert_eq!(gone["disabled_reason"], "gone");
        let failed = delivery_becomes(t, &made, "failed").await;
        assert_eq!(failed["failed_tries"][0]["error_type"], "http_410");
        let audit = t.get("/v1/audit-log?action=endpoint.disabled").await.is(200);
        assert_eq!(audit["entries"][0]["target"], made["id"]);
        t.enqueue(json!({})).await;
        let job = t.lease("w").await;
        t.ack(&job, "w", "succeeded").await.is(200);
        let events = t.database.number("select count(*) from outbound_events").await;
        assert_eq!(events, 0, "no endpoint wants to know");
        let enabled = t.patch(&path(&made, ""), json!({"enabled": true})).await.is(200);
        assert_eq!(
            (&enabled["state"], &enabled["failing_since"]),
            (&json!("enabled"), &Value::Null)
        );
        let id = failed["id"].as_str().expect("an id");
        let again = t.act(&path(&made, &format!("/deliveries/{id}/retry"))).await.is(200);
        assert_eq!(again["event_id"], failed["event_id"]);
        assert_eq!(sink.next().await.header("fencepost-delivery"), id);
        delivery_becomes(t, &made, "delivered").await;
        let late = t.act(&path(&made, &format!("/deliveries/{id}/retry"))).await;
        late.is_error(409, "invalid_state");
    });
}

#[test]
fn an_endpoint_that_fails_for_three_days_is_disabled() {
    run_alone(async |t| {
        let sink = Sink::start().await;
        let made = endpoint(t, &sink, json!({})).await;
        t.database
            .execute(
                "update webhook_endpoints
                 set failures = 9, failing_since = now() - interval '71 hours'",
            )
            .await;
        sink.answer([(500, "")]);
        t.act(&path(&made, "/test")).await.is(202);
        sink.next().await;
        let failing = "select failures::bigint from webhook_endpoints";
        t.database.until_at_least(failing, 10).await;
        assert_eq!(t.get(&path(&made, "")).await.is(200)["state"], "enabled");
        let older = "update webhook_endpoints set failing_since = now() - interval '73 hours'";
        t.database.execute(older).await;
        sink.answer([(500, "")]);
        hurry_until(t, &made, 1).await;
        let failing = endpoint_becomes(t, &made, "disabled").await;
        assert_eq!(failing["disabled_reason"], "failing");
        assert_ne!(failing["last_failure_at"], Value::Null);
    });
}

#[test]
fn a_rotated_secret_signs_beside_the_new_one_while_both_are_valid() {
    run_alone(async |t| {
        let sink = Sink::start().await;
        let made = endpoint(t, &sink, json!({})).await;
        let rotated = t.post(&path(&made, "/secret/rotate"), json!({})).await.is(200);
        let secrets = [&made, &rotated].map(|it| it["secret"].as_str().expect("one").to_owned());
        assert_ne!(secrets[0], secrets[1]);
        t.act(&path(&made, "/test")).await.is(202);
        // A node may still sign with the old one alone for a moment; it is valid.
        loop {
            let reported = sink.next().await;
            assert!(reported.is_signed_with(&secrets[0]));
            if reported.is_signed_with(&secrets[1]) {
                break;
            }
            t.act(&path(&made, "/test")).await.is(202);
        }
        let rotated = t.post(&path(&made, "/secret/rotate"), json!({"overlap_seconds": 0})).await;
        let newest = rotated.is(200)["secret"].as_str().expect("one").to_owned();
        loop {
            t.act(&path(&made, "/test")).await.is(202);
            let reported = sink.next().await;
            if reported.is_signed_with(&newest) {
                assert!(!reported.is_signed_with(&secrets[1]));
                break;
            }
        }
        let shown = t.get(&path(&made, "")).await.is(200);
        assert_eq!(shown.get("secret"), None);
        let stored = t.database.text("select secret::text from webhook_endpoints").await;
        assert!(!stored.is_empty());
    });
}

#[test]
fn a_deleted_endpoint_gets_no_more_events() {
    run_alone(async |t| {
        let sink = Sink::start().await;
        let made = endpoint(t, &sink, json!({})).await;
        sink.answer([(500, "")]);
        t.act(&path(&made, "/test")).await.is(202);
        sink.next().await;
        delivery_becomes(t, &made, "waiting").await;
        t.delete(&path(&made, "")).await.is_empty(204);
        t.get(&path(&made, "")).await.is_error(404, "endpoint_not_found");
        let cancelled = "select count(*) from finished_jobs where state = 'cancelled'";
        t.database.until_at_least(cancelled, 1).await;
        let left = t.database.number("select count(*) from event_subscriptions").await;
        assert_eq!(left, 0);
        assert!(!sink.has_more().await);
    });
}

#[test]
fn a_webhook_request_that_breaks_a_rule_is_refused_by_its_name() {
    run_alone(async |t| {
        let with = |more: Value| {
            let mut body = json!({"url": "https://example.com/hook", "events": ["job.*"]});
            body.as_object_mut().expect("an object").extend(more.as_object().expect("one").clone());
            t.post("/v1/webhooks", body)
        };
        for url in ["http://example.com/", "https://10.0.0.1/", "https://a@example.com/", "x"] {
            with(json!({"url": url})).await.refuses("url");
        }
        with(json!({"events": []})).await.refuses("events");
        assert!(
            with(json!({"events": ["job.*", "job.unknown"]}))
                .await
                .refuses("events[1]")
                .contains("job.dead_lettered")
        );
        with(json!({"queues": ["a\nb"]})).await.refuses("queues[0]");
        with(json!({"job_types": vec!["x"; 51]})).await.refuses("job_types");
        with(json!({"description": "x".repeat(201)})).await.refuses("description");
        with(json!({"max_in_flight": 51})).await.refuses("max_in_flight");
        with(json!({"timeout_seconds": 0})).await.refuses("timeout_seconds");
        with(json!({"secret": "mine"})).await.refuses("secret");
        let made = merged(with(json!({})).await.is(201), "endpoint");
        t.patch(&path(&made, ""), json!({"url": "https://127.0.0.2/"})).await.refuses("url");
        let overlap = json!({"overlap_seconds": 604_801});
        t.post(&path(&made, "/secret/rotate"), overlap).await.refuses("overlap_seconds");
        t.get(&path(&made, "/deliveries?event_type=job.*")).await.refuses("event_type");
        t.get(&path(&made, "/deliveries?state=lost")).await.refuses("state");
        t.get(&path(&made, "/deliveries?limit=101")).await.refuses("limit");
        t.get(&path(&made, "/deliveries?cursor=x")).await.refuses("cursor");
        let unknown = path(&made, "/deliveries/dlv_01m7w3ha3aextt8pkwwdmxsmqw");
        t.get(&unknown).await.is_error(404, "delivery_not_found");
    });
}

#[test]
fn endpoints_and_deliveries_belong_to_their_project() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let (t, other) = (server.project("main").await, server.project("other").await);
        let sink = Sink::start().await;
        let (mine, theirs) =
            (endpoint(&t, &sink, json!({})).await, endpoint(&other, &sink, json!({})).await);
        let sent = t.act(&path(&mine, "/test")).await.is(202);
        let sent = format!("/deliveries/{}", sent["id"].as_str().expect("an id"));
        sink.next().await;
        other.get(&path(&mine, "")).await.is_error(404, "endpoint_not_found");
        other.patch(&path(&mine, ""), json!({})).await.is_error(404, "endpoint_not_found");
        other.delete(&path(&mine, "")).await.is_error(404, "endpoint_not_found");
        other.act(&path(&mine, "/test")).await.is_error(404, "endpoint_not_found");
        other
            .post(&path(&mine, "/secret/rotate"), json!({}))
            .await
            .is_error(404, "endpoint_not_found");
        other.get(&path(&mine, "/deliveries")).await.is_error(404, "endpoint_not_found");
        other.get(&path(&theirs, &sent)).await.is_error(404, "delivery_not_found");
        // Its jobs are no jobs of the project.
        let job = sent.replace("/deliveries/dlv_", "/v1/jobs/job_");
        t.get(&job).await.is_error(404, "job_not_found");
        assert_eq!(t.get("/v1/jobs").await.is(200)["jobs"], json!([]));
        assert_eq!(t.get("/v1/queues").await.is(200)["queues"], json!([]));
        let key = json!({"name": "k", "scopes": ["produce", "work", "read", "payload:read",
                         "manage", "schedules"]});
        let key = t.post("/v1/keys", key).await.is(201)["secret"].as_str().expect("one").to_owned();
        let lesser = t.with_key(key);
        lesser.get("/v1/webhooks").await.is_error(403, "forbidden");
        lesser.get(&path(&mine, "/deliveries")).await.is_error(403, "forbidden");
        server.stop().await;
    });
}

#[test]
fn a_plan_has_a_number_of_endpoints() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project_with("main", "free", json!({"endpoints": 2})).await;
        let sink = Sink::start().await;
        for _ in 0..2 {
            endpoint(&t, &sink, json!({})).await;
        }
        let body = json!({"url": sink.url, "events": ["*"]});
        let refused = t.post("/v1/webhooks", body).await;
        refused.is_error(429, "quota_exceeded");
        let limits = t.get("/v1/limits").await.is(200);
        let limits = limits["limits"].as_array().expect("limits");
        let endpoints = limits.iter().find(|it| it["name"] == "endpoints").expect("it is listed");
        assert_eq!((&endpoints["used"], &endpoints["limit"]), (&json!(2), &json!(2)));
        let page = t.get("/v1/webhooks?limit=1").await.is(200);
        assert_eq!(
            (page["endpoints"].as_array().map(Vec::len), &page["has_more"]),
            (Some(1), &json!(true),)
        );
        server.stop().await;
    });
}

#[test]
fn an_endpoint_outside_of_what_the_operator_allows_is_never_called() {
    limited(async {
        let sink = Sink::start().await;
        let database = fresh_database().await;
        let server = TestServer::start(database.clone()).await;
        let t = server.project("main").await;
        let made = endpoint(&t, &sink, json!({})).await;
        server.stop().await;
        let strict = Stage {
            outbound: Outbound::new(Allowed::default(), None).expect("none"),
            ..Stage::default()
        };
        let server = TestServer::start_as(database, strict).await;
        let t = t.through(&server.url);
        t.act(&path(&made, "/test")).await.is(202);
        let events = json!({"url": sink.url});
        let refused: Reply = t.patch(&path(&made, ""), events).await;
        refused.refuses("url");
        assert_eq!(delivery_becomes(&t, &made, "waiting").await["tries"], 0);
        assert!(!sink.has_more().await);
        server.stop().await;
    });
}
