//! Many at once.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use crate::harness::{LoneProject, TestServer, fresh_database, limited, run, run_alone};
use serde_json::{Value, json};
use tokio::task::JoinSet;

/// Jobs that four senders send to two groups.
const ORDERED_JOBS: usize = 120;

#[test]
fn sixty_polls_and_forty_jobs_lease_each_job_once() {
    run(async |t| {
        let mut polls = JoinSet::new();
        for number in 0..60 {
            let t = t.clone();
            polls.spawn(async move {
                let worker = format!("w{number}");
                let poll = json!({"worker_id": worker, "queues": ["default"], "wait_seconds": 2});
                t.polled(poll).await
            });
        }
        let mut senders = JoinSet::new();
        for _ in 0..40 {
            let t = t.clone();
            senders.spawn(async move { t.enqueue(json!({})).await });
        }
        let sent: HashSet<String> = senders.join_all().await.into_iter().collect();
        let leased: Vec<Value> = polls.join_all().await.into_iter().flatten().collect();
        let ids: HashSet<String> =
            leased.iter().map(|it| it["id"].as_str().expect("an id").to_owned()).collect();
        assert_eq!((leased.len(), ids), (40, sent));
        assert!(leased.iter().all(|it| it["attempt"] == 1));
    });
}

#[test]
fn two_nodes_share_a_queue_and_lease_each_job_once() {
    limited(async {
        let database = fresh_database().await;
        let (one, two) =
            (TestServer::start(database.clone()).await, TestServer::start(database).await);
        let t = one.project("main").await;
        let on_two = t.through(&two.url);
        let jobs: Vec<_> = (0..300).map(|_| json!({"job_type": "t"})).collect();
        t.post("/v1/jobs/batch", json!({"jobs": jobs})).await.is(201);
        let mut workers = JoinSet::new();
        for number in 0..8 {
            let t = if number % 2 == 0 { t.clone() } else { on_two.clone() };
            workers.spawn(async move {
                let (worker, mut done) = (format!("w{number}"), Vec::new());
                loop {
                    let jobs = t.poll(&worker, 5).await;
                    if jobs.is_empty() {
                        return done;
                    }
                    for job in jobs {
                        t.ack(&job, &worker, "succeeded").await.is(200);
                        done.push(job["id"].clone());
                    }
                }
            });
        }
        let done = workers.join_all().await.concat();
        let distinct: HashSet<_> = done.iter().map(Value::to_string).collect();
        assert_eq!((done.len(), distinct.len()), (300, 300));
        // What one node stores, the other finds without a message.
        let waiting = tokio::spawn({
            let t = on_two.clone();
            async move { t.wait_and_lease("w").await }
        });
        let id = t.enqueue(json!({})).await;
        assert_eq!(waiting.await.expect("no panic")["id"], id);
        one.stop().await;
        two.stop().await;
    });
}

/// A start or an end of an attempt: whether it is a start, and the payload.
type Log = Arc<Mutex<Vec<(bool, Value)>>>;

