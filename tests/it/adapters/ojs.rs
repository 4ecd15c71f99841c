//! Open Job Spec: envelopes, lives of jobs, workers.

mod later;
mod options;
mod retries;

use crate::harness::{Reply, TestProject, run};
use reqwest::Method;
use serde_json::{Value, json};

pub const OJS: &str = "/ojs/v1";

/// Enqueues a job, and answers with it.
pub async fn enqueue(t: &TestProject, job: Value) -> Value {
    t.post(&format!("{OJS}/jobs"), job).await.is(201)["job"].clone()
}

/// Fetches the jobs that are there, without a name.
pub async fn fetch(t: &TestProject, queue: &str, count: u32) -> Vec<Value> {
    let wanted = json!({"queues": [queue], "count": count});
    let reply = t.post(&format!("{OJS}/workers/fetch"), wanted).await.is(200);
    reply["jobs"].as_array().expect("jobs").clone()
}

/// Fetches one job.
pub async fn fetch_one(t: &TestProject, queue: &str) -> Value {
    fetch(t, queue, 1).await.pop().expect("a job")
}

/// Reads a job.
pub async fn read(t: &TestProject, job: &Value) -> Value {
    let id = job["id"].as_str().expect("an id");
    t.get(&format!("{OJS}/jobs/{id}")).await.is(200)["job"].clone()
}

/// Settles a job.
pub async fn settle(t: &TestProject, what: &str, job: &Value, more: Value) -> Reply {
    let mut body = json!({"job_id": job["id"]});
    body.as_object_mut().expect("an object").extend(more.as_object().expect("one").clone());
    t.post(&format!("{OJS}/workers/{what}"), body).await
}

/// Expects an error of this wire.
pub fn refused(reply: &Reply, status: u16, code: &str) -> Value {
    let error = reply.is(status)["error"].clone();
    assert_eq!(error["code"], code, "{}", reply.text);
    assert_eq!(error["retryable"], false);
    assert!(error["message"].as_str().is_some_and(|it| !it.is_empty()));
    assert_eq!(reply.headers["content-type"], "application/openjobspec+json");
    assert_eq!(reply.headers["ojs-version"], "1.0");
    error
}

#[test]
fn a_job_is_answered_as_an_envelope_with_what_was_sent_beside() {
    run(async |t| {
        let job = json!({
            "type": "email.send", "args": ["a@b.c", 7.50, null, {"x": [1]}],
            "meta": {"trace_id": "t", "tags": ["a", "b"]}, "x_custom_field": "kept",
            "x_numeric_extension": 42,
            "options": {"queue": "reports", "priority": 10, "timeout_ms": 300_000, "tags": ["t"]},
        });
        let request = t.request(Method::POST, &format!("{OJS}/jobs"));
        let request = request.header("content-type", "application/openjobspec+json");
        let reply = Reply::of(
            request.body(job.to_string().replace("7.5", "7.50")).send().await.expect("an answer"),
        )
        .await;
        let stored = reply.is(201)["job"].clone();
        assert_eq!(reply.headers["content-type"], "application/openjobspec+json");
        assert_eq!(reply.headers["ojs-version"], "1.0");
        let id = stored["id"].as_str().expect("an id");
        assert_eq!(reply.headers["location"], format!("/ojs/v1/jobs/{id}"));
        assert_eq!(uuid::Uuid::parse_str(id).expect("a uuid").get_version_num(), 7);
        for (field, value) in [
            ("type", json!("email.send")),
            ("queue", json!("reports")),
            ("args", job["args"].clone()),
            ("meta", job["meta"].clone()),
            ("priority", json!(10)),
            ("state", json!("available")),
            ("attempt", json!(0)),
            ("max_attempts", json!(3)),
            ("timeout_ms", json!(300_000)),
            ("tags", json!(["t"])),
            ("x_custom_field", json!("kept")),
            ("x_numeric_extension", json!(42)),
        ] {
            assert_eq!(stored[field], value, "{field}");
        }
        for absent in ["started_at", "completed_at", "error", "result"] {
            assert!(stored[absent].is_null(), "{absent}");
        }
        assert!(reply.text.contains("7.50"), "numbers keep their spelling: {}", reply.text);
        assert_eq!(read(t, &stored).await, stored);
        // Native readers see the arguments as the payload.
        let native = t.get("/v1/jobs").await.is(200)["jobs"][0].clone();
        assert_eq!((&native["payload"], &native["timeout_seconds"]), (&job["args"], &json!(300)));
    });
}

