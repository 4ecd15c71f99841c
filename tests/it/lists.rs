//! What clients may ask of any list and of any error: filters, cursors, media types and codings.

use std::{collections::BTreeSet, io::Read};

use flate2::read::GzDecoder;
use reqwest::Method;
use serde_json::{Value, json};

use crate::harness::{Reply, TestProject, run, run_alone};

async fn ids(t: &TestProject, path: &str) -> BTreeSet<String> {
    let page = t.get(path).await.is(200);
    let jobs = page["jobs"].as_array().expect("jobs").clone();
    jobs.iter().map(|it| it["id"].as_str().expect("an id").to_owned()).collect()
}

#[test]
fn jobs_are_listed_by_several_states_however_a_client_writes_them() {
    run(async |t| {
        let pending = t.enqueue(json!({})).await;
        let scheduled = t.enqueue(json!({"delay_seconds": 600})).await;
        let cancelled = t.enqueue(json!({})).await;
        t.act(&format!("/v1/jobs/{cancelled}/cancel")).await.is(200);
        let both = BTreeSet::from([pending.clone(), scheduled.clone()]);
        for query in [
            "states=pending,scheduled",
            "states=pending&states=scheduled",
            "state=pending,scheduled",
            "state=pending&state=scheduled",
            "limit=50&state=scheduled&queue=default&state=pending",
        ] {
            assert_eq!(ids(t, &format!("/v1/jobs?{query}")).await, both, "{query}");
        }
        assert_eq!(ids(t, "/v1/jobs?state=cancelled").await, BTreeSet::from([cancelled]));
        t.get("/v1/jobs?states=pending,waiting").await.refuses("states");
        t.get("/v1/jobs?state=pending&state=x").await.refuses("state");
        t.get("/v1/jobs?state=pending&states=scheduled").await.refuses("states");
        t.get("/v1/jobs?queue=a&queue=b").await.is_error(400, "invalid_request");
    });
}

/// Enqueues jobs into the queue `rare`, and brings them into states. Returns each with its state.
async fn jobs_in_each_state(t: &TestProject) -> Vec<(&'static str, String)> {
    let mut jobs = Vec::new();
    for (state, outcome, attempts) in [
        ("succeeded", Some("succeeded"), 1),
        ("dead_letter", Some("failed"), 1),
        ("pending", Some("failed"), 2),
        ("processing", None, 1),
    ] {
        let id = t.enqueue(json!({"queue": "rare", "max_attempts": attempts})).await;
        let leased = t.post("/v1/workers/poll", json!({"worker_id": "w", "queues": ["rare"]}));
        let leased = leased.await.is(200)["jobs"][0].clone();
        assert_eq!(leased["id"], *id);
        if let Some(outcome) = outcome {
            t.ack(&leased, "w", outcome).await.is(200);
        }
        jobs.push((state, id));
    }
    jobs.push(("scheduled", t.enqueue(json!({"queue": "rare", "delay_seconds": 600})).await));
    let cancelled = t.enqueue(json!({"queue": "rare"})).await;
    t.act(&format!("/v1/jobs/{cancelled}/cancel")).await.is(200);
    jobs.push(("cancelled", cancelled));
    for more in [json!({}), json!({"concurrency_key": "k"})] {
        let mut job = json!({"queue": "rare"});
        job.as_object_mut().expect("an object").extend(more.as_object().expect("one").clone());
        jobs.push(("pending", t.enqueue(job).await));
    }
    jobs
}

