//! Rate limits and quotas: exact over all nodes, apart for apart work, and kept within their
//! promise whatever happens to Redis.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use fencepost::dev::redis::Redis;

use crate::{
    harness::{
        Reply, Stage, TestProject, TestServer, eventually, fresh_database, limited, repeatedly,
        run_alone, until,
    },
    nodes::until_all_know,
};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

/// What a flood brought about.
#[derive(Debug, Default)]
struct Flood {
    let_in: AtomicU32,
    refused: AtomicU32,
    failed: AtomicU32,
}

impl Flood {
    fn count(&self, status: u16) {
        let of = match status {
            200..=299 => &self.let_in,
            429 => &self.refused,
            _ => &self.failed,
        };
        of.fetch_add(1, Ordering::Relaxed);
    }

    fn let_in(&self) -> u32 {
        self.let_in.load(Ordering::Relaxed)
    }
}

/// Eight clients that enqueue on all nodes for a while, and until `least` calls were refused.
async fn flood(t: &TestProject, urls: &[String], time: Duration, least: u32) -> Arc<Flood> {
    const CLIENTS: usize = 8;
    let flood = Arc::new(Flood::default());
    let until = Instant::now() + time;
    let clients = (0..CLIENTS).map(|client| {
        let (t, flood, urls) = (t.clone(), Arc::clone(&flood), urls.to_vec());
        tokio::spawn(async move {
            let mut turn = client;
            while Instant::now() < until || flood.refused.load(Ordering::Relaxed) < least {
                let there = t.through(&urls[turn % urls.len()]);
                let reply = there.post("/v1/jobs", json!({"job_type": "t"})).await;
                flood.count(reply.status.as_u16());
                turn += 1;
            }
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.expect("a client");
    }
    flood
}

async fn three_nodes(stage: &Stage) -> (Vec<TestServer>, Vec<String>) {
    let (database, mut nodes) = (fresh_database().await, Vec::new());
    for _ in 0..3 {
        nodes.push(TestServer::start_as(database.clone(), stage.clone()).await);
    }
    let urls = nodes.iter().map(|it| it.url.clone()).collect();
    for node in &nodes {
        let ready = crate::harness::client()
            .get(format!("{}/readyz", node.url))
            .send()
            .await
            .expect("an answer");
        assert_eq!(ready.status(), 200);
    }
    (nodes, urls)
}

#[test]
fn a_limit_is_exact_for_eight_clients_on_three_nodes_and_separate_from_others() {
    limited(async {
        const LIMIT: u32 = 120;
        let (nodes, urls) = three_nodes(&Stage::default()).await;
        let limits = json!({"produce_per_minute": LIMIT});
        let t = nodes[0].project_with("hungry", "unlimited", limits).await;
        let other = nodes[0].project_with("other", "free", json!({})).await;
        let started = Instant::now();
        let flood = flood(&t, &urls, Duration::from_secs(2), LIMIT + 1).await;
        let back = started.elapsed().as_secs() as u32 * LIMIT / 60 + 1;
        let let_in = flood.let_in();
        assert!((LIMIT..=LIMIT + back).contains(&let_in), "{let_in} of {LIMIT} + {back}");
        assert!(flood.refused.load(Ordering::Relaxed) > LIMIT, "{flood:?}");
        assert_eq!(flood.failed.load(Ordering::Relaxed), 0);
        let stored = t.database.number("select count(*) from jobs").await;
        assert_eq!(stored, i64::from(let_in), "what was refused was not stored");
        let mut refused = t.post("/v1/jobs", json!({"job_type": "t"})).await;
        while refused.status == 201 {
            refused = t.post("/v1/jobs", json!({"job_type": "t"})).await;
        }
        refused.is_error(429, "rate_limit_exceeded");
        assert_eq!(refused.headers["retry-after"], "1");
        assert_eq!(refused.headers["x-ratelimit-remaining"], "0");
        let reset = refused.headers["x-ratelimit-reset"].to_str().expect("text");
        let reset_at: i64 = reset.parse().expect("a Unix time in seconds");
        let now = t.database.number("select extract(epoch from now())::bigint").await;
        assert!((now..=now + 61).contains(&reset_at), "{reset_at} is not within a minute of {now}");
        let reply = other.post("/v1/jobs", json!({"job_type": "t"})).await;
        assert_eq!(reply.headers["x-ratelimit-remaining"], "2999", "{}", reply.text);
        for node in nodes {
            node.stop().await;
        }
    });
}

#[test]
fn workers_and_producers_do_not_eat_each_others_budget() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let limits = json!({"produce_per_minute": 2, "work_per_minute": 2, "manage_per_minute": 2});
        let t = server.project_with("main", "unlimited", limits).await;
        let poll = json!({"worker_id": "w", "queues": ["q"], "wait_seconds": 0});
        for _ in 0..2 {
            t.post("/v1/jobs", json!({"job_type": "t"})).await.is(201);
        }
        t.post("/v1/jobs", json!({"job_type": "t"})).await.is_error(429, "rate_limit_exceeded");
        for _ in 0..2 {
            t.post("/v1/workers/poll", poll.clone()).await.is(200);
        }
        t.post("/v1/workers/poll", poll).await.is_error(429, "rate_limit_exceeded");
        let limits = t.get("/v1/limits").await.is(200);
        let rate = |name: &str| {
            let all = limits["limits"].as_array().expect("limits");
            let one = all.iter().find(|it| it["name"] == name).expect("a limit");
            (one["limit"].clone(), one["used"].clone())
        };
        assert_eq!(rate("produce_per_minute"), (json!(2), json!(2)));
        assert_eq!(rate("manage_per_minute"), (json!(2), json!(1)));
        assert_eq!(rate("waiting_jobs"), (Value::Null, json!(2)));
        assert_eq!(rate("keys"), (json!(50), json!(1)));
        t.get("/v1/jobs").await.is(200);
        t.get("/v1/jobs").await.is_error(429, "rate_limit_exceeded");
        server.stop().await;
    });
}

