//! Jobs that are leased by the statement that stores them, because a poll was parked for them.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use crate::harness::{
    LoneProject, Proxy, TestProject, TestServer, fresh_database, limited, run_alone,
};
use fencepost_domain::{
    ids::{JobId, LeaseId, ProjectId},
    lease::LeaseLength,
};
use fencepost_store::{
    claims::LeaseRequest,
    jobs::enqueue::{NewJob, Start, insert_jobs},
};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use uuid::Uuid;

/// Such a job was leased in the transaction that stored it.
const MATCHED: &str = "claimed_at = created_at";

async fn is_matched(t: &LoneProject, id: &str) -> bool {
    let id: JobId = id.parse().expect("an id");
    let of = |table| format!("select count(*) from {table} where id = '{}' and {MATCHED}", id.0);
    t.database.number(&of("jobs")).await + t.database.number(&of("finished_jobs")).await > 0
}

/// Polls and acks until the server stops; answers with the number of deliveries of each job.
fn work(t: &TestProject, worker: &str) -> JoinHandle<HashMap<String, Vec<Value>>> {
    let (t, worker) = (t.clone(), worker.to_owned());
    tokio::spawn(async move {
        let mut delivered: HashMap<String, Vec<Value>> = HashMap::new();
        let poll = json!({"worker_id": worker, "queues": ["default"], "wait_seconds": 2});
        loop {
            let jobs = t.polled(poll.clone()).await;
            for job in jobs {
                let id = job["id"].as_str().expect("an id").to_owned();
                let is_last = job["payload"] == "last";
                t.ack(&job, &worker, "succeeded").await.is(200);
                delivered.entry(id).or_default().push(job);
                if is_last {
                    return delivered;
                }
            }
        }
    })
}

/// Stores jobs one by one, each when the one before is done, until one of them was matched.
async fn until_matched(t: &LoneProject) -> String {
    loop {
        let id = t.enqueue(json!({})).await;
        t.job_becomes(&id, "succeeded").await;
        if is_matched(t, &id).await {
            return id;
        }
    }
}

#[test]
fn a_parked_poll_gets_a_job_from_the_statement_that_stores_it() {
    run_alone(async |t| {
        let working = work(t, "w");
        let matched = until_matched(t).await;
        t.enqueue(json!({"payload": "last"})).await;
        let delivered = working.await.expect("no panic");
        assert!(delivered.values().all(|it| it.len() == 1));
        let job = &delivered[&matched][0];
        assert_eq!((&job["attempt"], &job["failures"]), (&json!(1), &json!(0)));
        assert_eq!((&job["lease_seconds"], &job["max_attempts"]), (&json!(900), &json!(3)));
        let shown = t.job(&matched).await;
        assert_eq!(job["enqueued_at"], shown["created_at"]);
        let events = t.get(&format!("/v1/jobs/{matched}/events")).await.is(200);
        let types: Vec<_> = events["events"]
            .as_array()
            .expect("events")
            .iter()
            .map(|it| it["type"].as_str().expect("a type"))
            .collect();
        assert!(types.contains(&"fencepost.claimed"), "{types:?}");
    });
}

#[test]
fn a_matched_job_has_all_that_its_worker_may_ask_for() {
    run_alone(async |t| {
        let (report, mut reported) = tokio::sync::mpsc::unbounded_channel();
        let polling = {
            let t = t.clone();
            tokio::spawn(async move {
                loop {
                    let poll = json!({
                        "worker_id": "w", "queues": ["other", "default"], "job_types": ["mail"],
                        "wait_seconds": 2, "lease_seconds": 77, "capacity": 3,
                    });
                    for job in t.polled(poll).await {
                        t.ack(&job, "w", "succeeded").await.is(200);
                        report.send(job).expect("the test runs");
                    }
                }
            })
        };
        let job = loop {
            let sent = json!({
                "job_type": "mail", "payload": {"a": [1, 2]}, "tags": {"customer": "7"},
                "priority": 3, "max_attempts": 9, "timeout_seconds": 600,
            });
            let id = t.enqueue(sent).await;
            let job: Value = reported.recv().await.expect("a job");
            if is_matched(t, &id).await {
                break job;
            }
        };
        polling.abort();
        let expected = json!({
            "payload": {"a": [1, 2]}, "tags": {"customer": "7"}, "priority": 3, "max_attempts": 9,
            "timeout_seconds": 600, "lease_seconds": 77, "attempt": 1, "queue": "default",
        });
        for (field, value) in expected.as_object().expect("an object") {
            assert_eq!(job[field], *value, "{field}");
        }
    });
}

