//! Who is given what, when, and what happens on the way.

use std::time::{Duration, Instant};

use crate::harness::{Reply, TestServer, fresh_database, limited, run, run_alone};
use serde_json::{Value, json};

/// By then a claim for the worker `slow` is under way, and not over.
const IN_THE_CLAIM: Duration = Duration::from_millis(500);
/// Claims for the worker `slow` take a second.
const SLOW_CLAIMS: &str = "
    create function slow() returns trigger language plpgsql as $$
    begin
        if new.worker_id = 'slow' then perform pg_sleep(1); end if;
        return new;
    end $$;
    create trigger slow before update on jobs for each row execute function slow()";

fn ids(jobs: &[Value]) -> Vec<&str> {
    jobs.iter().map(|it| it["id"].as_str().expect("an id")).collect()
}

#[test]
fn the_best_priority_comes_first_and_then_the_oldest() {
    run(async |t| {
        let low = t.enqueue(json!({"priority": -1})).await;
        let first = t.enqueue(json!({})).await;
        let second = t.enqueue(json!({})).await;
        let high = t.enqueue(json!({"priority": 9})).await;
        assert_eq!(ids(&t.poll("w", 10).await), [&high, &first, &second, &low]);
    });
}

#[test]
fn a_polled_job_has_the_fields_of_its_wire() {
    run(async |t| {
        let id = t.enqueue(json!({"payload": {"a": 1}, "priority": 3, "tags": {"k": "v"}})).await;
        let job = t.lease("w").await;
        let mut fields: Vec<_> = job.as_object().expect("an object").keys().cloned().collect();
        fields.sort();
        assert_eq!(
            fields,
            [
                "attempt",
                "enqueued_at",
                "failures",
                "heartbeat_interval_seconds",
                "id",
                "job_type",
                "last_error",
                "lease_id",
                "lease_seconds",
                "max_attempts",
                "parent_results",
                "payload",
                "priority",
                "queue",
                "tags",
                "timeout_seconds",
                "traceparent",
            ]
        );
        assert_eq!(
            (&job["id"], &job["attempt"], &job["priority"]),
            (&json!(id), &json!(1), &json!(3))
        );
        assert_eq!((&job["payload"], &job["tags"]), (&json!({"a": 1}), &json!({"k": "v"})));
        let read = t.job(&id).await;
        assert_eq!((&read["state"], &read["worker_id"]), (&json!("processing"), &json!("w")));
        assert_eq!(read["waiting_for"], Value::Null);
    });
}

#[test]
fn queues_are_looked_at_in_the_order_given() {
    run(async |t| {
        let low = t.enqueue(json!({"queue": "low", "priority": 100})).await;
        let high = t.enqueue(json!({"queue": "high"})).await;
        t.enqueue(json!({"queue": "other"})).await;
        let poll = json!({"worker_id": "w", "queues": ["high", "low", "high"], "wait_seconds": 0});
        assert_eq!(ids(&t.polled(poll.clone()).await), [&high]);
        assert_eq!(ids(&t.polled(poll.clone()).await), [&low]);
        assert!(t.polled(poll).await.is_empty());
    });
}

#[test]
fn a_poll_fills_its_capacity_over_its_queues_in_their_order() {
    run(async |t| {
        let mut expected = Vec::new();
        for queue in ["a", "b", "c", "d"] {
            for _ in 0..2 {
                let id = t.enqueue(json!({"queue": queue})).await;
                expected.push(id);
            }
        }
        // A queue that the node knows to be empty is not in the way.
        let poll = |queues, wait| {
            json!({"worker_id": "w", "queues": queues, "capacity": 5, "wait_seconds": wait,
                "poll_id": uuid::Uuid::new_v4()})
        };
        let first = poll(["none", "a", "b", "c"], 5);
        let given = t.polled(first.clone()).await;
        assert_eq!(ids(&given), expected[..5]);
        assert_eq!(ids(&t.polled(first).await).len(), 5, "repeated: no more than it got");
        assert_eq!(ids(&t.polled(poll(["a", "c", "none", "d"], 0)).await), expected[5..]);
    });
}