#[test]
fn a_key_with_a_limit_of_its_own_leaves_the_rest_to_others() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project_with("main", "unlimited", json!({"produce_per_minute": 10})).await;
        let body = json!({"name": "k", "rate_limits": {"produce_per_minute": 3}});
        let made = t.post("/v1/keys", body).await.is(201);
        let secret = made["secret"].as_str().expect("a key").to_owned();
        let small = t.with_key(secret);
        let enqueue = async |t: &TestProject| {
            t.post("/v1/jobs", json!({"job_type": "t"})).await.status.as_u16()
        };
        let mut statuses = Vec::new();
        for _ in 0..5 {
            statuses.push(enqueue(&small).await);
        }
        assert_eq!(statuses, [201, 201, 201, 429, 429]);
        // What was refused by one limit was not counted against the other.
        let mut statuses = Vec::new();
        for _ in 0..8 {
            statuses.push(enqueue(&t).await);
        }
        assert_eq!(statuses, [201, 201, 201, 201, 201, 201, 201, 429]);
        server.stop().await;
    });
}

#[test]
fn an_ack_is_never_refused_for_a_limit_that_a_claim_has_passed() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project_with("main", "unlimited", json!({"work_per_minute": 10})).await;
        for _ in 0..50 {
            t.enqueue(json!({})).await;
        }
        let jobs = t.poll("w", 50).await;
        assert_eq!(jobs.len(), 50);
        let poll = json!({"worker_id": "w", "queues": ["default"], "wait_seconds": 0});
        repeatedly("the polls to be limited", async || {
            let reply = t.post("/v1/workers/poll", poll.clone()).await;
            (reply.status == 429).then_some(())
        })
        .await;
        for job in &jobs[..10] {
            t.heartbeat(job, "w").await.is(200);
        }
        for job in &jobs {
            t.ack(job, "w", "succeeded").await.is(200);
        }
        // What went beyond is paid back by polls.
        let refused = t.post("/v1/workers/poll", poll).await;
        refused.is_error(429, "rate_limit_exceeded");
        let wait: u32 = refused.headers["retry-after"].to_str().expect("text").parse().expect("s");
        assert!(wait > 120, "{wait}");
        server.stop().await;
    });
}

/// What is left of the budget.
fn left(reply: &Reply) -> u32 {
    let left = reply.headers["x-ratelimit-remaining"].to_str().expect("a text");
    left.parse().expect("a number")
}

