//! What a test stands on: a project on a server that tests share, or a server and a database of its
//! own, and verbs that read like the API. `run` and `run_alone` give each test its time limit.

mod cluster;
mod documented;
mod process;
mod project;
mod proxy;
mod reply;
mod shared;
mod sink;
mod wait;

use std::{
    fs::OpenOptions,
    io::Write,
    time::{Duration, Instant},
};

pub use self::{
    cluster::{ALL_ROWS, Database, fresh_database, home, logins, redis_url, share_with},
    process::{NodeProcess, Process, free_port, scratch, until_ready},
    project::{LoneProject, Stage, TestProject, TestServer, client, client_builder},
    proxy::{Proxy, Silence},
    reply::Reply,
    sink::Sink,
    wait::{eventually, repeatedly, until},
};

/// A test that takes longer has hung: on a slow machine, none has taken half of it.
const TIME_LIMIT: Duration = Duration::from_secs(120);

/// The file to which each test adds a line with its seconds and its name.
const TIMES_VARIABLE: &str = "FENCEPOST_TEST_TIMES";

/// Runs a test against a project on a server that tests share. It sees what a tenant sees: neither
/// the database nor the node.
pub fn run(test: impl AsyncFnOnce(&TestProject)) {
    limited(async {
        let project = shared::project().await;
        test(&project).await;
        shared::delete(&project).await;
    });
}

/// Runs a test against a project on a server and a database of its own.
pub fn run_alone(test: impl AsyncFnOnce(&LoneProject)) {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let project = server.project("main").await;
        test(&project).await;
        server.stop().await;
    });
}

/// Runs a test that makes its own stage.
pub fn limited(test: impl Future<Output = ()>) {
    run_for(TIME_LIMIT, test);
}

/// Runs a test that takes longer than others. The time counts once the tests' servers run: the
/// first tests wait for them, and none is to blame for a machine that starts them slowly.
pub fn run_for(time_limit: Duration, test: impl Future<Output = ()>) {
    fencepost_net::tls::install();
    cluster::start_servers();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name(wait::test_name())
        .enable_all()
        .build()
        .expect("a runtime");
    let since = Instant::now();
    runtime.block_on(async {
        let mut test = std::pin::pin!(tokio::time::timeout(time_limit, test));
        let ended = match tokio::time::timeout(wait::NAMED_AFTER, &mut test).await {
            Ok(ended) => ended,
            Err(_) => {
                wait::announce("runs");
                test.await
            }
        };
        ended.expect("the test took too long");
    });
    record(since.elapsed());
}

/// Adds the time of this test to the file of times, if there is one.
fn record(took: Duration) {
    let Ok(path) = std::env::var(TIMES_VARIABLE) else { return };
    let mut file = OpenOptions::new().create(true).append(true).open(path).expect("a file");
    let line = format!("{:.3}\t{}\n", took.as_secs_f64(), wait::test_name());
    file.write_all(line.as_bytes()).expect("a line");
}
