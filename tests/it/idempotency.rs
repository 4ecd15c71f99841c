//! What happens once: requests with an idempotency key, jobs with a unique key.

use crate::harness::{Reply, TestProject, TestServer, fresh_database, limited, run, run_alone};
use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};
use sqlx::Executor;

async fn send(request: RequestBuilder) -> Reply {
    Reply::of(request.send().await.expect("an answer")).await
}

async fn post_once(t: &TestProject, path: &str, key: &str, body: &Value) -> Reply {
    send(t.request(Method::POST, path).header("Idempotency-Key", key).json(body)).await
}

#[test]
fn a_repeated_request_is_answered_as_the_first_time_and_stores_nothing_more() {
    run_alone(async |t| {
        let job = json!({"job_type": "t", "payload": [1, 2]});
        let batch = json!({"jobs": [job, job]});
        let workflow = json!({"jobs": [{"key": "a", "job_type": "t"}]});
        let requests = [("/v1/jobs", job), ("/v1/jobs/batch", batch), ("/v1/workflows", workflow)];
        for (number, (path, body)) in requests.iter().enumerate() {
            let key = format!("key-{number}");
            let first = post_once(t, path, &key, body).await;
            first.is(201);
            assert!(first.headers.get("idempotent-replay").is_none());
            for quoted in [key.clone(), format!("\"{key}\"")] {
                let again = post_once(t, path, &quoted, body).await;
                again.is(201);
                assert_eq!(again.text, first.text, "{path}");
                assert_eq!(again.headers["idempotent-replay"], "true");
                assert_eq!(again.headers.get("location"), first.headers.get("location"));
            }
            let other = json!({"job_type": "other"});
            let reused = post_once(t, "/v1/jobs", &key, &other).await;
            reused.is_error(409, "idempotency_key_reuse");
        }
        assert_eq!(t.database.number("select count(*) from jobs").await, 4);
    });
}

#[test]
fn the_key_may_come_in_the_body_and_lives_for_a_day_in_its_project() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let (t, other) = (server.project("ours").await, server.project("theirs").await);
        let body = json!({"job_type": "t", "idempotency_key": "k"});
        let first = t.post("/v1/jobs", body.clone()).await.is(201);
        assert_eq!(t.post("/v1/jobs", body.clone()).await.is(201)["id"], first["id"]);
        assert_ne!(other.post("/v1/jobs", body.clone()).await.is(201)["id"], first["id"]);
        let both =
            send(t.request(Method::POST, "/v1/jobs").header("Idempotency-Key", "x").json(&body));
        both.await.refuses("Idempotency-Key");
        for bad in ["", &"x".repeat(201)] {
            let body = json!({"job_type": "t", "idempotency_key": bad});
            t.post("/v1/jobs", body).await.refuses("idempotency_key");
        }
        t.database
            .execute("update idempotency_keys set created_at = now() - interval '25 h'")
            .await;
        assert_ne!(t.post("/v1/jobs", body).await.is(201)["id"], first["id"]);
        server.stop().await;
    });
}

#[test]
fn many_at_once_with_one_key_store_one_job() {
    run_alone(async |t| {
        let body = json!({"job_type": "t"});
        let calls = (0..20).map(|_| post_once(t, "/v1/jobs", "k", &body));
        let replies = futures_util::future::join_all(calls).await;
        assert!(replies.iter().any(|it| it.status.as_u16() == 201));
        for reply in &replies {
            if reply.status.as_u16() != 201 {
                reply.is_error(409, "idempotency_in_progress");
                assert!(reply.headers.contains_key("retry-after"));
            }
        }
        assert_eq!(t.database.number("select count(*) from jobs").await, 1);
    });
}

#[test]
fn a_request_that_broke_off_finds_what_it_had_stored() {
    run_alone(async |t| {
        let parent = t.enqueue(json!({"delay_seconds": 60})).await;
        let tied = json!({"job_type": "t", "parent_job_id": parent});
        for (key, body) in [("plain", json!({"job_type": "t"})), ("tied", tied)] {
            let first = post_once(t, "/v1/jobs", key, &body).await.is(201);
            // As if the node had died before it could keep its answer.
            t.database
                .execute(
                    "update idempotency_keys set status = null, body = null, locked_at = now()",
                )
                .await;
            post_once(t, "/v1/jobs", key, &body).await.is_error(409, "idempotency_in_progress");
            t.database
                .execute("update idempotency_keys set locked_at = now() - interval '2 min'")
                .await;
            assert_eq!(post_once(t, "/v1/jobs", key, &body).await.is(201)["id"], first["id"]);
        }
        assert_eq!(t.database.number("select count(*) from jobs").await, 3);
    });
}

