//! The author and the reason of changes of jobs: in histories, jobs, webhooks and lists.

use std::collections::BTreeMap;

use fencepost_domain::{access::Role, actor::MAX_REASON_CHARS};
use serde_json::{Value, json};

use crate::{
    harness::{Sink, TestProject, eventually, run, run_alone},
    people::Person,
};

/// The changes in the history of a job: type, kind and id of the actor, reason.
async fn changes(t: &TestProject, id: &str) -> Vec<(String, Value, Value)> {
    let history = t.get(&format!("/v1/jobs/{id}/events")).await.is(200);
    let events = history["events"].as_array().expect("events");
    let caused = events.iter().filter(|it| it["actor"] != Value::Null);
    let text = |it: &Value| it.as_str().expect("a text").to_owned();
    caused.map(|it| (text(&it["type"]), it["actor"].clone(), it["reason"].clone())).collect()
}

/// The name of the test's key.
async fn own_key(t: &TestProject) -> Value {
    let keys = t.get("/v1/keys").await.is(200);
    let key = &keys["keys"][0];
    json!({"kind": "key", "id": key["id"], "name": key["name"]})
}

#[test]
fn a_change_of_a_job_names_the_api_key_and_the_reason() {
    run(async |t| {
        let key = own_key(t).await;
        let id = t.enqueue(json!({"delay_seconds": 600})).await;
        assert_eq!(t.job(&id).await["last_change"], Value::Null);
        let path = |action: &str| format!("/v1/jobs/{id}/{action}");
        let because = |reason: &str| json!({ "reason": reason });
        let urgent = json!({"priority": 5, "reason": "urgent"});
        t.patch(&format!("/v1/jobs/{id}"), urgent).await.is(200);
        t.post(&path("cancel"), because("no longer needed")).await.is(200);
        t.act(&path("retry")).await.is(200);
        t.post(&path("cancel"), json!({})).await.is(200);
        assert_eq!(
            changes(t, &id).await,
            [
                ("fencepost.changed".to_owned(), key.clone(), json!("urgent")),
                ("fencepost.cancelled".to_owned(), key.clone(), json!("no longer needed")),
                ("fencepost.retried".to_owned(), key.clone(), Value::Null),
                ("fencepost.cancelled".to_owned(), key.clone(), Value::Null),
            ]
        );
        let replayed = t.post(&path("replay"), because("once more")).await.is(201);
        let copy = replayed["id"].as_str().expect("an id");
        let change = t.job(copy).await["last_change"].clone();
        assert_eq!(
            (&change["type"], &change["actor"], &change["reason"]),
            (&json!("fencepost.replayed"), &key, &json!("once more"))
        );
        let listed = t.get("/v1/jobs?state=cancelled").await.is(200);
        let last = &listed["jobs"][0]["last_change"];
        assert_eq!((&last["type"], &last["actor"]), (&json!("fencepost.cancelled"), &key));
    });
}

#[test]
fn a_reason_has_bounds_and_a_refused_one_changes_nothing() {
    run(async |t| {
        let id = t.enqueue(json!({})).await;
        let longest = json!({"reason": "x".repeat(MAX_REASON_CHARS)});
        let (over, empty) =
            (json!({"reason": "ü".repeat(MAX_REASON_CHARS + 1)}), json!({"reason": ""}));
        let lines = json!({"reason": "one\nand another"});
        let unseen = json!({"reason": " \u{200b}"});
        let turned = json!({"reason": "a\u{202e}b"});
        for action in ["cancel", "retry", "replay"] {
            let path = format!("/v1/jobs/{id}/{action}");
            for bad in [&over, &empty, &lines, &unseen, &turned] {
                t.post(&path, bad.clone()).await.refuses("reason");
            }
            t.post(&path, json!({"why": "x"})).await.refuses("why");
        }
        for bad in [&over, &empty, &lines, &unseen, &turned] {
            t.post("/v1/workers/w/take-back", bad.clone()).await.refuses("reason");
            t.post("/v1/queues/default/take-back", bad.clone()).await.refuses("reason");
            let mut change = bad.clone();
            change["priority"] = json!(1);
            t.patch(&format!("/v1/jobs/{id}"), change).await.refuses("reason");
        }
        t.patch(&format!("/v1/jobs/{id}"), json!({"reason": "alone"})).await.refuses("body");
        assert_eq!(changes(t, &id).await, []);
        assert_eq!(t.job(&id).await["state"], "pending");
        t.post(&format!("/v1/jobs/{id}/cancel"), longest).await.is(200);
    });
}

