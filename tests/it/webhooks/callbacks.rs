//! `callback_url`, events about batches and workflows, and loops.

use serde_json::{Value, json};

use super::{endpoint, path};
use crate::harness::{Sink, TestProject, TestServer, fresh_database, limited, run, run_alone};

/// Runs the next job.
async fn work(t: &TestProject, status: &str) {
    let job = t.lease("w").await;
    t.ack(&job, "w", status).await.is(200);
}

#[test]
fn a_callback_url_of_a_job_is_notified_and_no_other_endpoint() {
    run_alone(async |t| {
        let (sink, other) = (Sink::start().await, Sink::start().await);
        let takes = json!({"events": [], "callbacks": true});
        let made = endpoint(t, &sink, takes).await;
        endpoint(t, &other, json!({"events": ["job.dead_lettered"]})).await;
        let url = format!("{}/orders/7?token=x", sink.url);
        let id = t.enqueue(json!({"callback_url": url, "payload": {"secret": 1}})).await;
        work(t, "succeeded").await;
        let reported = sink.next().await;
        assert!(reported.is_signed_with(made["secret"].as_str().expect("a secret")));
        assert_eq!(reported.path, format!("{}/orders/7?token=x", path_of(&sink.url)));
        let body = reported.body();
        assert_eq!(
            (&body["type"], &body["data"]["job"]["id"]),
            (&json!("job.succeeded"), &json!(id))
        );
        assert!(!reported.text.contains("secret"), "{}", reported.text);
        t.enqueue(json!({"callback_url": sink.url, "max_attempts": 1})).await;
        work(t, "failed").await;
        let body = sink.next().await.body();
        assert_eq!(body["type"], "job.dead_lettered");
        assert_eq!(body["data"]["error"]["outcome"], "failed");
        assert_eq!(other.next().await.body()["type"], "job.dead_lettered");
        let waiting = t.enqueue(json!({"callback_url": sink.url})).await;
        t.act(&format!("/v1/jobs/{waiting}/cancel")).await.is(200);
        assert_eq!(sink.next().await.body()["type"], "job.cancelled");
        // The endpoint moves on before the callback is sent: nothing goes to the former place.
        t.enqueue(json!({"callback_url": format!("{}/late", sink.url)})).await;
        t.patch(&path(&made, ""), json!({"url": format!("{}/new", sink.url)})).await.is(200);
        work(t, "succeeded").await;
        t.database.until("select count(*) from outbound_events", 0).await;
        assert!(!sink.has_more().await);
    });
}

fn path_of(url: &str) -> String {
    url.splitn(4, '/').nth(3).map(|it| format!("/{it}")).unwrap_or_default()
}

#[test]
fn a_url_that_no_endpoint_takes_is_refused() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let (t, other) = (server.project("main").await, server.project("other").await);
        let sink = Sink::start().await;
        let made = endpoint(&t, &sink, json!({"callbacks": true})).await;
        let of_others = format!("{}-of-others", sink.url);
        let outside = sink.url.replace("127.0.0.1", "127.0.0.2");
        let with_user = sink.url.replace("http://", "http://user@");
        for bad in ["", "x", "https://example.com/", &of_others, &outside, &with_user] {
            let job = json!({"job_type": "t", "callback_url": bad});
            t.post("/v1/jobs", job.clone()).await.refuses("callback_url");
            let batch = json!({"jobs": [{"job_type": "t"}, job]});
            t.post("/v1/jobs/batch", batch).await.refuses("jobs[1].callback_url");
            t.post("/v1/batches", json!({"callback_url": bad})).await.refuses("callback_url");
        }
        let fine = json!({"job_type": "t", "callback_url": sink.url});
        other.post("/v1/jobs", fine.clone()).await.refuses("callback_url");
        t.patch(&path(&made, ""), json!({"callbacks": false})).await.is(200);
        t.post("/v1/jobs", fine.clone()).await.refuses("callback_url");
        // A receiver that is gone does not stop producers.
        t.patch(&path(&made, ""), json!({"callbacks": true, "enabled": false})).await.is(200);
        t.post("/v1/jobs", fine).await.is(201);
        let no_events = json!({"url": sink.url, "events": []});
        t.post("/v1/webhooks", no_events).await.refuses("events");
        server.stop().await;
    });
}

