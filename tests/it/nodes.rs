//! Many nodes over one database: they find each other's jobs, and the death of one loses nothing.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use crate::harness::{
    Database, LoneProject, NodeProcess, Proxy, Stage, TestProject, TestServer, fresh_database,
    limited, redis_url, until, until_ready,
};
use serde_json::{Value, json};

/// Waits for two heartbeats of every node: the first one counts the others, and the second one
/// shows that the count was stored.
pub async fn until_all_know(database: &Database) {
    for _ in 0..2 {
        let last = "select coalesce(max(greatest(started_at, seen_at)), now())::text from nodes";
        let last = database.text(last).await;
        let waiting = format!("select count(*) from nodes where seen_at <= '{last}'");
        database.until(&waiting, 0).await;
    }
}

/// How long each of some jobs, stored on one node, took to a poll that was parked on another.
async fn pickups(redis: bool, rounds: u32) -> Vec<Duration> {
    let database = fresh_database().await;
    let stage = || match redis {
        true => Stage::default(),
        false => Stage { redis: None, ..Stage::default() },
    };
    let one = TestServer::start_as(database.clone(), stage()).await;
    let other = TestServer::start_as(database, stage()).await;
    let here = one.project("main").await;
    let there = here.through(&other.url);
    until_ready(&one.url).await;
    until_ready(&other.url).await;
    until_all_know(&here.database).await;
    let mut took = Vec::new();
    for _ in 0..rounds {
        let poll = json!({"worker_id": "w", "queues": ["default"], "wait_seconds": 20});
        let parked = tokio::spawn({
            let there = there.clone();
            async move { (there.polled(poll).await, Instant::now()) }
        });
        // Long enough for the poll to have looked, and to be parked.
        tokio::time::sleep(Duration::from_millis(120)).await;
        let stored = Instant::now();
        here.enqueue(json!({})).await;
        let (jobs, at) = parked.await.expect("an answer");
        assert_eq!(jobs.len(), 1);
        took.push(at - stored);
        there.ack(&jobs[0], "w", "succeeded").await.is(200);
    }
    one.stop().await;
    other.stop().await;
    took.sort();
    took
}

/// The fallback look comes every two seconds: what is quicker was published.
const HINTED_WITHIN: Duration = Duration::from_millis(700);
/// Without Redis.
const FOUND_WITHIN: Duration = Duration::from_millis(4_000);

#[test]
fn a_poll_on_another_node_hears_of_a_job_over_redis() {
    limited(async {
        let took = pickups(true, 25).await;
        let reported = took.iter().filter(|it| **it < HINTED_WITHIN).count();
        // Without hints, about a third would be found in that time.
        assert!(reported >= 20, "{took:?}");
    });
}

#[test]
fn hints_of_a_project_go_only_to_nodes_where_its_polls_were_parked() {
    limited(async {
        let database = fresh_database().await;
        let one = TestServer::start(database.clone()).await;
        let other = TestServer::start(database.clone()).await;
        let here = one.project("main").await;
        let there = here.through(&other.url);
        let channel = database
            .text(
                "select 'fencepost:' || replace(instance.public_id::text, '-', '')
                        || ':wake:' || projects.id % 256
                 from instance, projects
                 where slug = 'main'",
            )
            .await;
        let client = ::redis::Client::open(redis_url()).expect("a URL");
        let mut conn = client.get_multiplexed_async_connection().await.expect("a connection");
        let mut until_heard_by = async |nodes: i64| {
            until(format!("{nodes} nodes that listen"), async || {
                let ask = ::redis::cmd("PUBSUB").arg("NUMSUB").arg(&channel).to_owned();
                let heard_by: (String, i64) = ask.query_async(&mut conn).await.expect("a number");
                heard_by.1 == nodes
            })
            .await;
        };
        until_heard_by(0).await;
        let poll = json!({"worker_id": "w", "queues": ["default"], "wait_seconds": 0});
        assert!(there.polled(poll.clone()).await.is_empty());
        until_heard_by(1).await;
        assert!(here.polled(poll).await.is_empty());
        until_heard_by(2).await;
        one.stop().await;
        other.stop().await;
    });
}

#[test]
fn a_poll_on_another_node_finds_a_job_without_redis() {
    limited(async {
        let took = pickups(false, 4).await;
        assert!(took.iter().all(|it| *it < FOUND_WITHIN), "{took:?}");
    });
}

