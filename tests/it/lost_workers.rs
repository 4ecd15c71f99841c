//! Workers that make no calls: what becomes of their jobs, and what is said of them.

use serde_json::{Value, json};

use crate::{
    harness::{LoneProject, TestServer, eventually, fresh_database, limited, run_alone, until},
    workers::{beat, register, worker},
};

#[test]
fn a_worker_that_beats_and_falls_silent_loses_its_leases_without_a_failure() {
    run_alone(async |t| {
        let (id, spared) = (t.enqueue(json!({})).await, t.enqueue(json!({})).await);
        t.lease("beats").await;
        t.lease("does-not").await;
        beat(t, "beats", &[]).await;
        // What it did before is in the store once its neighbour is.
        until("the worker to be listed", async || worker(t, "does-not").await != Value::Null).await;
        t.database
            .execute(
                "update workers set last_seen_at = now() - interval '31 s',
                     last_beat_at = last_beat_at - interval '31 s';
                 update jobs set claimed_at = claimed_at - interval '31 s',
                     lease_expires_at = lease_expires_at - interval '31 s'",
            )
            .await;
        let job = t.wait_and_lease("other").await;
        assert_eq!((&job["id"], &job["failures"]), (&json!(id), &json!(0)));
        let attempt = t.job(&id).await["attempts"][0].clone();
        assert_eq!(
            (&attempt["outcome"], &attempt["error"]["type"]),
            (&json!("released"), &json!("worker_gone"))
        );
        assert_eq!(t.job(&spared).await["state"], "processing", "its silence means nothing");
        // It is marked after its leases have ended.
        until("the worker to be terminated", async || {
            worker(t, "beats").await["state"] == "terminated"
        })
        .await;
        assert_eq!(worker(t, "beats").await["alive"], false);
        beat(t, "beats", &[]).await;
        let back = worker(t, "beats").await;
        assert_eq!((&back["alive"], &back["state"]), (&json!(true), &json!("running")), "back");
        t.enqueue(json!({})).await;
        t.lease("beats").await;
    });
}

/// Makes all calls of workers and all leases happen that much earlier, once they are written.
async fn go_silent(t: &LoneProject, seconds: u32) {
    t.enqueue(json!({"queue": "last"})).await;
    t.polled(json!({"worker_id": "last", "queues": ["last"]})).await;
    until("the last worker to be listed", async || worker(t, "last").await != Value::Null).await;
    t.database
        .execute(&format!(
            "update workers set last_seen_at = last_seen_at - interval '{seconds} s',
                 last_beat_at = last_beat_at - interval '{seconds} s';
             update jobs set claimed_at = claimed_at - interval '{seconds} s',
                 lease_expires_at = lease_expires_at - interval '{seconds} s'
             where state = 'processing'"
        ))
        .await;
}