#[test]
fn a_member_is_named_to_members_and_not_to_keys() {
    run_alone(async |t| {
        let ada = Person::sign_up(t, "ada@example.com").await;
        ada.join(t, Role::Member).await;
        let id = t.enqueue(json!({})).await;
        let path = format!("/v1/projects/main/jobs/{id}");
        let cancelled = ada.post(&format!("{path}/cancel"), json!({"reason": "a test"})).await;
        let change = cancelled.is(200)["last_change"].clone();
        assert_eq!(
            change["actor"],
            json!({"kind": "member", "id": ada.account_id, "name": "ada@example.com"})
        );
        assert_eq!(change["reason"], "a test");
        let events = ada.get(&format!("{path}/events")).await.is(200);
        assert_eq!(events["events"][1]["actor"], change["actor"]);
        let for_a_key = json!({"kind": "member", "id": ada.account_id, "name": null});
        assert_eq!(t.job(&id).await["last_change"]["actor"], for_a_key);
        assert_eq!(changes(t, &id).await[0].1, for_a_key);
        ada.delete(&format!("/v1/projects/main/members/{}", ada.account_id)).await.is_empty(204);
        let eve = Person::sign_up(t, "eve@example.com").await;
        eve.join(t, Role::Viewer).await;
        assert_eq!(eve.get(&path).await.is(200)["last_change"]["actor"], for_a_key, "it has left");
    });
}

#[test]
fn what_follows_from_something_else_names_it() {
    run(async |t| {
        let parent = t.enqueue(json!({"max_attempts": 1})).await;
        let child = t.enqueue(json!({"depends_on": [parent]})).await;
        let job = t.lease("w").await;
        t.ack(&job, "w", "failed").await.is(200);
        t.job_becomes(&child, "cancelled").await;
        let by_parent = json!({"kind": "parent", "id": parent, "name": null});
        assert_eq!(changes(t, &child).await[0].1, by_parent);
        let retry = json!({"reason": "the disk has room again"});
        t.post(&format!("/v1/dead-letters/{parent}/retry"), retry).await.is(200);
        let (kind, actor, reason) = changes(t, &child).await[1].clone();
        assert_eq!((kind.as_str(), &actor), ("fencepost.revived", &by_parent));
        assert_eq!(reason, Value::Null);
        assert_eq!(changes(t, &parent).await[0].2, "the disk has room again");

        let begun = t.post("/v1/jobs/cancel", json!({"filter": {"q": "state:pending"}})).await;
        let operation = begun.is(202)["operation"]["id"].clone();
        t.job_becomes(&parent, "cancelled").await;
        let by_operation = json!({"kind": "operation", "id": operation, "name": null});
        assert_eq!(t.job(&parent).await["last_change"]["actor"], by_operation);

        let unique = |on_conflict: &str| json!({"key": "k", "on_conflict": on_conflict});
        let first = t.enqueue(json!({"unique": unique("replace")})).await;
        let second = t.enqueue(json!({"unique": unique("replace")})).await;
        let history = t.get(&format!("/v1/jobs/{first}/events")).await.is(200);
        let replaced = &history["events"][1];
        assert_eq!(replaced["payload"]["replaced_by"], json!(second));
        assert_eq!(replaced["actor"], json!({"kind": "server", "id": null, "name": null}));
    });
}

#[test]
fn a_job_that_expires_is_cancelled_by_the_server() {
    run(async |t| {
        let now = t.enqueue(json!({"queue": "other"})).await;
        let now = t.job(&now).await["created_at"].as_str().expect("a time").to_owned();
        let now: chrono::DateTime<chrono::Utc> = now.parse().expect("a time");
        let soon = now + chrono::TimeDelta::seconds(1);
        let id = t.enqueue(json!({ "expires_at": soon })).await;
        let job = t.job_becomes(&id, "cancelled").await;
        let change = &job["last_change"];
        assert_eq!(
            (&change["type"], &change["actor"]["kind"]),
            (&json!("fencepost.expired"), &json!("server"))
        );
    });
}