#[test]
fn a_job_is_leased_when_it_is_stored_only_where_nothing_limits_claims() {
    run_alone(async |t| {
        for (queue, column, value) in [
            ("paused", "paused_at", "now()"),
            ("paused-type", "paused_types", "'{t}'"),
            ("full", "max_concurrency", "1000"),
            ("rated", "rate_limit_count", "1000, rate_limit_per_seconds = 1"),
            ("leased", "default_lease_seconds", "60"),
        ] {
            let project = "(select id from projects where slug = 'main')";
            t.database
                .execute(&format!(
                    "insert into queues (project_id, name) values ({project}, '{queue}');
                     update queues set {column} = {value} where name = '{queue}'"
                ))
                .await;
        }
        let project = "select id::bigint from projects where slug = 'main'";
        let project_id = ProjectId(t.database.number(project).await as i32);
        let mut conn = t.database.connect().await;
        let cases = [
            ("free", Start::After(0), true),
            ("free", Start::After(60), false),
            ("paused", Start::After(0), false),
            ("paused-type", Start::After(0), false),
            ("full", Start::After(0), false),
            ("rated", Start::After(0), false),
            ("leased", Start::After(0), false),
        ];
        for (queue, start, is_leased) in cases {
            let job = NewJob {
                project_id,
                id: JobId::generate(),
                queue: queue.to_owned(),
                job_type: "t".to_owned(),
                rank: 0,
                start,
                max_attempts: None,
                timeout_seconds: 60,
                payload: "null".to_owned(),
                retry: None,
                tags: None,
                extras: None,
            };
            let lease_id = LeaseId(Uuid::new_v4());
            let lease = LeaseRequest {
                worker_id: "w",
                lease: LeaseLength::default(),
                poll_id: None,
                loss_fails: None,
                lease_id,
            };
            let stored = insert_jobs(&mut conn, &[&job], &[None], &[Some(lease)], &[]).await;
            let stored = stored.expect("it is stored").pop().expect("one");
            assert_eq!(stored.is_leased, is_leased, "{queue}, {start:?}");
            let row = format!(
                "select state || ' ' || attempt || ' ' || coalesce(lease_id::text, '')
                 from jobs where id = '{}'",
                job.id.0
            );
            let expected = match (is_leased, start) {
                (true, _) => format!("processing 1 {}", lease_id.0),
                (false, Start::After(0)) => "pending 0 ".to_owned(),
                (false, _) => "scheduled 0 ".to_owned(),
            };
            assert_eq!(t.database.text(&row).await, expected, "{queue}");
        }
    });
}

#[test]
fn a_queue_that_was_paused_elsewhere_hands_out_nothing_to_parked_polls() {
    run_alone(async |t| {
        let working = work(t, "w");
        for _ in 0..10 {
            until_matched(t).await;
            // As another node would, and before its hint arrives here.
            t.database
                .execute(
                    "insert into queues (project_id, name, paused_at)
                     select id, 'default', now() from projects where slug = 'main'",
                )
                .await;
            let ids = [t.enqueue(json!({})).await, t.enqueue(json!({})).await];
            let leased = "select count(*) from jobs where state = 'processing'";
            assert_eq!(t.database.number(leased).await, 0);
            t.act("/v1/queues/default/resume").await.is(200);
            for id in ids {
                t.job_becomes(&id, "succeeded").await;
            }
            t.database.execute("delete from queues").await;
        }
        t.enqueue(json!({"payload": "last"})).await;
        let delivered = working.await.expect("no panic");
        assert!(delivered.values().all(|it| it.len() == 1 && it[0]["attempt"] == 1));
    });
}

#[test]
fn a_match_whose_commit_is_in_doubt_is_released_and_loses_no_job() {
    limited(async {
        let database = fresh_database().await;
        let proxy = Proxy::start(&database).await;
        let server = proxy.server().await;
        let t = LoneProject::at(&server.url, &database, "main").await;
        let working = work(&t, "w");
        until_matched(&t).await;
        let mut was_matched = false;
        while !was_matched {
            proxy.swallow_answer_to(b"whose answer is lost");
            let id = t.enqueue(json!({"payload": "whose answer is lost"})).await;
            assert!(proxy.has_swallowed(), "the answer was lost");
            was_matched = is_matched(&t, &id).await;
            let started = Instant::now();
            t.job_becomes(&id, "succeeded").await;
            assert!(started.elapsed() < Duration::from_secs(20), "its lease is longer");
        }
        t.enqueue(json!({"payload": "last"})).await;
        let delivered = working.await.expect("no panic");
        assert!(delivered.values().all(|it| it.len() == 1), "each was acknowledged once");
        server.stop().await;
    });
}

#[test]
fn a_statement_that_fails_frees_the_polls_that_were_reserved_for_it() {
    run_alone(async |t| {
        let working = work(t, "w");
        until_matched(t).await;
        t.database
            .execute(
                "create function refuse() returns trigger language plpgsql as $$
                 begin
                     if new.payload = '\"refused\"' then raise exception 'refused'; end if;
                     return new;
                 end $$;
                 create trigger refuse before insert on job_bodies
                     for each row execute function refuse()",
            )
            .await;
        for _ in 0..3 {
            let refused = json!({"job_type": "t", "payload": "refused"});
            assert!(t.post("/v1/jobs", refused).await.status.is_server_error());
            until_matched(t).await;
        }
        t.enqueue(json!({"payload": "last"})).await;
        let delivered = working.await.expect("no panic");
        assert!(delivered.values().all(|it| it.len() == 1 && it[0]["attempt"] == 1));
    });
}

#[test]
fn workers_of_two_nodes_get_each_job_once() {
    limited(async {
        const JOBS: usize = 300;
        let database = fresh_database().await;
        let (one, two) =
            (TestServer::start(database.clone()).await, TestServer::start(database).await);
        let t = one.project("main").await;
        let on_two = t.through(&two.url);
        let workers: Vec<_> = (0..8)
            .map(|number| work(if number % 2 == 0 { &t } else { &on_two }, &format!("w{number}")))
            .collect();
        let mut sent = Vec::new();
        for number in 0..JOBS {
            let there = if number % 3 == 0 { &on_two } else { &t };
            sent.push(there.enqueue(json!({})).await);
        }
        for id in &sent {
            t.job_becomes(id, "succeeded").await;
        }
        for _ in &workers {
            t.enqueue(json!({"payload": "last"})).await;
        }
        let mut deliveries: HashMap<String, usize> = HashMap::new();
        for worker in workers {
            for (id, jobs) in worker.await.expect("no panic") {
                *deliveries.entry(id).or_default() += jobs.len();
            }
        }
        assert!(sent.iter().all(|it| deliveries[it] == 1));
        let matched = format!("select count(*) from finished_jobs where {MATCHED}");
        assert!(t.database.number(&matched).await > 0, "some were matched");
        one.stop().await;
        two.stop().await;
    });
}