#[test]
fn a_worker_that_says_how_often_it_calls_is_gone_after_three_times_that() {
    run_alone(async |t| {
        for bad in [4, 3_601] {
            let body =
                json!({"worker_id": "w", "queues": [], "job_types": [], "beat_seconds": bad});
            t.post("/v1/workers/register", body).await.refuses("beat_seconds");
        }
        for (worker_id, beat_seconds) in [("often", 5), ("seldom", 600)] {
            register(t, worker_id, json!({"beat_seconds": beat_seconds})).await;
            assert_eq!(worker(t, worker_id).await["beat_seconds"], beat_seconds);
        }
        // A worker as other job queues have it: one slot, no poll and no heartbeat while it works.
        let job = json!({"timeout_seconds": 400, "max_attempts": 1});
        let mut leased = Vec::new();
        for worker_id in ["often", "seldom", "plain"] {
            t.enqueue(job.clone()).await;
            leased.push(t.lease(worker_id).await);
        }
        let intervals = [&leased[0], &leased[1]].map(|it| &it["heartbeat_interval_seconds"]);
        assert_eq!(intervals, [&json!(5), &json!(66)], "at most what the worker registered");
        let id = leased[0]["id"].as_str().expect("an id");
        let why = t.get(&format!("/v1/jobs/{id}/explain")).await.is(200);
        let summary = why["summary"].as_str().expect("a sentence");
        assert!(summary.starts_with("worker often runs it: if it makes no call, "), "{summary}");
        let silence = format!(
            "select extract(epoch from '{}'::timestamptz - last_seen_at)::bigint
             from workers where worker_id = 'often'",
            why["next_change_at"].as_str().expect("a time")
        );
        assert_eq!(
            t.database.number(&silence).await,
            15,
            "three times that, and not the end of the lease"
        );
        go_silent(t, 150).await;
        // A job that may fail once may be lost once.
        let lost = t.job_becomes(id, "dead_letter").await;
        let why = (&lost["dead_letter_reason"], &lost["losses"], &lost["max_losses"]);
        assert_eq!(why, (&json!("lost"), &json!(1), &json!(1)));
        t.act(&format!("/v1/jobs/{id}/retry")).await.is(200);
        let again = t.wait_and_lease("other").await;
        assert_eq!(
            (&again["id"], &again["attempt"], &again["failures"]),
            (&json!(id), &json!(2), &json!(0))
        );
        t.ack(&leased[0], "often", "succeeded").await.is_error(409, "worker_mismatch");
        until("the worker to be gone", async || worker(t, "often").await["alive"] == false).await;
        assert_eq!(worker(t, "seldom").await["alive"], true, "it may be silent for 30 minutes");
        for (job, worker_id) in [(&leased[1], "seldom"), (&leased[2], "plain")] {
            t.ack(job, worker_id, "succeeded").await.is(200);
            assert_eq!(t.job(job["id"].as_str().expect("an id")).await["attempt"], 1);
        }
    });
}

#[test]
fn a_poll_that_waits_is_a_call_all_the_time() {
    run_alone(async |t| {
        register(t, "w", json!({"beat_seconds": 5})).await;
        let parked = {
            let t = t.clone();
            tokio::spawn(async move { t.wait_and_lease("w").await })
        };
        // The poll itself is heard at its beginning.
        let heard = "select count(*) from workers
                     where worker_id = 'w' and last_seen_at > registered_at + interval '4 s'";
        t.database.until(heard, 1).await;
        let id = t.enqueue(json!({"timeout_seconds": 1_000})).await;
        assert_eq!(parked.await.expect("an answer")["id"], id);
        go_silent(t, 16).await;
        t.job_becomes(&id, "pending").await;
    });
}