#[test]
fn a_claim_that_fills_a_poll_from_its_next_queue_is_awaited_and_released_if_the_client_is_gone() {
    run_alone(async |t| {
        t.database.execute(SLOW_CLAIMS).await;
        let slow_b = "create or replace function slow() returns trigger language plpgsql as $$
                      begin
                          if new.queue = 'b' and new.state = 'processing' then perform pg_sleep(1); end if;
                          return new;
                      end $$";
        t.database.execute(slow_b).await;
        let poll = json!({"worker_id": "w", "queues": ["a", "b"], "capacity": 2});
        let first =
            [t.enqueue(json!({"queue": "a"})).await, t.enqueue(json!({"queue": "b"})).await];
        assert_eq!(ids(&t.polled(poll.clone()).await), first, "longer than the look itself");
        let second = t.enqueue(json!({"queue": "a"})).await;
        t.enqueue(json!({"queue": "b"})).await;
        let request = t.request(reqwest::Method::POST, "/v1/workers/poll").json(&poll);
        let gone = tokio::time::timeout(IN_THE_CLAIM, request.send()).await;
        assert!(gone.is_err(), "the claim is under way");
        let again = json!({"worker_id": "other", "queues": ["a"], "wait_seconds": 5});
        assert_eq!(ids(&t.polled(again).await), [&second], "it is free at once");
    });
}

#[test]
fn a_poll_that_names_types_gets_only_those_best_first() {
    run(async |t| {
        t.enqueue(json!({"job_type": "other", "priority": 50})).await;
        let report = t.enqueue(json!({"job_type": "report"})).await;
        let mail = t.enqueue(json!({"job_type": "mail", "priority": 5})).await;
        let poll = json!({
            "worker_id": "w", "queues": ["default"], "job_types": ["report", "mail", "none"],
            "capacity": 10, "wait_seconds": 0,
        });
        assert_eq!(ids(&t.polled(poll).await), [&mail, &report]);
    });
}

#[test]
fn a_parked_poll_wakes_for_its_job_and_need_not_look_for_it() {
    run_alone(async |t| {
        for types in [json!([]), json!(["test"])] {
            let poll = json!({"worker_id": "w", "queues": ["default"], "job_types": types});
            // A look that finds nothing: from now on only a wake or the fallback look finds a job.
            let mut look = poll.clone();
            look["wait_seconds"] = json!(0);
            assert!(t.polled(look).await.is_empty());
            let parked = tokio::spawn({
                let t = t.clone();
                async move { t.polled(poll).await }
            });
            let id = t.enqueue(json!({})).await;
            assert_eq!(ids(&parked.await.expect("no panic")), [&id]);
            let late =
                "select (extract(epoch from claimed_at - created_at) * 1000)::bigint from jobs
                        order by id desc limit 1";
            let late_ms = t.database.number(late).await;
            assert!(late_ms < 1_000, "{late_ms} ms: found by the fallback look");
        }
    });
}

#[test]
fn an_empty_wait_ends_on_time_with_an_empty_list() {
    run(async |t| {
        let started = Instant::now();
        let poll = json!({"worker_id": "w", "queues": ["default"], "wait_seconds": 1});
        assert!(t.polled(poll).await.is_empty());
        assert!(started.elapsed() >= Duration::from_secs(1));
        let started = Instant::now();
        assert!(t.poll("w", 1).await.is_empty());
        assert!(started.elapsed() < Duration::from_secs(1), "a poll that does not wait looks once");
    });
}

#[test]
fn a_repeated_poll_gets_the_same_jobs_while_their_leases_run() {
    run(async |t| {
        let first = t.enqueue(json!({})).await;
        let second = t.enqueue(json!({})).await;
        let poll = |worker: &str, id: &str| json!({"worker_id": worker, "queues": ["default"], "poll_id": id, "wait_seconds": 0});
        let (one, two) =
            ("0190c6b0-0000-7000-8000-000000000001", "0190c6b0-0000-7000-8000-000000000002");
        let got = t.polled(poll("w", one)).await;
        assert_eq!(ids(&got), [&first]);
        assert_eq!(t.polled(poll("w", one)).await, got);
        assert_eq!(ids(&t.polled(poll("w", two)).await), [&second]);
        assert!(t.polled(poll("other", one)).await.is_empty(), "another worker's id is another id");
        t.ack(&got[0], "w", "succeeded").await.is(200);
        assert!(t.polled(poll("w", one)).await.is_empty());
        t.post("/v1/workers/poll", poll("w", "x")).await.refuses("poll_id");
    });
}

