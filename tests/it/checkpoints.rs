//! Workers store how far an attempt has come, and the next lease brings it.

use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::harness::{
    LoneProject, TestProject, TestServer, fresh_database, limited, run, run_alone,
};

/// A heartbeat of this lease with a checkpoint.
async fn save(t: &TestProject, job: &Value, sequence: i64, checkpoint: Value) -> Value {
    t.post("/v1/workers/heartbeat", beat(job, sequence, checkpoint)).await.is(200)
}

fn beat(job: &Value, sequence: i64, checkpoint: Value) -> Value {
    json!({
        "job_id": job["id"], "worker_id": "w", "attempt": job["attempt"],
        "checkpoint": checkpoint, "checkpoint_sequence": sequence,
    })
}

async fn lose_leased(t: &LoneProject) {
    t.expire_leases().await;
    t.database.until("select count(*) from jobs where state = 'processing'", 0).await;
}

#[test]
fn the_next_lease_brings_the_last_checkpoint() {
    run_alone(async |t| {
        let id = t.enqueue(json!({"max_attempts": 9})).await;
        let job = t.lease("w").await;
        assert!(job.get("checkpoint").is_none(), "{job}");
        let saved = save(t, &job, 1, json!({"frame": 10})).await;
        assert_eq!(saved, json!({"status": "ok", "checkpoint": "stored"}));
        assert_eq!(save(t, &job, 1, json!({"frame": 10})).await, saved, "the same is stored");
        assert_eq!(save(t, &job, 1, json!({"frame": 11})).await["checkpoint"], "stale");
        assert_eq!(save(t, &job, 7, json!({"frame": 70})).await, saved);
        assert_eq!(save(t, &job, 6, json!({"frame": 60})).await["checkpoint"], "stale");
        let shown = t.job(&id).await;
        assert_eq!(
            (&shown["checkpoint"], &shown["checkpoint_sequence"]),
            (&json!({"frame": 70}), &json!(7))
        );
        lose_leased(t).await;
        t.post("/v1/workers/heartbeat", beat(&job, 8, json!("late")))
            .await
            .is_error(409, "invalid_state");
        let next = t.wait_and_lease("w").await;
        assert_eq!(
            (&next["checkpoint"], &next["checkpoint_sequence"]),
            (&json!({"frame": 70}), &json!(7))
        );
        t.post("/v1/workers/heartbeat", beat(&job, 9, json!("stale")))
            .await
            .is_error(409, "stale_lease");
        for (sequence, status, more) in [
            (8, "failed", json!({"retry_after_seconds": 0})),
            (9, "released", json!({})),
            (10, "released", json!({"delay_seconds": 1})),
            (11, "rate_limited", json!({"retry_after_seconds": 1, "scope": "queue"})),
        ] {
            let job = match sequence {
                8 => next.clone(),
                _ => t.wait_and_lease("w").await,
            };
            let mut more = more;
            more["checkpoint"] = json!([sequence]);
            more["checkpoint_sequence"] = json!(sequence);
            t.ack_with(&job, "w", status, more).await.is(200);
            assert_eq!(t.job(&id).await["checkpoint"], json!([sequence]), "{status}");
        }
        let job = t.wait_and_lease("w").await;
        let old = json!({"checkpoint": 1, "checkpoint_sequence": 1, "retryable": false});
        assert_eq!(t.ack_with(&job, "w", "failed", old).await.is(200)["action"], "done");
        assert_eq!(t.job(&id).await["checkpoint"], json!([11]), "an outcome counts without it");
        let replayed = t.post(&format!("/v1/jobs/{id}/replay"), json!({})).await.is(201);
        assert!(replayed.get("checkpoint").is_none(), "{replayed}");
        let replayed = replayed["id"].as_str().expect("an id");
        t.act(&format!("/v1/jobs/{replayed}/cancel")).await.is(200);
        t.act(&format!("/v1/jobs/{id}/retry")).await.is(200);
        let job = t.wait_and_lease("w").await;
        assert_eq!(job["checkpoint"], json!([11]), "a retry keeps it");
        t.ack_with(&job, "w", "failed", json!({"retryable": false})).await.is(200);
        let retry = json!({"keep_checkpoint": false, "reason": "from the start"});
        t.post(&format!("/v1/jobs/{id}/retry"), retry).await.is(200);
        assert!(t.wait_and_lease("w").await.get("checkpoint").is_none(), "it was dropped");
        assert!(t.job(&id).await.get("checkpoint").is_none());
    });
}

