//! What a test stands on: a database of its own, a server of its own, and verbs that read like the
//! API. `run` gives each test its time limit.

mod cluster;
mod documented;
mod process;
mod project;
mod proxy;
mod reply;
mod sink;

use std::time::Duration;

pub use self::{
    cluster::{Database, fresh_database, home, logins, redis_url, share_with},
    process::{NodeProcess, Process, free_port, scratch, until_ready},
    project::{Stage, TestProject, TestServer},
    proxy::{Proxy, Silence},
    reply::Reply,
    sink::Sink,
};

/// A test that takes longer has hung: on a slow machine, none has taken half of it.
const TIME_LIMIT: Duration = Duration::from_secs(120);

/// Runs a test against a project on a server and a database of its own.
pub fn run(test: impl AsyncFnOnce(&TestProject)) {
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
    fencepost::tls::install();
    cluster::start_servers();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        tokio::time::timeout(time_limit, test).await.expect("the test took too long");
    });
}
