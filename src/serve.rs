//! One node, from its listeners to its last answer.

use std::time::Duration;

use anyhow::Context;
use chrono::TimeDelta;
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

/// Closing the database's connections may take this long; then the process ends without.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

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
    /// How long new connections are still accepted once the node stops, so that load balancers see
    /// that it is not ready before it is gone.
    pub linger: Duration,
    /// Recurring schedules that fire more often are refused.
    pub min_schedule_period: Duration,
}

/// Serves until `stop` is cancelled; then drains and returns.
///
/// The way down: `readyz` answers 503, parked polls are answered over three seconds (empty, unless a
/// claim for them is under way), the loops end their batch, after `linger` no connection is accepted
/// any more, requests under way finish within [`DRAIN_TIMEOUT`].
///
/// # Errors
/// When the database cannot be reached at the start, or was not migrated; or when the node stopped
/// because a part of it has failed for good.
pub async fn serve(node: Node, stop: CancellationToken) -> anyhow::Result<()> {
    let Node { api, operator, database_url, pools, linger, min_schedule_period } = node;
    let pools = Pools::new(&database_url, pools).context("the database's URL cannot be read")?;
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
    // The operator watches to the end.
    let ended = CancellationToken::new();
    if let Some((listener, metrics)) = operator {
        let router = http::operator_router(metrics.clone());
        tokio::spawn(http::server::run(listener, router, ended.clone(), TaskTracker::new()));
        tokio::spawn(upkeep(metrics, ended.clone()));
    }
    let closing = CancellationToken::new();
    tokio::spawn(close_later(stop, linger, closing.clone()));
    let (connections, handlers) = (TaskTracker::new(), TaskTracker::new());
    let min_schedule_period = TimeDelta::from_std(min_schedule_period)?;
    let app = App::new(engine.clone(), cursor_key, min_schedule_period);
    let router = http::router(app, handlers.clone());
    http::server::run(api, router, closing, connections.clone()).await;
    let drained = timeout(DRAIN_TIMEOUT, async {
        connections.wait().await;
        // A handler may outlive the connection of a client that has gone.
        handlers.close();
        handlers.wait().await;
        background.wait().await;
        engine.finish().await;
    });
    if drained.await.is_err() {
        tracing::warn!(connections = connections.len(), "stopped with requests unfinished");
    }
    ended.cancel();
    let has_failed = engine.has_failed();
    // With it the pump ends, which keeps connections for its next claims.
    drop(engine);
    let _ = timeout(CLOSE_TIMEOUT, pools.close()).await;
    anyhow::ensure!(!has_failed, "a part of this node has failed");
    Ok(())
}

async fn close_later(stop: CancellationToken, linger: Duration, closing: CancellationToken) {
    stop.cancelled().await;
    tracing::info!("stopping: answering parked polls and finishing requests");
    tokio::time::sleep(linger).await;
    closing.cancel();
}

async fn upkeep(metrics: PrometheusHandle, ended: CancellationToken) {
    while timeout(telemetry::UPKEEP_PERIOD, ended.cancelled()).await.is_err() {
        metrics.run_upkeep();
    }
}
