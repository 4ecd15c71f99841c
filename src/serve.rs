//! One node, from its listeners to its last answer.

use std::time::Duration;

use anyhow::Context;
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::{net::TcpListener, time::timeout};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    app::App,
    config::PoolArgs,
    engine::Engine,
    http, loops,
    store::{self, pools::Pools},
    telemetry,
};

/// Requests under way may finish within this once the node stops.
pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(25);

/// What a node serves from.
pub struct Node {
    /// The API's listener.
    pub api: TcpListener,
    /// The operator's listener, with what it shows; none where nobody watches.
    pub operator: Option<(TcpListener, PrometheusHandle)>,
    /// The database, migrated.
    pub database_url: String,
    /// How many connections each kind of work may have.
    pub pools: PoolArgs,
}

/// Serves until `stop` is cancelled; then drains and returns.
///
/// The way down: `readyz` answers 503, parked polls are answered empty over three seconds, the
/// loops end their batch, requests under way finish within [`DRAIN_TIMEOUT`].
///
/// # Errors
/// When the database cannot be reached at the start, or was not migrated.
pub async fn serve(node: Node, stop: CancellationToken) -> anyhow::Result<()> {
    let Node { api, operator, database_url, pools } = node;
    let pools = Pools::new(&database_url, pools)?;
    let cursor_key = {
        let mut conn = pools.read.acquire().await.context("the database does not answer")?;
        store::projects::cursor_key(&mut conn)
            .await
            .context("the database is not migrated: run `fencepost migrate`")?
    };
    let engine = Engine::start(pools.clone(), stop.clone());
    let background = TaskTracker::new();
    loops::start(&engine, &stop, &background);
    background.close();
    if let Some((listener, metrics)) = operator {
        let router = http::operator_router(metrics.clone());
        let connections = TaskTracker::new();
        tokio::spawn(http::server::run(listener, router, stop.clone(), connections));
        tokio::spawn(upkeep(metrics, stop.clone()));
    }
    let connections = TaskTracker::new();
    let router = http::router(App::new(engine, cursor_key));
    http::server::run(api, router, stop.clone(), connections.clone()).await;
    tracing::info!("stopping: answering parked polls and finishing requests");
    let drained = timeout(DRAIN_TIMEOUT, async {
        connections.wait().await;
        background.wait().await;
    });
    if drained.await.is_err() {
        tracing::warn!(connections = connections.len(), "stopped with requests unfinished");
    }
    pools.close().await;
    Ok(())
}

async fn upkeep(metrics: PrometheusHandle, stop: CancellationToken) {
    while timeout(telemetry::UPKEEP_PERIOD, stop.cancelled()).await.is_err() {
        metrics.run_upkeep();
    }
}
