//! Replaying: new jobs with the work of earlier ones, single and in bulk.

use serde_json::{Value, json};

use crate::{
    harness::{Reply, TestServer, eventually, fresh_database, limited, run},
    operations::ends,
};

#[test]
fn a_replay_is_a_new_job_with_the_same_work_and_the_earlier_one_stays() {
    run(async |t| {
        let job = json!({
            "job_type": "mail", "payload": {"n": 1}, "queue": "mails", "priority": 7,
            "max_attempts": 1, "timeout_seconds": 60, "tags": {"customer": "1"}, "labels": ["gpu"],
            "concurrency_key": "c", "concurrency_limit": 2, "group": "g", "unique": {"key": "u"},
            "retry": {"strategy": "constant", "initial_seconds": 5},
            "on_failure": {"job_type": "reported"},
        });
        let earlier = t.post("/v1/jobs", job).await.is(201);
        let id = earlier["id"].as_str().expect("an id");
        let reply = t.post(&format!("/v1/jobs/{id}/replay"), json!({})).await;
        let again = reply.is(201);
        let location = reply.headers["location"].to_str().expect("text").to_owned();
        assert_eq!(location, format!("/v1/jobs/{}", again["id"].as_str().expect("an id")));
        let same = [
            "job_type",
            "payload",
            "queue",
            "priority",
            "max_attempts",
            "timeout_seconds",
            "tags",
            "labels",
            "concurrency_key",
            "concurrency_limit",
            "group",
            "retry",
            "state",
        ];
        for field in same {
            assert_eq!(again[field], earlier[field], "{field}");
        }
        assert_eq!((&again["replay_of"], &again["unique_key"]), (&json!(id), &Value::Null));
        assert_eq!(earlier["replay_of"], Value::Null);
        let changed = json!({"payload": [2], "queue": "other", "priority": 1, "run_at": "2100-01-01T00:00:00Z"});
        let changed = t.post(&format!("/v1/jobs/{id}/replay"), changed).await.is(201);
        assert_eq!(
            (&changed["payload"], &changed["queue"], &changed["priority"], &changed["state"]),
            (&json!([2]), &json!("other"), &json!(1), &json!("scheduled"))
        );
        let retyped = json!({"job_type": "other.type", "labels": ["gpu", "eu", "gpu"]});
        let retyped = t.post(&format!("/v1/jobs/{id}/replay"), retyped).await.is(201);
        assert_eq!(retyped["job_type"], "other.type");
        assert_eq!(retyped["labels"], json!(["eu", "gpu"]));
        assert_eq!((&retyped["payload"], &retyped["replay_of"]), (&earlier["payload"], &json!(id)));
        let nothing = json!({"payload": null});
        let nothing = t.post(&format!("/v1/jobs/{id}/replay"), nothing).await.is(201);
        assert_eq!(nothing["payload"], Value::Null);
        assert_eq!(t.job(id).await["state"], "pending", "the earlier job stays as it is");
    });
}

#[test]
fn a_replay_can_be_repeated_and_is_refused_by_field() {
    run(async |t| {
        let id = t.enqueue(json!({"payload": {"n": 1}})).await;
        let path = format!("/v1/jobs/{id}/replay");
        let twice = async || {
            let sent = t.request(reqwest::Method::POST, &path).header("idempotency-key", "once");
            let reply = sent.json(&json!({"payload": 2})).send().await.expect("an answer");
            Reply::of(reply).await.is(201)["id"].clone()
        };
        assert_eq!(twice().await, twice().await);
        for (body, field) in [
            (json!({"queue": ""}), "queue"),
            (json!({"priority": 200}), "priority"),
            (json!({"run_at": "soon"}), "run_at"),
            (json!({"job_type": ""}), "job_type"),
            (json!({"labels": [""]}), "labels[0]"),
        ] {
            t.post(&path, body).await.refuses(field);
        }
        let unknown = "/v1/jobs/job_01m7w3ha3aextt8pkwwdmxsmqw/replay";
        t.post(unknown, json!({})).await.is_error(404, "job_not_found");
        let key = json!({"name": "k", "scopes": ["produce", "read"]});
        let both = t.post("/v1/keys", key).await.is(201);
        let both = t.with_key(both["secret"].as_str().expect("a key"));
        both.post(&path, json!({})).await.is(201);
        both.post(&path, json!({"queue": "mine", "payload": 2})).await.is(201);
        both.post(&path, json!({"queue": "mine"})).await.is_error(403, "forbidden");
    });
}

#[test]
fn the_template_of_a_workflow_is_replayed_with_a_payload_only() {
    run(async |t| {
        let graph = json!({"input": {"a": 1}, "jobs": [
            {"key": "first", "job_type": "t"},
            {"key": "second", "job_type": "t", "depends_on": ["first"], "template": "lenient",
             "payload": {"of": "{{steps.first.output.x}}"}},
        ]});
        let made = t.post("/v1/workflows", graph).await.is(201);
        let jobs = made["jobs"].as_array().expect("jobs");
        let second = jobs.iter().find(|it| it["key"] == "second").expect("the second");
        let path = format!("/v1/jobs/{}/replay", second["id"].as_str().expect("an id"));
        t.post(&path, json!({})).await.refuses("payload");
        let again = t.post(&path, json!({"payload": 3})).await.is(201);
        assert_eq!((&again["payload"], &again["workflow_id"]), (&json!(3), &Value::Null));
    });
}

#[test]
fn ended_jobs_are_replayed_in_bulk_each_once_within_the_quota() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project_with("main", "unlimited", json!({"waiting_jobs": 3})).await;
        for n in 0..3 {
            t.enqueue(json!({"payload": n, "tags": {"batch": "x"}})).await;
        }
        for job in t.poll("w", 2).await {
            t.ack(&job, "w", "succeeded").await.is(200);
        }
        let dry = json!({"filter": {"tag": "batch:x"}, "dry_run": true});
        assert_eq!(t.post("/v1/jobs/replay", dry).await.is(200)["count"], 2);
        let live = json!({"filter": {"state": "pending"}});
        t.post("/v1/jobs/replay", live).await.refuses("filter.state");
        let all = json!({"filter": {"tag": "batch:x"}});
        // The node goes by the count of before the acks for a moment.
        let begun = eventually("the replay to be accepted", async || {
            let reply = t.post("/v1/jobs/replay", all.clone()).await;
            (reply.status != 429).then(|| reply.is(202))
        })
        .await;
        let ended = ends(&t, &begun["operation"]).await;
        assert_eq!((&ended["state"], &ended["done"]), (&json!("succeeded"), &json!(2)));
        let replayed = t.get("/v1/jobs?state=pending&tag=batch:x").await.is(200);
        let replayed = replayed["jobs"].as_array().expect("jobs").clone();
        let of: Vec<_> = replayed.iter().filter(|it| it["replay_of"].is_string()).collect();
        assert_eq!((replayed.len(), of.len()), (3, 2));
        t.post("/v1/jobs/replay", all).await.is_error(429, "quota_exceeded");
        server.stop().await;
    });
}