#[test]
fn bad_jobs_are_refused_by_name() {
    run(async |t| {
        let refuses = async |job: Value, field: &str| {
            let reply = t.post(&format!("{OJS}/jobs"), job).await;
            let error = refused(&reply, 400, "invalid_request");
            assert!(error["message"].as_str().expect("text").contains(field), "{error}");
        };
        refuses(json!({"args": []}), "type").await;
        refuses(json!({"type": "a"}), "args").await;
        for odd in ["Email.Send", "email send", "1email.send", "", "email@send!"] {
            refuses(json!({"type": odd, "args": []}), "type").await;
        }
        for odd in ["Default", "my_queue!", "-invalid", "my queue"] {
            refuses(json!({"type": "a", "args": [], "options": {"queue": odd}}), "queue").await;
        }
        for odd in [json!({}), json!("x"), json!(42), json!(true), json!(null)] {
            refuses(json!({"type": "a", "args": odd}), "args").await;
        }
        let v4 = "7e57d004-2b97-4e7a-b45f-5387367791cd";
        for odd in [v4, "no", "019461A8-1A2B-7C3D-8E4F-5A6B7C8D9E0F", ""] {
            refuses(json!({"type": "a", "args": [], "id": odd}), "id").await;
        }
        for odd in [101, -101, 999_999] {
            refuses(json!({"type": "a", "args": [], "options": {"priority": odd}}), "priority")
                .await;
        }
        for (name, odd) in [
            ("pending", json!("yes")),
            ("labels", json!([""])),
            ("rate_limit", json!(true)),
            ("visibility_timeout_ms", json!(0)),
            ("visibility_timeout_ms", json!(1_800_001)),
        ] {
            refuses(json!({"type": "a", "args": [], "options": {name: odd}}), name).await;
        }
        let unreadable = t.post_text(&format!("{OJS}/jobs"), "{ invalid").await;
        refused(&unreadable, 400, "invalid_payload");
        refused(&t.post_text(&format!("{OJS}/jobs"), "").await, 400, "invalid_payload");
        let typed =
            t.request(Method::POST, &format!("{OJS}/jobs")).header("content-type", "text/plain");
        let reply = Reply::of(typed.body("{}").send().await.expect("an answer")).await;
        refused(&reply, 400, "invalid_request");
        let missing = t.get(&format!("{OJS}/jobs/01961111-aaaa-7bbb-8ccc-dddddddddddd")).await;
        let error = refused(&missing, 404, "not_found");
        assert!(error["hint"].is_string() && error["docs_url"].is_string());
        assert_eq!(error["request_id"], missing.headers["x-request-id"].to_str().expect("text"));
    });
}

#[test]
fn an_id_of_the_clients_own_is_unique_in_its_project() {
    run(async |t| {
        let id = "019461a8-1a2b-7c3d-8e4f-5a6b7c8d9e0f";
        let job = json!({"type": "a", "args": [], "id": id});
        assert_eq!(enqueue(t, job.clone()).await["id"], id);
        let again = t.post(&format!("{OJS}/jobs"), job.clone()).await;
        assert_eq!(refused(&again, 409, "duplicate")["details"]["existing_job_id"], id);
        fetch_one(t, "default").await;
        settle(t, "ack", &json!({"id": id}), json!({})).await.is(200);
        refused(&t.post(&format!("{OJS}/jobs"), job).await, 409, "duplicate");
    });
}

#[test]
fn of_many_who_choose_the_same_id_at_once_one_has_it() {
    run(async |t| {
        let id = uuid::Uuid::now_v7().to_string();
        let posts = (0..8).map(|n| {
            let (t, job) = (t.clone(), json!({"type": "a", "args": [n], "id": id}));
            tokio::spawn(async move { t.post(&format!("{OJS}/jobs"), job).await })
        });
        let mut stored = Vec::new();
        for post in posts.collect::<Vec<_>>() {
            let reply = post.await.expect("no panic");
            match reply.status.as_u16() {
                201 => stored.push(reply.json()["job"]["args"].clone()),
                _ => drop(refused(&reply, 409, "duplicate")),
            }
        }
        let kept = read(t, &json!({"id": id})).await["args"].clone();
        assert_eq!(stored, [kept]);
    });
}

