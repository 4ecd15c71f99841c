//! An endpoint that is notified of the ends of jobs. It refuses some deliveries.

use std::{
    net::SocketAddr,
    sync::{Arc, atomic::Ordering},
};

use axum::{
    Router,
    body::Bytes,
    extract::{Path, State},
    http::{HeaderMap, StatusCode},
    routing::post,
};
use serde_json::Value;
use tokio::net::TcpListener;

use crate::{clients::World, history::Event, pushed};

/// Of a hundred deliveries, those that are refused.
const REFUSED_PERCENT: u32 = 2;

/// Answers deliveries on this listener.
pub fn start(listener: TcpListener, world: Arc<World>) {
    let routes = Router::new()
        .route("/{tenant}", post(take))
        .route("/pushed/{tenant}", post(pushed::take))
        .with_state(world);
    tokio::spawn(async move { axum::serve(listener, routes).await });
}

/// Where the endpoint of a tenant is.
#[must_use]
pub fn url(address: SocketAddr, tenant: usize) -> String {
    format!("http://{address}/{tenant}")
}

/// Where its jobs are sent that are pushed.
#[must_use]
pub fn pushed_url(address: SocketAddr, tenant: usize) -> String {
    format!("http://{address}/pushed/{tenant}")
}

async fn take(
    State(world): State<Arc<World>>,
    Path(tenant): Path<usize>,
    headers: HeaderMap,
    body: Bytes,
) -> StatusCode {
    let event: Value = serde_json::from_slice(&body).unwrap_or_default();
    let text = |it: &Value| it.as_str().unwrap_or_default().to_owned();
    let id = headers.get("webhook-id").and_then(|it| it.to_str().ok()).unwrap_or_default();
    let is_healing = world.is_healing.load(Ordering::Relaxed);
    let is_taken = is_healing || rand::random_range(0..100) >= REFUSED_PERCENT;
    world.history.note(Event::Delivered {
        tenant,
        event: id.to_owned(),
        kind: text(&event["type"]),
        job: text(&event["data"]["job"]["id"]),
        is_taken,
    });
    if is_taken { StatusCode::NO_CONTENT } else { StatusCode::INTERNAL_SERVER_ERROR }
}