#[test]
fn jobs_of_a_queue_in_a_state_are_found_between_any_number_of_others() {
    run_alone(async |t| {
        let jobs = jobs_in_each_state(t).await;
        // Some come before and some after them, in all orders.
        t.database
            .execute(
                "insert into jobs (project_id, id, queue, job_type, state, rank, run_at,
                                   max_attempts, timeout_seconds)
                 select id, (lpad(to_hex(n % 2 * 15), 8, 'f') || '-0000-7000-8000-'
                            || lpad(to_hex(n), 12, '0'))::uuid,
                        'common', 't', 'pending', 0, now(), 3, 600
                 from projects, generate_series(1, 30000) n;
                 insert into finished_jobs (project_id, id, queue, job_type, state, rank, run_at,
                                            created_at, attempt, failures, max_attempts,
                                            timeout_seconds, cancel_requested)
                 select project_id, gen_random_uuid(), 'rare', job_type, 'succeeded', 0, now(), now(), 1, 0, 3, 600, false
                 from jobs where queue = 'common'",
            )
            .await;
        for state in ["scheduled", "pending", "processing", "dead_letter", "cancelled"] {
            let wanted = jobs.iter().filter(|it| it.0 == state).map(|it| it.1.clone()).collect();
            for order in ["newest", "oldest"] {
                let path = format!("/v1/jobs?queue=rare&state={state}&order={order}");
                assert_eq!(ids(t, &path).await, wanted, "{state}, {order}");
                let page = t.get(&path).await.is(200);
                assert_eq!(page["next_cursor"], Value::Null, "{state}, {order}");
            }
        }
        let bulk = json!({"filter": {"queue": "rare", "state": "cancelled"}, "dry_run": true});
        let counted = t.post("/v1/jobs/retry", bulk).await.is(200);
        assert_eq!((&counted["count"], &counted["is_capped"]), (&json!(1), &json!(false)));
    });
}

#[test]
fn a_cursor_belongs_to_its_filters() {
    run(async |t| {
        for queue in ["a", "a", "b", "b"] {
            t.enqueue(json!({"queue": queue})).await;
        }
        let cursor = async |path: &str| {
            let page = t.get(path).await.is(200);
            page["next_cursor"].as_str().expect("a cursor").to_owned()
        };
        let of_a = cursor("/v1/jobs?queue=a&limit=1").await;
        t.get(&format!("/v1/jobs?queue=a&limit=1&cursor={of_a}")).await.is(200);
        for other in
            ["queue=b&", "", "queue=a&state=pending&", "queue=a&order=oldest&", "q=queue:a&"]
        {
            let refused = t.get(&format!("/v1/jobs?{other}limit=1&cursor={of_a}")).await;
            let error = refused.is_error(400, "invalid_request");
            let message = error["message"].as_str().expect("a text");
            assert!(message.contains("same filters"), "{other}: {message}");
        }
        let of_all = cursor("/v1/jobs?limit=1").await;
        t.get(&format!("/v1/jobs?limit=2&cursor={of_all}")).await.is(200);
        t.get(&format!("/v1/jobs?queue=a&cursor={of_all}")).await.refuses("cursor");
        let of_states = cursor("/v1/jobs?states=pending,cancelled&limit=1").await;
        for same in ["states=cancelled,pending,cancelled", "state=cancelled&state=pending"] {
            t.get(&format!("/v1/jobs?{same}&cursor={of_states}")).await.is(200);
        }
        let of_queues = cursor("/v1/queues?limit=1").await;
        t.get(&format!("/v1/queues?cursor={of_queues}")).await.is(200);
        for list in ["workers", "recurring", "jobs"] {
            t.get(&format!("/v1/{list}?cursor={of_queues}")).await.refuses("cursor");
        }
    });
}

#[test]
fn the_history_of_a_job_is_read_in_pages_from_its_end() {
    run(async |t| {
        let id = t.enqueue(json!({"max_attempts": 5, "retry": {"initial_seconds": 0}})).await;
        for _ in 0..3 {
            let job = t.wait_and_lease("w").await;
            t.ack_with(&job, "w", "failed", json!({"error": {"message": "no"}})).await.is(200);
        }
        let whole = t.get(&format!("/v1/jobs/{id}/events")).await.is(200);
        assert_eq!((&whole["has_more"], &whole["next_cursor"]), (&json!(false), &Value::Null));
        let (mut read, mut cursor) = (Vec::new(), String::new());
        loop {
            let page = t.get(&format!("/v1/jobs/{id}/events?limit=2{cursor}")).await.is(200);
            let mut events = page["events"].as_array().expect("events").clone();
            assert!(events.len() <= 2);
            events.append(&mut read);
            read = events;
            match page["next_cursor"].as_str() {
                Some(next) => cursor = format!("&cursor={next}"),
                None => break,
            }
        }
        assert_eq!(json!(read), whole["events"]);
        let other = t.enqueue(json!({})).await;
        t.get(&format!("/v1/jobs/{other}/events?limit=2{cursor}")).await.refuses("cursor");
    });
}