#[test]
fn the_jobs_of_a_cancelled_workflow_have_its_author_and_reason() {
    run(async |t| {
        let key = own_key(t).await;
        let graph = json!({"jobs": [
            {"key": "a", "job_type": "t"}, {"key": "b", "job_type": "t", "depends_on": ["a"]}
        ]});
        let workflow = t.post("/v1/workflows", graph).await.is(201);
        let path = format!("/v1/workflows/{}/cancel", workflow["id"].as_str().expect("an id"));
        t.post(&path, json!({"reason": ""})).await.refuses("reason");
        t.post(&path, json!({"reason": "sold out"})).await.is(200);
        for job in workflow["jobs"].as_array().expect("jobs") {
            let job = t.job_becomes(job["id"].as_str().expect("an id"), "cancelled").await;
            let change = &job["last_change"];
            assert_eq!((&change["actor"], &change["reason"]), (&key, &json!("sold out")));
        }
    });
}

#[test]
fn bulk_replays_and_retries_name_their_operation() {
    run(async |t| {
        let id = t.enqueue(json!({"max_attempts": 1})).await;
        let job = t.lease("w").await;
        t.ack(&job, "w", "failed").await.is(200);
        let filter = json!({"filter": {"ids": [id]}});
        let replay = t.post("/v1/jobs/replay", filter.clone()).await.is(202);
        let retry = t.post("/v1/jobs/retry", filter).await.is(202);
        let id_of = |begun: &Value| begun["operation"]["id"].clone();
        let retried = eventually("the retry", async || {
            let change = t.job(&id).await["last_change"].clone();
            (change["type"] == "fencepost.retried").then_some(change)
        })
        .await;
        assert_eq!(retried["actor"]["id"], id_of(&retry));
        let copy = eventually("the replay", async || {
            let page = t.get("/v1/jobs").await.is(200);
            let jobs = page["jobs"].as_array().expect("jobs").clone();
            jobs.into_iter().find(|it| it["replay_of"] == json!(id))
        })
        .await;
        assert_eq!(copy["last_change"]["type"], "fencepost.replayed");
        assert_eq!(copy["last_change"]["actor"]["id"], id_of(&replay));
    });
}

#[test]
fn a_take_back_is_recorded_with_each_job() {
    run(async |t| {
        let key = own_key(t).await;
        let id = t.enqueue(json!({})).await;
        t.lease("hangs").await;
        let reason = json!({"reason": "its machine burns"});
        t.post("/v1/workers/hangs/take-back", reason).await.is(200);
        let job = t.job(&id).await;
        assert_eq!((&job["state"], &job["failures"]), (&json!("pending"), &json!(0)));
        assert_eq!(
            changes(t, &id).await,
            [("fencepost.take_back".to_owned(), key, json!("its machine burns"))]
        );
        let held = t.lease("hangs").await;
        t.post(&format!("/v1/jobs/{id}/cancel"), json!({"reason": "too late"})).await.is(200);
        t.act("/v1/workers/hangs/take-back").await.is(200);
        let job = t.job_becomes(held["id"].as_str().expect("an id"), "cancelled").await;
        assert_eq!(job["last_change"]["reason"], "too late");
    });
}

#[test]
fn a_webhook_says_who_cancelled_and_why() {
    run(async |t| {
        let sink = Sink::start().await;
        let endpoint = json!({"url": sink.url, "events": ["job.cancelled"]});
        t.post("/v1/webhooks", endpoint).await.is(201);
        let key = own_key(t).await;
        let id = t.enqueue(json!({})).await;
        t.post(&format!("/v1/jobs/{id}/cancel"), json!({"reason": "a refund"})).await.is(200);
        let by = sink.next().await.body()["data"]["cancelled_by"].clone();
        let mut expected = key.clone();
        expected["reason"] = json!("a refund");
        assert_eq!(by, expected);
        let asked = t.enqueue(json!({})).await;
        let running = t.lease("w").await;
        t.post(&format!("/v1/jobs/{asked}/cancel"), json!({"reason": "slow"})).await.is(200);
        t.ack(&running, "w", "released").await.is(200);
        let by = sink.next().await.body()["data"]["cancelled_by"].clone();
        assert_eq!((&by["id"], &by["reason"]), (&key["id"], &json!("slow")));
    });
}