#[test]
fn a_bulk_request_is_counted_by_its_jobs_wholly_or_not_at_all() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project_with("main", "unlimited", json!({"produce_per_minute": 10})).await;
        let batch = async |jobs: usize| {
            t.post("/v1/jobs/batch", json!({"jobs": vec![json!({"job_type": "t"}); jobs]})).await
        };
        let message = batch(11).await.refuses("jobs");
        assert!(message.contains("at most 10 entries"), "{message}");
        let stored = batch(6).await;
        stored.is(201);
        // A refused batch costs 1: the call. One may have come back meanwhile.
        assert!((3..=4).contains(&left(&stored)), "{:?}", stored.headers);
        let refused = batch(6).await;
        refused.is_error(429, "rate_limit_exceeded");
        assert!((2..=3).contains(&left(&refused)), "{:?}", refused.headers);
        let graph = |jobs: usize| {
            let job = |it: usize| json!({"key": format!("j{it}"), "job_type": "t"});
            json!({"jobs": (0..jobs).map(job).collect::<Vec<_>>()})
        };
        t.post("/v1/workflows", graph(11)).await.refuses("jobs");
        t.post("/v1/workflows", graph(8)).await.is_error(429, "rate_limit_exceeded");
        assert_eq!(t.database.number("select count(*) from jobs").await, 6);
        server.stop().await;
    });
}

#[test]
fn acks_cost_one_each_and_heartbeats_one_for_fifty_leases() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project_with("main", "unlimited", json!({"work_per_minute": 100})).await;
        for _ in 0..60 {
            t.enqueue(json!({})).await;
        }
        let mut jobs = t.poll("w", 30).await;
        jobs.extend(t.poll("w", 30).await);
        assert_eq!(jobs.len(), 60);
        let ids: Vec<_> = jobs.iter().map(|it| &it["id"]).collect();
        let beat = json!({"worker_id": "w", "active_job_ids": ids});
        let beat = t.post("/v1/workers/heartbeat", beat).await;
        beat.is(200);
        // Two polls, and a heartbeat of 60 leases. Some of it may have come back.
        assert!((96..=99).contains(&left(&beat)), "{:?}", beat.headers);
        let ack = |job: &Value| TestProject::ack_body(job, "w", "succeeded");
        let acks = |jobs: &[Value]| json!({"acks": jobs.iter().map(ack).collect::<Vec<_>>()});
        let acked = t.post("/v1/workers/ack/batch", acks(&jobs)).await;
        acked.is(200);
        assert!((36..=42).contains(&left(&acked)), "{:?}", acked.headers);
        // Acks may overdraw.
        t.post("/v1/workers/ack/batch", acks(&jobs)).await.is(200);
        let many = jobs.iter().cycle().take(101).cloned().collect::<Vec<_>>();
        let message = t.post("/v1/workers/ack/batch", acks(&many)).await.refuses("acks");
        assert!(message.contains("at most 100 entries"), "{message}");
        server.stop().await;
    });
}

#[test]
fn polls_that_wait_are_counted_on_all_nodes_together() {
    limited(async {
        let (nodes, urls) = three_nodes(&Stage::default()).await;
        let t = nodes[0].project_with("main", "unlimited", json!({"parked_polls": 3})).await;
        let poll = |wait: u32| json!({"worker_id": "w", "queues": ["q"], "wait_seconds": wait});
        let mut parked = Vec::new();
        for url in &urls {
            let there = t.through(url);
            parked.push(tokio::spawn(async move {
                there.post("/v1/workers/poll", poll(20)).await.is(200)
            }));
        }
        let used = async || {
            let limits = t.get("/v1/limits").await.is(200);
            let all = limits["limits"].as_array().expect("limits").clone();
            all.iter().find(|it| it["name"] == "parked_polls").expect("one")["used"].clone()
        };
        until("three counted polls", async || {
            assert!(!parked.iter().any(JoinHandle::is_finished), "a poll did not wait");
            used().await == 3
        })
        .await;
        for url in &urls {
            let there = t.through(url);
            let refused = there.post("/v1/workers/poll", poll(0)).await;
            let error = refused.is_error(429, "quota_exceeded");
            assert!(error["message"].as_str().expect("words").contains("3 parked polls"));
        }
        // Those that wait are not harmed, and give their places back.
        for _ in 0..3 {
            t.enqueue(json!({"queue": "q"})).await;
        }
        for parked in parked {
            assert_eq!(parked.await.expect("an answer")["jobs"].as_array().map(Vec::len), Some(1));
        }
        until("the counts to end", async || used().await == 0).await;
        t.post("/v1/workers/poll", poll(0)).await.is(200);
        for node in nodes {
            node.stop().await;
        }
    });
}