#[test]
fn a_deregistered_worker_releases_the_jobs_it_lists() {
    run(async |t| {
        let job = enqueue(t, json!({"type": "a", "args": []})).await;
        fetch_one(t, "default").await;
        let path = format!("{OJS}/workers/heartbeat");
        t.post(&path, json!({"worker_id": "w"})).await.is(200);
        let gone = json!({"worker_id": "w", "state": "terminated", "active_job_ids": [job["id"]]});
        assert_eq!(t.post(&path, gone).await.is(200)["jobs_extended"], json!([]));
        assert_eq!(read(t, &job).await["state"], "available");
    });
}

#[test]
fn a_job_lives_from_available_to_completed() {
    run(async |t| {
        let job = enqueue(t, json!({"type": "a.b", "args": [1], "meta": {"k": "v"}})).await;
        refused(&settle(t, "ack", &job, json!({})).await, 409, "conflict");
        let fetched = fetch_one(t, "default").await;
        assert_eq!((&fetched["id"], &fetched["state"]), (&job["id"], &json!("active")));
        assert_eq!((&fetched["attempt"], &fetched["meta"]), (&json!(1), &json!({"k": "v"})));
        assert!(fetched["started_at"].is_string());
        assert_eq!(read(t, &job).await["state"], "active");
        assert!(fetch(t, "default", 1).await.is_empty());
        let result = json!({"result": {"status": "ok", "nested": [1, {"x": null}]}});
        let done = settle(t, "ack", &job, result.clone()).await.is(200);
        assert_eq!((&done["acknowledged"], &done["state"]), (&json!(true), &json!("completed")));
        assert_eq!((&done["id"], &done["job_id"]), (&job["id"], &job["id"]));
        assert!(done["completed_at"].is_string());
        let over = read(t, &job).await;
        assert_eq!((&over["state"], &over["result"]), (&json!("completed"), &result["result"]));
        assert_eq!(over["attempt"], 1);
        refused(&settle(t, "ack", &job, json!({})).await, 409, "conflict");
        refused(&settle(t, "nack", &job, json!({"error": {"code": "x"}})).await, 409, "conflict");
        let path = format!("{OJS}/jobs/{}", job["id"].as_str().expect("an id"));
        refused(&t.delete(&path).await, 409, "conflict");
    });
}

#[test]
fn a_cancelled_job_is_cancelled_at_once_also_under_a_lease() {
    run(async |t| {
        let cancel = async |job: &Value| {
            t.delete(&format!("{OJS}/jobs/{}", job["id"].as_str().expect("an id"))).await
        };
        let waiting = enqueue(t, json!({"type": "a", "args": []})).await;
        let cancelled = cancel(&waiting).await.is(200)["job"].clone();
        assert_eq!((&cancelled["state"], &cancelled["attempt"]), (&json!("cancelled"), &json!(0)));
        assert!(cancelled["cancelled_at"].is_string() && cancelled["completed_at"].is_null());
        refused(&cancel(&waiting).await, 409, "conflict");
        refused(&settle(t, "ack", &waiting, json!({})).await, 409, "conflict");
        let active = enqueue(t, json!({"type": "a", "args": []})).await;
        fetch_one(t, "default").await;
        let cancelled = cancel(&active).await.is(200)["job"].clone();
        assert_eq!((&cancelled["state"], &cancelled["attempt"]), (&json!("cancelled"), &json!(1)));
        assert!(cancelled["started_at"].is_string());
        refused(&settle(t, "ack", &active, json!({})).await, 409, "conflict");
    });
}