#[test]
fn two_parked_polls_with_one_id_get_the_same_job() {
    run(async |t| {
        let poll = json!({
            "worker_id": "w", "queues": ["default"], "wait_seconds": 20,
            "poll_id": "0190c6b0-0000-7000-8000-000000000003",
        });
        let mut polls = tokio::task::JoinSet::new();
        for _ in 0..2 {
            let (t, poll) = (t.clone(), poll.clone());
            polls.spawn(async move { t.polled(poll).await });
        }
        let id = t.enqueue(json!({})).await;
        let answers = polls.join_all().await;
        assert_eq!(ids(&answers[0]), [&id]);
        assert_eq!(answers[0], answers[1]);
        assert_eq!(t.job(&id).await["attempt"], 1);
    });
}

#[test]
fn two_polls_with_one_id_that_do_not_wait_get_the_same_jobs() {
    run(async |t| {
        for round in 0..20 {
            for _ in 0..4 {
                t.enqueue(json!({})).await;
            }
            let poll = json!({
                "worker_id": "w", "queues": ["default"], "wait_seconds": 0, "capacity": 2,
                "poll_id": uuid::Uuid::new_v4(),
            });
            let (one, two) = tokio::join!(t.polled(poll.clone()), t.polled(poll.clone()));
            assert_eq!(one.len(), 2, "round {round}");
            assert_eq!(one, two, "round {round}");
            assert_eq!(t.poll("w", 10).await.len(), 2, "round {round}: no more were leased");
        }
    });
}

#[test]
fn many_polls_with_one_id_get_the_same_job_though_a_claim_was_under_way() {
    run_alone(async |t| {
        t.database.execute(SLOW_CLAIMS).await;
        let id = t.enqueue(json!({})).await;
        let poll = json!({
            "worker_id": "slow", "queues": ["default"], "wait_seconds": 20,
            "poll_id": "0190c6b0-0000-7000-8000-000000000004",
        });
        let mut polls = tokio::task::JoinSet::new();
        for _ in 0..4 {
            let (t, poll) = (t.clone(), poll.clone());
            polls.spawn(async move { t.polled(poll).await });
        }
        let answers = polls.join_all().await;
        assert!(answers.iter().all(|it| ids(it) == [&id]), "{answers:?}");
        assert_eq!(t.job(&id).await["attempt"], 1);
    });
}

#[test]
fn a_client_that_vanishes_while_parked_leaves_its_job_to_others() {
    run(async |t| {
        for _ in 0..3 {
            let poll = json!({"worker_id": "gone", "queues": ["default"]});
            let request = t.request(reqwest::Method::POST, "/v1/workers/poll").json(&poll);
            let vanished = tokio::time::timeout(Duration::from_millis(50), request.send()).await;
            assert!(vanished.is_err(), "it was parked");
        }
        let id = t.enqueue(json!({})).await;
        let job = t.wait_and_lease("here").await;
        assert_eq!((&job["id"], &job["failures"]), (&json!(id), &json!(0)));
    });
}

#[test]
fn jobs_claimed_for_a_disconnected_client_are_released() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project("main").await;
        // Claims take long enough here for the client to vanish in the middle of one.
        server.database.execute(SLOW_CLAIMS).await;
        let id = t.enqueue(json!({})).await;
        let poll = json!({"worker_id": "slow", "queues": ["default"]});
        let request = t.request(reqwest::Method::POST, "/v1/workers/poll").json(&poll);
        assert!(tokio::time::timeout(IN_THE_CLAIM, request.send()).await.is_err());
        let job = t.wait_and_lease("here").await;
        assert_eq!(
            (&job["id"], &job["attempt"], &job["failures"]),
            (&json!(id), &json!(2), &json!(0))
        );
        let attempts = t.job(&id).await["attempts"].clone();
        assert_eq!(
            (&attempts[0]["outcome"], &attempts[0]["worker_id"]),
            (&json!("released"), &json!("slow"))
        );
        server.stop().await;
    });
}

