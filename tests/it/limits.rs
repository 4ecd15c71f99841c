//! Every bound, at both ends; and what no bound would stop.

use fencepost_domain::limits;

use crate::harness::{TestProject, TestServer, eventually, fresh_database, limited, run};
use serde_json::{Value, json};

fn text(chars: usize) -> String {
    "ä".repeat(chars)
}

async fn enqueue(t: &TestProject, field: &str, value: Value) -> crate::harness::Reply {
    let mut job = json!({"job_type": "t"});
    job[field] = value;
    t.post("/v1/jobs", job).await
}

#[test]
fn names_are_bounded_in_characters() {
    run(async |t| {
        for (field, max) in
            [("job_type", limits::MAX_JOB_TYPE_CHARS), ("queue", limits::MAX_QUEUE_CHARS)]
        {
            enqueue(t, field, json!(text(max))).await.is(201);
            let message = enqueue(t, field, json!(text(max + 1))).await.refuses(field);
            assert!(message.contains(&max.to_string()), "{message}");
            for bad in ["", "a\u{0}b", "a\nb", "\u{7f}"] {
                enqueue(t, field, json!(bad)).await.refuses(field);
            }
        }
    });
}

#[test]
fn numbers_are_bounded_at_both_ends() {
    run(async |t| {
        for (field, min, max) in [
            ("priority", i64::from(limits::MIN_PRIORITY), i64::from(limits::MAX_PRIORITY)),
            ("max_attempts", 1, i64::from(limits::MAX_MAX_ATTEMPTS)),
            ("timeout_seconds", 1, i64::from(limits::MAX_TIMEOUT_SECONDS)),
            ("delay_seconds", 0, limits::MAX_DELAY_SECONDS),
        ] {
            for good in [min, max] {
                enqueue(t, field, json!(good)).await.is(201);
            }
            for bad in [
                json!(min - 1),
                json!(max + 1),
                json!(i64::MAX),
                json!(1e99),
                json!("1"),
                json!(1.5),
            ] {
                let is_number = bad.is_number();
                let kind = if bad.is_i64() { "must be" } else { "must be an integer" };
                let message = enqueue(t, field, bad).await.refuses(field);
                let bounds = format!("{kind} between {min} and {max}, is ");
                assert!(!is_number || message.starts_with(&bounds), "{field}: {message}");
            }
        }
        let ack = json!({"job_id": "job_01m7w3ha3aextt8pkwwdmxsmqw", "worker_id": "w",
            "status": "failed", "attempt": 1, "retry_after_seconds": -1});
        let bounds = format!("must be between 0 and {}, is -1", limits::MAX_RETRY_SECONDS);
        let alone = t.post("/v1/workers/ack", ack.clone()).await;
        assert_eq!(alone.refuses("retry_after_seconds"), bounds);
        let of_batch = t.post("/v1/workers/ack/batch", json!({"acks": [ack]})).await.is(200);
        let details = &of_batch["results"][0]["error"]["details"][0];
        assert_eq!(details["message"], bounds, "{of_batch}");
    });
}

#[test]
fn a_retry_policy_is_bounded() {
    run(async |t| {
        for (field, min, max) in [
            ("initial_seconds", 0, limits::MAX_RETRY_SECONDS),
            ("max_seconds", 0, limits::MAX_RETRY_SECONDS),
            ("jitter_seconds", 0, limits::MAX_RETRY_SECONDS),
            ("multiplier", 1, limits::MAX_RETRY_MULTIPLIER as i64),
        ] {
            for good in [min, max] {
                enqueue(t, "retry", json!({field: good})).await.is(201);
            }
            for bad in [min - 1, max + 1] {
                enqueue(t, "retry", json!({field: bad})).await.refuses(&format!("retry.{field}"));
            }
        }
        let max = limits::MAX_NON_RETRYABLE_TYPES;
        let types = |count| json!({"non_retryable_types": vec!["t"; count]});
        enqueue(t, "retry", types(max)).await.is(201);
        enqueue(t, "retry", types(max + 1)).await.refuses("retry.non_retryable_types");
        enqueue(t, "retry", json!({"non_retryable_types": [""]}))
            .await
            .refuses("retry.non_retryable_types[0]");
        enqueue(t, "retry", json!({"strategy": "magic"})).await.refuses("retry.strategy");
    });
}

