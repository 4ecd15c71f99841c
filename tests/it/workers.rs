//! Workers: registration, directives, and timeouts.

use crate::harness::{
    Reply, TestProject, TestServer, eventually, fresh_database, limited, run, run_alone, until,
};
use fencepost_domain::limits;
use serde_json::{Value, json};

pub async fn beat(t: &TestProject, worker: &str, jobs: &[&Value]) -> Value {
    let active: Vec<_> = jobs
        .iter()
        .map(|it| json!({"job_id": it["id"], "attempt": it["attempt"], "lease_id": it["lease_id"]}))
        .collect();
    let beat = json!({"worker_id": worker, "active_jobs": active});
    t.post("/v1/workers/heartbeat", beat).await.is(200)
}

async fn direct(t: &TestProject, worker: &str, what: &str) -> Reply {
    t.post(&format!("/v1/workers/{worker}/{what}"), json!({})).await
}

pub async fn worker(t: &TestProject, name: &str) -> Value {
    let page = t.get("/v1/workers").await.is(200);
    let workers = page["workers"].as_array().expect("workers");
    workers.iter().find(|it| it["worker_id"] == name).cloned().unwrap_or(Value::Null)
}

pub async fn register(t: &TestProject, name: &str, more: Value) -> Value {
    let mut body = json!({"worker_id": name, "queues": ["default"], "job_types": []});
    body.as_object_mut().expect("an object").extend(more.as_object().expect("one").clone());
    t.post("/v1/workers/register", body).await.is(200)
}

#[test]
fn a_worker_may_send_fields_of_a_newer_version_and_no_misspelt_ones() {
    run(async |t| {
        let about = json!({
            "worker_id": "w", "queues": ["default"], "job_types": ["t"], "region": {"a": [1]},
        });
        t.post("/v1/workers/register", about).await.is(200);
        let id = t.enqueue(json!({"job_type": "t"})).await;
        let poll = json!({"worker_id": "w", "queues": ["default"], "shard": 3});
        let polled = t.post("/v1/workers/poll", poll).await.is(200);
        assert_eq!(polled["jobs"][0]["id"], json!(id));
        let beat = json!({"job_id": id, "worker_id": "w", "attempt": 1, "cpu": 0.5});
        t.post("/v1/workers/heartbeat", beat).await.is(200);
        let ack = |attempt: &str| json!({"a": 7, "job_id": id, "worker_id": "w", "status": "succeeded", attempt: 1, "z": 7});
        t.post("/v1/workers/ack", ack("atempt")).await.refuses("atempt");
        let both = json!({"acks": [ack("atempt"), ack("attempt")]});
        let results = t.post("/v1/workers/ack/batch", both).await.is(200)["results"].clone();
        assert_eq!((&results[0]["status"], &results[1]["status"]), (&json!(400), &json!(200)));
        t.post("/v1/jobs", json!({"job_type": "t", "shard": 3})).await.refuses("shard");
    });
}

#[test]
fn one_heartbeat_renews_all_jobs_of_a_worker_and_says_what_became_of_each() {
    run_alone(async |t| {
        for _ in 0..3 {
            t.enqueue(json!({"timeout_seconds": 600})).await;
        }
        let jobs = t.poll("w", 3).await;
        let (kept, cancelled, lost) = (&jobs[0], &jobs[1], &jobs[2]);
        let cancel = format!("/v1/jobs/{}/cancel", cancelled["id"].as_str().expect("an id"));
        t.post(&cancel, json!({})).await.is(200);
        t.ack(lost, "w", "succeeded").await.is(200);
        t.database.execute("update jobs set lease_expires_at = now() + interval '9 s'").await;
        let reply = beat(t, "w", &[kept, cancelled, lost]).await;
        let of = |job: &Value, status: &str, lease: Value| json!({"job_id": job["id"], "status": status, "lease_seconds": lease});
        assert_eq!(
            reply,
            json!({"state": "running", "jobs": [
                of(kept, "ok", json!(300)),
                of(cancelled, "cancel", json!(300)),
                of(lost, "lost", Value::Null),
            ]})
        );
        let renewed = "select count(*) from jobs where lease_expires_at > now() + interval '200 s'";
        assert_eq!(t.database.number(renewed).await, 2);
        let by_id =
            json!({"worker_id": "w", "active_job_ids": [kept["id"], "nonsense", kept["id"]]});
        let reply = t.post("/v1/workers/heartbeat", by_id).await.is(200);
        let statuses: Vec<_> =
            reply["jobs"].as_array().expect("jobs").iter().map(|it| &it["status"]).collect();
        assert_eq!(statuses, ["ok", "lost", "ok"]);
        let stale = json!({"worker_id": "w", "active_jobs": [
            {"job_id": kept["id"], "attempt": 2}, {"job_id": cancelled["id"], "progress": 0.5},
        ]});
        let reply = t.post("/v1/workers/heartbeat", stale).await.is(200);
        assert_eq!(reply["jobs"][0]["status"], "lost");
        let id = cancelled["id"].as_str().expect("an id");
        assert_eq!(t.job(id).await["progress"], 0.5);
    });
}