#[test]
fn reasons_count_as_stored_bytes() {
    run_alone(async |t| {
        let deltas = "select coalesce(sum(bytes), 0)::bigint from stored_byte_deltas";
        let stored = "select coalesce(sum(bytes), 0)::bigint from stored_bytes";
        let all = format!("select ({deltas}) + ({stored})");
        let id = t.enqueue(json!({})).await;
        let before = t.database.number(&all).await;
        let reason = "r".repeat(MAX_REASON_CHARS);
        t.post(&format!("/v1/jobs/{id}/cancel"), json!({ "reason": reason })).await.is(200);
        let more = t.database.number(&all).await - before;
        assert!(more >= MAX_REASON_CHARS as i64, "{more}");
    });
}

#[test]
fn limits_tags_and_labels_of_a_waiting_job_change() {
    run(async |t| {
        let id = t.enqueue(json!({"tags": {"customer": "3"}, "labels": ["cpu"]})).await;
        let path = format!("/v1/jobs/{id}");
        let change = json!({
            "max_attempts": 1, "timeout_seconds": 70, "max_losses": 9,
            "tags": {"customer": "4", "region": "eu"}, "labels": ["gpu", "a", "gpu"],
        });
        let changed = t.patch(&path, change).await.is(200);
        assert_eq!(changed["tags"], json!({"customer": "4", "region": "eu"}));
        assert_eq!(changed["labels"], json!(["a", "gpu"]));
        let numbers = ["max_attempts", "timeout_seconds", "max_losses"].map(|it| &changed[it]);
        assert_eq!(numbers, [&json!(1), &json!(70), &json!(9)]);
        assert_eq!(t.get("/v1/jobs?tag=customer:4").await.is(200)["jobs"][0]["id"], json!(id));
        let events = t.get(&format!("{path}/events")).await.is(200);
        let events = events["events"].as_array().expect("events").iter();
        let noted = events.filter(|it| it["type"] == "fencepost.changed").collect::<Vec<_>>();
        assert_eq!(noted[0]["payload"]["labels"], json!(["a", "gpu"]));
        let poll =
            |labels: Value| json!({"worker_id": "w", "queues": ["default"], "labels": labels});
        let with = async |labels| {
            let mut poll = poll(labels);
            poll["wait_seconds"] = json!(0);
            t.polled(poll).await
        };
        assert!(with(json!(["cpu"])).await.is_empty(), "its labels are others now");
        let job = with(json!(["gpu", "a"])).await.remove(0);
        assert_eq!((&job["timeout_seconds"], &job["max_attempts"]), (&json!(70), &json!(1)));
        t.patch(&path, json!({"max_attempts": 2})).await.is_error(409, "invalid_state");
        t.ack(&job, "w", "failed").await.is(200);
        t.job_becomes(&id, "dead_letter").await;
        let other = t.enqueue(json!({"tags": {"a": "b"}, "labels": ["cpu"]})).await;
        let path = format!("/v1/jobs/{other}");
        let changed = t.patch(&path, json!({"tags": {}, "labels": []})).await.is(200);
        assert_eq!((&changed["tags"], &changed["labels"]), (&json!({}), &json!([])));
        assert_eq!(with(json!([])).await[0]["id"], json!(other), "any worker may have it");
    });
}

#[test]
fn changes_of_limits_have_bounds() {
    run(async |t| {
        let id = t.enqueue(json!({"delay_seconds": 600})).await;
        let path = format!("/v1/jobs/{id}");
        for (field, bad) in [
            ("max_attempts", json!(0)),
            ("max_attempts", json!(101)),
            ("timeout_seconds", json!(0)),
            ("timeout_seconds", json!(86_401)),
            ("max_losses", json!(0)),
            ("max_losses", json!(101)),
            ("labels", json!(vec!["x"; 17])),
            ("tags", json!((0..33).map(|it| (it.to_string(), "v")).collect::<BTreeMap<_, _>>())),
        ] {
            t.patch(&path, json!({ field: bad })).await.refuses(field);
        }
        t.patch(&path, json!({"reason": "none"})).await.refuses("body");
    });
}
