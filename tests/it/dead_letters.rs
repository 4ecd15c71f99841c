//! Dead letters: listed, grouped, retried, deleted; and the circuit breaker.

use crate::harness::{TestProject, run, run_alone};
use serde_json::{Value, json};

/// A job of this shape that was dead-lettered after one failure with this error.
async fn die(t: &TestProject, job: Value, error: Value) -> String {
    let mut job = job;
    job["max_attempts"] = 1.into();
    let queue = job.get("queue").cloned().unwrap_or("default".into());
    let id = t.enqueue(job).await;
    let poll = json!({"worker_id": "w", "queues": [queue], "wait_seconds": 0, "capacity": 50});
    let jobs = t.polled(poll).await;
    let leased = jobs.iter().find(|it| it["id"] == id).expect("it is handed out");
    t.ack_with(leased, "w", "failed", json!({"error": error})).await.is(200);
    id
}

fn error(message: &str) -> Value {
    json!({"type": "Timeout", "message": message})
}

async fn letters(t: &TestProject, query: &str) -> Vec<String> {
    let page = t.get(&format!("/v1/dead-letters{query}")).await.is(200);
    let letters = page["dead_letters"].as_array().expect("dead letters").iter();
    letters.map(|it| it["job"]["id"].as_str().expect("an id").to_owned()).collect()
}

#[test]
fn dead_letters_are_listed_newest_first_with_their_errors() {
    run(async |t| {
        let first = die(t, json!({"queue": "a"}), error("no answer after 30 s")).await;
        let second = die(t, json!({"queue": "b", "job_type": "mail"}), error("no route")).await;
        t.enqueue(json!({})).await;
        let page = t.get("/v1/dead-letters").await.is(200);
        let newest = &page["dead_letters"][0];
        assert_eq!(newest["job"]["id"], second);
        assert_eq!(newest["job"]["state"], "dead_letter");
        assert_eq!(newest["job"]["last_error"]["message"], "no route");
        assert_eq!(newest["died_at"], newest["job"]["completed_at"]);
        assert_eq!(letters(t, "").await, [&*second, &*first]);
        assert_eq!(letters(t, "?queue=a").await, [&*first]);
        assert_eq!(letters(t, "?job_type=mail").await, [&*second]);
        let fingerprint = newest["fingerprint"].as_str().expect("a fingerprint");
        assert_eq!(letters(t, &format!("?fingerprint={fingerprint}")).await, [&*second]);
        let died_at = newest["died_at"].as_str().expect("a time");
        assert_eq!(letters(t, &format!("?died_before={died_at}")).await, [&*first]);
        assert_eq!(letters(t, &format!("?died_after={died_at}")).await, [&*second]);
        let one = t.get("/v1/dead-letters?limit=1").await.is(200);
        assert_eq!(one["has_more"], true);
        let cursor = one["next_cursor"].as_str().expect("a cursor");
        assert_eq!(letters(t, &format!("?limit=1&cursor={cursor}")).await, [&*first]);
        t.get("/v1/dead-letters?cursor=AAAA").await.refuses("cursor");
        t.get("/v1/dead-letters?limit=0").await.refuses("limit");
        t.get("/v1/dead-letters?fingerprint=x").await.refuses("fingerprint");
        t.get("/v1/dead-letters?died_after=x").await.refuses("died_after");
        t.get("/v1/dead-letters?state=x").await.refuses("state");
    });
}

