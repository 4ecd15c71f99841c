//! Pausing and resuming single jobs, and many at once.

use serde_json::{Value, json};

use crate::harness::{TestProject, eventually, run, run_alone};

async fn pause(t: &TestProject, id: &str) -> Value {
    t.act(&format!("/v1/jobs/{id}/pause")).await.is(200)
}

async fn resume(t: &TestProject, id: &str) -> Value {
    t.act(&format!("/v1/jobs/{id}/resume")).await.is(200)
}

/// Its state and what it waits for.
fn stands(job: &Value) -> (&str, &str) {
    let word = |field: &str| job[field].as_str().unwrap_or("null");
    (word("state"), word("waiting_for"))
}

const PAUSED: (&str, &str) = ("scheduled", "job_paused");
const READY: (&str, &str) = ("pending", "worker");

#[test]
fn a_paused_job_starts_when_it_is_resumed() {
    run(async |t| {
        let id = t.enqueue(json!({})).await;
        let why = json!({"reason": "the partner is down"});
        let paused = t.post(&format!("/v1/jobs/{id}/pause"), why).await.is(200);
        assert_eq!(stands(&paused), PAUSED);
        let change = &paused["last_change"];
        assert_eq!(
            (&change["type"], &change["reason"]),
            (&json!("fencepost.paused"), &json!("the partner is down"))
        );
        assert_eq!(pause(t, &id).await["paused_at"], paused["paused_at"], "nothing changes");
        let why = t.get(&format!("/v1/jobs/{id}/explain")).await.is(200);
        assert_eq!(why["reason"], "job_paused");
        assert!(why["summary"].as_str().is_some_and(|it| it.contains("is paused since")), "{why}");
        let counts = t.get("/v1/queues/default").await.is(200)["counts"].clone();
        assert_eq!((&counts["scheduled"], &counts["pending"]), (&json!(1), &json!(0)));
        assert!(t.poll("w", 1).await.is_empty(), "it is paused");

        let resumed = resume(t, &id).await;
        assert_eq!((stands(&resumed), &resumed["paused_at"]), (READY, &Value::Null));
        assert_eq!(resumed["last_change"]["type"], "fencepost.resumed");
        resume(t, &id).await;
        let history = t.get(&format!("/v1/jobs/{id}/events")).await.is(200);
        let events = history["events"].as_array().expect("events").iter();
        let changes = events.filter(|it| it["actor"] != Value::Null).count();
        assert_eq!(changes, 2, "what changes nothing leaves no event: {history}");
        assert_eq!(t.lease("w").await["id"], id.as_str());
    });
}

#[test]
fn a_job_that_runs_or_has_ended_is_neither_paused_nor_resumed() {
    run(async |t| {
        let id = t.enqueue(json!({})).await;
        let job = t.lease("w").await;
        let refused = async || {
            for action in ["pause", "resume"] {
                let path = format!("/v1/jobs/{id}/{action}");
                t.act(&path).await.is_error(409, "invalid_state");
            }
        };
        refused().await;
        t.ack(&job, "w", "succeeded").await.is(200);
        refused().await;
        t.act("/v1/jobs/job_01m7w3ha3aextt8pkwwdmxsmqw/pause").await.is_error(404, "job_not_found");
    });
}

#[test]
fn a_job_in_backoff_keeps_its_time_and_its_failures() {
    run(async |t| {
        let id = t.enqueue(json!({})).await;
        let job = t.lease("w").await;
        let later = json!({"error": {"type": "E"}, "retry_after_seconds": 600});
        t.ack_with(&job, "w", "failed", later).await.is(200);
        let before = t.job(&id).await;
        assert_eq!(stands(&pause(t, &id).await), PAUSED);
        let after = resume(t, &id).await;
        assert_eq!(stands(&after), ("pending", "backoff"));
        assert_eq!((&after["run_at"], &after["failures"]), (&before["run_at"], &json!(1)));
        pause(t, &id).await;
        // A time that passes meanwhile makes it ready only once it is resumed.
        let now = json!({"delay_seconds": 0});
        assert_eq!(stands(&t.patch(&format!("/v1/jobs/{id}"), now).await.is(200)), PAUSED);
        assert!(t.poll("w", 1).await.is_empty());
        assert_eq!(stands(&resume(t, &id).await), READY);
        assert_eq!(t.lease("w").await["attempt"], 2);
        let counts = t.get("/v1/queues/default").await.is(200)["counts"].clone();
        let counts = ["scheduled", "pending", "backoff", "processing"].map(|it| counts[it].clone());
        assert_eq!(counts, [json!(0), json!(0), json!(0), json!(1)]);
    });
}

