//! Enqueue, read, list.

use crate::{
    console::Browser,
    harness::{TestServer, fresh_database, limited, run, run_alone},
    people::Person,
};
use chrono::{DateTime, Utc};
use fencepost_domain::{access::Role, limits};
use reqwest::Method;
use serde_json::{Value, json};

#[test]
fn what_a_session_creates_has_a_location_that_it_can_read() {
    run_alone(async |t| {
        let ada = Person::sign_up(t, "ada@example.com").await;
        let slug = ada.made["project"]["slug"].as_str().expect("a slug").to_owned();
        let below = format!("/v1/projects/{slug}");
        let workflow = json!({"jobs": [{"key": "a", "job_type": "t"}]});
        for (path, body) in [
            ("/jobs", json!({"job_type": "t"})),
            ("/batches", json!({})),
            ("/workflows", workflow),
            ("/recurring", json!({"job_type": "t", "cron_expression": "@daily"})),
            ("/jobs/cancel", json!({"filter": {}})),
            ("/queues/default/purge", json!({"confirm": "default"})),
        ] {
            let path = format!("{below}{path}");
            let reply = ada.send(Method::POST, &path, Some(body)).await;
            assert!([201, 202].contains(&reply.status.as_u16()), "{path}: {}", reply.text);
            let location = reply.headers["location"].to_str().expect("text").to_owned();
            assert!(location.starts_with(&below), "{location}");
            ada.send(Method::GET, &location, None).await.is(200);
        }
    });
}

#[test]
fn a_job_is_stored_with_its_defaults_and_its_location() {
    run(async |t| {
        let reply = t.post("/v1/jobs", json!({"job_type": "mail"})).await;
        let job = reply.is(201);
        let path = reply.headers["location"].to_str().expect("text").to_owned();
        assert_eq!(path, format!("/v1/jobs/{}", job["id"].as_str().expect("an id")));
        assert_eq!(job["state"], "pending");
        assert_eq!(job["waiting_for"], "worker");
        assert_eq!(job["queue"], "default");
        assert_eq!((&job["attempt"], &job["failures"]), (&json!(0), &json!(0)));
        assert_eq!((&job["max_attempts"], &job["timeout_seconds"]), (&json!(3), &json!(1800)));
        assert_eq!(job["payload"], Value::Null);
        assert_eq!(
            job["retry"],
            json!({
                "strategy": "exponential", "initial_seconds": 15, "multiplier": 2.0,
                "max_seconds": 21600, "jitter": "additive", "jitter_seconds": 3, "non_retryable_types": [],
            })
        );
        let mut read = t.get(&path).await.is(200);
        assert_eq!(read.as_object_mut().expect("an object").remove("attempts"), Some(json!([])));
        assert_eq!(read, job);
    });
}