#[test]
fn the_end_of_a_batch_is_sent_to_endpoints_that_asked_and_to_its_url() {
    run(async |t| {
        let (asked, named) = (Sink::start().await, Sink::start().await);
        endpoint(t, &asked, json!({"events": ["batch.*"]})).await;
        endpoint(t, &named, json!({"events": [], "callbacks": true})).await;
        let batch = json!({"name": "import 7", "callback_url": named.url});
        let batch = t.post("/v1/batches", batch).await.is(201);
        let id = batch["id"].as_str().expect("an id");
        for _ in 0..2 {
            t.enqueue(json!({"batch_id": id, "max_attempts": 1})).await;
        }
        t.act(&format!("/v1/batches/{id}/seal")).await.is(200);
        work(t, "succeeded").await;
        work(t, "failed").await;
        for sink in [&asked, &named] {
            let body = sink.next().await.body();
            assert_eq!(body["type"], "batch.failed");
            assert_eq!(body["data"]["job"], Value::Null);
            let reported = &body["data"]["batch"];
            assert_eq!((&reported["id"], &reported["name"]), (&json!(id), &json!("import 7")));
            let counts = ["total_jobs", "succeeded_jobs", "dead_letter_jobs"];
            assert_eq!(counts.map(|it| reported[it].as_i64()), [Some(2), Some(1), Some(1)]);
        }
        let dead = t.get("/v1/dead-letters").await.is(200);
        let job = dead["dead_letters"][0]["job"]["id"].as_str().expect("a dead letter");
        t.act(&format!("/v1/dead-letters/{job}/retry")).await.is(200);
        work(t, "succeeded").await;
        for sink in [&asked, &named] {
            assert_eq!(sink.next().await.body()["type"], "batch.succeeded");
        }
    });
}

/// Who is notified of the end of the next workflow: one endpoint that asked, and the URL that it
/// names.
async fn listeners(t: &TestProject) -> (Sink, Sink) {
    let (asked, named) = (Sink::start().await, Sink::start().await);
    endpoint(t, &asked, json!({"events": ["workflow.*"]})).await;
    endpoint(t, &named, json!({"events": [], "callbacks": true})).await;
    (asked, named)
}

/// Two jobs, the second after the first.
fn two_jobs(more: Value) -> Value {
    let mut workflow = more;
    workflow["jobs"] = json!([
        {"key": "fetch", "job_type": "t", "max_attempts": 1},
        {"key": "send", "job_type": "t", "max_attempts": 1, "depends_on": ["fetch"]},
    ]);
    workflow
}

#[test]
fn the_end_of_a_workflow_is_sent_to_endpoints_that_asked_and_to_its_url() {
    run_alone(async |t| {
        let (asked, named) = listeners(t).await;
        let nightly = two_jobs(json!({"name": "nightly", "callback_url": named.url}));
        let made = t.post("/v1/workflows", nightly).await.is(201);
        work(t, "succeeded").await;
        work(t, "succeeded").await;
        for sink in [&asked, &named] {
            let body = sink.next().await.body();
            assert_eq!(body["type"], "workflow.succeeded");
            assert_eq!(
                (&body["data"]["job"], &body["data"]["batch"]),
                (&json!(null), &json!(null))
            );
            let reported = json!({
                "id": made["id"], "name": "nightly", "total_jobs": 2, "succeeded_jobs": 2
            });
            assert_eq!(body["data"]["workflow"], reported);
        }
        let unnamed = t.post("/v1/workflows", two_jobs(json!({}))).await.is(201);
        let id = unnamed["id"].as_str().expect("an id");
        t.act(&format!("/v1/workflows/{id}/cancel")).await.is(200);
        let body = asked.next().await.body();
        assert_eq!(
            (&body["type"], &body["data"]["workflow"]["id"]),
            (&json!("workflow.cancelled"), &json!(id))
        );
        t.database.until("select count(*) from job_ends", 0).await;
        assert!(!asked.has_more().await && !named.has_more().await);
    });
}

#[test]
fn a_workflow_that_fails_and_whose_job_is_retried_is_reported_twice() {
    run_alone(async |t| {
        let (asked, named) = listeners(t).await;
        let nightly = two_jobs(json!({"callback_url": format!("{}/7", named.url)}));
        t.post("/v1/workflows", nightly).await.is(201);
        work(t, "failed").await;
        for sink in [&asked, &named] {
            assert_eq!(sink.next().await.body()["type"], "workflow.failed");
        }
        let dead = t.get("/v1/dead-letters").await.is(200);
        let job = dead["dead_letters"][0]["job"]["id"].as_str().expect("a dead letter").to_owned();
        let retry = format!("/v1/dead-letters/{job}/retry");
        t.act(&retry).await.is(200);
        work(t, "failed").await;
        t.database.until("select count(*) from job_ends", 0).await;
        t.act(&retry).await.is(200);
        work(t, "succeeded").await;
        work(t, "succeeded").await;
        for sink in [&asked, &named] {
            // That it has failed in the same way again is no news.
            assert_eq!(sink.next().await.body()["type"], "workflow.succeeded");
        }
    });
}