#[test]
fn jobs_are_released_for_a_worker_that_does_not() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let (t, other) = (&server.project("ours").await, &server.project("theirs").await);
        let theirs = other.enqueue(json!({})).await;
        other.lease("hangs").await;
        let mut jobs = Vec::new();
        register(t, "hangs", json!({})).await;
        for worker_id in ["hangs", "silent", "silent", "lives"] {
            t.enqueue(json!({"timeout_seconds": 1_000})).await;
            jobs.push(t.lease(worker_id).await);
        }
        let id = |at: usize| jobs[at]["id"].as_str().expect("an id");
        let released = |jobs: u32| json!({"released": jobs, "has_more": false});
        let of_worker = "/v1/workers/hangs/take-back";
        assert_eq!(t.act(of_worker).await.is(200), released(1));
        assert_eq!(t.act(of_worker).await.is(200), released(0));
        let job = t.job(id(0)).await;
        let attempt = &job["attempts"][0];
        assert_eq!((&job["state"], &job["failures"]), (&json!("pending"), &json!(0)));
        assert_eq!(
            (&attempt["outcome"], &attempt["error"]["type"]),
            (&json!("released"), &json!("take_back"))
        );
        t.ack(&jobs[0], "hangs", "succeeded").await.is_error(409, "invalid_state");
        let of_queue = "/v1/queues/default/take-back";
        assert_eq!(t.act(of_queue).await.is(200), released(0), "no worker is silent yet");
        go_silent(t, 70).await;
        // It is heard again, but its old lease is not renewed.
        beat(t, "lives", &[]).await;
        until("the worker to be heard", async || worker(t, "lives").await["alive"] == true).await;
        let silent = t.get("/v1/queues/default").await.is(200)["silent"].clone();
        assert_eq!((&silent["jobs"], &silent["workers"]), (&json!(2), &json!(1)), "{silent}");
        let returns = t.job(id(1)).await["lease_expires_at"].clone();
        assert!(silent["return_by"].as_str() >= returns.as_str(), "{silent} {returns}");
        let explained = t.get(&format!("/v1/jobs/{}/explain", id(1))).await.is(200);
        let summary = explained["summary"].as_str().expect("a sentence");
        assert!(summary.contains("has made no call for 7"), "{summary}");
        let metrics = t.get("/v1/metrics/prometheus").await.text;
        let counted = r#"silent_jobs{project="ours",queue="default"} 2"#;
        assert!(metrics.contains(counted), "{metrics}");
        assert_eq!(t.act(of_queue).await.is(200), released(2));
        assert_eq!(t.get("/v1/queues/default").await.is(200)["silent"], Value::Null);
        assert_eq!(t.job(id(1)).await["state"], "pending");
        assert_eq!(t.job(id(3)).await["state"], "processing", "its worker is back");
        t.ack(&jobs[3], "lives", "succeeded").await.is(200);
        assert_eq!(other.job(&theirs).await["state"], "processing");
        let unknown_field = json!({"dry_run": true});
        t.post(of_worker, unknown_field.clone()).await.refuses("dry_run");
        t.post(of_queue, unknown_field).await.refuses("dry_run");
        t.poll("new", 1).await;
        assert_eq!(t.act("/v1/workers/new/take-back").await.is(200)["has_more"], false);
        t.act("/v1/workers/unknown/take-back").await.is_error(404, "worker_not_found");
        t.act("/v1/queues/unknown/take-back").await.is_error(404, "queue_not_found");
        let audit = t.get("/v1/audit-log").await.is(200);
        let entries = audit["entries"].as_array().expect("entries").iter();
        let actions: Vec<_> = entries.filter_map(|it| it["action"].as_str()).collect();
        assert_eq!(actions.iter().filter(|it| **it == "queue.take_back").count(), 2);
        assert_eq!(actions.iter().filter(|it| **it == "worker.take_back").count(), 3);
        server.stop().await;
    });
}

#[test]
fn a_worker_of_another_protocol_that_is_gone_counts_a_failure() {
    run_alone(async |t| {
        let id = t.enqueue(json!({})).await;
        let fetch = json!({"worker_id": "w", "queues": ["default"]});
        t.post("/ojs/v1/workers/fetch", fetch).await.is(200);
        let beat = json!({"worker_id": "w", "active_jobs": []});
        t.post("/ojs/v1/workers/heartbeat", beat).await.is(200);
        go_silent(t, 31).await;
        assert_eq!(t.wait_and_lease("other").await["failures"], 1);
        assert_eq!(t.job(&id).await["attempts"][0]["outcome"], "lease_expired");
    });
}

#[test]
fn a_bare_ack_of_a_worker_that_was_gone_is_none_of_its_next_attempt() {
    run_alone(async |t| {
        let id = t.enqueue(json!({})).await;
        t.lease("w").await;
        beat(t, "w", &[]).await;
        go_silent(t, 31).await;
        t.job_becomes(&id, "pending").await;
        t.wait_and_lease("w").await;
        let bare = json!({"job_id": id, "worker_id": "w", "status": "succeeded"});
        t.post("/v1/workers/ack", bare).await.is_error(409, "fence_required");
    });
}