#[test]
fn parents_that_end_meanwhile_do_not_start_a_paused_child() {
    run(async |t| {
        let parent = t.enqueue(json!({})).await;
        let child = t.enqueue(json!({"depends_on": [parent]})).await;
        pause(t, &child).await;
        let job = t.lease("w").await;
        assert_eq!(stands(&resume(t, &child).await), ("scheduled", "parents"));
        pause(t, &child).await;
        t.ack(&job, "w", "succeeded").await.is(200);
        assert_eq!(stands(&t.job(&child).await), PAUSED);
        assert_eq!(stands(&resume(t, &child).await), READY);

        let parent = t.enqueue(json!({"max_attempts": 1, "job_type": "fails"})).await;
        let child = t.enqueue(json!({"depends_on": [parent]})).await;
        pause(t, &child).await;
        t.act(&format!("/v1/jobs/{parent}/cancel")).await.is(200);
        t.job_becomes(&child, "cancelled").await;
    });
}

#[test]
fn a_paused_job_holds_its_place_where_the_order_is_strict() {
    run_alone(async |t| {
        t.patch("/v1/queues/default", json!({"groups": {"order": "strict"}})).await.is(200);
        let first = t.enqueue(json!({"group": "a"})).await;
        let second = t.enqueue(json!({"group": "a"})).await;
        pause(t, &first).await;
        assert!(t.poll("w", 9).await.is_empty(), "the first of the group is paused");
        let why = t.get(&format!("/v1/jobs/{second}/explain")).await.is(200);
        assert_eq!(why["reason"], "group_held", "{why}");
        assert!(why["summary"].as_str().is_some_and(|it| it.contains("and paused")), "{why}");
        // The other way around: one that waits for its group is paused.
        pause(t, &second).await;
        resume(t, &first).await;
        let job = t.wait_and_lease("w").await;
        assert_eq!(job["id"], first.as_str());
        t.ack(&job, "w", "succeeded").await.is(200);
        t.database.until("select count(*) from jobs where waits_for_group", 0).await;
        assert_eq!(stands(&t.job(&second).await), PAUSED);
        assert!(t.poll("w", 9).await.is_empty());
        resume(t, &second).await;
        assert_eq!(t.wait_and_lease("w").await["id"], second.as_str());
    });
}

#[test]
fn a_paused_job_leaves_its_room_to_others_of_its_group() {
    run(async |t| {
        let settings = json!({"groups": {"max_running": 1}});
        t.patch("/v1/queues/default", settings).await.is(200);
        let first = t.enqueue(json!({"group": "a"})).await;
        let second = t.enqueue(json!({"group": "a"})).await;
        pause(t, &first).await;
        let job = t.wait_and_lease("w").await;
        assert_eq!(job["id"], second.as_str(), "nothing keeps it");
        resume(t, &first).await;
        assert!(t.poll("w", 9).await.is_empty(), "one of the group runs");
        t.ack(&job, "w", "succeeded").await.is(200);
        assert_eq!(t.wait_and_lease("w").await["id"], first.as_str());
    });
}

#[test]
fn a_paused_job_takes_no_turn_of_its_group() {
    run(async |t| {
        t.patch("/v1/queues/default", json!({"groups": {"fair": true}})).await.is(200);
        let first = t.enqueue(json!({"group": "a"})).await;
        let second = t.enqueue(json!({"group": "a"})).await;
        let other = t.enqueue(json!({"group": "b"})).await;
        pause(t, &first).await;
        let mut ids = vec![t.wait_and_lease("w").await["id"].clone()];
        ids.push(t.wait_and_lease("w").await["id"].clone());
        assert!(t.poll("w", 9).await.is_empty());
        ids.sort_by_key(ToString::to_string);
        assert_eq!(ids, [json!(second), json!(other)]);
        resume(t, &first).await;
        assert_eq!(t.wait_and_lease("w").await["id"], first.as_str());
    });
}

#[test]
fn a_resumed_job_without_a_group_gets_its_turn() {
    run_alone(async |t| {
        t.patch("/v1/queues/default", json!({"groups": {"fair": true}})).await.is(200);
        let id = t.enqueue(json!({})).await;
        pause(t, &id).await;
        assert!(t.poll("w", 1).await.is_empty());
        // As after a minute without jobs that have no group.
        t.database.execute("delete from group_turns").await;
        resume(t, &id).await;
        assert_eq!(t.wait_and_lease("w").await["id"], id.as_str());
    });
}