#[test]
fn an_error_is_a_problem_of_rfc_9457_for_those_who_ask() {
    run(async |t| {
        let ask = async |accept: &str| {
            let request = t.request(Method::GET, "/v1/jobs?limit=0").header("accept", accept);
            let answer = request.send().await.expect("an answer");
            let kind = answer.headers()["content-type"].to_str().expect("a text").to_owned();
            (kind, answer.json::<Value>().await.expect("JSON"))
        };
        for other in [
            "application/problem+json;q=0",
            "application/problem+json;q=0.1, application/json",
            "*/*",
        ] {
            assert_eq!(ask(other).await.0, "application/json", "{other}");
        }
        let (kind, usual) = ask("application/json").await;
        assert_eq!(kind, "application/json");
        let (kind, problem) = ask("application/problem+json, application/json;q=0.5").await;
        assert_eq!(kind, "application/problem+json");
        assert_eq!(
            (&problem["status"], &problem["title"]),
            (&json!(400), &json!("invalid request"))
        );
        assert_eq!(problem["type"], usual["error"]["docs_url"]);
        assert_eq!(problem["detail"], usual["error"]["message"]);
        assert_eq!(problem["code"], "invalid_request");
        assert_eq!(problem["details"], usual["error"]["details"]);
        let fine = t.request(Method::GET, "/v1/jobs").header("accept", "application/problem+json");
        Reply::of(fine.send().await.expect("an answer")).await.is(200);
    });
}

#[test]
fn a_large_list_is_compressed_for_those_who_ask_and_is_the_same() {
    run(async |t| {
        let payload = "0123456789".repeat(2_000);
        for _ in 0..10 {
            t.enqueue(json!({"payload": payload})).await;
        }
        let get = async |path: &str, coding: &'static str| {
            let request = t.request(Method::GET, path).header("accept-encoding", coding);
            let answer = request.send().await.expect("an answer");
            let coding = answer.headers().get("content-encoding").cloned();
            (
                coding.map(|it| it.to_str().expect("a text").to_owned()),
                answer.bytes().await.expect("a body"),
            )
        };
        let (coding, plain) = get("/v1/jobs", "identity").await;
        assert_eq!(coding, None);
        let (coding, packed) = get("/v1/jobs", "br, gzip").await;
        assert_eq!(coding.as_deref(), Some("gzip"));
        assert!(packed.len() * 20 < plain.len(), "{} of {}", packed.len(), plain.len());
        let mut unpacked = Vec::new();
        GzDecoder::new(&packed[..]).read_to_end(&mut unpacked).expect("gzip");
        assert_eq!(unpacked, plain);
        let (coding, _) = get("/v1/jobs?limit=1&payloads=false", "gzip").await;
        assert_eq!(coding, None, "small answers are sent as they are");
        let head = async |coding: &'static str| {
            let request = t.request(Method::HEAD, "/v1/jobs").header("accept-encoding", coding);
            let answer = request.send().await.expect("an answer");
            assert_eq!(answer.headers()["vary"], "accept-encoding", "{coding}");
            answer.headers().get("content-length").cloned()
        };
        assert_eq!(head("gzip").await, None, "it is not known");
        let length = head("identity").await.expect("a length");
        assert_eq!(length.to_str().expect("a text"), plain.len().to_string());
    });
}