#[test]
fn queues_are_looked_at_in_the_order_given_and_jobs_come_by_priority_then_age() {
    run(async |t| {
        let in_queue = |queue: &str, priority: i32, n: i32| json!({"type": "a", "args": [n], "options": {"queue": queue, "priority": priority}});
        for (queue, priority, n) in
            [("low", 0, 1), ("high", -10, 2), ("high", 10, 3), ("high", -10, 4)]
        {
            enqueue(t, in_queue(queue, priority, n)).await;
        }
        let mut order = Vec::new();
        for _ in 0..4 {
            let wanted = json!({"queues": ["high", "low"], "worker_id": "w"});
            let reply = t.post(&format!("{OJS}/jobs/fetch"), wanted).await.is(200);
            assert_eq!(
                reply["jobs"].as_array().map(Vec::len),
                Some(1),
                "one unless more are asked for"
            );
            order.push(reply["jobs"][0]["args"][0].clone());
        }
        assert_eq!(order, [3, 2, 4, 1]);
        for (queue, n) in [("low", 1), ("high", 2), ("low", 3)] {
            enqueue(t, in_queue(queue, 0, n)).await;
        }
        let wanted = json!({"queues": ["high", "low"], "count": 5});
        let reply = t.post(&format!("{OJS}/jobs/fetch"), wanted).await.is(200);
        let all: Vec<_> = reply["jobs"]
            .as_array()
            .expect("jobs")
            .iter()
            .map(|it| it["args"][0].clone())
            .collect();
        assert_eq!(all, [2, 1, 3]);
        for _ in 0..60 {
            enqueue(t, in_queue("many", 0, 0)).await;
        }
        assert_eq!(fetch(t, "many", 1_000).await.len(), 50);
        refused(&t.post(&format!("{OJS}/workers/fetch"), json!({})).await, 400, "invalid_request");
    });
}

#[test]
fn a_worker_registers_beats_and_goes_as_the_protocol_draws_it() {
    run(async |t| {
        let worker = json!({
            "worker_id": "worker-abc-123", "hostname": "web-01.example.com", "pid": 12_345,
            "queues": ["default", "emails"], "concurrency": 10, "labels": ["region:us-east-1"],
        });
        t.post(&format!("{OJS}/workers/register"), worker).await.is(200);
        let job = enqueue(t, json!({"type": "a", "args": []})).await;
        // The fetch names no worker; the heartbeat that lists the job adopts it.
        let fetched = fetch_one(t, "default").await;
        assert!(fetched["worker_id"].is_null());
        let beat = json!({"worker_id": "worker-abc-123", "state": "running", "active_job_ids": [job["id"]]});
        let reported = t.post(&format!("{OJS}/workers/heartbeat"), beat.clone()).await.is(200);
        assert_eq!(
            (&reported["state"], &reported["visibility_timeout"]),
            (&json!("running"), &json!(1800))
        );
        assert_eq!(reported["jobs_extended"], json!([job["id"]]));
        assert!(reported["server_time"].is_string());
        assert_eq!(read(t, &job).await["worker_id"], "worker-abc-123");
        // Another worker may neither keep it nor settle it.
        let other = json!({"worker_id": "other", "active_jobs": [job["id"]]});
        let reported = t.post(&format!("{OJS}/workers/heartbeat"), other).await.is(200);
        assert_eq!(reported["jobs_extended"], json!([]));
        refused(&settle(t, "ack", &job, json!({"worker_id": "other"})).await, 409, "conflict");
        t.act("/v1/workers/worker-abc-123/quiet").await.is(200);
        let reported = t.post(&format!("{OJS}/workers/heartbeat"), beat).await.is(200);
        assert_eq!(reported["state"], "quiet");
        let request = json!({"worker_id": "worker-abc-123"});
        t.post(&format!("{OJS}/workers/deregister"), request).await.is(200);
        let back = read(t, &job).await;
        assert_eq!((&back["state"], &back["attempt"]), (&json!("available"), &json!(0)));
        let unknown = json!({"worker_id": "unknown"});
        refused(&t.post(&format!("{OJS}/workers/deregister"), unknown).await, 404, "not_found");
    });
}

#[test]
fn a_worker_that_has_not_registered_is_described_by_its_beats() {
    run(async |t| {
        let path = format!("{OJS}/workers/heartbeat");
        let beat = |host: &str| {
            json!({
                "worker_id": "w", "hostname": host, "pid": 7, "queues": ["a"],
                "concurrency": 3, "labels": ["gpu"],
            })
        };
        t.post(&path, json!({"worker_id": "w"})).await.is(200);
        t.post(&path, beat("one")).await.is(200);
        let seen = async || t.get("/v1/workers").await.is(200)["workers"][0].clone();
        let worker = seen().await;
        assert_eq!((&worker["hostname"], &worker["pid"]), (&json!("one"), &json!(7)));
        assert_eq!((&worker["queues"], &worker["labels"]), (&json!(["a"]), &json!(["gpu"])));
        assert_eq!(worker["concurrency"], 3);
        // It is registered now: only a registration changes that.
        t.post(&path, beat("two")).await.is(200);
        assert_eq!(seen().await["hostname"], "one");
        let odd = json!({"worker_id": "w", "concurrency": 0});
        refused(&t.post(&path, odd).await, 400, "invalid_request");
    });
}