#[test]
fn a_repeated_poll_gets_no_job_that_is_being_released() {
    run_alone(async |t| {
        t.database.execute(SLOW_CLAIMS).await;
        t.database
            .execute(
                "create function slow_release() returns trigger language plpgsql as $$
                 begin
                     perform pg_sleep(2);
                     return new;
                 end $$;
                 create trigger slow_release before update on jobs for each row
                 when (old.worker_id = 'slow' and new.worker_id is null)
                 execute function slow_release()",
            )
            .await;
        t.enqueue(json!({})).await;
        let poll = json!({
            "worker_id": "slow", "queues": ["default"], "wait_seconds": 20,
            "poll_id": "0190c6b0-0000-7000-8000-000000000005",
        });
        let request = t.request(reqwest::Method::POST, "/v1/workers/poll").json(&poll);
        assert!(tokio::time::timeout(IN_THE_CLAIM, request.send()).await.is_err());
        let claimed = "select count(*) from jobs where state = 'processing'";
        t.database.until_at_least(claimed, 1).await;
        let jobs = t.polled(poll).await;
        assert_eq!(jobs[0]["attempt"], 2, "the first was not delivered");
        t.ack(&jobs[0], "slow", "succeeded").await.is(200);
    });
}

#[test]
fn a_server_that_stops_in_the_middle_of_a_claim_gives_its_jobs_back() {
    limited(async {
        let database = fresh_database().await;
        let server = TestServer::start(database.clone()).await;
        let t = server.project("main").await;
        database.execute(SLOW_CLAIMS).await;
        t.enqueue(json!({})).await;
        let poll = json!({"worker_id": "slow", "queues": ["default"]});
        let request = t.request(reqwest::Method::POST, "/v1/workers/poll").json(&poll);
        assert!(tokio::time::timeout(IN_THE_CLAIM, request.send()).await.is_err());
        server.stop().await;
        let waiting =
            "select count(*) from jobs where state = 'pending' and attempt = 1 and failures = 0";
        assert_eq!(database.number(waiting).await, 1);
    });
}

#[test]
fn a_server_that_stops_answers_its_parked_polls() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project("main").await;
        let mut polls = tokio::task::JoinSet::new();
        for number in 0..20 {
            let t = t.clone();
            polls.spawn(async move {
                let worker = format!("w{number}");
                t.polled(json!({"worker_id": worker, "queues": ["default"]})).await
            });
        }
        t.get("/readyz").await.status.is_success().then_some(()).expect("ready");
        // Wait until all are parked: a job for each proves it, and leaves none.
        for _ in 0..20 {
            t.enqueue(json!({})).await;
        }
        while let Some(polled) = polls.join_next().await {
            assert_eq!(polled.expect("no panic").len(), 1);
        }
        for number in 0..20 {
            let t = t.clone();
            polls.spawn(async move {
                let worker = format!("w{number}");
                t.polled(json!({"worker_id": worker, "queues": ["none"]})).await
            });
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
        let started = Instant::now();
        server.stop().await;
        while let Some(polled) = polls.join_next().await {
            assert!(polled.expect("no panic").is_empty());
        }
        assert!(started.elapsed() < Duration::from_secs(10), "not the polls' own thirty seconds");
    });
}

#[test]
fn a_revoked_key_ends_its_parked_polls_and_opens_nothing() {
    run_alone(async |t| {
        let parked = tokio::spawn({
            let t = t.clone();
            async move { t.post("/v1/workers/poll", json!({"worker_id": "w", "queues": ["q"]})).await }
        });
        // The key is known to the server once it has answered something.
        t.get("/v1/jobs").await.is(200);
        let started = Instant::now();
        t.database.execute("update api_keys set revoked_at = now()").await;
        parked.await.expect("no panic").is_error(401, "unauthorized");
        assert!(started.elapsed() < Duration::from_secs(15), "not the poll's own thirty seconds");
        t.get("/v1/jobs").await.is_error(401, "unauthorized");
    });
}