/// A call that goes to another node when one does not answer.
async fn call(t: &TestProject, urls: &[String], first: usize, path: &str, body: &Value) -> Value {
    for turn in 0.. {
        let url = format!("{}{path}", urls[(first + turn) % urls.len()]);
        let request = t.client.post(url).bearer_auth(&t.api_key).json(body);
        if let Ok(reply) = request.send().await
            && reply.status().is_success()
            && let Ok(body) = reply.json().await
        {
            return body;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    unreachable!("turns have no end")
}

#[test]
fn the_death_of_a_node_loses_nothing_and_its_clients_go_on_elsewhere() {
    const JOBS: usize = 300;
    const WORKERS: usize = 6;
    limited(async {
        let database = fresh_database().await;
        let mut nodes: Vec<_> = (0..3).map(|_| NodeProcess::start(&database)).collect();
        let urls: Vec<_> = nodes.iter().map(NodeProcess::url).collect();
        for url in &urls {
            until_ready(url).await;
        }
        let t = LoneProject::at(&urls[1], &database, "main").await;
        let done = Arc::new(AtomicUsize::new(0));
        let workers: Vec<_> = (0..WORKERS)
            .map(|number| {
                let (t, urls, done) = (t.clone(), urls.clone(), Arc::clone(&done));
                tokio::spawn(async move {
                    let worker = format!("w{number}");
                    while done.load(Ordering::Relaxed) < JOBS {
                        let poll = json!({
                            "worker_id": worker, "queues": ["default"], "wait_seconds": 1,
                            "lease_seconds": 3, "capacity": 5, "poll_id": uuid::Uuid::new_v4(),
                        });
                        let polled = call(&t, &urls, number, "/v1/workers/poll", &poll).await;
                        for job in polled["jobs"].as_array().expect("jobs") {
                            let ack = TestProject::ack_body(job, &worker, "succeeded");
                            call(&t, &urls, number, "/v1/workers/ack", &ack).await;
                            done.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                })
            })
            .collect();
        for number in 0..JOBS {
            if number == JOBS / 3 {
                nodes[0].kill();
            }
            let url = &urls[if number < JOBS / 3 { number % 3 } else { 1 + number % 2 }];
            let body = json!({"job_type": "test"});
            let key = format!("job-{number}");
            // Stored once, even when the answer was lost with its node.
            loop {
                let request = t.client.post(format!("{url}/v1/jobs")).bearer_auth(&t.api_key);
                let sent = request.header("idempotency-key", &key).json(&body).send().await;
                if sent.is_ok_and(|it| it.status() == 201) {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        for worker in workers {
            worker.await.expect("a worker");
        }
        let number = async |sql: &str| database.number(sql).await;
        assert_eq!(number("select count(*) from finished_jobs").await, JOBS as i64);
        assert_eq!(number("select count(*) from jobs").await, 0);
        assert_eq!(number("select count(distinct id) from finished_jobs").await, JOBS as i64);
    });
}

#[test]
fn what_one_node_changes_of_a_project_the_others_obey() {
    limited(async {
        let database = fresh_database().await;
        let one = TestServer::start(database.clone()).await;
        let other = TestServer::start(database).await;
        let here = one.project("main").await;
        let there = here.through(&other.url);
        there.get("/v1/jobs").await.is(200);
        // A pause on one node keeps jobs from polls on the other.
        here.act("/v1/queues/default/pause").await.is(200);
        here.enqueue(json!({})).await;
        assert!(there.poll("w", 1).await.is_empty());
        let waiting = tokio::spawn({
            let there = there.clone();
            async move { there.wait_and_lease("w").await }
        });
        here.act("/v1/queues/default/resume").await.is(200);
        waiting.await.expect("a job");
        one.stop().await;
        other.stop().await;
    });
}

#[test]
fn five_nodes_without_redis_share_many_concurrency_keys() {
    const KEYS: usize = 400;
    const JOBS: i64 = 2 * KEYS as i64;
    limited(async {
        let database = fresh_database().await;
        let stage = Stage { redis: None, ..Stage::default() };
        let mut nodes = Vec::new();
        for _ in 0..5 {
            nodes.push(TestServer::start_as(database.clone(), stage.clone()).await);
        }
        let t = nodes[0].project("main").await;
        // Whatever runs twice under one key is counted by the database itself.
        database
            .execute(
                "create table crowds (key text);
                 create function note_crowd() returns trigger
                 language plpgsql security definer as $$
                 begin
                     insert into crowds
                     select new.concurrency_key
                     from jobs
                     where project_id = new.project_id and state = 'processing'
                         and concurrency_key = new.concurrency_key
                     having count(*) > 1;
                     return null;
                 end $$;
                 create trigger note_crowd after update on jobs for each row
                 when (new.state = 'processing') execute function note_crowd()",
            )
            .await;
        for _ in 0..2 {
            let job = |key: usize| json!({"job_type": "t", "concurrency_key": format!("k{key}")});
            let jobs: Vec<_> = (0..KEYS).map(job).collect();
            t.post("/v1/jobs/batch", json!({"jobs": jobs})).await.is(201);
        }
        let workers = nodes.iter().enumerate().flat_map(|(number, node)| {
            let t = t.through(&node.url);
            (0..3).map(move |each| (t.clone(), format!("w{number}-{each}")))
        });
        let workers: Vec<_> = workers
            .map(|(t, worker)| {
                tokio::spawn(async move {
                    let done = "select count(*) from finished_jobs";
                    while t.database.number(done).await < JOBS {
                        let poll = json!({
                            "worker_id": worker, "queues": ["default"], "capacity": 20,
                            "wait_seconds": 1,
                        });
                        for job in t.polled(poll).await {
                            t.ack(&job, &worker, "succeeded").await.is(200);
                        }
                    }
                })
            })
            .collect();
        for worker in workers {
            worker.await.expect("a worker");
        }
        assert_eq!(database.number("select count(*) from crowds").await, 0);
        for node in nodes {
            node.stop().await;
        }
    });
}

#[test]
fn a_node_that_starts_waits_for_its_database() {
    limited(async {
        let proxy = Proxy::start(&fresh_database().await).await;
        proxy.cut(true);
        let mut node = NodeProcess::start(&proxy.database());
        proxy.until_accepted(2).await;
        proxy.cut(false);
        node.until_ready().await;
    });
}