#[test]
fn a_project_without_listeners_notes_no_end_of_a_workflow() {
    run_alone(async |t| {
        let sink = Sink::start().await;
        endpoint(t, &sink, json!({"events": ["job.dead_lettered"]})).await;
        t.post("/v1/workflows", two_jobs(json!({}))).await.is(201);
        let seen = "select count(*) from workflows where told_state is not null";
        work(t, "succeeded").await;
        work(t, "succeeded").await;
        t.database.until("select count(*) from finished_jobs", 2).await;
        t.database.until("select count(*) from job_ends", 0).await;
        assert_eq!(t.database.number(seen).await, 0);
        t.post("/v1/workflows", two_jobs(json!({"callback_url": sink.url})))
            .await
            .refuses("callback_url");
    });
}

#[test]
fn a_workflow_ends_when_its_last_job_does_also_one_that_ran_while_it_was_cancelled() {
    run_alone(async |t| {
        let (asked, _) = listeners(t).await;
        let made = t.post("/v1/workflows", two_jobs(json!({}))).await.is(201);
        let job = t.lease("w").await;
        t.act(&format!("/v1/workflows/{}/cancel", made["id"].as_str().expect("one"))).await.is(200);
        t.database.until("select count(*) from job_ends", 0).await;
        assert!(!asked.has_more().await, "one job runs");
        t.ack(&job, "w", "succeeded").await.is(200);
        assert_eq!(asked.next().await.body()["type"], "workflow.cancelled");
    });
}

#[test]
fn a_handled_failure_is_a_success_and_an_end_is_sent_to_endpoints_that_asked_later() {
    run(async |t| {
        let (_, named) = listeners(t).await;
        let handled = json!({"callback_url": named.url, "jobs": [
            {"key": "fetch", "job_type": "t", "max_attempts": 1},
            {"key": "mend", "job_type": "t", "depends_on": [{"key": "fetch", "when": "failed"}]},
        ]});
        t.post("/v1/workflows", handled).await.is(201);
        work(t, "failed").await;
        let job = t.wait_and_lease("w").await;
        assert!(!named.has_more().await, "the handler runs");
        t.ack(&job, "w", "succeeded").await.is(200);
        assert_eq!(named.next().await.body()["type"], "workflow.succeeded");
    });
}

#[test]
fn an_end_that_no_endpoint_asked_for_is_reported_when_it_comes_again() {
    run_alone(async |t| {
        let sink = Sink::start().await;
        let made = endpoint(t, &sink, json!({"events": ["workflow.cancelled"]})).await;
        t.post("/v1/workflows", two_jobs(json!({}))).await.is(201);
        work(t, "failed").await;
        let dead = t.get("/v1/dead-letters").await.is(200);
        let job = dead["dead_letters"][0]["job"]["id"].as_str().expect("a dead letter").to_owned();
        t.database.until("select count(*) from job_ends", 0).await;
        t.patch(&path(&made, ""), json!({"events": ["workflow.*"]})).await.is(200);
        t.act(&format!("/v1/dead-letters/{job}/retry")).await.is(200);
        work(t, "failed").await;
        assert_eq!(sink.next().await.body()["type"], "workflow.failed");
    });
}