#[test]
fn tags_are_bounded() {
    run(async |t| {
        let tags = |count: usize| -> Value {
            (0..count)
                .map(|it| (format!("k{it}"), json!("v")))
                .collect::<serde_json::Map<_, _>>()
                .into()
        };
        enqueue(t, "tags", tags(limits::MAX_TAGS)).await.is(201);
        enqueue(t, "tags", tags(limits::MAX_TAGS + 1)).await.refuses("tags");
        enqueue(t, "tags", json!({text(limits::MAX_TAG_KEY_CHARS): "v"})).await.is(201);
        enqueue(t, "tags", json!({text(limits::MAX_TAG_KEY_CHARS + 1): "v"})).await.refuses("tags");
        enqueue(t, "tags", json!({"k": text(limits::MAX_TAG_VALUE_CHARS)})).await.is(201);
        enqueue(t, "tags", json!({"k": text(limits::MAX_TAG_VALUE_CHARS + 1)}))
            .await
            .refuses("tags.k");
        enqueue(t, "tags", json!({"k": "a\u{0}"})).await.refuses("tags.k");
        enqueue(t, "tags", json!({"k": 1})).await.refuses("tags.k");
    });
}

#[test]
fn payloads_and_results_are_bounded_in_bytes_and_depth() {
    run(async |t| {
        let string = |bytes: usize| json!("x".repeat(bytes - 2));
        enqueue(t, "payload", string(limits::MAX_PAYLOAD_BYTES)).await.is(201);
        let error = enqueue(t, "payload", string(limits::MAX_PAYLOAD_BYTES + 1)).await;
        let error = error.is_error(413, "payload_too_large");
        assert_eq!(error["details"][0]["field"], "payload");
        assert!(error["details"][0]["message"].as_str().expect("text").contains("262144"));

        let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        let job = |payload: String| {
            format!(r#"{{"job_type":"deep","queue":"deep","payload":{payload}}}"#)
        };
        t.post_text("/v1/jobs", job(nested(limits::MAX_JSON_DEPTH))).await.is_created();
        t.post_text("/v1/jobs", job(nested(limits::MAX_JSON_DEPTH + 1))).await.refuses("payload");
        t.post_text("/v1/jobs", job(nested(100_000))).await.refuses("payload");

        let job = t.lease("w").await;
        let ack = async |result: Value| {
            t.ack_with(&job, "w", "succeeded", json!({"result": result})).await
        };
        let error = ack(string(limits::MAX_RESULT_BYTES + 1)).await;
        assert_eq!(error.is_error(413, "payload_too_large")["details"][0]["field"], "result");
        ack(string(limits::MAX_RESULT_BYTES)).await.is(200);
    });
}

#[test]
fn a_body_is_bounded_and_must_be_readable() {
    run(async |t| {
        let large = |bytes: usize| format!(r#"{{"job_type":"{}"}}"#, "x".repeat(bytes));
        t.post_text("/v1/jobs", large(limits::MAX_BODY_BYTES))
            .await
            .is_error(413, "payload_too_large");
        t.post_text("/v1/jobs/batch", large(limits::MAX_BATCH_BODY_BYTES))
            .await
            .is_error(413, "payload_too_large");
        for unreadable in
            ["", "{", "nope", "[1", "{\"job_type\":\"t\"} x", "\u{0}", "{\"job_type\":\"\u{1}\"}"]
        {
            t.post_text("/v1/jobs", unreadable).await.is_error(400, "invalid_request");
        }
        t.post_text("/v1/jobs", b"{\"job_type\":\"\xff\"}".to_vec())
            .await
            .is_error(400, "invalid_request");
        t.post_text("/v1/jobs", "[]").await.is_error(400, "invalid_request");
        t.post_text("/v1/jobs", "\"x\"").await.is_error(400, "invalid_request");
        // An array of a shape's fields is not that shape.
        for (path, body, field) in [
            ("/v1/jobs", r#"["t",null,null,null,null,null,null,null,null,null]"#, "body"),
            ("/v1/jobs", r#"{"job_type":"t","retry":["constant",1,1,1,1,[]]}"#, "retry"),
            (
                "/v1/jobs/batch",
                r#"{"jobs":[["t",null,null,null,null,null,null,null,null,null]]}"#,
                "jobs[0]",
            ),
            ("/v1/workers/poll", r#"["w",["q"],null,null,0,null,null]"#, "body"),
        ] {
            let message = t.post_text(path, body).await.refuses(field);
            assert!(message.starts_with("must be an object"), "{message}");
        }
        t.post_text("/v1/jobs", "{}").await.refuses("job_type");
        t.post_text("/v1/jobs", r#"{"job_type":"a","job_type":"b"}"#).await.refuses("job_type");
        let form = t.request(reqwest::Method::POST, "/v1/jobs").body("job_type=t").send().await;
        crate::harness::Reply::of(form.expect("an answer"))
            .await
            .is_error(415, "unsupported_media_type");
    });
}

#[test]
fn batches_are_bounded() {
    run(async |t| {
        let jobs = |count| json!({"jobs": vec![json!({"job_type": "t"}); count]});
        t.post("/v1/jobs/batch", jobs(limits::MAX_ENQUEUE_BATCH_JOBS)).await.is(201);
        t.post("/v1/jobs/batch", jobs(limits::MAX_ENQUEUE_BATCH_JOBS + 1)).await.refuses("jobs");
        t.post("/v1/jobs/batch", jobs(0)).await.refuses("jobs");
        let ack = json!({"job_id": "job_x", "worker_id": "w", "status": "succeeded"});
        let acks = |count| json!({"acks": vec![ack.clone(); count]});
        let reply = t.post("/v1/workers/ack/batch", acks(limits::MAX_ACK_BATCH)).await.is(200);
        assert_eq!(reply["results"][499]["error"]["code"], "job_not_found");
        t.post("/v1/workers/ack/batch", acks(limits::MAX_ACK_BATCH + 1)).await.refuses("acks");
    });
}

#[test]
fn a_poll_is_bounded() {
    run(async |t| {
        let poll = async |field: &str, value: Value| {
            let mut poll = json!({"worker_id": "w", "queues": ["q"], "wait_seconds": 0});
            poll[field] = value;
            t.post("/v1/workers/poll", poll).await
        };
        for (field, min, max) in [
            ("capacity", 1, i64::from(limits::MAX_POLL_CAPACITY)),
            ("lease_seconds", 1, i64::from(limits::MAX_LEASE_SECONDS)),
        ] {
            for good in [min, max] {
                poll(field, json!(good)).await.is(200);
            }
            for bad in [min - 1, max + 1] {
                poll(field, json!(bad)).await.refuses(field);
            }
        }
        poll("wait_seconds", json!(limits::MAX_POLL_WAIT_SECONDS + 1))
            .await
            .refuses("wait_seconds");
        poll("wait_seconds", json!(-1)).await.refuses("wait_seconds");
        let names =
            |count: usize| -> Value { (0..count).map(|it| json!(format!("n{it}"))).collect() };
        poll("queues", names(limits::MAX_POLL_QUEUES)).await.is(200);
        poll("queues", names(limits::MAX_POLL_QUEUES + 1)).await.refuses("queues");
        poll("queues", names(0)).await.refuses("queues");
        poll("queues", json!(["a", ""])).await.refuses("queues[1]");
        poll("job_types", names(limits::MAX_POLL_JOB_TYPES)).await.is(200);
        poll("job_types", names(limits::MAX_POLL_JOB_TYPES + 1)).await.refuses("job_types");
        poll("job_types", names(0)).await.is(200);
        poll("worker_id", json!(text(limits::MAX_WORKER_ID_CHARS))).await.is(200);
        poll("worker_id", json!(text(limits::MAX_WORKER_ID_CHARS + 1))).await.refuses("worker_id");
        poll("worker_id", json!("a\u{0}")).await.refuses("worker_id");
    });
}

#[test]
fn a_registration_is_bounded() {
    run(async |t| {
        let register = async |field: &str, value: Value| {
            let mut worker = json!({"worker_id": "w", "queues": [], "job_types": []});
            worker[field] = value;
            t.post("/v1/workers/register", worker).await
        };
        let max = limits::MAX_REGISTERED_NAMES;
        for field in ["queues", "job_types"] {
            register(field, json!(vec!["n"; max])).await.is(200);
            register(field, json!(vec!["n"; max + 1])).await.refuses(field);
        }
        for field in ["hostname", "sdk_version"] {
            register(field, json!(text(limits::MAX_WORKER_INFO_CHARS))).await.is(200);
            register(field, json!(text(limits::MAX_WORKER_INFO_CHARS + 1))).await.refuses(field);
        }
        register("concurrency", json!(limits::MAX_WORKER_CONCURRENCY)).await.is(200);
        register("concurrency", json!(limits::MAX_WORKER_CONCURRENCY + 1))
            .await
            .refuses("concurrency");
        register("concurrency", json!(0)).await.refuses("concurrency");
        register("pid", json!(-1)).await.refuses("pid");
    });
}

#[test]
fn an_ack_is_bounded() {
    run(async |t| {
        t.enqueue(json!({})).await;
        let job = t.lease("w").await;
        let ack = async |more: Value| t.ack_with(&job, "w", "failed", more).await;
        let max = limits::MAX_RETRY_SECONDS;
        ack(json!({"retry_after_seconds": max + 1})).await.refuses("retry_after_seconds");
        ack(json!({"retry_after_seconds": -1})).await.refuses("retry_after_seconds");
        ack(json!({"duration_ms": limits::MAX_DURATION_MS + 1})).await.refuses("duration_ms");
        ack(json!({"retry_after_seconds": max, "duration_ms": limits::MAX_DURATION_MS}))
            .await
            .is(200);
    });
}

#[test]
fn a_failure_is_never_refused_for_the_way_its_error_looks() {
    run(async |t| {
        let id = t.enqueue(json!({})).await;
        let job = t.lease("w").await;
        let trace = format!("\u{1b}[31m{}", "é".repeat(limits::MAX_ERROR_BYTES));
        let error = json!({"type": "E\u{0}", "message": "a\u{0}b\tc\n", "stack_trace": trace});
        t.ack_with(&job, "w", "failed", json!({"error": error})).await.is(200);
        let kept = t.job(&id).await["last_error"].clone();
        assert_eq!(
            (&kept["type"], &kept["message"]),
            (&json!("E\u{fffd}"), &json!("a\u{fffd}b\tc\n"))
        );
        assert_eq!(kept["truncated"], true);
        let bytes: usize = ["type", "message", "stack_trace"]
            .iter()
            .map(|it| kept[it].as_str().expect("text").len())
            .sum();
        assert!(
            (limits::MAX_ERROR_BYTES - 3..=limits::MAX_ERROR_BYTES).contains(&bytes),
            "{bytes}"
        );
    });
}

#[test]
fn a_plan_bounds_the_queues_of_a_project() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project_with("main", "free", json!({"queues": 2})).await;
        let job = |queue: &str| json!({"job_type": "t", "queue": queue});
        let id = t.enqueue(job("q0")).await;
        // The number may be a second old.
        let mut names = 0;
        let refused = eventually("the limit of queues", async || {
            names += 1;
            let reply = t.post("/v1/jobs", job(&format!("q{names}"))).await;
            (reply.status != 201).then_some(reply)
        })
        .await;
        let error = refused.is_error(429, "quota_exceeded");
        assert_eq!(error["message"], "at most 2 queues are allowed");
        t.post("/v1/jobs", job("q0")).await.is(201);
        let path = format!("/v1/jobs/{id}");
        let moved = t.patch(&path, json!({"queue": "elsewhere"})).await;
        moved.is_error(429, "quota_exceeded");
        t.patch(&path, json!({"queue": "q1"})).await.is(200);
        server.stop().await;
    });
}

#[test]
fn callbacks_count_against_the_budget_of_who_names_them() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project_with("main", "unlimited", json!({"produce_per_minute": 20})).await;
        let follow = |then: Value| json!({"job_type": "after", "on_complete": then});
        let job = json!({
            "job_type": "t", "on_success": {"job_type": "a"}, "on_failure": {"job_type": "b"},
            "on_complete": follow(follow(Value::Null)),
        });
        let left = |reply: &crate::harness::Reply| {
            reply.headers["x-ratelimit-remaining"].to_str().expect("text").to_owned()
        };
        let one = t.post("/v1/jobs", job.clone()).await;
        one.is(201);
        assert_eq!(left(&one), "15", "the job, and four callbacks");
        let many = t.post("/v1/jobs/batch", json!({"jobs": [job.clone(), job.clone()]})).await;
        many.is(201);
        assert_eq!(left(&many), "5");
        let too_many = json!({"jobs": vec![job.clone(); 5]});
        let refused = t.post("/v1/jobs/batch", too_many).await;
        refused.refuses("jobs");
        let refused = t.post("/v1/jobs", job).await;
        refused.is_error(429, "rate_limit_exceeded");
        assert_eq!(left(&refused), "3", "each refused request costs 1");
        let batch = json!({
            "on_success": {"job_type": "a"}, "on_failure": {"job_type": "b"},
            "on_complete": {"job_type": "b"},
        });
        t.post("/v1/batches", batch).await.is_error(429, "rate_limit_exceeded");
        assert_eq!(t.get("/v1/batches").await.is(200)["batches"], json!([]));
        server.stop().await;
    });
}
