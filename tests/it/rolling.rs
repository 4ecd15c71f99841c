//! A deploy: three nodes behind a real proxy are restarted one after the other under load. No
//! request fails, no job is lost, and no attempt is burnt.

use std::{
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use crate::harness::{
    LoneProject, NodeProcess, Process, Reply, TestProject, free_port, fresh_database, limited,
    run_for, scratch, until,
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

const NODES: usize = 3;
const PRODUCERS: usize = 3;
const WORKERS: usize = 8;
/// The proxy needs a second to see that a node is not ready.
const LINGER: [&str; 2] = ["--linger-seconds", "3"];

/// The proxy of ops/haproxy.cfg, before these nodes.
struct Balancer {
    url: String,
    stats: String,
    _process: Process,
}

impl Balancer {
    async fn start(nodes: &[u16]) -> Self {
        Self::start_with(nodes, |config| config).await
    }

    async fn start_with(nodes: &[u16], change: impl FnOnce(String) -> String) -> Self {
        let (port, stats) = (free_port(), free_port());
        let kept = crate::docs::read("ops/haproxy.cfg");
        let servers: String =
            nodes.iter().map(|it| format!("    server node-{it} 127.0.0.1:{it}\n")).collect();
        let config = kept
            .replace("    server-template node 20 nodes:7070 init-addr none\n", &servers)
            .replace(":8080", &format!("127.0.0.1:{port}"))
            .replace("127.0.0.1:8404", &format!("127.0.0.1:{stats}"))
            // Here nodes have addresses, not names.
            .replace(" resolvers docker init-addr last,libc,none", "");
        assert_eq!(config.matches("server node-").count(), nodes.len());
        let file = scratch("haproxy").join("haproxy.cfg");
        std::fs::write(&file, change(config)).expect("it is written");
        let process = Process::start(Command::new("haproxy").arg("-db").arg("-f").arg(&file));
        let stats = format!("http://127.0.0.1:{stats}/stats;csv");
        let this = Self { url: format!("http://127.0.0.1:{port}"), stats, _process: process };
        for node in nodes {
            this.until_up(*node).await;
        }
        this
    }

    /// Waits until it sends to this node.
    async fn until_up(&self, node: u16) {
        until(format!("node {node} to be up"), async || {
            let Ok(answer) = crate::harness::client().get(&self.stats).send().await else {
                return false;
            };
            let text = answer.text().await.unwrap_or_default();
            let row = text.lines().find(|it| it.starts_with(&format!("nodes,node-{node},")));
            // "UP", but not "UP 1/2": on its way down.
            row.is_some_and(|it| it.split(',').any(|it| it == "UP"))
        })
        .await;
    }
}

#[test]
fn a_client_of_the_proxy_holds_256_connections_each_for_the_time_of_a_head() {
    limited(async {
        let faster = |config: String| {
            let changed = config.replace("timeout http-request 10s", "timeout http-request 1s");
            assert_ne!(changed, config);
            changed
        };
        let proxy = Balancer::start_with(&[], faster).await;
        let address = proxy.url.strip_prefix("http://").expect("an http URL").to_owned();
        let open = async || loop {
            if let Ok(it) = TcpStream::connect(&address).await {
                return it;
            }
        };
        let mut opened = Vec::new();
        for _ in 0..300 {
            let mut connection = open().await;
            // A refused one may be closed already.
            let _ = connection.write_all(b"GET / HTTP/1.1\r\nx: ").await;
            opened.push(connection);
        }
        let mut held = 0;
        for mut connection in opened {
            let mut text = String::new();
            let _ = connection.read_to_string(&mut text).await;
            assert!(text.is_empty() || text.starts_with("HTTP/1.1 408"), "{text}");
            held += usize::from(!text.is_empty());
        }
        assert_eq!(held, 256);
        let answer = crate::harness::client()
            .get(&proxy.url)
            .send()
            .await
            .expect("a connection is free again");
        assert_eq!(answer.status(), 503, "there are no nodes");
    });
}

/// Calls once: an answer that is no success is what must not be.
async fn call(t: &TestProject, path: &str, body: Value) -> Value {
    let sent = t.request(reqwest::Method::POST, path).json(&body).send().await;
    let reply = Reply::of(sent.unwrap_or_else(|error| panic!("{path}: {error:?}"))).await;
    assert!(reply.status.is_success(), "{path}: {reply:?}");
    reply.json()
}

async fn produce(t: TestProject, stop: Arc<AtomicBool>) -> usize {
    let mut stored = 0;
    while !stop.load(Ordering::Relaxed) {
        call(&t, "/v1/jobs", json!({"job_type": "test"})).await;
        stored += 1;
        tokio::time::sleep(Duration::from_millis(15)).await;
    }
    stored
}

async fn work(t: TestProject, number: usize, stop: Arc<AtomicBool>, done: Arc<AtomicUsize>) {
    let worker = format!("w{number}");
    while !stop.load(Ordering::Relaxed) {
        let poll = json!({
            "worker_id": worker, "queues": ["default"], "wait_seconds": 2, "capacity": 3,
        });
        let polled = call(&t, "/v1/workers/poll", poll).await;
        for job in polled["jobs"].as_array().expect("jobs") {
            tokio::time::sleep(Duration::from_millis(20)).await;
            let ack = TestProject::ack_body(job, &worker, "succeeded");
            call(&t, "/v1/workers/ack", ack).await;
            done.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[test]
fn a_rolling_restart_fails_no_request_loses_no_job_and_burns_no_attempt() {
    run_for(Duration::from_secs(120), async {
        let database = fresh_database().await;
        let ports: Vec<_> = (0..NODES).map(|_| free_port()).collect();
        let start = |port| NodeProcess::start_at(&database, port, &LINGER);
        let mut nodes: Vec<_> = ports.iter().map(|it| start(*it)).collect();
        for node in &mut nodes {
            node.until_ready().await;
        }
        let balancer = Balancer::start(&ports).await;
        let t = LoneProject::at(&balancer.url, &database, "main").await;
        let (idle, stop) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let done = Arc::new(AtomicUsize::new(0));
        let producers: Vec<_> = (0..PRODUCERS)
            .map(|_| tokio::spawn(produce(t.project.clone(), Arc::clone(&idle))))
            .collect();
        let workers: Vec<_> = (0..WORKERS)
            .map(|number| {
                tokio::spawn(work(t.project.clone(), number, Arc::clone(&stop), Arc::clone(&done)))
            })
            .collect();
        for node in &mut nodes {
            let before = done.load(Ordering::Relaxed);
            let port = node.port;
            assert!(node.terminate().await, "it ends well");
            *node = start(port);
            node.until_ready().await;
            balancer.until_up(port).await;
            assert!(done.load(Ordering::Relaxed) > before, "the others go on");
        }
        idle.store(true, Ordering::Relaxed);
        let mut stored = 0;
        for producer in producers {
            stored += producer.await.expect("no request of a producer fails");
        }
        until(format!("{stored} jobs to be done"), async || {
            assert!(workers.iter().all(|it| !it.is_finished()), "no request of a worker fails");
            done.load(Ordering::Relaxed) >= stored
        })
        .await;
        stop.store(true, Ordering::Relaxed);
        for worker in workers {
            worker.await.expect("no request of a worker fails");
        }
        let number = async |sql: &str| database.number(sql).await;
        let stored = i64::try_from(stored).expect("few");
        assert!(stored > 300, "{stored} jobs are a load");
        assert_eq!(number("select count(*) from finished_jobs").await, stored);
        assert_eq!(number("select count(*) from jobs").await, 0);
        let burnt = "select count(*) from finished_jobs where failures > 0 or state <> 'succeeded'";
        assert_eq!(number(burnt).await, 0);
        let ended = "select count(*) from attempts where outcome <> 'released'";
        assert_eq!(number(ended).await, 0);
    });
}

/// The nodes that requests with these values of a header reach, by their names in the proxy.
async fn reached(proxy: &Balancer, header: &str, values: usize) -> Vec<String> {
    let mut reached = Vec::new();
    for value in 0..values {
        let url = format!("{}/livez", proxy.url);
        let sent = crate::harness::client().get(url).header(header, format!("v{value}"));
        let answer = sent.send().await.expect("an answer");
        assert_eq!(answer.status(), 200);
        let node = answer.headers()["x-node"].to_str().expect("a name").to_owned();
        reached.push(node);
    }
    reached
}

#[test]
fn a_project_stays_on_its_node_while_others_come_and_go() {
    const PROJECTS: usize = 120;
    run_for(Duration::from_secs(120), async {
        let database = fresh_database().await;
        let start = |port| NodeProcess::start_at(&database, port, &LINGER);
        let ports: Vec<_> = (0..4).map(|_| free_port()).collect();
        let mut nodes: Vec<_> = ports.iter().map(|it| start(*it)).collect();
        for node in &mut nodes {
            node.until_ready().await;
        }
        let shown = |config: String| {
            let option = "    option httpchk GET /readyz\n";
            let shows = format!("{option}    http-response set-header x-node %s\n");
            let config = config.replace(option, &shows);
            // A request that has just ended may still count, and few of them are beyond the bound.
            let unbound = config.replace("    hash-balance-factor 150\n", "");
            assert_ne!(unbound, config);
            unbound
        };
        let three = Balancer::start_with(&ports[..3], shown).await;
        let before = reached(&three, "fencepost-project", PROJECTS).await;
        assert_eq!(before, reached(&three, "fencepost-project", PROJECTS).await);
        let by_key = reached(&three, "authorization", PROJECTS).await;
        assert_eq!(before, by_key, "before a client knows its project, its key leads");
        for port in &ports[..3] {
            let name = format!("node-{port}");
            let share = before.iter().filter(|it| **it == name).count();
            assert!(share >= PROJECTS / 10, "{name} has {share} of {PROJECTS}");
        }
        let four = Balancer::start_with(&ports, shown).await;
        let after = reached(&four, "fencepost-project", PROJECTS).await;
        let added = format!("node-{}", ports[3]);
        let moved: Vec<_> = after.iter().zip(&before).filter(|(now, then)| now != then).collect();
        assert!(moved.iter().all(|it| *it.0 == added), "only to the node that came: {moved:?}");
        assert!(moved.len() * 2 <= PROJECTS, "{} of {PROJECTS} moved", moved.len());
        drop(nodes.remove(0));
        let gone = format!("node-{}", ports[0]);
        until("the proxy to see it", async || {
            let now = reached(&four, "fencepost-project", PROJECTS).await;
            now.iter().zip(&after).all(|(now, then)| (then == &gone) != (now == then))
        })
        .await;
    });
}