#[test]
fn a_project_has_as_many_jobs_waiting_as_its_plan_allows() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let limits = json!({"waiting_jobs": 5, "payload_bytes": 10, "retention_days": 3});
        let t = server.project_with("main", "unlimited", limits).await;
        let batch = |jobs: usize| json!({"jobs": vec![json!({"job_type": "test"}); jobs]});
        t.post("/v1/jobs/batch", batch(6)).await.is_error(429, "quota_exceeded");
        t.post("/v1/jobs/batch", batch(4)).await.is(201);
        t.enqueue(json!({"delay_seconds": 60})).await;
        let refused = t.post("/v1/jobs", json!({"job_type": "test"})).await;
        let error = refused.is_error(429, "quota_exceeded");
        assert_eq!(error["message"], "at most 5 live jobs are allowed");
        let graph = json!({"jobs": [{"key": "a", "job_type": "t"}]});
        t.post("/v1/workflows", graph).await.is_error(429, "quota_exceeded");
        let job = t.lease("w").await;
        t.ack(&job, "w", "succeeded").await.is(200);
        until("room for a waiting job", async || {
            t.post("/v1/jobs", json!({"job_type": "test"})).await.status != 429
        })
        .await;
        let large = json!({"job_type": "t", "payload": "12345678901"});
        t.post("/v1/jobs", large).await.is_error(413, "payload_too_large");
        t.patch("/v1/queues/q", json!({"retention_days": 4})).await.refuses("retention_days");
        server.stop().await;
    });
}

#[test]
fn the_number_of_queues_with_settings_is_bounded() {
    run_alone(async |t| {
        let fill = format!(
            "insert into queues (project_id, name)
             select id, 'q' || n from projects, generate_series(1, {}) n where slug = 'main'",
            fencepost_domain::limits::MAX_PROJECT_QUEUES
        );
        t.database.execute(&fill).await;
        let limit = json!({"max_concurrency": 1});
        let refused = [
            t.patch("/v1/queues/new", limit.clone()).await,
            t.act("/v1/queues/new/pause").await,
            t.post("/v1/queues/new/pause", json!({"job_type": "a"})).await,
        ];
        for reply in refused {
            let error = reply.is_error(429, "quota_exceeded");
            assert_eq!(error["message"], "at most 100000 queues with settings are allowed");
        }
        t.patch("/v1/queues/q7", limit).await.is(200);
        t.act("/v1/queues/q8/pause").await.is(200);
    });
}

#[test]
fn a_project_with_all_its_queues_stores_jobs_in_these_only() {
    run_alone(async |t| {
        let fill = format!(
            "insert into queue_counts (project_id, queue)
             select id, 'q' || n from projects, generate_series(1, {}) n where slug = 'main'",
            fencepost_domain::limits::MAX_PROJECT_QUEUES
        );
        t.database.execute(&fill).await;
        let job = |queue: &str| json!({"job_type": "t", "queue": queue});
        // The number may be a second old.
        let mut names = 0;
        let refused = eventually("the limit of queues", async || {
            names += 1;
            let jobs = json!({"jobs": [job("q2"), job(&format!("new{names}"))]});
            let reply = t.post("/v1/jobs/batch", jobs).await;
            (reply.status != 201).then_some(reply)
        })
        .await;
        let error = refused.is_error(429, "quota_exceeded");
        assert_eq!(error["message"], "at most 100000 queues are allowed");
        t.post("/v1/jobs", job("q2")).await.is(201);
        t.database.execute("delete from queue_counts where queue like 'q7%'").await;
        until("room for a queue", async || t.post("/v1/jobs", job("newer")).await.status != 429)
            .await;
    });
}

