//! What a job costs on one node, and on several with as much load each, behind the proxy that the
//! project ships. The machine's cores are shared, so rates say little and CPU a job says it.

use std::{
    fs,
    net::TcpListener,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use tokio::task::JoinSet;

use super::{
    client::{SMALL_PAYLOAD_BYTES, Target},
    load::{self, Step},
    nodes::{ACQUAINTANCE, Node, Stores},
    process::{self, Watched},
    report::{Measure, plain},
};

/// Nodes that share the load of three.
const NODES: usize = 3;
/// Projects that share the load of a node: enough for a hash to spread them evenly.
const PROJECTS_PER_NODE: usize = 8;
/// The load of a node is that of this many runs of the lifecycle.
const LOADS_PER_NODE: usize = 2;
/// Projects that are needed.
pub const PROJECTS: usize = NODES * PROJECTS_PER_NODE;
const PROXY_CONFIG: &str = include_str!("../../ops/haproxy.cfg");
const START_TIMEOUT: Duration = Duration::from_secs(10);
const LOOK_PERIOD: Duration = Duration::from_millis(20);

/// HAProxy before these nodes.
struct Proxy {
    child: Child,
    dir: PathBuf,
    authority: String,
}

impl Proxy {
    async fn start(nodes: &[Node]) -> anyhow::Result<Self> {
        let free = || anyhow::Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string());
        let (authority, stats) = (free()?, free()?);
        let servers: String = nodes
            .iter()
            .enumerate()
            .map(|(number, it)| format!("    server n{number} {}\n", it.authority()))
            .collect();
        let config = PROXY_CONFIG
            .replace("    server-template node 20 nodes:7070 init-addr none\n", &servers)
            .replace(" resolvers docker init-addr last,libc,none", "")
            .replace("bind :8080", &format!("bind {authority}"))
            .replace("127.0.0.1:8404", &stats)
            // All connections are of one client here.
            .replace("gt 256", "gt 8000");
        ensure!(config.contains("server n0"), "ops/haproxy.cfg has another form");
        let dir =
            std::env::temp_dir().join(format!("fencepost-bench-proxy-{}", std::process::id()));
        fs::create_dir_all(&dir)?;
        let file = dir.join("haproxy.cfg");
        fs::write(&file, config)?;
        let mut command = Command::new("haproxy");
        command.arg("-db").arg("-f").arg(&file).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().context("haproxy is missing: apt-get install haproxy")?;
        let proxy = Self { child, dir, authority };
        let deadline = Instant::now() + START_TIMEOUT;
        while tokio::net::TcpStream::connect(&proxy.authority).await.is_err() {
            ensure!(Instant::now() < deadline, "the proxy was not ready in time");
            tokio::time::sleep(LOOK_PERIOD).await;
        }
        Ok(proxy)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// The cost of lifecycles.
#[derive(Debug, Clone, Copy)]
struct Cost {
    jobs_per_second: f64,
    /// CPU of all nodes, without that of the proxy.
    nodes_us: f64,
    postgres_us: f64,
}

impl Cost {
    fn us(self) -> f64 {
        self.nodes_us + self.postgres_us
    }
}

/// Measures the cost of a job on one node, and on three at three times the load.
///
/// # Errors
/// When something does not start, or a job is lost.
pub async fn measure(
    watched: &Watched,
    stores: &Stores,
    keys: &[String],
    queue: &str,
    time: Duration,
) -> anyhow::Result<Vec<Measure>> {
    let queue = |nodes: usize| format!("{queue}-{nodes}");
    let one = cost(watched, stores, (1, keys), &queue(1), time).await?;
    let three = cost(watched, stores, (NODES, keys), &queue(NODES), time).await?;
    Ok(vec![
        plain("lifecycle, one node", one.jobs_per_second, "jobs/s"),
        plain("lifecycle, three nodes, three times the load", three.jobs_per_second, "jobs/s"),
        plain("CPU a job, one node", one.us(), "us"),
        plain("of that PostgreSQL's", one.postgres_us, "us"),
        plain("CPU a job, three nodes, three times the load", three.us(), "us"),
        plain("of that PostgreSQL's, three nodes", three.postgres_us, "us"),
        plain("CPU a job, to one node", three.us() / one.us(), "times"),
    ])
}

/// Lifecycles of all of these projects at once, over this many nodes.
async fn cost(
    watched: &Watched,
    stores: &Stores,
    (count, keys): (usize, &[String]),
    queue: &str,
    time: Duration,
) -> anyhow::Result<Cost> {
    let mut nodes = Vec::new();
    for _ in 0..count {
        nodes.push(Node::start(stores).await?);
    }
    let proxy = Proxy::start(&nodes).await?;
    tokio::time::sleep(ACQUAINTANCE).await;
    let used = async || {
        let of_nodes: f64 = nodes.iter().map(|it| process::cpu_seconds(it.pid())).sum();
        anyhow::Ok((of_nodes, watched.usage().await?.postgres_seconds))
    };
    let before = used().await?;
    let mut running = JoinSet::new();
    for api_key in keys.iter().take(count * PROJECTS_PER_NODE).cloned() {
        let (authority, queue) = (proxy.authority.clone(), queue.to_owned());
        running.spawn(async move {
            let target = Target { authority, api_key, payload_bytes: SMALL_PAYLOAD_BYTES };
            let targets = std::slice::from_ref(&target);
            let parts = PROJECTS_PER_NODE / LOADS_PER_NODE;
            let ran = load::rate_of_part(targets, Step::Lifecycle, &queue, time, parts);
            let (rate, ledger) = ran.await?;
            anyhow::Ok((rate, ledger, target))
        });
    }
    let mut done = Vec::new();
    while let Some(ended) = running.join_next().await {
        done.push(ended??);
    }
    let after = used().await?;
    let jobs_per_second: f64 = done.iter().map(|it| it.0).sum();
    for (_, ledger, target) in done {
        ledger.check(&target, queue).await?;
    }
    let jobs = jobs_per_second * time.as_secs_f64();
    let us = |from: f64, to: f64| (to - from) * 1e6 / jobs;
    let (nodes_us, postgres_us) = (us(before.0, after.0), us(before.1, after.1));
    Ok(Cost { jobs_per_second, nodes_us, postgres_us })
}