#[test]
fn a_worker_may_introduce_itself() {
    run_alone(async |t| {
        let worker = json!({
            "worker_id": "w", "queues": ["a"], "job_types": ["t"], "hostname": "h",
            "sdk_version": "1", "concurrency": 5, "pid": 77,
        });
        for _ in 0..2 {
            let reply = t.post("/v1/workers/register", worker.clone()).await.is(200);
            assert_eq!(reply["status"], "registered");
            assert_eq!(reply["rejected_schedules"], Value::Null);
        }
        assert_eq!(t.database.number("select count(*) from workers where pid = 77").await, 1);
        let bare = json!({"worker_id": "v", "queues": [], "job_types": []});
        t.post("/v1/workers/register", bare.clone()).await.is(200);
        let with = async |field: &str, value: Value| {
            let mut worker = bare.clone();
            worker[field] = value;
            t.post("/v1/workers/register", worker).await
        };
        for none in [json!(null), json!([])] {
            with("recurring_schedules", none).await.is(200);
        }
        let schedules = json!([{"job_type": "t", "cron_expression": "* * * * *"}]);
        with("recurring_schedules", schedules).await.is(200);
    });
}

#[test]
fn a_malformed_value_is_answered_with_what_is_wanted_there() {
    run(async |t| {
        let poll = json!({"worker_id": "w", "queues": ["default"], "poll_id": "abc"});
        assert_eq!(
            t.post("/v1/workers/poll", poll).await.refuses("poll_id"),
            "must be a UUID that the worker generates for each poll"
        );
        let ack =
            json!({"job_id": "job_x", "worker_id": "w", "status": "succeeded", "lease_id": 5});
        let lease = "must be the `lease_id` returned by the poll: a UUID";
        assert_eq!(t.post("/v1/workers/ack", ack).await.refuses("lease_id"), lease);
        let beat = json!({"job_id": "job_x", "worker_id": "w", "lease_id": "abc"});
        assert_eq!(t.post("/v1/workers/heartbeat", beat).await.refuses("lease_id"), lease);
        let time = "must be a time with its zone, as in RFC 3339: 2026-01-31T12:00:00Z";
        let job = json!({"job_type": "a", "run_at": "tomorrow"});
        assert_eq!(t.post("/v1/jobs", job).await.refuses("run_at"), time);
        let listed = t.get("/v1/jobs?created_after=yesterday").await;
        assert_eq!(listed.refuses("created_after"), time);
        let group = json!({"filter": {"fingerprint": "abc"}, "dry_run": true});
        assert_eq!(
            t.post("/v1/dead-letters/retry", group).await.refuses("filter.fingerprint"),
            "must be the fingerprint of a group"
        );
    });
}

#[test]
fn a_poll_reports_a_queue_that_never_had_a_job() {
    run(async |t| {
        t.enqueue(json!({"queue": "default"})).await;
        let queues = json!(["default", "defalt"]);
        let body = json!({"worker_id": "w", "queues": queues, "job_types": []});
        let advice = |reply: &Reply| {
            reply.headers.get("fencepost-advice").map(|it| it.to_str().expect("text").to_owned())
        };
        let registered = t.post("/v1/workers/register", body).await;
        assert_eq!(registered.is(200), json!({"status": "registered"}));
        assert_eq!(advice(&registered).as_deref(), Some("unknown-queue"));
        let poll = json!({"worker_id": "w", "queues": queues, "wait_seconds": 0});
        let found = t.post("/v1/workers/poll", poll.clone()).await;
        assert_eq!(found.is(200)["jobs"].as_array().map(Vec::len), Some(1));
        assert_eq!(advice(&found), None);
        let empty = t.post("/v1/workers/poll", poll.clone()).await;
        assert_eq!(empty.is(200), json!({"jobs": []}));
        assert_eq!(advice(&empty).as_deref(), Some("unknown-queue"));
        let job = &found.json()["jobs"][0];
        let then_poll = json!({
            "queues": queues, "wait_seconds": 0, "poll_id": "0190c6b0-0000-7000-8000-000000000009",
        });
        let acked = t.ack_with(job, "w", "succeeded", json!({"then_poll": then_poll})).await;
        assert_eq!(acked.is(200)["poll"], json!({"jobs": []}));
        assert_eq!(advice(&acked).as_deref(), Some("unknown-queue"));
        t.enqueue(json!({"queue": "defalt", "delay_seconds": 600})).await;
        let known = t.post("/v1/workers/poll", poll).await;
        assert_eq!((known.is(200), advice(&known)), (json!({"jobs": []}), None));
    });
}
