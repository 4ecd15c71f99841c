//! The native wire: parse, call the engine, answer. No SQL, no rules. The path of a file is the path
//! of its routes.

pub mod error;
mod extract;
mod health;
mod jobs;
mod layers;
pub mod openapi;
pub mod server;
mod validate;
mod workers;

use axum::{Router, middleware, routing};
use tokio_util::task::TaskTracker;
use utoipa_axum::{router::OpenApiRouter, routes};

pub use self::extract::BODY_TIMEOUT;
use crate::{app::App, error::Error};

/// The routes of the data plane, all in one table. They answer twice: under `/v1`, and under
/// `/v1/projects/{project}`, where the project must agree with the key.
fn data_plane() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(jobs::create::create, jobs::read::list))
        .routes(routes!(jobs::create::create_batch))
        .routes(routes!(jobs::read::get))
        .routes(routes!(workers::register::register))
        .routes(routes!(workers::poll::poll))
        .routes(routes!(workers::heartbeat::heartbeat))
        .routes(routes!(workers::ack::ack))
        .routes(routes!(workers::ack::ack_batch))
}

/// Everything the API's listener answers. `handlers` tells when the last handler has ended.
pub fn router(app: App, handlers: TaskTracker) -> Router {
    let (scoped, _) = data_plane().split_for_parts();
    let (plain, _) = data_plane().split_for_parts();
    Router::new()
        .nest("/v1", plain)
        .nest("/v1/projects/{project}", scoped)
        .route("/livez", routing::get(health::live))
        .route("/readyz", routing::get(health::ready))
        .route("/", routing::get(openapi::front_door))
        .merge(openapi::pages())
        .merge(openapi::docs())
        .fallback(async || Error::NoSuchRoute)
        .method_not_allowed_fallback(async || Error::MethodNotAllowed)
        .layer(middleware::from_fn_with_state(handlers, layers::detach))
        .layer(middleware::from_fn(layers::observe))
        .with_state(app)
}

/// The operator's listener: numbers that no customer may see.
pub fn operator_router(metrics: metrics_exporter_prometheus::PrometheusHandle) -> Router {
    Router::new()
        .route("/metrics", routing::get(async move || metrics.render()))
        .route("/livez", routing::get(health::live))
}