#[test]
fn what_failed_alike_is_one_group() {
    run_alone(async |t| {
        let first = die(t, json!({}), error("no answer from 10.0.0.7 after 30 s")).await;
        let second = die(t, json!({}), error("no answer from 10.0.0.8 after 5 s")).await;
        die(t, json!({}), error("no route")).await;
        die(t, json!({"job_type": "other"}), error("no route")).await;
        let silent = t.enqueue(json!({"max_attempts": 1})).await;
        t.lease("w").await;
        t.expire_leases().await;
        t.job_becomes(&silent, "dead_letter").await;
        let page = t.get("/v1/dead-letters/groups").await.is(200);
        let groups = page["groups"].as_array().expect("groups");
        assert_eq!(groups.len(), 4);
        assert_eq!(groups[0]["error_type"], "lease_expired");
        assert!(groups[0]["sample_message"].as_str().expect("text").starts_with("the lease"));
        let oldest = &groups[3];
        assert_eq!((&oldest["count"], &oldest["sample_job_id"]), (&json!(2), &json!(first)));
        assert_eq!(oldest["sample_message"], "no answer from 10.0.0.7 after 30 s");
        assert!(oldest["first_seen_at"].as_str() < oldest["last_seen_at"].as_str());
        t.act(&format!("/v1/dead-letters/{second}/retry")).await.is(200);
        t.delete(&format!("/v1/dead-letters/{first}")).await.is_empty(204);
        let one = t.get("/v1/dead-letters/groups?limit=2").await.is(200);
        assert_eq!(one["has_more"], true);
        let cursor = one["next_cursor"].as_str().expect("a cursor");
        let rest = t.get(&format!("/v1/dead-letters/groups?cursor={cursor}")).await.is(200);
        assert_eq!(rest["groups"].as_array().expect("groups").len(), 1, "an empty group is gone");
    });
}

#[test]
fn a_dead_letter_that_comes_back_keeps_its_history_and_starts_its_failures_anew() {
    run(async |t| {
        let id = die(t, json!({}), error("no")).await;
        let back = t.act(&format!("/v1/dead-letters/{id}/retry")).await.is(200);
        assert_eq!((&back["state"], &back["failures"]), (&json!("pending"), &json!(0)));
        assert!(letters(t, "").await.is_empty());
        let leased = t.lease("w").await;
        assert_eq!((&leased["id"], &leased["attempt"]), (&json!(id), &json!(2)));
        let again = t.act(&format!("/v1/dead-letters/{id}/retry")).await;
        again.is_error(409, "invalid_state");
        t.ack_with(&leased, "w", "failed", json!({"error": error("again")})).await.is(200);
        let job = t.job(&id).await;
        assert_eq!(job["state"], "dead_letter");
        assert_eq!(job["attempts"].as_array().expect("attempts").len(), 2);
        assert_eq!(letters(t, "").await, [&*id]);
    });
}

#[test]
fn a_deleted_dead_letter_leaves_nothing_behind() {
    run_alone(async |t| {
        let id = die(t, json!({"payload": {"a": 1}}), error("no")).await;
        let waiting = t.enqueue(json!({})).await;
        t.delete(&format!("/v1/dead-letters/{waiting}")).await.is_error(409, "invalid_state");
        t.delete(&format!("/v1/dead-letters/{id}")).await.is_empty(204);
        t.delete(&format!("/v1/dead-letters/{id}")).await.is_error(404, "job_not_found");
        t.get(&format!("/v1/jobs/{id}")).await.is_error(404, "job_not_found");
        for table in ["jobs", "job_bodies", "attempts", "dead_letters", "job_events"] {
            let left = format!("select count(*) from {table}");
            let expected = i64::from(["jobs", "job_bodies"].contains(&table));
            assert_eq!(t.database.number(&left).await, expected, "{table}");
        }
        let queue = t.get("/v1/queues/default").await.is(200);
        assert_eq!(queue["counts"]["dead_letter"], 0);
    });
}

#[test]
fn too_many_dead_letters_of_a_type_in_a_row_pull_its_brake() {
    run(async |t| {
        t.patch("/v1/queues/default", json!({"brake_after": 3})).await.is(200);
        for _ in 0..2 {
            die(t, json!({"job_type": "mail"}), error("no")).await;
            die(t, json!({"job_type": "report"}), error("no")).await;
        }
        t.enqueue(json!({"job_type": "mail"})).await;
        let good = t.lease("w").await;
        t.ack(&good, "w", "succeeded").await.is(200);
        die(t, json!({"job_type": "mail"}), error("no")).await;
        let queue = t.get("/v1/queues/default").await.is(200);
        assert_eq!(queue["paused_types"], json!([]), "a success in between counts");
        die(t, json!({"job_type": "report"}), error("no")).await;
        let queue = t.get("/v1/queues/default").await.is(200);
        let paused = &queue["paused_types"][0];
        assert_eq!(
            (&paused["job_type"], &paused["paused_by"]),
            (&json!("report"), &json!("brake"))
        );
        assert_eq!(paused["dead_letters_in_a_row"], 3);
        let held = t.enqueue(json!({"job_type": "report"})).await;
        let free = t.enqueue(json!({"job_type": "mail"})).await;
        let jobs = t.poll("w", 5).await;
        assert_eq!(jobs.iter().map(|it| &it["id"]).collect::<Vec<_>>(), [&*free]);
        let why = t.get(&format!("/v1/jobs/{held}/explain")).await.is(200);
        let why = why["summary"].as_str().expect("words");
        assert!(
            why.ends_with("paused by the circuit breaker after 3 consecutive dead letters"),
            "{why}"
        );
        t.post("/v1/queues/default/resume", json!({"job_type": "report"})).await.is(200);
        assert_eq!(t.wait_and_lease("w").await["id"], held);
        for _ in 0..2 {
            die(t, json!({"job_type": "report"}), error("no")).await;
        }
        let queue = t.get("/v1/queues/default").await.is(200);
        assert_eq!(queue["paused_types"], json!([]), "it counts from 0 again");
    });
}

