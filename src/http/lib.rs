//! The native API: validate, call, answer. A handler calls `engine` or `identity` for a change, and
//! may call the store for a read or for one statement without a rule. The path of a file in
//! `routes/` is the path of its routes; `server/` has what all requests pass.

#![warn(missing_docs)]

pub mod change;
mod cursor;
pub mod deprecation;
pub mod docs;
pub mod error;
mod idempotency;
pub mod job;
pub mod openapi;
mod packages;
mod page;
mod redact;
mod retry;
pub mod routes;
pub mod server;
pub mod settings;
mod tags;

use axum::{
    Router,
    middleware::{from_fn, from_fn_with_state},
    routing,
};
use fencepost_signals::telemetry;
use fencepost_web::{app::App, wire::compressed};
use tokio_util::task::TaskTracker;

use self::{
    deprecation::Deprecated,
    routes::{data_plane, people_plane, project_plane},
    server::{health, middleware, middleware::Passage, security_txt},
};

/// All routes below `/v1`, without middleware: for calls within the process.
pub fn api(app: App) -> Router {
    v1().with_state(app)
}

fn v1() -> Router<App> {
    let plain = data_plane().merge(people_plane()).below("/v1");
    let scoped = data_plane().merge(project_plane()).below("/v1/projects/{project}");
    plain.merge(scoped)
}

/// Everything that the API's listener answers, including adapters and pages. `handlers` shows when
/// the last handler has ended.
pub fn router(
    app: App,
    adapters: Router<App>,
    deprecated: &'static [Deprecated],
    handlers: TaskTracker,
) -> Router {
    let passage = Passage::new(app.clone(), deprecated, handlers);
    Router::new()
        .merge(v1())
        .route("/livez", routing::get(health::live))
        .route("/readyz", routing::get(health::ready))
        .route("/.well-known/security.txt", routing::get(security_txt::get))
        .route("/", routing::get(openapi::front_door))
        .merge(documents())
        .merge(packages::routes())
        .merge(adapters)
        .fallback(openapi::no_such_route)
        .method_not_allowed_fallback(openapi::wrong_method)
        .layer(from_fn_with_state(passage, middleware::pass))
        .with_state(app)
}

/// The documentation, and the documents of the native API.
fn documents() -> Router<App> {
    Router::new()
        .route("/openapi-3.0.json", routing::get(openapi::serve_older))
        .route("/openapi-project.json", routing::get(openapi::serve_of_project))
        .merge(docs::routes())
        .merge(openapi::docs())
        .layer(from_fn(compressed::gzip))
}

/// The operator's listener: metrics that no customer may see.
pub fn operator_router(metrics: metrics_exporter_prometheus::PrometheusHandle) -> Router {
    Router::new()
        .route(
            "/metrics",
            routing::get(async move || {
                telemetry::process::collect();
                metrics.render()
            }),
        )
        .route("/livez", routing::get(health::live))
}