#[test]
fn a_request_finds_what_an_earlier_try_commits_late() {
    run_alone(async |t| {
        let job = json!({"job_type": "t"});
        let first = post_once(t, "/v1/jobs", "k", &job).await.is(201);
        // As if the node had been cut off from its database before the commit.
        t.database
            .execute(
                "create table late as select * from jobs; delete from jobs;
                 update idempotency_keys set status = null, body = null,
                     locked_at = now() - interval '2 min'",
            )
            .await;
        let mut late = t.database.connect().await;
        late.execute("begin").await.expect("a transaction begins");
        late.execute("insert into jobs select * from late").await.expect("a job is stored");
        let again = {
            let (t, job) = (t.clone(), job.clone());
            tokio::spawn(async move { post_once(&t, "/v1/jobs", "k", &job).await })
        };
        // Longer than failed batches are tried again.
        let waits = "select count(*) from pg_stat_activity
                     where wait_event_type = 'Lock' and datname = current_database()
                         and query_start < now() - interval '1200 ms'";
        t.database.until(waits, 1).await;
        late.execute("commit").await.expect("the transaction commits");
        assert_eq!(again.await.expect("it does not panic").is(201)["id"], first["id"]);
        assert_eq!(t.database.number("select count(*) from jobs").await, 1);
    });
}

#[test]
fn a_request_that_could_not_free_its_key_may_be_repeated_once_the_database_answers() {
    run_alone(async |t| {
        let refuse = "create function refuse() returns trigger language plpgsql as $$
                      begin raise exception 'refused' using errcode = '57P01'; end $$;
                      create trigger refuse before insert on jobs for each row
                      execute function refuse();
                      create trigger refuse before update on idempotency_keys for each row
                      execute function refuse()";
        t.database.execute(refuse).await;
        let job = json!({"job_type": "t"});
        let broken = post_once(t, "/v1/jobs", "k", &job).await;
        assert!(broken.status.is_server_error(), "{}", broken.text);
        post_once(t, "/v1/jobs", "k", &job).await.is_error(409, "idempotency_in_progress");
        t.database.execute("drop function refuse cascade").await;
        let unlocked = "select count(*) from idempotency_keys where locked_at = '-infinity'";
        t.database.until(unlocked, 1).await;
        post_once(t, "/v1/jobs", "k", &job).await.is(201);
        assert_eq!(t.database.number("select count(*) from jobs").await, 1);
    });
}

#[test]
fn a_request_whose_node_is_gone_may_be_repeated_at_once() {
    run_alone(async |t| {
        let body = json!({"job_type": "t"});
        let first = post_once(t, "/v1/jobs", "k", &body).await.is(201);
        let broken_off = "update idempotency_keys set status = null, body = null,";
        // A node that was killed is silent from then on.
        let gone = uuid::Uuid::new_v4();
        for seen_at in ["now()", "now() - interval '16 s'"] {
            t.database
                .execute(&format!(
                    "insert into nodes (id, seen_at) values ('{gone}', {seen_at})
                     on conflict (id) do update set seen_at = excluded.seen_at"
                ))
                .await;
            t.database
                .execute(&format!("{broken_off} locked_at = now(), locked_by = '{gone}'"))
                .await;
            let again = post_once(t, "/v1/jobs", "k", &body).await;
            match seen_at {
                "now()" => drop(again.is_error(409, "idempotency_in_progress")),
                _ => assert_eq!(again.is(201)["id"], first["id"]),
            }
        }
        assert_eq!(t.database.number("select count(*) from jobs").await, 1);
    });
}

#[test]
fn a_request_that_is_refused_spends_no_key() {
    run_alone(async |t| {
        let parent = "job_01m7w3ha3aextt8pkwwdmxsmqw";
        for (number, wrong) in [
            json!({"job_type": ""}),
            json!({"job_type": "t", "delay_seconds": -1}),
            json!({"job_type": "t", "unknown": 1}),
            json!({"job_type": "t", "priority": 99_999}),
            json!({"job_type": "t", "parent_job_id": parent}),
            json!({"job_type": "t", "payload": "x".repeat(300_000)}),
        ]
        .iter()
        .enumerate()
        {
            let key = format!("bad-{number}");
            let refused = post_once(t, "/v1/jobs", &key, wrong).await;
            assert!([400, 413].contains(&refused.status.as_u16()), "{}", refused.text);
            post_once(t, "/v1/jobs", &key, &json!({"job_type": "t"})).await.is(201);
        }
        let batch = |job_type: &str| json!({"jobs": [{"job_type": "t"}, {"job_type": job_type}]});
        post_once(t, "/v1/jobs/batch", "batch", &batch("")).await.refuses("jobs[1].job_type");
        post_once(t, "/v1/jobs/batch", "batch", &batch("t")).await.is(201);
        t.database.execute("delete from jobs").await;
        let body = json!({"job_type": "t"});
        t.database.execute("alter table job_bodies rename to elsewhere").await;
        post_once(t, "/v1/jobs", "k", &body).await.is_error(500, "internal");
        t.database.execute("alter table elsewhere rename to job_bodies").await;
        post_once(t, "/v1/jobs", "k", &body).await.is(201);
        assert_eq!(t.database.number("select count(*) from jobs").await, 1);
        let request = t.client.post(format!("{}/v1/jobs", t.url)).header("Idempotency-Key", "new");
        send(request.json(&body)).await.is_error(401, "unauthorized");
        assert_eq!(
            t.database.number("select count(*) from idempotency_keys where key = 'new'").await,
            0
        );
    });
}

