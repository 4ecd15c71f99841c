//! Jobs that not every worker may have at any time: labels, concurrency keys, limited queues.

use std::sync::{
    Arc,
    atomic::{AtomicI64, Ordering},
};

use crate::harness::{Reply, TestProject, TestServer, fresh_database, limited, run, run_alone};
use reqwest::Method;
use serde_json::{Value, json};

async fn limit(t: &TestProject, queue: &str, max_concurrency: Value) -> Reply {
    let body = json!({"max_concurrency": max_concurrency});
    let request = t.request(Method::PATCH, &format!("/v1/queues/{queue}")).json(&body);
    Reply::of(request.send().await.expect("an answer")).await
}

fn poll(more: Value) -> Value {
    let mut poll =
        json!({"worker_id": "w", "queues": ["default"], "wait_seconds": 0, "capacity": 50});
    poll.as_object_mut().expect("an object").extend(more.as_object().expect("one").clone());
    poll
}

fn ids(jobs: &[Value]) -> Vec<String> {
    jobs.iter().map(|it| it["id"].as_str().expect("an id").to_owned()).collect()
}

#[test]
fn a_job_with_labels_goes_only_to_a_worker_that_has_them_all() {
    run(async |t| {
        let plain = t.enqueue(json!({})).await;
        let one = t.enqueue(json!({"labels": ["gpu"], "priority": 5})).await;
        let two = t.enqueue(json!({"labels": ["linux", "gpu", "gpu"]})).await;
        assert_eq!(t.job(&two).await["labels"], json!(["gpu", "linux"]));
        assert_eq!(ids(&t.polled(poll(json!({"labels": ["linux"]}))).await), [&*plain]);
        let other_type = json!({"labels": ["gpu", "linux"], "job_types": ["other"]});
        assert!(t.polled(poll(other_type)).await.is_empty());
        assert_eq!(ids(&t.polled(poll(json!({"labels": ["gpu"]}))).await), [&*one]);
        let registered = json!({
            "worker_id": "r", "queues": ["default"], "job_types": [], "labels": ["gpu", "linux"],
        });
        t.post("/v1/workers/register", registered).await.is(200);
        let none = poll(json!({"worker_id": "r", "labels": []}));
        assert!(t.polled(none).await.is_empty(), "what it says in the poll counts");
        let jobs = t.polled(poll(json!({"worker_id": "r"}))).await;
        assert_eq!(ids(&jobs), [&*two], "a poll without labels has those that were registered");
    });
}

#[test]
fn a_parked_poll_hears_of_a_job_with_its_labels() {
    run(async |t| {
        let parked = {
            let t = t.clone();
            let poll = json!({"worker_id": "w", "queues": ["default"], "labels": ["gpu"]});
            tokio::spawn(async move { t.polled(poll).await })
        };
        let id = t.enqueue(json!({"labels": ["gpu"]})).await;
        assert_eq!(ids(&parked.await.expect("an answer")), [id]);
    });
}

/// The indexes of the jobs that may start beside `running` ones, lower limits first.
fn may_start(limits: &[(usize, usize)], running: usize) -> Vec<usize> {
    let mut in_order = limits.to_vec();
    in_order.sort_by_key(|(index, limit)| (*limit, *index));
    let mut count = running;
    let starts = |(index, limit): (usize, usize)| {
        let starts = count < limit;
        count += usize::from(starts);
        starts.then_some(index)
    };
    let mut started: Vec<_> = in_order.into_iter().filter_map(starts).collect();
    started.sort_unstable();
    started
}

#[test]
fn jobs_of_one_key_with_several_limits_start_as_soon_as_their_own_limit_allows() {
    run(async |t| {
        let rounds: [&[usize]; 8] = [
            &[1, 1, 2],
            &[1, 1, 1, 2],
            &[1, 1, 3],
            &[2, 3, 2, 3, 2, 3],
            &[2, 1],
            &[5, 1, 1, 1, 1, 1, 3],
            &[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2],
            &[3, 3, 3, 3],
        ];
        for (round, limits) in rounds.into_iter().enumerate() {
            let mut stored = Vec::new();
            for limit in limits {
                let job =
                    json!({"concurrency_key": format!("k{round}"), "concurrency_limit": limit});
                stored.push(t.enqueue(job).await);
            }
            let mut waiting: Vec<_> = limits.iter().copied().enumerate().collect();
            let mut running: Vec<Value> = Vec::new();
            while !waiting.is_empty() {
                let leased = t.polled(poll(json!({"capacity": 10}))).await;
                let index = |job: &Value| stored.iter().position(|it| job["id"] == **it);
                let mut started: Vec<_> = leased.iter().filter_map(index).collect();
                started.sort_unstable();
                let case = format!("{limits:?}, waiting {waiting:?}, running {}", running.len());
                assert_eq!(started, may_start(&waiting, running.len()), "{case}");
                waiting.retain(|it| !started.contains(&it.0));
                running.extend(leased);
                t.ack(&running.remove(0), "w", "succeeded").await.is(200);
            }
            for job in running {
                t.ack(&job, "w", "succeeded").await.is(200);
            }
        }
    });
}