#[test]
fn a_bad_heartbeat_is_refused_by_name() {
    run(async |t| {
        let with = async |more: Value| {
            let mut beat = json!({"worker_id": "w"});
            beat.as_object_mut().expect("an object").extend(more.as_object().expect("it").clone());
            t.post("/v1/workers/heartbeat", beat).await
        };
        with(json!({})).await.is(200);
        with(json!({"attempt": 1})).await.refuses("attempt");
        with(json!({"state": "asleep"})).await.refuses("state");
        with(json!({"job_id": "x", "state": "quiet"})).await.refuses("state");
        with(json!({"active_jobs": [], "active_job_ids": []})).await.refuses("active_job_ids");
        with(json!({"active_job_ids": vec!["x"; 501]})).await.refuses("active_job_ids");
        with(json!({"active_jobs": [{"job_id": "x", "progress": 2}]}))
            .await
            .refuses("active_jobs[0].progress");
        with(json!({"active_jobs": [{}]})).await.refuses("active_jobs[0].job_id");
    });
}

#[test]
fn a_directive_reaches_the_worker_with_its_next_heartbeat_and_its_polls_get_nothing() {
    run(async |t| {
        register(t, "w", json!({})).await;
        t.enqueue(json!({})).await;
        let parked = {
            let t = t.clone();
            let poll = json!({"worker_id": "w", "queues": ["empty"]});
            tokio::spawn(async move { t.post("/v1/workers/poll", poll).await.is(200) })
        };
        // The poll is parked when its worker was seen.
        until("the queues of the worker", async || worker(t, "w").await["queues"] != Value::Null)
            .await;
        for (what, state) in [("quiet", "quiet"), ("terminate", "terminate")] {
            let reply = direct(t, "w", what).await.is(200);
            assert_eq!(reply, json!({"worker_id": "w", "directive": state}));
            assert_eq!(beat(t, "w", &[]).await["state"], state);
            let poll = json!({"worker_id": "w", "queues": ["default"], "wait_seconds": 0});
            let reply = t.post("/v1/workers/poll", poll).await.is(200);
            assert_eq!(reply, json!({"jobs": [], "state": state}));
            assert_eq!(worker(t, "w").await["directive"], state);
        }
        let reply = parked.await.expect("an answer");
        assert_eq!(reply["jobs"], json!([]));
        assert!(["quiet", "terminate"].iter().any(|it| reply["state"] == *it), "{reply}");
        register(t, "w", json!({})).await;
        assert_eq!(beat(t, "w", &[]).await["state"], "terminate", "a directive sticks");
        assert_eq!(direct(t, "w", "resume").await.is(200)["directive"], Value::Null);
        assert_eq!(worker(t, "w").await["directive"], Value::Null);
        assert_eq!(beat(t, "w", &[]).await["state"], "running");
        assert_eq!(t.poll("w", 1).await.len(), 1);
        direct(t, "unknown", "quiet").await.is_error(404, "worker_not_found");
    });
}

#[test]
fn a_worker_hears_its_own_state_until_it_gets_a_directive() {
    run(async |t| {
        let says = async |state: &str| {
            let beat = json!({"worker_id": "w", "state": state});
            t.post("/v1/workers/heartbeat", beat).await.is(200)["state"].clone()
        };
        register(t, "w", json!({})).await;
        for state in ["running", "quiet", "terminate", "quiet"] {
            assert_eq!(says(state).await, *state);
        }
        direct(t, "w", "terminate").await.is(200);
        assert_eq!(says("quiet").await, "terminate");
        direct(t, "w", "resume").await.is(200);
        assert_eq!(says("quiet").await, "running");
        assert_eq!(says("quiet").await, "running", "until it runs");
        assert_eq!(says("running").await, "running");
        assert_eq!(says("quiet").await, "quiet", "on its own again");
    });
}