#[test]
fn a_loop_of_deliveries_and_jobs_ends() {
    run_alone(async |t| {
        let sink = Sink::start().await;
        let made = endpoint(t, &sink, json!({"events": ["job.succeeded"]})).await;
        let send = async |hop: &str| {
            let request = t.request(reqwest::Method::POST, "/v1/jobs").header("fencepost-hop", hop);
            request.json(&json!({"job_type": "t"})).send().await.expect("an answer").status()
        };
        let enqueue = async |hop: &str| {
            assert_eq!(send(hop).await, 201);
            work(t, "succeeded").await;
        };
        for malformed in ["not a number", "-3", "1.5", ""] {
            assert_eq!(send(malformed).await, 400, "{malformed:?}");
        }
        let mut hop = "0".to_owned();
        for expected in 1..=5 {
            enqueue(&hop).await;
            hop = sink.next().await.header("fencepost-hop").to_owned();
            assert_eq!(hop, expected.to_string());
        }
        enqueue(&hop).await;
        t.database.until("select dropped_events from webhook_endpoints", 1).await;
        assert!(!sink.has_more().await);
        // It counts for jobs of batches, workflows, replays and other protocols, too.
        let done = t.enqueue(json!({})).await;
        work(t, "succeeded").await;
        assert_eq!(sink.next().await.header("fencepost-hop"), "1");
        let replay = format!("/v1/jobs/{done}/replay");
        let many = [
            ("/v1/jobs/batch", json!({"jobs": [{"job_type": "t"}]})),
            ("/v1/workflows", json!({"jobs": [{"key": "a", "job_type": "t"}]})),
            ("/ojs/v1/jobs", json!({"type": "t", "args": []})),
            ("/ojs/v1/jobs/batch", json!({"jobs": [{"type": "t", "args": []}]})),
            (replay.as_str(), json!({})),
        ];
        for (place, body) in many {
            let request = t.request(reqwest::Method::POST, place).header("fencepost-hop", "2");
            let sent = request.json(&body).send().await.expect("an answer");
            assert_eq!(sent.status(), 201);
            work(t, "succeeded").await;
            assert_eq!(sink.next().await.header("fencepost-hop"), "3");
        }
        t.act(&path(&made, "/test")).await.is(202);
        assert_eq!(sink.next().await.header("fencepost-hop"), "1");
    });
}

#[test]
fn a_loop_over_workflows_batches_and_callbacks_ends_as_one_over_jobs() {
    run_alone(async |t| {
        let sink = Sink::start().await;
        let ends = json!(["workflow.succeeded", "batch.succeeded"]);
        endpoint(t, &sink, json!({"events": ends})).await;
        let after = json!({"events": ["job.succeeded"], "job_types": ["after"]});
        endpoint(t, &sink, after).await;
        let work_soon = async || {
            let job = t.wait_and_lease("w").await;
            t.ack(&job, "w", "succeeded").await.is(200);
        };
        let send = async |place: &str, hop: i16, body: Value| {
            let request = t.request(reqwest::Method::POST, place).header("fencepost-hop", hop);
            let sent = request.json(&body).send().await.expect("an answer");
            assert_eq!(sent.status(), 201, "{place}");
            let made: Value = sent.json().await.expect("JSON");
            made["id"].as_str().unwrap_or_default().to_owned()
        };
        let arrives = async |kind: &str, hop: &str| {
            let event = sink.next().await;
            assert_eq!((&event.body()["type"], event.header("fencepost-hop")), (&json!(kind), hop));
        };
        let jobs = json!([{"key": "a", "job_type": "t"}]);
        send("/v1/workflows", 2, json!({"jobs": jobs})).await;
        work_soon().await;
        arrives("workflow.succeeded", "3").await;
        let empty = send("/v1/batches", 3, json!({})).await;
        t.act(&format!("/v1/batches/{empty}/seal")).await.is(200);
        arrives("batch.succeeded", "4").await;
        let batch = json!({"on_success": {"job_type": "after"}});
        let batch = t.post("/v1/batches", batch).await.is(201)["id"].clone();
        send("/v1/jobs", 1, json!({"job_type": "t", "batch_id": batch})).await;
        let seal = format!("/v1/batches/{}/seal", batch.as_str().expect("an id"));
        t.act(&seal).await.is(200);
        work_soon().await;
        arrives("batch.succeeded", "2").await;
        work_soon().await;
        arrives("job.succeeded", "2").await;
        let callback = json!({"job_type": "t", "on_success": {"job_type": "after"}});
        send("/v1/jobs", 4, callback.clone()).await;
        work_soon().await;
        work_soon().await;
        arrives("job.succeeded", "5").await;
        send("/v1/jobs", 5, callback).await;
        work_soon().await;
        work_soon().await;
        t.database.until("select sum(dropped_events)::bigint from webhook_endpoints", 1).await;
        assert!(!sink.has_more().await);
    });
}

#[test]
fn an_endpoint_that_would_get_nothing_is_refused() {
    run(async |t| {
        let sink = Sink::start().await;
        let nothing = json!({"url": sink.url, "events": []});
        t.post("/v1/webhooks", nothing).await.refuses("events");
        let made = endpoint(t, &sink, json!({"events": ["job.*"], "callbacks": true})).await;
        let change = async |change: Value| t.patch(&path(&made, ""), change).await;
        change(json!({"events": []})).await.is(200);
        change(json!({"callbacks": false})).await.refuses("events");
        change(json!({"description": "for callbacks"})).await.is(200);
        change(json!({"events": ["job.*"], "callbacks": false})).await.is(200);
        change(json!({"events": []})).await.refuses("events");
    });
}
