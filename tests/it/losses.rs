//! Attempts that end without an outcome are losses: they have bounds of their own.

use serde_json::{Value, json};

use crate::harness::{
    LoneProject, TestServer, eventually, fresh_database, limited, run, run_alone, until,
};

/// Leases the next job, and loses it.
async fn lose(t: &LoneProject) -> Value {
    let job = t.wait_and_lease("w").await;
    lose_leased(t).await;
    job
}

async fn lose_leased(t: &LoneProject) {
    t.expire_leases().await;
    t.database.until("select count(*) from jobs where state = 'processing'", 0).await;
}

/// What a job says of its losses and failures.
fn counts(job: &Value) -> [i64; 2] {
    ["losses", "failures"].map(|it| job[it].as_i64().expect("a number"))
}

#[test]
fn a_payload_that_kills_each_worker_stops_after_its_losses_in_a_row() {
    run_alone(async |t| {
        let id = t.enqueue(json!({"max_losses": 3, "max_attempts": 1})).await;
        lose(t).await;
        let waiting = t.job(&id).await;
        assert_eq!(counts(&waiting), [1, 0]);
        assert_eq!(waiting["waiting_for"], "worker", "it is ready at once");
        let again = lose(t).await;
        assert_eq!(again["failures"], 0);
        let waiting = t.job(&id).await;
        assert_eq!((counts(&waiting), &waiting["waiting_for"]), ([2, 0], &json!("backoff")));
        let why = t.get(&format!("/v1/jobs/{id}/explain")).await.is(200);
        assert!(
            why["summary"].as_str().is_some_and(|it| it.starts_with("lost 2 times in a row")),
            "{why}"
        );
        lose(t).await;
        let dead = t.job_becomes(&id, "dead_letter").await;
        assert_eq!((counts(&dead), &dead["dead_letter_reason"]), ([3, 0], &json!("lost")));
        assert_eq!(dead["last_error"]["type"], "lease_expired");
        let why = t.get(&format!("/v1/jobs/{id}/explain")).await.is(200);
        let why = why["summary"].as_str().expect("a sentence");
        assert!(why.starts_with("dead-lettered because its workers were lost 3 times"), "{why}");
        t.act(&format!("/v1/jobs/{id}/retry")).await.is(200);
        let back = t.job(&id).await;
        assert_eq!((counts(&back), &back["dead_letter_reason"]), ([0, 0], &Value::Null));
        let job = t.wait_and_lease("w").await;
        t.ack(&job, "w", "failed").await.is(200);
        let dead = t.job(&id).await;
        assert_eq!((counts(&dead), &dead["dead_letter_reason"]), ([0, 1], &json!("failed")));
    });
}

#[test]
fn an_outcome_or_progress_begins_a_new_row_of_losses() {
    run_alone(async |t| {
        let retry = json!({"strategy": "constant", "initial_seconds": 0, "jitter_seconds": 0});
        let id = t.enqueue(json!({"max_losses": 2, "retry": retry})).await;
        lose(t).await;
        let job = t.wait_and_lease("w").await;
        t.ack(&job, "w", "failed").await.is(200);
        lose(t).await;
        assert_eq!(counts(&t.job(&id).await), [2, 1], "an outcome was between them");
        for (progress, losses) in [(0.5, 3), (0.6, 4)] {
            let job = t.wait_and_lease("w").await;
            let beat = json!({
                "job_id": job["id"], "worker_id": "w", "attempt": job["attempt"],
                "progress": progress,
            });
            t.post("/v1/workers/heartbeat", beat).await.is(200);
            lose_leased(t).await;
            let lost = t.job(&id).await;
            assert_eq!((&lost["state"], counts(&lost)), (&json!("pending"), [losses, 1]));
        }
        let job = t.wait_and_lease("w").await;
        let beat = json!({
            "job_id": job["id"], "worker_id": "w", "attempt": job["attempt"], "progress": 0.6,
        });
        t.post("/v1/workers/heartbeat", beat).await.is(200);
        lose_leased(t).await;
        let dead = t.job_becomes(&id, "dead_letter").await;
        assert_eq!(dead["dead_letter_reason"], "lost", "it came no further");
    });
}