#[test]
fn priority_counts_across_gates() {
    run(async |t| {
        let mut expected = Vec::new();
        for (priority, more) in [
            (3, json!({"concurrency_key": "a", "concurrency_limit": 9})),
            (2, json!({})),
            (1, json!({"labels": ["x"]})),
            (0, json!({})),
        ] {
            let mut job = more;
            job["priority"] = json!(priority);
            expected.push(t.enqueue(job).await);
        }
        let mut taken = Vec::new();
        for _ in 0..4 {
            let poll = poll(json!({"labels": ["x"], "capacity": 1}));
            taken.extend(ids(&t.polled(poll).await));
        }
        assert_eq!(taken, expected);
    });
}

#[test]
fn a_concurrency_key_bounds_running_jobs_and_the_next_starts_when_one_ends() {
    run(async |t| {
        let job = |key: &str| json!({"concurrency_key": key, "concurrency_limit": 2});
        for _ in 0..4 {
            t.enqueue(job("acme")).await;
        }
        let other = t.enqueue(job("other")).await;
        let first = t.poll("w", 50).await;
        assert_eq!(first.len(), 3);
        assert!(ids(&first).contains(&other));
        let waiting = t.get("/v1/jobs?state=pending").await.is(200);
        let waiting = waiting["jobs"].as_array().expect("jobs").clone();
        assert_eq!(waiting.len(), 2);
        for job in &waiting {
            assert_eq!(job["waiting_for"], "concurrency");
        }
        let id = waiting[0]["id"].as_str().expect("an id");
        let reported = t.get(&format!("/v1/jobs/{id}/explain")).await.is(200);
        assert_eq!(reported["summary"], "key acme 2/2 busy");
        assert_eq!(reported["waiting_for"], "concurrency");
        let acme = first.iter().find(|it| it["id"] != other).expect("one of acme");
        for status in ["succeeded", "failed"] {
            let parked = {
                let t = t.clone();
                tokio::spawn(async move { t.wait_and_lease("w").await })
            };
            let running =
                if status == "succeeded" { acme.clone() } else { t.job_of_key(&first, &other) };
            t.ack(&running, "w", status).await.is(200);
            let next = parked.await.expect("an answer");
            assert_ne!(next["id"], other);
        }
    });
}

impl TestProject {
    /// The second job of the key: neither the first, nor `other`.
    fn job_of_key(&self, jobs: &[Value], other: &str) -> Value {
        jobs.iter().filter(|it| it["id"] != other).nth(1).expect("a second").clone()
    }
}

/// 64 workers on two nodes take, hold and settle; the most that ever ran at a time must stay within
/// the limit, and everything must be done in the end.
async fn never_more_than(t: &TestProject, other_node: &TestProject, limit: i64, jobs: i64) {
    let (running, most, left) =
        (Arc::new(AtomicI64::new(0)), Arc::new(AtomicI64::new(0)), Arc::new(AtomicI64::new(jobs)));
    let workers = (0..64).map(|number| {
        let t = if number % 2 == 0 { t.clone() } else { other_node.clone() };
        let (running, most, left) = (running.clone(), most.clone(), left.clone());
        tokio::spawn(async move {
            let worker = format!("w{number}");
            let poll = json!({"worker_id": worker, "queues": ["default"], "wait_seconds": 1});
            while left.load(Ordering::SeqCst) > 0 {
                for job in t.polled(poll.clone()).await {
                    let now = running.fetch_add(1, Ordering::SeqCst) + 1;
                    most.fetch_max(now, Ordering::SeqCst);
                    tokio::task::yield_now().await;
                    // A claim after the ack may start one.
                    running.fetch_sub(1, Ordering::SeqCst);
                    t.ack(&job, &worker, "succeeded").await.is(200);
                    left.fetch_sub(1, Ordering::SeqCst);
                }
            }
        })
    });
    for worker in workers.collect::<Vec<_>>() {
        worker.await.expect("it ends well");
    }
    let most = most.load(Ordering::SeqCst);
    assert!((1..=limit).contains(&most), "{most} ran at a time, {limit} may");
}