#[test]
fn a_worker_that_is_back_keeps_its_new_leases() {
    run_alone(async |t| {
        let lease = async |worker: &str| {
            let poll = json!({"worker_id": worker, "queues": [worker], "lease_seconds": 300});
            t.polled(poll).await.remove(0)
        };
        for worker in ["back", "gone"] {
            t.enqueue(json!({"queue": worker})).await;
            lease(worker).await;
            beat(t, worker, &[]).await;
        }
        t.database
            .execute(
                "update jobs set claimed_at = claimed_at - interval '31 s',
                     lease_expires_at = lease_expires_at - interval '31 s'",
            )
            .await;
        t.enqueue(json!({"queue": "back"})).await;
        let new = lease("back").await;
        // What both did is in the store once a third one is. Then it is as if what `back` did
        // since were not yet written.
        t.enqueue(json!({"queue": "seen"})).await;
        lease("seen").await;
        until("the worker to be listed", async || worker(t, "seen").await != Value::Null).await;
        // Those that are silent for longest come first: `back` is looked at before `gone` is lost.
        let silent = "update workers set last_seen_at = now() - interval '31 s',
                          last_beat_at = now() - case worker_id
                              when 'back' then interval '40 s' else interval '31 s'
                          end
                      where worker_id <> 'seen'";
        t.database.execute(silent).await;
        until("the worker to be terminated", async || {
            worker(t, "gone").await["state"] == "terminated"
        })
        .await;
        let id = new["id"].as_str().expect("an id");
        let shown = t.job(id).await;
        assert_eq!(shown["state"], "processing", "it was heard when it got the lease: {shown}");
        assert_eq!(worker(t, "back").await["state"], "running");
    });
}

#[test]
fn jobs_that_silent_workers_hold_are_one_incident_until_they_return() {
    run_alone(async |t| {
        let queues = ["mail", "video"];
        let put = async |enabled: bool| {
            let alarm = json!({"for_seconds": 0, "queues": queues, "enabled": enabled});
            t.put("/v1/alarms/workers_silent", alarm).await.is(200);
        };
        put(false).await;
        // Many that live, whose names come first.
        for number in 0..30 {
            t.enqueue(json!({"queue": "mail"})).await;
            let poll = json!({"worker_id": format!("a-{number}"), "queues": ["mail"]});
            assert_eq!(t.polled(poll).await.len(), 1);
        }
        for (queue, jobs) in [("mail", 2), ("video", 1)] {
            for _ in 0..jobs {
                t.enqueue(json!({ "queue": queue })).await;
            }
            let poll =
                json!({"worker_id": format!("of-{queue}"), "queues": [queue], "capacity": 9});
            assert_eq!(t.polled(poll).await.len(), jobs);
        }
        go_silent(t, 70).await;
        for number in 0..30 {
            beat(t, &format!("a-{number}"), &[]).await;
        }
        put(true).await;
        let open = eventually("an incident", async || {
            let page = t.get("/v1/incidents?state=open").await.is(200);
            page["incidents"].as_array().expect("a list").first().cloned()
        })
        .await;
        let details = &open["details"];
        assert_eq!((&open["rule"], &details["value"]), (&json!("workers_silent"), &json!(3)));
        assert_eq!((&details["queues"], &details["name"]), (&json!(queues), &Value::Null));
        let last = t.database.text(
            "select to_char(max(lease_expires_at) at time zone 'utc', 'YYYY-MM-DD HH24:MI:SS')
             from jobs where state = 'processing' and queue <> 'last'",
        );
        let summary = open["summary"].as_str().expect("a sentence");
        assert!(summary.starts_with("3 running jobs are held"), "{summary}");
        assert!(summary.contains(&format!("by {} UTC", last.await)), "{summary}");
        t.act("/v1/queues/mail/take-back").await.is(200);
        t.act("/v1/workers/of-video/take-back").await.is(200);
        until("the incident to end", async || {
            t.get("/v1/incidents?state=open").await.is(200)["incidents"] == json!([])
        })
        .await;
    });
}