#[test]
fn losses_of_a_type_in_a_row_open_its_circuit_breaker() {
    run_alone(async |t| {
        t.patch("/v1/queues/default", json!({"brake_after": 1})).await.is(200);
        let id = t.enqueue(json!({"job_type": "poison"})).await;
        let paused = async || t.get("/v1/queues/default").await.is(200)["paused_types"][0].clone();
        lose(t).await;
        assert_eq!(paused().await, Value::Null, "a host that dies loses healthy jobs, too");
        lose(t).await;
        let paused = paused().await;
        let paused = (&paused["job_type"], &paused["paused_by"]);
        assert_eq!(paused, (&json!("poison"), &json!("brake")));
        assert_eq!(t.job(&id).await["state"], "pending", "it is no dead letter");
    });
}

#[test]
fn the_protocol_that_leased_it_and_its_project_say_how_a_loss_counts() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = &server.project("losses").await;
        let fetch = json!({"worker_id": "w", "queues": ["default"]});
        let id = t.enqueue(json!({})).await;
        t.post("/ojs/v1/workers/fetch", fetch).await.is(200);
        lose_leased(t).await;
        assert_eq!(counts(&t.job(&id).await), [0, 1], "Open Job Spec counts a failure");
        lose(t).await;
        assert_eq!(counts(&t.job(&id).await), [1, 1], "the native API does not");
        t.database.execute("update projects set losses_count_as_failures = true").await;
        t.wait_and_lease("w").await;
        lose_leased(t).await;
        let dead = t.job(&id).await;
        assert_eq!(counts(&dead), [1, 2], "the project says so");
        server.stop().await;
    });
}

#[test]
fn a_take_back_lets_the_job_wait_again_however_often_it_was_lost() {
    run_alone(async |t| {
        let id = t.enqueue(json!({"max_losses": 1, "timeout_seconds": 1_000})).await;
        for losses in 1..=2 {
            t.wait_and_lease("w").await;
            until("the lease to be released", async || {
                t.act("/v1/workers/w/take-back").await.is(200)["released"] == 1
            })
            .await;
            let back = t.job(&id).await;
            assert_eq!((&back["state"], counts(&back)), (&json!("pending"), [losses, 0]));
        }
    });
}

#[test]
fn max_losses_has_bounds_and_a_default() {
    run(async |t| {
        for bad in [0, 101, -1] {
            t.post("/v1/jobs", json!({"job_type": "t", "max_losses": bad}))
                .await
                .refuses("max_losses");
        }
        for (job, max_losses) in [
            (json!({}), 5),
            (json!({"max_attempts": 1}), 1),
            (json!({"max_attempts": 1, "max_losses": 9}), 9),
        ] {
            let id = t.enqueue(job).await;
            let stored = t.job(&id).await;
            assert_eq!((&stored["max_losses"], &stored["losses"]), (&json!(max_losses), &json!(0)));
            let replayed = t.post(&format!("/v1/jobs/{id}/replay"), json!({})).await.is(201);
            assert_eq!(replayed["max_losses"], max_losses);
        }
    });
}

#[test]
fn people_learn_of_a_job_that_loses_its_workers_and_of_their_hosts() {
    run_alone(async |t| {
        let host = json!({
            "worker_id": "w", "queues": ["default"], "job_types": ["*"], "hostname": "host-a",
        });
        t.post("/v1/workers/register", host).await.is(200);
        let id = t.enqueue(json!({"job_type": "poison"})).await;
        for _ in 0..3 {
            lose(t).await;
        }
        let incident = eventually("an incident", async || {
            let page = t.get("/v1/incidents?state=open").await.is(200);
            let open = page["incidents"].as_array().expect("a list").clone();
            open.into_iter().find(|it| it["rule"] == "jobs_lost")
        })
        .await;
        let details = &incident["details"];
        assert_eq!(incident["subject"], "default/poison");
        assert_eq!((&details["job_id"], &details["value"]), (&json!(id), &json!(3)));
        let workers = details["lost_by"].as_array().expect("workers");
        assert_eq!(workers.len(), 1, "one worker lost it three times: {workers:?}");
        assert_eq!(
            (&workers[0]["worker_id"], &workers[0]["hostname"]),
            (&json!("w"), &json!("host-a"))
        );
        assert!(workers[0]["last_seen_at"].is_string(), "{workers:?}");
        let summary = incident["summary"].as_str().expect("a sentence");
        assert!(summary.contains("lost 3 times in a row by its workers: w on host-a"), "{summary}");
    });
}