#[test]
fn a_worker_that_goes_hands_its_jobs_back_and_stays_gone_until_it_registers() {
    run(async |t| {
        let goodbyes = [
            ("/v1/workers/deregister", json!({"worker_id": "w"})),
            ("/v1/workers/heartbeat", json!({"worker_id": "w", "state": "terminated"})),
        ];
        for (path, body) in goodbyes {
            register(t, "w", json!({})).await;
            let id = t.enqueue(json!({})).await;
            let job = t.lease("w").await;
            let reply = t.post(path, body).await.is(200);
            if path.ends_with("deregister") {
                assert_eq!(reply, json!({"status": "terminated", "released": 1}));
            } else {
                assert_eq!(reply["state"], "terminate");
            }
            let read = t.job(&id).await;
            assert_eq!((&read["state"], &read["failures"]), (&json!("pending"), &json!(0)));
            assert_eq!(read["attempts"][0]["outcome"], "released");
            t.ack(&job, "w", "succeeded").await.is_error(409, "invalid_state");
            let poll = json!({"worker_id": "w", "queues": ["default"], "wait_seconds": 0});
            let reply = t.post("/v1/workers/poll", poll).await.is(200);
            assert_eq!(reply, json!({"jobs": [], "state": "terminate"}));
            let gone = worker(t, "w").await;
            assert_eq!((&gone["state"], &gone["alive"]), (&json!("terminated"), &json!(false)));
            register(t, "w", json!({})).await;
            let again = t.lease("w").await;
            assert_eq!((&again["id"], &again["attempt"]), (&json!(id), &json!(2)));
            t.ack(&again, "w", "succeeded").await.is(200);
        }
        let unknown = json!({"worker_id": "unknown"});
        t.post("/v1/workers/deregister", unknown).await.is_error(404, "worker_not_found");
    });
}

#[test]
fn a_worker_that_has_only_polled_is_known_at_once() {
    run(async |t| {
        t.enqueue(json!({})).await;
        t.lease("fresh").await;
        t.post("/v1/workers/fresh/quiet", json!({})).await.is(200);
        let gone = json!({"worker_id": "fresh"});
        t.post("/v1/workers/deregister", gone).await.is(200);
        assert_eq!(worker(t, "fresh").await["state"], "terminated");
        t.lease("other").await;
        let gone = json!({"worker_id": "other"});
        t.post("/v1/workers/deregister", gone).await.is(200);
        assert_eq!(worker(t, "other").await["state"], "terminated");
    });
}

#[test]
fn the_registry_shows_who_is_there_and_what_they_have() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let (t, other) = (server.project("ours").await, server.project("theirs").await);
        let more = json!({
            "labels": ["gpu", "a"], "concurrency": 4, "hostname": "h", "pid": 7,
            "sdk_version": "1.2", "job_types": ["test"],
        });
        register(&t, "a", more).await;
        register(&t, "b", json!({})).await;
        t.enqueue(json!({})).await;
        t.lease("a").await;
        let page = t.get("/v1/workers?label=gpu").await.is(200);
        assert_eq!(page["workers"].as_array().map(Vec::len), Some(1));
        let mut seen = page["workers"][0].clone();
        for time in ["last_seen_at", "registered_at"] {
            assert!(seen.as_object_mut().expect("an object").remove(time).is_some());
        }
        assert_eq!(
            seen,
            json!({
                "worker_id": "a", "state": "running", "directive": null, "alive": true,
                "queues": ["default"], "job_types": ["test"], "labels": ["a", "gpu"],
                "beat_seconds": null,
                "concurrency": 4, "slots_in_use": 1, "hostname": "h", "sdk_version": "1.2",
                "pid": 7,
            })
        );
        let first = t.get("/v1/workers?limit=1").await.is(200);
        assert_eq!(first["has_more"], true);
        let cursor = first["next_cursor"].as_str().expect("a cursor");
        let second = t.get(&format!("/v1/workers?limit=1&cursor={cursor}")).await.is(200);
        assert_eq!(
            (&second["workers"][0]["worker_id"], &second["has_more"]),
            (&json!("b"), &json!(false))
        );
        assert_eq!(other.get("/v1/workers").await.is(200)["workers"], json!([]));
        direct(&other, "a", "quiet").await.is_error(404, "worker_not_found");
        other
            .post("/v1/workers/deregister", json!({"worker_id": "a"}))
            .await
            .is_error(404, "worker_not_found");
        assert_eq!(worker(&t, "a").await["state"], "running");
        t.get("/v1/workers?limit=0").await.refuses("limit");
        server.stop().await;
    });
}

#[test]
fn a_worker_that_only_polls_is_known_too() {
    run(async |t| {
        let poll =
            json!({"worker_id": "p", "queues": ["q"], "job_types": ["x"], "wait_seconds": 0});
        t.post("/v1/workers/poll", poll).await.is(200);
        let seen = eventually("the worker to be listed", async || {
            let seen = worker(t, "p").await;
            (seen != Value::Null).then_some(seen)
        })
        .await;
        assert_eq!((&seen["queues"], &seen["job_types"]), (&json!(["q"]), &json!(["x"])));
        assert_eq!(seen["alive"], true);
    });
}