/// Counts in the store itself how many ever ran at a time.
const WATCH_RUNNING: &str = "
    create table most (n bigint);
    insert into most values (0);
    create function watch() returns trigger language plpgsql security definer as $$
    begin
        update most set n = greatest(n, (select count(*) from jobs where state = 'processing'));
        return null;
    end $$;
    create trigger watch after update on jobs for each statement execute function watch()";

#[test]
fn sixty_four_workers_never_exceed_the_limit_of_a_key() {
    limited(async {
        let database = fresh_database().await;
        database.execute(WATCH_RUNNING).await;
        let server = TestServer::start(database.clone()).await;
        let other = TestServer::start(database.clone()).await;
        let t = server.project("main").await;
        let there = t.through(&other.url);
        for number in 0..120 {
            let job_type = format!("type-{}", number % 3);
            let job = json!({
                "job_type": job_type, "concurrency_key": "acme", "concurrency_limit": 3,
            });
            t.enqueue(job).await;
        }
        never_more_than(&t, &there, 3, 120).await;
        assert!(database.number("select n from most").await <= 3);
        server.stop().await;
        other.stop().await;
    });
}

#[test]
fn sixty_four_workers_never_exceed_the_limit_of_a_queue() {
    limited(async {
        let database = fresh_database().await;
        database.execute(WATCH_RUNNING).await;
        let server = TestServer::start(database.clone()).await;
        let other = TestServer::start(database.clone()).await;
        let t = server.project("main").await;
        let there = t.through(&other.url);
        assert_eq!(limit(&t, "default", json!(4)).await.is(200)["max_concurrency"], 4);
        for number in 0..120 {
            let labels = if number % 4 == 0 { json!([]) } else { json!(null) };
            t.enqueue(json!({"labels": labels})).await;
        }
        never_more_than(&t, &there, 4, 120).await;
        assert!(database.number("select n from most").await <= 4);
        server.stop().await;
        other.stop().await;
    });
}

/// Jobs that this poll gets before a node would look again by itself, every two seconds.
async fn polled_soon(t: &TestProject) -> Vec<Value> {
    t.polled(poll(json!({"wait_seconds": 1}))).await
}

#[test]
fn a_worker_of_many_slots_gets_the_next_job_of_a_key_after_each_ack() {
    const ROUNDS: usize = 4;
    run(async |t| {
        for status in ["succeeded", "failed", "cancelled"] {
            for _ in 0..=ROUNDS {
                let job = json!({"concurrency_key": status, "max_attempts": 1});
                t.enqueue(job).await;
            }
            let mut job = polled_soon(t).await.pop().expect("the first job");
            for _ in 0..ROUNDS {
                let status = if status == "cancelled" {
                    let path = format!("/v1/jobs/{}/cancel", job["id"].as_str().expect("an id"));
                    t.act(&path).await.is(200);
                    "failed"
                } else {
                    status
                };
                t.ack(&job, "w", status).await.is(200);
                let next = polled_soon(t).await;
                assert_eq!(next.len(), 1, "after {status}");
                job = next.into_iter().next().expect("one");
            }
            t.ack(&job, "w", "succeeded").await.is(200);
        }
    });
}

#[test]
fn a_worker_of_many_slots_gets_the_next_job_of_a_key_with_its_ack() {
    run(async |t| {
        for _ in 0..6 {
            t.enqueue(json!({"concurrency_key": "acme"})).await;
        }
        let mut job = polled_soon(t).await.pop().expect("the first job");
        for round in 1..6 {
            let then_poll = json!({
                "queues": ["default"], "capacity": 10, "wait_seconds": 1,
                "poll_id": format!("0190f5fe-7c00-7a00-8000-00000000000{round}"),
            });
            let more = json!({"then_poll": then_poll});
            let answer = t.ack_with(&job, "w", "succeeded", more).await.is(200);
            job = answer["poll"]["jobs"][0].clone();
            assert!(job.is_object(), "round {round}: {answer}");
        }
    });
}

#[test]
fn a_worker_of_many_slots_fills_a_limited_queue_after_each_batch_of_acks() {
    run(async |t| {
        limit(t, "default", json!(5)).await.is(200);
        for _ in 0..30 {
            t.enqueue(json!({})).await;
        }
        for _ in 0..6 {
            let jobs = polled_soon(t).await;
            assert_eq!(jobs.len(), 5);
            let acks: Vec<_> =
                jobs.iter().map(|it| TestProject::ack_body(it, "w", "succeeded")).collect();
            t.post("/v1/workers/ack/batch", json!({"acks": acks})).await.is(200);
        }
    });
}