#[test]
fn schemas_are_an_empty_list_and_counts_stand_beside_the_queue() {
    run(async |t| {
        enqueue(t, json!({"type": "a", "args": []})).await;
        let schemas = t.get(&format!("{OJS}/schemas?limit=5")).await.is(200);
        assert_eq!(schemas["schemas"], json!([]));
        assert_eq!(schemas["pagination"]["limit"], 5);
        let stats = t.get(&format!("{OJS}/queues/default/stats")).await.is(200);
        assert_eq!((&stats["status"], &stats["stats"]["available"]), (&json!("active"), &json!(1)));
        assert_eq!(stats["stats"], stats["queue"]["stats"]);
    });
}

#[test]
fn a_page_says_how_many_items_are_known_to_be_there() {
    run(async |t| {
        for queue in ["a", "b", "c"] {
            enqueue(t, json!({"type": "a", "args": [], "options": {"queue": queue}})).await;
        }
        let page = async |offset: u32| {
            let path = format!("{OJS}/queues?limit=1&offset={offset}");
            let page = t.get(&path).await.is(200)["pagination"].clone();
            (page["total"].as_u64(), page["has_more"].as_bool())
        };
        assert_eq!((page(0).await, page(2).await), ((Some(2), Some(true)), (Some(3), Some(false))));
    });
}

#[test]
fn a_worker_that_gives_its_name_with_the_ack_adopts_the_job_then() {
    run(async |t| {
        let job = enqueue(t, json!({"type": "a", "args": []})).await;
        fetch_one(t, "default").await;
        let path = format!("{OJS}/jobs/{}/ack", job["id"].as_str().expect("an id"));
        t.post(&path, json!({"worker_id": "late"})).await.is(200);
        let bare = enqueue(t, json!({"type": "a", "args": []})).await;
        fetch_one(t, "default").await;
        t.act(&format!("{OJS}/jobs/{}/ack", bare["id"].as_str().expect("an id"))).await.is(200);
        assert_eq!(read(t, &bare).await["state"], "completed");
    });
}

#[test]
fn the_manifest_is_shown_without_a_key() {
    run(async |t| {
        let get = async |path: &str| {
            let request = t.client.get(format!("{}{path}", t.url));
            Reply::of(request.send().await.expect("an answer")).await
        };
        let manifest = get("/ojs/manifest").await.is(200);
        assert_eq!(manifest["specversion"], "1.0");
        assert_eq!(
            (&manifest["implementation"]["name"], &manifest["protocols"][0]),
            (&json!("fencepost"), &json!("http"))
        );
        assert!(manifest["conformance_level"].is_u64());
        assert_eq!(get("/ojs/v1/health").await.is(200)["status"], "ok");
        let keyless = get("/ojs/v1/queues").await;
        refused(&keyless, 401, "unauthorized");
    });
}

#[test]
fn events_report_what_has_happened_to_jobs() {
    run(async |t| {
        let job =
            enqueue(t, json!({"type": "test.echo", "args": [], "options": {"queue": "e"}})).await;
        enqueue(t, json!({"type": "other", "args": []})).await;
        let path = format!("{OJS}/events?types=job.enqueued,job.completed&queues=e&limit=10");
        let events = t.get(&path).await.is(200)["events"].clone();
        assert_eq!(
            (&events[0]["type"], events.as_array().map(Vec::len)),
            (&json!("job.enqueued"), Some(1))
        );
        assert_eq!(events[0]["data"]["job_type"], "test.echo");
        fetch_one(t, "e").await;
        settle(t, "ack", &job, json!({})).await.is(200);
        let events = t.get(&path).await.is(200)["events"].clone();
        assert_eq!(
            (&events[0]["type"], &events[0]["data"]["attempt"]),
            (&json!("job.completed"), &json!(1))
        );
        assert!(events[0]["data"]["duration_ms"].is_i64());
    });
}