#[test]
fn a_paused_job_keeps_its_unique_key_until_it_ends_or_expires() {
    run_alone(async |t| {
        let unique = json!({"unique": {"key": "k"}});
        let id = t.enqueue(unique).await;
        pause(t, &id).await;
        let again = json!({"job_type": "t", "unique": {"key": "k", "on_conflict": "reject"}});
        t.post("/v1/jobs", again).await.is_error(409, "unique_conflict");
        t.act(&format!("/v1/jobs/{id}/cancel")).await.is(200);
        assert_eq!(stands(&t.job(&id).await).0, "cancelled");
        let next = t.enqueue(json!({"expires_at": "2999-01-01T00:00:00Z"})).await;
        pause(t, &next).await;
        for table in ["jobs", "job_expiries"] {
            let passed = format!("update {table} set expires_at = now() - interval '1 s'");
            t.database.execute(&passed).await;
        }
        t.job_becomes(&next, "cancelled").await;
        // A retry begins anew.
        t.act(&format!("/v1/jobs/{id}/retry")).await.is(200);
        assert_eq!(t.wait_and_lease("w").await["id"], id.as_str());
    });
}

async fn ends(t: &TestProject, begun: &Value) -> Value {
    let path = format!("/v1/operations/{}", begun["operation"]["id"].as_str().expect("an id"));
    eventually("the end of the operation", async || {
        let shown = t.get(&path).await.is(200);
        (shown["state"] == "succeeded").then_some(shown)
    })
    .await
}

#[test]
fn many_jobs_are_paused_and_resumed_at_once() {
    run_alone(async |t| {
        let jobs = |tag: &str| {
            let tag = tag.to_owned();
            (0..60).map(move |n| {
                json!({"job_type": "t", "delay_seconds": n % 2 * 600, "tags": {"for": tag}})
            })
        };
        let all: Vec<_> = jobs("a").chain(jobs("b")).collect();
        t.post("/v1/jobs/batch", json!({ "jobs": all })).await.is(201);
        let running = t.lease("w").await;
        let of_a = json!({"filter": {"q": "tag:for=a"}});
        let begun = t.post("/v1/jobs/pause", of_a.clone()).await.is(202);
        assert_eq!(begun["operation"]["kind"], "jobs_pause");
        let paused = ends(t, &begun).await;
        assert_eq!((&paused["done"], &paused["skipped"]), (&json!(59), &json!(0)), "one runs");
        let again = t.post("/v1/jobs/pause", json!({"filter": {}, "dry_run": true})).await.is(200);
        assert_eq!(again["count"], 60, "paused ones do not count");
        let page = t.get("/v1/jobs?q=is:paused&limit=200").await.is(200);
        let page = page["jobs"].as_array().expect("jobs");
        assert_eq!(page.len(), 59);
        assert!(page.iter().all(|it| stands(it) == PAUSED && it["tags"]["for"] == "a"), "{page:?}");
        let refused = t.get("/v1/jobs?q=is:late").await.refuses("q");
        assert!(refused.contains("is:paused"), "{refused}");
        let both = json!({"filter": {"q": "is:paused"}});
        t.post("/v1/jobs/pause", both).await.refuses("filter.q");

        let ready = t.poll("w", 50).await;
        assert_eq!(ready.len(), 30, "those of the other tag that are due");
        let limited = json!({"filter": {}, "max": 20});
        assert_eq!(ends(t, &t.post("/v1/jobs/resume", limited).await.is(202)).await["done"], 20);
        let all = t.post("/v1/jobs/resume", json!({"filter": {}})).await.is(202);
        assert_eq!((&all["count"], &ends(t, &all).await["done"]), (&json!(39), &json!(39)));
        assert_eq!(t.poll("w", 50).await.len(), 29);
        assert_eq!(t.get("/v1/jobs?q=is:paused").await.is(200)["jobs"], json!([]));
        t.ack(&running, "w", "succeeded").await.is(200);
        let counts = t.get("/v1/queues/default").await.is(200)["counts"].clone();
        let counts = ["scheduled", "pending", "processing"].map(|it| counts[it].clone());
        assert_eq!(counts, [json!(60), json!(0), json!(59)]);
    });
}
