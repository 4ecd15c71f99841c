//! A proxy that is killed with hundreds of parked polls behind it: no job is worked on twice, and
//! none waits for a lease.

use std::{
    collections::HashMap,
    net::TcpStream,
    process::Command,
    sync::Mutex,
    time::{Duration, Instant},
};

use crate::harness::{
    LoneProject, NodeProcess, Process, TestProject, eventually, free_port, fresh_database, run_for,
    scratch, until,
};
use futures_util::future::join_all;
use serde_json::{Value, json};
use uuid::Uuid;

const POLLS: usize = 500;
/// The length of each lease: a job that waited for one would be late.
const LEASE: Duration = Duration::from_secs(30);

/// A proxy that can be killed and started again.
struct Proxy {
    port: u16,
    start: Box<dyn Fn() -> Process>,
    running: Process,
}

impl Proxy {
    async fn new(port: u16, start: impl Fn() -> Process + 'static) -> Self {
        let this = Self { port, running: start(), start: Box::new(start) };
        this.until_open().await;
        this
    }

    /// As ops/haproxy.cfg says, but for many connections of one address.
    async fn haproxy(node: u16) -> Self {
        let (port, stats) = (free_port(), free_port());
        let config = crate::docs::read("ops/haproxy.cfg")
            .replace(
                "server-template node 20 nodes:7070 init-addr none",
                &format!("server n 127.0.0.1:{node}"),
            )
            .replace(":8080", &format!("127.0.0.1:{port}"))
            .replace("127.0.0.1:8404", &format!("127.0.0.1:{stats}"))
            .replace(" resolvers docker init-addr last,libc,none", "")
            .replace("gt 256", "gt 2000");
        let file = scratch("killed-haproxy").join("haproxy.cfg");
        std::fs::write(&file, config).expect("it is written");
        Self::new(port, move || {
            Process::start(Command::new("haproxy").arg("-db").arg("-f").arg(&file))
        })
        .await
    }

    /// As ops/nginx.conf says, but for many connections of one address.
    async fn nginx(node: u16) -> Self {
        let port = free_port();
        let folder = scratch("killed-nginx");
        let config = crate::docs::read("ops/nginx.conf")
            .replace("        server node2:7070 max_fails=1 fail_timeout=1s;\n", "")
            .replace("node1:7070", &format!("127.0.0.1:{node}"))
            .replace("listen 8080", &format!("listen 127.0.0.1:{port}"))
            .replace("limit_conn clients 256", "limit_conn clients 2000")
            // One process, so that all of it is killed; its files are in the folder.
            .replace("worker_processes auto;", "master_process off;\ndaemon off;")
            .replace(
                "http {",
                "http {\n    access_log off;\n    client_body_temp_path body;\n    \
                               proxy_temp_path proxy;\n    fastcgi_temp_path fastcgi;\n    \
                               uwsgi_temp_path uwsgi;\n    scgi_temp_path scgi;",
            );
        std::fs::write(folder.join("nginx.conf"), config).expect("it is written");
        let prefix = folder.display().to_string();
        let start = move || {
            let main = "pid nginx.pid; error_log error.log;";
            let args = ["-p", &prefix, "-c", "nginx.conf", "-e", "error.log", "-g", main];
            Process::start(Command::new("nginx").args(args))
        };
        Self::new(port, start).await
    }

    async fn until_open(&self) {
        until("the proxy to listen", async || TcpStream::connect(("127.0.0.1", self.port)).is_ok())
            .await;
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }
}

/// The answer to a call, if it was accepted and its answer has arrived.
async fn call(t: &TestProject, path: &str, body: &Value) -> Option<Value> {
    let sent = t.request(reqwest::Method::POST, path).json(body).send().await.ok()?;
    sent.error_for_status().ok()?.json().await.ok()
}

/// One worker: it repeats its poll with its id until it has a job, and acks it.
async fn work(t: &TestProject, number: usize, given: &Mutex<HashMap<String, Vec<String>>>) {
    let worker = format!("w{number}");
    let poll = json!({
        "worker_id": worker, "queues": ["default"], "wait_seconds": 30, "capacity": 1,
        "poll_id": Uuid::now_v7(), "lease_seconds": LEASE.as_secs(),
    });
    let job = eventually("a job", async || {
        let answer = call(t, "/v1/workers/poll", &poll).await;
        answer.and_then(|it| it["jobs"].as_array()?.first().cloned())
    })
    .await;
    let id = job["id"].as_str().expect("an id").to_owned();
    given.lock().expect("no panic").entry(id).or_default().push(worker.clone());
    let ack = TestProject::ack_body(&job, &worker, "succeeded");
    until("an answer to the ack", async || call(t, "/v1/workers/ack", &ack).await.is_some()).await;
}

async fn parked(node: &NodeProcess) -> usize {
    let text = node.metrics().await;
    let line = text.lines().find_map(|it| it.strip_prefix("fencepost_polls_parked "));
    line.and_then(|it| it.parse::<f64>().ok()).unwrap_or(0.0) as usize
}

fn survives(proxy: impl AsyncFnOnce(u16) -> Proxy) {
    run_for(Duration::from_secs(150), async {
        let database = fresh_database().await;
        let mut node = NodeProcess::start_at(&database, free_port(), &["--trusted-hops", "1"]);
        node.until_ready().await;
        let mut proxy = proxy(node.port).await;
        let direct = LoneProject::at(&node.url(), &database, "main").await;
        let behind = direct.through(&proxy.url());
        let given = Mutex::new(HashMap::new());
        let workers = (0..POLLS).map(|number| work(&behind, number, &given));
        let outage = async {
            until("all polls to be parked", async || parked(&node).await >= POLLS).await;
            proxy.running.kill();
            // Some are leased to polls whose end the node has not noticed yet.
            let begun = Instant::now();
            let jobs = vec![json!({"job_type": "test"}); POLLS];
            direct.post("/v1/jobs/batch", json!({"jobs": jobs})).await.is(201);
            proxy.running = (proxy.start)();
            proxy.until_open().await;
            begun
        };
        let (begun, _) = tokio::join!(outage, join_all(workers));
        let took = begun.elapsed();
        assert!(took < LEASE, "a job waited for a lease: {took:?}");
        let given = given.lock().expect("no panic").clone();
        let doubled: Vec<_> = given.values().filter(|it| it.len() > 1).collect();
        assert!(given.len() == POLLS && doubled.is_empty(), "{} jobs, {doubled:?}", given.len());
        let number = async |sql: &str| database.number(sql).await;
        assert_eq!(number("select count(*) from finished_jobs").await, POLLS as i64);
        assert_eq!(number("select count(*) from finished_jobs where failures > 0").await, 0);
    });
}

#[test]
fn haproxy_is_killed_and_no_job_is_doubled_or_late() {
    survives(Proxy::haproxy);
}

#[test]
fn nginx_is_killed_and_no_job_is_doubled_or_late() {
    survives(Proxy::nginx);
}