/// Leases jobs and logs the start and the end of each attempt, until all jobs have succeeded. The
/// first attempt of every fifth fails.
async fn work_in_order(t: LoneProject, worker: String, log: Log, left: Arc<AtomicUsize>) {
    let note = |is_start, job: &Value| {
        log.lock().expect("no panic").push((is_start, job["payload"].clone()));
    };
    let poll =
        json!({"worker_id": worker, "queues": ["default"], "capacity": 5, "wait_seconds": 1});
    while left.load(Ordering::SeqCst) > 0 {
        let jobs = t.polled(poll.clone()).await;
        for job in &jobs {
            note(true, job);
        }
        for job in &jobs {
            note(false, job);
            let number = job["payload"]["number"].as_u64().expect("a number");
            if number.is_multiple_of(5) && job["attempt"] == 1 {
                t.ack_with(job, &worker, "failed", json!({"retry_after_seconds": 0})).await.is(200);
            } else {
                t.ack(job, &worker, "succeeded").await.is(200);
                left.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }
}

#[test]
fn two_nodes_run_the_jobs_of_a_group_in_order() {
    limited(async {
        let database = fresh_database().await;
        let (one, two) =
            (TestServer::start(database.clone()).await, TestServer::start(database).await);
        let t = one.project("main").await;
        let nodes = [t.clone(), t.through(&two.url)];
        t.patch("/v1/queues/default", json!({"groups": {"order": "strict"}})).await.is(200);
        let (log, left) = (Log::default(), Arc::new(AtomicUsize::new(ORDERED_JOBS)));
        let mut tasks = JoinSet::new();
        for (number, node) in nodes.iter().cycle().take(4).enumerate() {
            let (sender, group) = (node.clone(), ["a", "b"][number / 2]);
            tasks.spawn(async move {
                for job in 0..ORDERED_JOBS / 4 {
                    let payload = json!({"group": group, "sender": number, "number": job});
                    sender.enqueue(json!({"group": group, "payload": payload})).await;
                }
            });
            let (log, left) = (Arc::clone(&log), Arc::clone(&left));
            tasks.spawn(work_in_order(node.clone(), format!("w{number}"), log, left));
        }
        tasks.join_all().await;
        one.stop().await;
        two.stop().await;
        let log = log.lock().expect("no panic");
        for group in ["a", "b"] {
            let of_group: Vec<_> = log.iter().filter(|it| it.1["group"] == group).collect();
            for pair in of_group.chunks(2) {
                assert!(pair[0].0 && !pair[1].0, "one at a time: {of_group:?}");
                assert_eq!(pair[0].1, pair[1].1);
            }
        }
        for sender in 0..4 {
            let of_sender = log.iter().filter(|it| it.0 && it.1["sender"] == sender);
            let mut numbers: Vec<_> = of_sender.filter_map(|it| it.1["number"].as_u64()).collect();
            assert!(numbers.is_sorted(), "as they were sent, over retries: {numbers:?}");
            numbers.dedup();
            assert_eq!(numbers.len(), ORDERED_JOBS / 4);
        }
    });
}

#[test]
fn of_many_acks_of_one_lease_with_different_outcomes_one_counts() {
    run_alone(async |t| {
        for _ in 0..10 {
            let id = t.enqueue(json!({})).await;
            let job = t.lease("w").await;
            let mut acks = JoinSet::new();
            for number in 0..12 {
                let (t, job) = (t.clone(), job.clone());
                let status = ["succeeded", "failed", "released"][number % 3];
                acks.spawn(async move { (status, t.ack(&job, "w", status).await.status.as_u16()) });
            }
            let mut accepted = HashMap::new();
            for (status, code) in acks.join_all().await {
                assert!(code == 200 || code == 409, "{code}");
                if code == 200 {
                    *accepted.entry(status).or_insert(0) += 1;
                }
            }
            assert_eq!(
                accepted.len(),
                1,
                "one outcome, however often it was repeated: {accepted:?}"
            );
            assert_eq!(
                accepted.values().sum::<i32>(),
                4,
                "and each of its repetitions is answered"
            );
            let job = t.job(&id).await;
            assert_eq!(job["attempts"].as_array().expect("attempts").len(), 1);
            if job["state"] == "pending" {
                t.database.execute("update jobs set run_at = now() where state = 'backoff'").await;
                let again = t.wait_and_lease("w").await;
                t.ack(&again, "w", "succeeded").await.is(200);
            }
        }
    });
}

#[test]
fn a_reaper_and_an_ack_that_meet_settle_the_attempt_once() {
    run_alone(async |t| {
        for _ in 0..5 {
            let id = t.enqueue(json!({"max_attempts": 1})).await;
            let job = t.lease("w").await;
            t.expire_leases().await;
            let acked = t.ack(&job, "w", "succeeded").await.status.as_u16();
            let expected = if acked == 200 { "succeeded" } else { "dead_letter" };
            let job = t.job_becomes(&id, expected).await;
            assert_eq!(job["attempts"].as_array().expect("attempts").len(), 1);
        }
    });
}

#[test]
fn acks_heartbeats_and_releases_of_the_same_jobs_in_any_order_never_deadlock() {
    run_alone(async |t| {
        let jobs: Vec<_> = (0..50).map(|_| json!({"job_type": "t"})).collect();
        t.post("/v1/jobs/batch", json!({"jobs": jobs})).await.is(201);
        let leased = t.poll("w", 50).await;
        let mut calls = JoinSet::new();
        for round in 0..6_usize {
            let (t, mut leased) = (t.clone(), leased.clone());
            leased.rotate_left(round * 7);
            if round % 2 == 1 {
                leased.reverse();
            }
            calls.spawn(async move {
                for job in leased {
                    let status = match round % 3 {
                        0 => t.heartbeat(&job, "w").await.status,
                        1 => t.ack(&job, "w", "succeeded").await.status,
                        _ => t.ack(&job, "w", "failed").await.status,
                    };
                    assert!([200, 409].contains(&status.as_u16()), "{status}");
                }
            });
        }
        calls.join_all().await;
        let settled = "select (select count(*) from finished_jobs)
                            + (select count(*) from jobs where state = 'backoff')";
        assert_eq!(t.database.number(settled).await, 50);
    });
}