#[test]
fn a_child_whose_dead_parent_was_deleted_does_not_run_without_it() {
    run(async |t| {
        let parent = t.enqueue(json!({"max_attempts": 1})).await;
        let child = t.enqueue(json!({"depends_on": [parent]})).await;
        let leased = t.lease("w").await;
        t.ack(&leased, "w", "failed").await.is(200);
        t.job_becomes(&child, "cancelled").await;
        t.delete(&format!("/v1/dead-letters/{parent}")).await.is_empty(204);
        let retried = t.act(&format!("/v1/jobs/{child}/retry")).await;
        retried.is_error(409, "parent_terminal");
    });
}

#[test]
fn a_group_begins_anew_when_nothing_of_it_was_left() {
    run(async |t| {
        let first = die(t, json!({}), error("no")).await;
        let group = async || t.get("/v1/dead-letters/groups").await.is(200)["groups"][0].clone();
        let before = group().await;
        t.delete(&format!("/v1/dead-letters/{first}")).await.is_empty(204);
        assert_eq!(group().await, Value::Null);
        let second = die(t, json!({}), error("no")).await;
        let after = group().await;
        assert_eq!((&after["sample_job_id"], &after["count"]), (&json!(second), &json!(1)));
        assert!(before["first_seen_at"].as_str() < after["first_seen_at"].as_str());
        let seen_at = after["first_seen_at"].as_str().expect("a time");
        assert_eq!(letters(t, &format!("?died_after={seen_at}")).await, [&*second]);
    });
}

#[test]
fn an_operation_names_the_error_of_its_group_when_the_group_is_gone() {
    run(async |t| {
        die(t, json!({}), error("no answer after 30 s")).await;
        let letter = t.get("/v1/dead-letters").await.is(200)["dead_letters"][0].take();
        let body = json!({"filter": {"fingerprint": letter["fingerprint"]}});
        let begun = t.post("/v1/dead-letters/retry", body).await.is(202)["operation"].take();
        assert_eq!(begun["sample_error"], "Timeout: no answer after 30 s");
        t.wait_and_lease("w").await;
        let groups = t.get("/v1/dead-letters/groups").await.is(200);
        assert_eq!(groups["groups"], json!([]));
        let at = format!("/v1/operations/{}", begun["id"].as_str().expect("an id"));
        assert_eq!(t.get(&at).await.is(200)["sample_error"], begun["sample_error"]);
    });
}

#[test]
fn a_null_is_no_filter() {
    run(async |t| {
        let body = json!({"filter": {"queue": null}, "dry_run": true});
        t.post("/v1/dead-letters/retry", body.clone()).await.refuses("filter.queue");
        let body = json!({"filter": {"fingerprint": null}, "confirm": "purge"});
        t.post("/v1/dead-letters/purge", body).await.refuses("filter.fingerprint");
        t.post("/v1/queues/default/pause", json!({"job_type": null})).await.refuses("job_type");
        let bad = json!({"filter": {"died_after": "2026-11-20"}, "dry_run": true});
        let message = t.post("/v1/dead-letters/retry", bad).await.refuses("filter.died_after");
        assert!(message.contains("RFC 3339"), "{message}");
    });
}