#[test]
fn a_whole_worker_sends_checkpoints_of_its_jobs() {
    run(async |t| {
        for _ in 0..2 {
            t.enqueue(json!({})).await;
        }
        let jobs = t.poll("w", 2).await;
        let active = |job: &Value, sequence: i64| {
            json!({
                "job_id": job["id"], "lease_id": job["lease_id"], "checkpoint": {"at": sequence},
                "checkpoint_sequence": sequence,
            })
        };
        let beat = json!({
            "worker_id": "w", "active_jobs": [active(&jobs[0], 3), active(&jobs[1], 4)],
        });
        let answer = t.post("/v1/workers/heartbeat", beat).await.is(200);
        let kept = |it: usize| answer["jobs"][it]["checkpoint"].clone();
        assert_eq!([kept(0), kept(1)], [json!("stored"), json!("stored")]);
        let other = json!({"lease_id": "00000000-0000-4000-8000-000000000000"});
        let mut lost = active(&jobs[0], 9);
        lost["lease_id"] = other["lease_id"].clone();
        let beat = json!({"worker_id": "w", "active_jobs": [lost, active(&jobs[1], 2)]});
        let answer = t.post("/v1/workers/heartbeat", beat).await.is(200);
        assert_eq!(answer["jobs"][0]["status"], "lost");
        assert!(answer["jobs"][0].get("checkpoint").is_none(), "{answer}");
        assert_eq!(answer["jobs"][1]["checkpoint"], "stale");
        let id = jobs[0]["id"].as_str().expect("an id");
        assert_eq!(t.job(id).await["checkpoint"], json!({"at": 3}));
        let bare = json!({"job_id": id, "checkpoint": 1, "checkpoint_sequence": 1});
        let beat = json!({"worker_id": "w", "active_jobs": [bare]});
        t.post("/v1/workers/heartbeat", beat).await.refuses("active_jobs[0].attempt");
        let twice = json!({
            "worker_id": "w", "active_jobs": [active(&jobs[0], 20), active(&jobs[0], 21)],
        });
        t.post("/v1/workers/heartbeat", twice).await.refuses("active_jobs[1].checkpoint");
        // An attempt that is lost, beside the one that runs.
        let mut lost = active(&jobs[0], 30);
        lost["lease_id"] = other["lease_id"].clone();
        let mut held = active(&jobs[0], 31);
        for field in ["checkpoint", "checkpoint_sequence"] {
            held.as_object_mut().expect("an object").remove(field);
        }
        let beat = json!({"worker_id": "w", "active_jobs": [held, lost]});
        let answer = t.post("/v1/workers/heartbeat", beat).await.is(200);
        assert_eq!([0, 1].map(|it| &answer["jobs"][it]["status"]), ["ok", "lost"]);
        assert!(!answer.to_string().contains("checkpoint"), "nothing is stored: {answer}");
    });
}