#[test]
fn without_redis_each_node_keeps_to_its_share() {
    limited(async {
        const LIMIT: u32 = 90;
        let (nodes, urls) = three_nodes(&Stage { redis: None, ..Stage::default() }).await;
        let t =
            nodes[0].project_with("main", "unlimited", json!({"produce_per_minute": LIMIT})).await;
        until_all_know(&t.database).await;
        let started = Instant::now();
        // All nodes are called alike: by then, each has used its share.
        let flood = flood(&t, &urls, Duration::from_secs(2), LIMIT).await;
        let let_in = flood.let_in();
        let most = LIMIT + 5 + started.elapsed().as_secs() as u32 * LIMIT / 60;
        assert!((LIMIT..=most).contains(&let_in), "{let_in} of {LIMIT} to {most}");
        assert_eq!(flood.failed.load(Ordering::Relaxed), 0);
        for node in nodes {
            node.stop().await;
        }
    });
}

#[test]
fn whatever_happens_to_redis_no_call_fails_and_limits_keep_their_promise() {
    limited(async {
        const LIMIT: u32 = 60;
        let place = Redis::dir(std::process::id() + 4_000_000);
        let redis = Redis::start(&place).expect("Redis starts");
        // As it is in earnest: what takes longer is done without.
        let stage = Stage {
            redis: Some(redis.url().into()),
            redis_budget: fencepost_signals::redis_bus::DEFAULT_BUDGET,
            ..Stage::default()
        };
        let (nodes, urls) = three_nodes(&stage).await;
        let t =
            nodes[0].project_with("main", "unlimited", json!({"produce_per_minute": LIMIT})).await;
        // A node's share, when Redis is gone, is a part of the limit by the nodes that it knows.
        until_all_know(&t.database).await;
        let started = Instant::now();
        let nemesis = async {
            let mut redis = redis;
            let pause = || tokio::time::sleep(Duration::from_millis(700));
            let signal = |name: &str, pid: u32| {
                let mut kill = std::process::Command::new("kill");
                assert!(kill.args([name, &pid.to_string()]).status().expect("it runs").success());
            };
            pause().await;
            signal("-STOP", redis.pid());
            pause().await;
            signal("-CONT", redis.pid());
            pause().await;
            let client = ::redis::Client::open(redis.url()).expect("a URL");
            let mut conn = client.get_multiplexed_async_connection().await.expect("a connection");
            ::redis::cmd("FLUSHALL").exec_async(&mut conn).await.expect("flushed");
            pause().await;
            for (bytes, is_full) in [("1", true), ("0", false)] {
                let limit = ["SET", "maxmemory", bytes];
                ::redis::cmd("CONFIG").arg(&limit).exec_async(&mut conn).await.expect("it is set");
                let wrote = ::redis::cmd("SET").arg(&["a", "b"]).exec_async(&mut conn).await;
                assert_eq!(wrote.is_err(), is_full, "{wrote:?}");
                pause().await;
            }
            drop(redis);
            pause().await;
            redis = Redis::start(&place).expect("it starts again");
            pause().await;
            redis
        };
        let (flood, redis) = tokio::join!(flood(&t, &urls, Duration::from_secs(8), 0), nemesis);
        assert_eq!(flood.failed.load(Ordering::Relaxed), 0, "{flood:?}");
        // Once with what Redis knew, once after each time it forgot (flushed, restarted), and once
        // by the nodes alone (full, gone); and what comes back, to Redis and to the nodes.
        let back = started.elapsed().as_secs() as u32 * LIMIT / 60 + 1;
        let most = LIMIT * 4 + 2 * back + 3;
        let let_in = flood.let_in();
        assert!((LIMIT..=most).contains(&let_in), "{let_in}, at most {most}");
        for node in nodes {
            node.stop().await;
        }
        drop(redis);
    });
}

#[test]
fn one_tenants_flood_does_not_slow_another_to_a_halt() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let limits = json!({"produce_per_minute": 30, "waiting_jobs": 50});
        let t = server.project_with("main", "free", limits).await;
        let quiet = server.project("quiet").await;
        let urls = [t.url.clone()];
        let flooding = flood(&t, &urls, Duration::from_secs(3), 0);
        let working = async {
            for _ in 0..10 {
                quiet.enqueue(json!({})).await;
                let job = quiet.wait_and_lease("w").await;
                quiet.ack(&job, "w", "succeeded").await.is(200);
            }
        };
        let (flood, ()) = tokio::join!(flooding, working);
        assert!(flood.let_in() <= 30 + 3, "{flood:?}");
        server.stop().await;
    });
}