#[test]
fn a_payload_comes_back_byte_for_byte() {
    run(async |t| {
        for payload in [
            r#"{"b":1,"a":2,"a":3, "n": 12345678901234567890123, "f": 1.0e+2}"#,
            r#"["\u0000","\ud800", "é"]"#,
            "  \"spaces around are not part of it\"  ",
            "null",
            "false",
        ] {
            let body = format!(r#"{{"job_type":"test","payload":{payload}}}"#);
            let enqueued = t.post_text("/v1/jobs", body).await;
            enqueued.is_created();
            let expected = format!(r#""payload":{},"#, payload.trim());
            assert!(enqueued.text.contains(&expected), "{}", enqueued.text);
            let poll = json!({"worker_id": "w", "queues": ["default"]});
            let polled = t.post("/v1/workers/poll", poll).await;
            assert!(polled.text.contains(&expected), "{}", polled.text);
        }
    });
}

#[test]
fn a_result_comes_back_byte_for_byte() {
    run(async |t| {
        let id = t.enqueue(json!({})).await;
        t.lease("w").await;
        let body = format!(
            r#"{{"job_id":"{id}","worker_id":"w","status":"succeeded","result":{{"b": 1,"a":[ ]}}}}"#
        );
        t.post_text("/v1/workers/ack", body).await.is(200);
        let read = t.get(&format!("/v1/jobs/{id}")).await;
        assert!(read.text.contains(r#""result":{"b": 1,"a":[ ]}"#), "{}", read.text);
    });
}

#[test]
fn every_setting_of_a_job_is_kept() {
    run(async |t| {
        let retry = json!({
            "strategy": "polynomial", "initial_seconds": 1, "multiplier": 3.5, "max_seconds": 9,
            "jitter": "additive", "jitter_seconds": 0, "non_retryable_types": ["a.*"],
        });
        let sent = json!({
            "job_type": "a.b", "queue": "q", "priority": -7, "max_attempts": 9,
            "timeout_seconds": 77, "retry": retry, "tags": {"k": "v", "": ""},
        });
        t.post("/v1/jobs", sent.clone()).await.refuses("tags");
        let mut sent = sent;
        sent["tags"] = json!({"k": "v", "empty": ""});
        let id = t.enqueue(sent.clone()).await;
        let job = t.job(&id).await;
        for (field, value) in sent.as_object().expect("an object") {
            assert_eq!(&job[field], value, "{field}");
        }
    });
}

#[test]
fn a_job_for_later_is_scheduled() {
    run(async |t| {
        let later =
            t.post("/v1/jobs", json!({"job_type": "t", "delay_seconds": 3600})).await.is(201);
        assert_eq!(
            (&later["state"], &later["waiting_for"]),
            (&json!("scheduled"), &json!("run_at"))
        );
        let past = json!({"job_type": "t", "run_at": "2020-01-01T00:00:00Z"});
        assert_eq!(t.post("/v1/jobs", past).await.is(201)["state"], "pending");
        let both = json!({"job_type": "t", "run_at": "2020-01-01T00:00:00Z", "delay_seconds": 1});
        t.post("/v1/jobs", both).await.refuses("delay_seconds");
        let too_far = json!({"job_type": "t", "run_at": "2999-01-01T00:00:00+02:00"});
        assert!(t.post("/v1/jobs", too_far).await.refuses("run_at").contains("100 years"));
        // Beyond 32 bits of seconds and milliseconds since 1970, and since 2000.
        for far in ["2038-01-19T03:14:08Z", "2046-01-01T00:00:00Z", "2099-12-31T23:59:59.999Z"] {
            let job = t.post("/v1/jobs", json!({"job_type": "t", "run_at": far})).await.is(201);
            let stored = job["run_at"].as_str().expect("a time");
            assert_eq!(stored.parse::<DateTime<Utc>>(), far.parse(), "{far}");
            let id = job["id"].as_str().expect("an id");
            let earlier = json!({"delay_seconds": 600_000_000});
            t.patch(&format!("/v1/jobs/{id}"), earlier).await.is(200);
        }
        for unreadable in ["0001-01-01T00:00:00Z", "+262000-01-01T00:00:00Z", "tomorrow"] {
            let job = json!({"job_type": "t", "run_at": unreadable});
            t.post("/v1/jobs", job).await.refuses("run_at");
        }
    });
}

#[test]
fn a_bulk_enqueue_is_stored_whole_and_in_order() {
    run_alone(async |t| {
        let jobs: Vec<_> = (0..500).map(|it| json!({"job_type": format!("t{it}")})).collect();
        let stored = t.post("/v1/jobs/batch", json!({"jobs": jobs})).await.is(201);
        let stored = stored["jobs"].as_array().expect("jobs");
        let expected = (0..500).map(|it| json!(format!("t{it}")));
        assert!(stored.iter().map(|it| it["job_type"].clone()).eq(expected));
        assert_eq!(t.database.number("select count(*) from jobs").await, 500);
    });
}

#[test]
fn a_batch_with_one_bad_job_stores_nothing_and_names_it() {
    run_alone(async |t| {
        let post = async |bad: Value| {
            let jobs = json!([{"job_type": "a"}, bad, {"job_type": "c"}]);
            t.post("/v1/jobs/batch", json!({"jobs": jobs})).await
        };
        post(json!({"job_type": "b", "priority": 101})).await.refuses("jobs[1].priority");
        post(json!({"job_type": "b", "oops": 1})).await.refuses("jobs[1].oops");
        post(json!({"job_type": "b", "run_at": "2999-01-01T00:00:00Z"}))
            .await
            .refuses("jobs[1].run_at");
        let large = "x".repeat(256 * 1024);
        let error = post(json!({"job_type": "b", "payload": large})).await;
        assert_eq!(
            error.is_error(413, "payload_too_large")["details"][0]["field"],
            "jobs[1].payload"
        );
        assert_eq!(t.database.number("select count(*) from jobs").await, 0);
        assert_eq!(t.database.number("select count(*) from job_bodies").await, 0);
    });
}

#[test]
fn a_list_is_walked_from_the_newest_to_the_oldest() {
    run(async |t| {
        let mut ids = Vec::new();
        for number in 0..25 {
            ids.push(t.enqueue(json!({"payload": number})).await);
        }
        let done = t.lease("w").await;
        t.ack(&done, "w", "succeeded").await.is(200);
        ids.reverse();
        let (mut seen, mut cursor) = (Vec::new(), String::new());
        loop {
            let page = t.get(&format!("/v1/jobs?limit=10{cursor}")).await.is(200);
            let jobs = page["jobs"].as_array().expect("jobs");
            seen.extend(jobs.iter().map(|it| it["id"].as_str().expect("an id").to_owned()));
            if page["has_more"] == false {
                assert_eq!(page["next_cursor"], Value::Null);
                break;
            }
            cursor = format!("&cursor={}", page["next_cursor"].as_str().expect("a cursor"));
        }
        assert_eq!(seen, ids);
    });
}

#[test]
fn a_list_obeys_its_filters() {
    run(async |t| {
        let mail = t.enqueue(json!({"job_type": "mail", "queue": "a"})).await;
        let later = t.enqueue(json!({"job_type": "mail", "queue": "b", "delay_seconds": 9})).await;
        let done = t.enqueue(json!({"job_type": "report"})).await;
        let leased = t.lease("w").await;
        t.ack(&leased, "w", "succeeded").await.is(200);
        let failed = t.enqueue(json!({"job_type": "report"})).await;
        let leased = t.lease("w").await;
        let error = json!({"error": {"message": "kaboom"}});
        t.ack_with(&leased, "w", "failed", error).await.is(200);
        let newest = t.get("/v1/jobs?limit=1").await.is(200)["jobs"][0].clone();
        assert_eq!(newest["last_error"]["message"], "kaboom");
        let list = async |query: &str| -> Vec<String> {
            let page = t.get(&format!("/v1/jobs?{query}")).await.is(200);
            let jobs = page["jobs"].as_array().expect("jobs").clone();
            jobs.iter().map(|it| it["id"].as_str().expect("an id").to_owned()).collect()
        };
        let [mail, later, done, failed] = [&mail, &later, &done, &failed].map(String::as_str);
        assert_eq!(list("").await, [failed, done, later, mail]);
        assert_eq!(list("state=scheduled").await, [later]);
        assert_eq!(list("state=succeeded").await, [done]);
        assert_eq!(list("state=pending").await, [failed, mail], "a backoff is shown as pending");
        assert_eq!(list("job_type=mail&queue=a").await, [mail]);
        assert_eq!(list("job_type=none").await, Vec::<String>::new());
        let created = t.job(later).await["created_at"].as_str().expect("a time").to_owned();
        assert_eq!(list(&format!("created_before={created}")).await, [mail]);
        assert_eq!(list(&format!("created_after={created}")).await, [failed, done, later]);
    });
}

#[test]
fn a_filtered_page_looks_at_a_bounded_number_of_jobs_and_says_that_there_may_be_more() {
    run_alone(async |t| {
        let oldest = t.enqueue(json!({"job_type": "rare"})).await;
        t.database
            .execute(
                "insert into jobs (project_id, id, queue, job_type, state, rank, run_at,
                                   max_attempts, timeout_seconds)
                 select project_id, ('ffffffff-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid,
                        queue, 'common', state, rank, run_at, max_attempts, timeout_seconds
                 from jobs, generate_series(1, 10500) n;
                 insert into job_bodies (project_id, job_id, payload)
                 select project_id, id, '1' from jobs where job_type = 'common'",
            )
            .await;
        let first = t.get("/v1/jobs?job_type=rare").await.is(200);
        assert_eq!((&first["jobs"], &first["has_more"]), (&json!([]), &json!(true)));
        assert!(first["scanned_until"].is_string());
        let cursor = first["next_cursor"].as_str().expect("a cursor");
        let second = t.get(&format!("/v1/jobs?job_type=rare&cursor={cursor}")).await.is(200);
        assert_eq!(second["jobs"][0]["id"], oldest);
        assert_eq!(second["scanned_until"], Value::Null);
        assert_eq!(second["has_more"], false);
        // The console searches further by itself.
        let mut browser = Browser::of_member(t, "ada@example.com", Role::Viewer).await;
        let page = browser.get(&format!("/console/p/{}/jobs?job_type=rare", t.id)).await;
        page.says(200, &oldest);
    });
}

#[test]
fn what_is_ready_is_found_however_much_has_finished_since() {
    run_alone(async |t| {
        let mut ready = Vec::new();
        for _ in 0..3 {
            ready.insert(0, t.enqueue(json!({"queue": "invoices"})).await);
        }
        t.database
            .execute(
                "insert into finished_jobs (
                     project_id, id, queue, job_type, state, rank, run_at, created_at, attempt,
                     failures, max_attempts, timeout_seconds, cancel_requested
                 )
                 select id, ('ffffffff-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid,
                        'other', 'common', 'succeeded', 0, now(), now(), 1, 0, 3, 60, false
                 from projects, generate_series(1, 30000) n
                 where slug = 'main'",
            )
            .await;
        let page = t.get("/v1/jobs?queue=invoices&state=pending").await.is(200);
        let found: Vec<_> = page["jobs"].as_array().expect("jobs").iter().collect();
        assert_eq!(
            found.iter().map(|it| &it["id"]).collect::<Vec<_>>(),
            [&ready[0], &ready[1], &ready[2]]
        );
        assert_eq!(page["has_more"], false);
    });
}

#[test]
fn a_cursor_cannot_be_made_up_or_taken_from_another_project() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let (ours, theirs) = (server.project("ours").await, server.project("theirs").await);
        for _ in 0..2 {
            ours.enqueue(json!({})).await;
        }
        let page = ours.get("/v1/jobs?limit=1").await.is(200);
        let cursor = page["next_cursor"].as_str().expect("a cursor").to_owned();
        let path = format!("/v1/jobs?cursor={cursor}");
        ours.get(&path).await.is(200);
        theirs.get(&path).await.refuses("cursor");
        let forged = format!("/v1/jobs?cursor=AAAA{}", &cursor[4..]);
        ours.get(&forged).await.refuses("cursor");
        for junk in ["x", "", "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA", "%00"] {
            ours.get(&format!("/v1/jobs?cursor={junk}")).await.refuses("cursor");
        }
        server.stop().await;
    });
}

#[test]
fn lists_omit_payloads_on_request() {
    run(async |t| {
        let done = t.enqueue(json!({"payload": {"n": 1}})).await;
        let leased = t.lease("w").await;
        t.ack_with(&leased, "w", "succeeded", json!({"result": {"n": 2}})).await.is(200);
        let dead = t.enqueue(json!({"payload": {"n": 3}, "max_attempts": 1})).await;
        let leased = t.lease("w").await;
        t.ack(&leased, "w", "failed").await.is(200);
        let seen = async |query: &str| {
            let jobs = t.get(&format!("/v1/jobs{query}")).await.is(200)["jobs"].clone();
            let letters = t.get(&format!("/v1/dead-letters{query}")).await.is(200);
            let ids = [&jobs[0]["id"], &jobs[1]["id"], &letters["dead_letters"][0]["job"]["id"]];
            assert_eq!(ids, [dead.as_str(), done.as_str(), dead.as_str()]);
            let carried = |job: &serde_json::Value| [job["payload"].clone(), job["result"].clone()];
            let letter = &letters["dead_letters"][0]["job"];
            [carried(&jobs[0]), carried(&jobs[1]), carried(letter)].concat()
        };
        let (one, two, three) = (json!({"n": 1}), json!({"n": 2}), json!({"n": 3}));
        let null = json!(null);
        let all = [three.clone(), null.clone(), one, two, three, null.clone()];
        assert_eq!(seen("").await, all);
        assert_eq!(seen("?payloads=true").await, all);
        assert_eq!(seen("?payloads=false").await, [const { serde_json::Value::Null }; 6]);
        t.get("/v1/jobs?payloads=no").await.refuses("payloads");
        assert_eq!(t.get(&format!("/v1/jobs/{done}")).await.is(200)["payload"], json!({"n": 1}));
    });
}

#[test]
fn a_page_ends_where_its_payloads_are_large() {
    run(async |t| {
        let text = "x".repeat(limits::MAX_PAYLOAD_BYTES - 100);
        let fitting = limits::MAX_PAGE_BYTES / limits::MAX_PAYLOAD_BYTES;
        let all = fitting + 3;
        for _ in 0..all {
            t.enqueue(json!({"payload": text, "max_attempts": 1})).await;
        }
        let page = t.get("/v1/jobs?limit=200").await.is(200);
        assert_eq!(page["jobs"].as_array().map(Vec::len), Some(fitting));
        assert_eq!(page["has_more"], true);
        let cursor = page["next_cursor"].as_str().expect("a cursor");
        let rest = t.get(&format!("/v1/jobs?limit=200&cursor={cursor}")).await.is(200);
        assert_eq!(rest["jobs"].as_array().map(Vec::len), Some(3));
        assert_eq!(rest["has_more"], false);
        let bare = t.get("/v1/jobs?limit=200&payloads=false").await.is(200);
        assert_eq!(bare["jobs"].as_array().map(Vec::len), Some(all));
        for _ in 0..all {
            let leased = t.lease("w").await;
            t.ack(&leased, "w", "failed").await.is(200);
        }
        let page = t.get("/v1/dead-letters?limit=200").await.is(200);
        assert_eq!(page["dead_letters"].as_array().map(Vec::len), Some(fitting));
        let cursor = page["next_cursor"].as_str().expect("a cursor");
        let rest = t.get(&format!("/v1/dead-letters?limit=200&cursor={cursor}")).await.is(200);
        assert_eq!(rest["dead_letters"].as_array().map(Vec::len), Some(3));
    });
}

#[test]
fn a_list_refuses_what_it_does_not_know() {
    run(async |t| {
        t.get("/v1/jobs?stat=pending").await.refuses("stat");
        t.get("/v1/jobs?state=waiting").await.refuses("state");
        t.get("/v1/jobs?created_after=now").await.refuses("created_after");
        t.get("/v1/jobs?queue=%00").await.refuses("queue");
        t.get(&format!("/v1/jobs/{}/logs?attempt=0", t.enqueue(json!({})).await))
            .await
            .refuses("attempt");
        let doubled = r#"{"job_type": "t", "tags": {"k": "1", "a": "2", "k": "3"}}"#;
        t.post_text("/v1/jobs", doubled).await.refuses("tags");
        t.get("/v1/jobs?limit=0").await.refuses("limit");
        t.get("/v1/jobs?limit=201").await.refuses("limit");
        t.get("/v1/jobs?limit=200").await.is(200);
    });
}

#[test]
fn a_job_that_is_not_there_is_not_found_however_it_is_named() {
    run(async |t| {
        for id in [
            "job_01m7w3ha3aextt8pkwwdmxsmqw",
            "job_x",
            "x",
            "key_01m7w3ha3aextt8pkwwdmxsmqw",
            "%00",
        ] {
            t.get(&format!("/v1/jobs/{id}")).await.is_error(404, "job_not_found");
        }
    });
}