#[test]
fn a_checkpoint_has_bounds_and_needs_a_fence() {
    run(async |t| {
        let id = t.enqueue(json!({})).await;
        let job = t.lease("w").await;
        let path = "/v1/workers/heartbeat";
        for sequence in [-1, 1 << 53] {
            t.post(path, beat(&job, sequence, json!(1))).await.refuses("checkpoint_sequence");
        }
        let mut alone = beat(&job, 1, json!(1));
        alone.as_object_mut().expect("an object").remove("checkpoint_sequence");
        t.post(path, alone).await.refuses("checkpoint_sequence");
        let mut alone = beat(&job, 1, json!(1));
        alone.as_object_mut().expect("an object").remove("checkpoint");
        t.post(path, alone).await.refuses("checkpoint");
        let large = json!("x".repeat(64 * 1_024));
        t.post(path, beat(&job, 1, large)).await.is_error(413, "payload_too_large");
        let whole = json!("x".repeat(64 * 1_024 - 2));
        assert_eq!(save(t, &job, 1, whole).await["checkpoint"], "stored");
        let mut bare = beat(&job, 2, json!(1));
        bare.as_object_mut().expect("an object").remove("attempt");
        t.post(path, bare).await.is_error(409, "fence_required");
        let more = json!({"checkpoint": 1, "checkpoint_sequence": 2});
        t.ack_with(&job, "w", "succeeded", more.clone()).await.refuses("checkpoint");
        let mut bare = more;
        bare["job_id"] = json!(id);
        bare["worker_id"] = json!("w");
        bare["status"] = json!("failed");
        t.post("/v1/workers/ack", bare).await.is_error(409, "fence_required");
        assert_eq!(t.job(&id).await["state"], "processing");
        assert_eq!(save(t, &job, 8, Value::Null).await["checkpoint"], "stored");
        let read = t.get(&format!("/v1/jobs/{id}")).await.is(200);
        assert_eq!((&read["checkpoint"], &read["checkpoint_sequence"]), (&Value::Null, &json!(8)));
        // A text is kept byte for byte.
        let text = r#"{"worker_id":"w","job_id":"JOB","attempt":1,"checkpoint_sequence":9,"checkpoint":{"n": 1.50, "big": 12345678901234567890}}"#;
        t.post_text(path, text.replace("JOB", &id)).await.is(200);
        let read = t.get(&format!("/v1/jobs/{id}")).await;
        assert!(read.text.contains(r#"{"n": 1.50, "big": 12345678901234567890}"#), "{}", read.text);
    });
}

#[test]
fn a_checkpoint_that_grew_begins_a_new_row_of_losses() {
    run_alone(async |t| {
        let id = t.enqueue(json!({"max_losses": 2})).await;
        for sequence in 1..=3 {
            let job = t.wait_and_lease("w").await;
            save(t, &job, sequence, json!(sequence)).await;
            lose_leased(t).await;
            let lost = t.job(&id).await;
            assert_eq!((&lost["state"], &lost["losses"]), (&json!("pending"), &json!(sequence)));
        }
        let job = t.wait_and_lease("w").await;
        assert_eq!(save(t, &job, 3, json!(3)).await["checkpoint"], "stored", "it was");
        lose_leased(t).await;
        assert_eq!(t.job_becomes(&id, "dead_letter").await["dead_letter_reason"], "lost");
    });
}

#[test]
fn a_stale_holder_never_replaces_what_the_next_lease_saw() {
    const ROUNDS: i64 = 12;
    run_alone(async |t| {
        let id = t.enqueue(json!({"max_losses": 100})).await;
        let mut before = None;
        for round in 0..ROUNDS {
            let job = t.wait_and_lease("w").await;
            assert_eq!(job.get("checkpoint_sequence").cloned(), before, "round {round}");
            let mut beats = JoinSet::new();
            for step in 1..=8 {
                let (t, job) = (t.clone(), job.clone());
                beats.spawn(async move {
                    let sequence = round * 10 + step;
                    let reply =
                        t.post("/v1/workers/heartbeat", beat(&job, sequence, json!(sequence)));
                    let reply = reply.await;
                    (reply.status == 200).then(|| reply.json()["checkpoint"] == "stored")
                });
            }
            let released = t.ack(&job, "w", "released").await;
            beats.join_all().await;
            released.is(200);
            before = t.job(&id).await.get("checkpoint_sequence").cloned();
        }
    });
}

#[test]
fn checkpoints_count_as_bytes_and_go_with_their_job() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project_with("small", "free", json!({"stored_bytes": 60_000})).await;
        t.enqueue(json!({"max_attempts": 1})).await;
        let job = t.lease("w").await;
        let large = json!("x".repeat(50_000));
        assert_eq!(save(&t, &job, 1, large.clone()).await["checkpoint"], "stored");
        let counted = "select coalesce(sum(bytes), 0)::bigint
            from (select bytes from stored_bytes union all select bytes from stored_byte_deltas) it";
        t.database.until(&format!("select (({counted}) > 50000)::int::bigint"), 1).await;
        let mut sequence = 1;
        crate::harness::until("the project to be full", async || {
            sequence += 1;
            save(&t, &job, sequence, json!("y".repeat(64_000))).await["checkpoint"] == "full"
        })
        .await;
        assert_eq!(save(&t, &job, 1, json!("old")).await["checkpoint"], "full");
        let stored = t.job(job["id"].as_str().expect("an id")).await;
        let kept = stored["checkpoint_sequence"].as_i64().expect("a number");
        let again = save(&t, &job, kept, stored["checkpoint"].clone()).await;
        assert_eq!(again["checkpoint"], "stored", "it was, before the project was full");
        t.ack(&job, "w", "failed").await.is(200);
        let id = job["id"].as_str().expect("an id");
        t.delete(&format!("/v1/dead-letters/{id}")).await.is_empty(204);
        let left = "select count(*) from job_checkpoints";
        assert_eq!(t.database.number(left).await, 0);
        t.database.until(&format!("select (({counted}) < 20000)::int::bigint"), 1).await;
        server.stop().await;
    });
}

#[test]
fn a_key_that_may_not_read_payloads_sees_no_checkpoint() {
    run(async |t| {
        let id = t.enqueue(json!({})).await;
        let job = t.lease("w").await;
        save(t, &job, 1, json!({"secret": "42"})).await;
        let made = json!({"name": "reader", "scopes": ["read"]});
        let key = t.post("/v1/keys", made).await.is(201);
        let reader = t.with_key(key["secret"].as_str().expect("a key"));
        let seen = reader.get(&format!("/v1/jobs/{id}")).await;
        assert!(!seen.text.contains("secret") && seen.text.contains("checkpoint"), "{}", seen.text);
        assert_eq!(seen.is(200)["redacted"], true);
    });
}