fn unique(key: &str, on_conflict: &str) -> Value {
    json!({"job_type": "t", "unique": {"key": key, "on_conflict": on_conflict}})
}

#[test]
fn a_conflict_with_another_job_is_not_repeated_for_a_key() {
    run(async |t| {
        let first = t.post("/v1/jobs", unique("k", "reject")).await.is(201);
        let body = unique("k", "reject");
        post_once(t, "/v1/jobs", "once", &body).await.is_error(409, "unique_conflict");
        let path = format!("/v1/jobs/{}/cancel", first["id"].as_str().expect("an id"));
        t.post(&path, json!({})).await.is(200);
        post_once(t, "/v1/jobs", "once", &body).await.is(201);
    });
}

#[test]
fn a_unique_key_belongs_to_one_live_job() {
    run(async |t| {
        let first = t.post("/v1/jobs", unique("k", "reject")).await.is(201);
        assert_eq!(first["unique_key"], "k");
        let error =
            t.post("/v1/jobs", unique("k", "reject")).await.is_error(409, "unique_conflict");
        assert_eq!(error["details"][0]["field"], "unique.key");
        assert!(error["details"][0]["message"].as_str().expect("text").contains("job_"));
        let same = t.post("/v1/jobs", unique("k", "return_existing")).await;
        assert_eq!(same.is(200)["id"], first["id"]);
        let second = t.post("/v1/jobs", unique("k", "replace")).await.is(201);
        assert_eq!(t.job(first["id"].as_str().expect("an id")).await["state"], "cancelled");
        let job = t.lease("w").await;
        assert_eq!(job["id"], second["id"]);
        t.post("/v1/jobs", unique("k", "replace")).await.is_error(409, "unique_conflict");
        let retried = format!("/v1/jobs/{}/retry", first["id"].as_str().expect("an id"));
        t.post(&retried, json!({})).await.is_error(409, "unique_conflict");
        t.ack_with(&job, "w", "failed", json!({"retryable": false})).await.is(200);
        t.post("/v1/jobs", unique("k", "reject")).await.is(201);
        let retried = format!("/v1/jobs/{}/retry", second["id"].as_str().expect("an id"));
        t.post(&retried, json!({})).await.is_error(409, "unique_conflict");
    });
}

#[test]
fn a_batch_with_a_taken_key_is_refused_whole_or_answers_with_the_job_that_has_it() {
    run_alone(async |t| {
        let first = t.post("/v1/jobs", unique("k", "reject")).await.is(201);
        let batch = |it: Value| json!({"jobs": [{"job_type": "t"}, it]});
        let reply = t.post("/v1/jobs/batch", batch(unique("k", "reject"))).await;
        let error = reply.is_error(409, "unique_conflict");
        assert_eq!(error["details"][0]["field"], "jobs[1].unique.key");
        let reply = t.post("/v1/jobs/batch", batch(unique("k", "return_existing"))).await;
        assert_eq!(reply.is(201)["jobs"][1]["id"], first["id"]);
        let twice = json!({"jobs": [unique("n", "reject"), unique("n", "reject")]});
        t.post("/v1/jobs/batch", twice).await.refuses("jobs[1].unique.key");
        assert_eq!(t.database.number("select count(*) from jobs").await, 2);
    });
}

#[test]
fn a_race_for_a_unique_key_has_one_winner() {
    run_alone(async |t| {
        for (on_conflict, losers) in [("reject", 409), ("return_existing", 200)] {
            let body = unique(on_conflict, on_conflict);
            let calls = (0..24).map(|_| t.post("/v1/jobs", body.clone()));
            let replies = futures_util::future::join_all(calls).await;
            let won = replies.iter().filter(|it| it.status.as_u16() == 201).count();
            let lost = replies.iter().filter(|it| it.status.as_u16() == losers).count();
            assert_eq!((won, lost), (1, 23), "{on_conflict}");
        }
        assert_eq!(t.database.number("select count(*) from jobs").await, 2);
    });
}

#[test]
fn a_batch_that_broke_off_finds_what_it_had_stored_and_what_was_there_before() {
    run_alone(async |t| {
        let first = t.post("/v1/jobs", unique("k", "reject")).await.is(201);
        let batch = json!({"jobs": [{"job_type": "t"}, unique("k", "return_existing")]});
        let stored = post_once(t, "/v1/jobs/batch", "b", &batch).await.is(201);
        assert_eq!(stored["jobs"][1]["id"], first["id"]);
        t.database
            .execute(
                "update idempotency_keys
                 set status = null, body = null, locked_at = now() - interval '2 min'",
            )
            .await;
        let again = post_once(t, "/v1/jobs/batch", "b", &batch).await.is(201);
        assert_eq!(again["jobs"][0]["id"], stored["jobs"][0]["id"]);
        assert_eq!(again["jobs"][1]["id"], first["id"]);
        assert_eq!(t.database.number("select count(*) from jobs").await, 2);
    });
}