#[test]
fn schedules_that_a_worker_brings_are_kept_and_bad_ones_reported() {
    run_alone(async |t| {
        let schedules = json!({"recurring_schedules": [
            {"job_type": "MyApp.Jobs.Cleanup", "cron_expression": "0 3 * * *", "queue": "night", "timezone": "Europe/Paris"},
            {"job_type": "Report", "cron_expression": "61 * * * *"},
            {"job_type": "Report", "cron_expression": "@daily", "timezone": "Mars/Base"},
            {"job_type": "Other.Cleanup", "cron_expression": "@hourly"},
            {"job_type": "Report", "cron_expression": "@daily", "timezon": "UTC"},
            "nonsense",
            {"job_type": "MyApp.Jobs.Cleanup", "cron_expression": "0 3 * * *", "queue": "night", "timezone": "Europe/Paris"},
            {"job_type": "MyApp.Jobs.Cleanup", "cron_expression": "0 5 * * *"},
            {"job_type": "Newer", "cron_expression": "@daily", "enabled": false},
            {"job_type": "Report", "cron_expression": "@daily", "max_attempts": 5_000_000_000_u64},
            {"job_type": 5, "cron_expression": "@daily"},
        ]});
        let reply = register(t, "w", schedules).await;
        assert_eq!(reply["status"], "registered");
        let rejected = reply["rejected_schedules"].as_array().expect("a list");
        let reported: Vec<_> = rejected
            .iter()
            .map(|it| (it["index"].as_u64().expect("a place"), it["reason"].as_str().expect("why")))
            .collect();
        assert_eq!(
            reported.iter().map(|it| it.0).collect::<Vec<_>>(),
            [1, 2, 3, 4, 5, 7, 8, 9, 10]
        );
        assert!(reported[0].1.starts_with("cron_expression: "), "{reported:?}");
        assert!(reported[1].1.contains("Mars/Base"), "{reported:?}");
        assert!(reported[2].1.contains("rjob_Cleanup"), "{reported:?}");
        assert!(reported[3].1.contains("`timezone`"), "{reported:?}");
        assert!(reported[5].1.contains("recurring_schedules[0]"), "{reported:?}");
        let attempts = "max_attempts: must be between 1 and 100, is 5000000000";
        assert!(reported[6].1.starts_with("enabled: is not a field here"), "{reported:?}");
        assert_eq!(reported[7].1, attempts);
        assert_eq!(reported[8].1, "job_type: must be a string, is an integer");
        assert_eq!(rejected[2]["job_type"], "Other.Cleanup");
        t.database.execute("update recurring_schedules set is_paused = true").await;
        let again = json!({"recurring_schedules": [
            {"job_type": "MyApp.Jobs.Cleanup", "cron_expression": "0 4 * * *"},
        ]});
        let again = register(t, "w", again).await;
        assert_eq!(
            (&again["status"], &again["rejected_schedules"]),
            (&json!("registered"), &Value::Null)
        );
        let kept = "select count(*) from recurring_schedules
                    where id = 'rjob_Cleanup' and cron_expression = '0 4 * * *'
                        and queue = 'night' and timezone = 'Europe/Paris' and is_paused";
        assert_eq!(t.database.number(kept).await, 1);
        let many = json!({"worker_id": "w", "queues": [], "job_types": [], "recurring_schedules": vec![1; 101]});
        t.post("/v1/workers/register", many).await.refuses("recurring_schedules");
        let long = vec!["x".repeat(400); limits::MAX_REGISTERED_NAMES_BYTES / 400 + 1];
        let long = json!({"worker_id": "w", "queues": [], "job_types": long});
        t.post("/v1/workers/register", long).await.refuses("job_types");
    });
}

#[test]
fn one_bad_name_does_not_hide_the_others_and_a_refused_worker_is_not_registered() {
    run(async |t| {
        let job = "job_01m7w3ha3aextt8pkwwdmxsmqw";
        for bad in ["\0", ""] {
            let beat = json!({"worker_id": bad, "job_id": job});
            t.post("/v1/workers/heartbeat", beat).await.refuses("worker_id");
        }
        for step in [".", ".."] {
            let worker = json!({"worker_id": step, "queues": [], "job_types": []});
            t.post("/v1/workers/register", worker).await.refuses("worker_id");
        }
        let stranger = json!({"worker_id": "stranger", "job_id": job});
        t.post("/v1/workers/heartbeat", stranger).await.is_error(404, "job_not_found");
        for path in ["/v1/workers/%00/quiet", "/v1/workers/%0A/resume"] {
            t.post(path, json!({})).await.refuses("worker_id");
        }
        for queues in [json!(["one"]), json!(["one", "two"])] {
            let poll = json!({"worker_id": "p", "queues": queues, "wait_seconds": 0});
            t.post("/v1/workers/poll", poll).await.is(200);
        }
        until("both queues of the worker", async || {
            worker(t, "p").await["queues"] == json!(["one", "two"])
        })
        .await;
        assert_eq!(worker(t, "stranger").await, Value::Null);
    });
}