#[test]
fn a_queue_of_limit_zero_hands_out_nothing_until_the_limit_is_taken_away() {
    run(async |t| {
        limit(t, "default", json!(0)).await.is(200);
        let id = t.enqueue(json!({})).await;
        let parked = {
            let t = t.clone();
            tokio::spawn(async move { t.wait_and_lease("w").await })
        };
        assert!(t.poll("v", 1).await.is_empty());
        let reported = t.get(&format!("/v1/jobs/{id}/explain")).await.is(200);
        assert_eq!(reported["summary"], "queue default allows no job: its limit is 0");
        assert_eq!(limit(t, "default", json!(null)).await.is(200)["max_concurrency"], Value::Null);
        assert_eq!(parked.await.expect("an answer")["id"], id);
        limit(t, "default", json!(-1)).await.refuses("max_concurrency");
        limit(t, "default", json!("x")).await.refuses("max_concurrency");
        let body = json!({});
        let request = t.request(Method::PATCH, "/v1/queues/default").json(&body);
        Reply::of(request.send().await.expect("an answer")).await.refuses("body");
        limit(t, &"x".repeat(101), json!(1)).await.refuses("queue");
    });
}

#[test]
fn jobs_of_more_concurrency_keys_than_a_page_holds_are_all_claimed() {
    run(async |t| {
        let jobs: Vec<_> = (0..450)
            .map(|it| json!({"job_type": "t", "concurrency_key": format!("key-{it}")}))
            .collect();
        t.post("/v1/jobs/batch", json!({"jobs": jobs})).await.is(201);
        let mut taken = std::collections::HashSet::new();
        while taken.len() < 450 {
            let poll =
                json!({"worker_id": "w", "queues": ["default"], "capacity": 50, "wait_seconds": 5});
            let jobs = t.polled(poll).await;
            assert!(!jobs.is_empty(), "{} of 450 were handed out", taken.len());
            taken.extend(ids(&jobs));
        }
    });
}

#[test]
fn a_claim_locks_few_keys_however_many_there_are() {
    const WANTED: usize = 5;
    const MAX_LOCKS: i64 = 25;
    run_alone(async |t| {
        t.database
            .execute(
                "create table locks (held bigint);
                 create function count_locks() returns trigger
                 language plpgsql security definer as $$
                 begin
                     insert into locks
                     select count(*) from pg_locks
                     where locktype = 'advisory' and pid = pg_backend_pid();
                     return new;
                 end $$;
                 create trigger count_locks before update on jobs for each row
                 when (new.state = 'processing') execute function count_locks()",
            )
            .await;
        for page in 0..3 {
            let job =
                |it: usize| json!({"job_type": "t", "concurrency_key": format!("{page}-{it}")});
            let jobs: Vec<_> = (0..400).map(job).collect();
            t.post("/v1/jobs/batch", json!({"jobs": jobs})).await.is(201);
        }
        for _ in 0..3 {
            assert_eq!(t.polled(poll(json!({"capacity": WANTED}))).await.len(), WANTED);
        }
        let most = t.database.number("select max(held) from locks").await;
        assert!((1..=MAX_LOCKS).contains(&most), "{most} locks");
    });
}

#[test]
fn bad_labels_and_concurrency_limits_are_refused_by_field() {
    run_alone(async |t| {
        let with = async |more: Value| {
            let mut job = json!({"job_type": "t"});
            job.as_object_mut().expect("an object").extend(more.as_object().expect("it").clone());
            t.post("/v1/jobs", job).await
        };
        with(json!({"labels": vec!["x"; 17]})).await.refuses("labels");
        with(json!({"labels": [""]})).await.refuses("labels[0]");
        with(json!({"concurrency_key": ""})).await.refuses("concurrency_key");
        with(json!({"concurrency_limit": 3})).await.refuses("concurrency_limit");
        with(json!({"concurrency_key": "k", "concurrency_limit": 0}))
            .await
            .refuses("concurrency_limit");
        let labels = json!({"worker_id": "w", "queues": ["q"], "labels": vec!["x"; 17]});
        t.post("/v1/workers/poll", labels).await.refuses("labels");
        assert_eq!(t.database.number("select count(*) from jobs").await, 0);
    });
}
