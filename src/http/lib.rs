//! The native API: validate, call, answer. A handler calls `engine` or `identity` for a change, and
//! may call the store for a read or for one statement without a rule. The path of a file is the
//! path of its routes.

#![warn(missing_docs)]

pub mod alarms;
pub mod answers;
pub mod audit;
pub mod auth;
pub mod batches;
pub mod bulk;
mod cursor;
pub mod dead_letters;
pub mod deprecation;
pub mod docs;
pub mod error;
mod health;
mod idempotency;
pub mod incidents;
pub mod invitations;
pub mod job;
pub mod job_types;
pub mod jobs;
pub mod keys;
pub mod late_refusals;
pub mod least_rate;
pub mod limits;
pub mod me;
pub mod members;
pub mod metrics;
mod middleware;
pub mod openapi;
pub mod operations;
mod page;
pub mod projects;
pub mod queues;
pub mod recurring;
mod redact;
mod retry;
mod route_group;
mod route_metrics;
mod security_txt;
pub mod server;
mod usage;
pub mod webhooks;
pub mod workers;
pub mod workflows;

use axum::{
    Router,
    middleware::{from_fn, from_fn_with_state},
    routing,
};
use fencepost_signals::telemetry;
use fencepost_web::{
    app::App,
    wire::{
        compressed,
        routes::{Routes, routes},
    },
};
use tokio_util::task::TaskTracker;

use self::{deprecation::Deprecated, middleware::Passage};

/// Routes of the data plane. Each answers twice: under `/v1`, and under `/v1/projects/{project}`,
/// where the project must agree with the key.
fn data_plane() -> Routes {
    Routes::default()
        .merge(routes_of_jobs())
        .routes(routes!(queues::list))
        .routes(routes!(queues::get, queues::change))
        .routes(routes!(queues::backlog::get))
        .routes(routes!(queues::push::get, queues::push::put, queues::push::delete))
        .routes(routes!(queues::push::rotate))
        .routes(routes!(queues::control::pause))
        .routes(routes!(queues::control::resume))
        .routes(routes!(queues::control::purge))
        .routes(routes!(dead_letters::list))
        .routes(routes!(dead_letters::groups))
        .routes(routes!(dead_letters::bulk::retry))
        .routes(routes!(dead_letters::bulk::purge))
        .routes(routes!(dead_letters::retry))
        .routes(routes!(dead_letters::delete))
        .routes(routes!(recurring::list, recurring::create))
        .routes(routes!(recurring::times::preview))
        .routes(routes!(recurring::get, recurring::put, recurring::delete))
        .routes(routes!(recurring::control::pause))
        .routes(routes!(recurring::control::resume))
        .routes(routes!(recurring::control::run))
        .routes(routes!(recurring::control::fires))
        .routes(routes!(recurring::times::next))
        .routes(routes!(operations::list))
        .routes(routes!(operations::get))
        .routes(routes!(operations::abort))
        .routes(routes!(workers::registry::list))
        .routes(routes!(workers::register::register))
        .routes(routes!(workers::registry::deregister))
        .routes(routes!(workers::registry::quiet))
        .routes(routes!(workers::registry::terminate))
        .routes(routes!(workers::registry::resume))
        .routes(routes!(workers::poll::poll))
        .routes(routes!(workers::heartbeat::heartbeat))
        .routes(routes!(workers::ack::ack))
        .routes(routes!(workers::ack::ack_batch))
        .routes(routes!(workers::report::events))
        .routes(routes!(workers::report::logs))
        .routes(routes!(keys::list, keys::create))
        .routes(routes!(keys::get, keys::change, keys::revoke::revoke))
        .routes(routes!(keys::revoke::rotate))
        .routes(routes!(webhooks::list, webhooks::create))
        .routes(routes!(webhooks::get, webhooks::change, webhooks::delete))
        .routes(routes!(webhooks::rotate))
        .routes(routes!(webhooks::deliveries::test))
        .routes(routes!(webhooks::replay::replay))
        .routes(routes!(webhooks::deliveries::list))
        .routes(routes!(webhooks::deliveries::get))
        .routes(routes!(webhooks::deliveries::retry))
        .routes(routes!(audit::list))
        .routes(routes!(audit::export))
        .routes(routes!(limits::list))
        .routes(routes!(usage::get))
        .routes(routes!(metrics::summary))
        .routes(routes!(metrics::throughput))
        .routes(routes!(job_types::list))
        .routes(routes!(job_types::schema::get, job_types::schema::put))
        .routes(routes!(metrics::prometheus::scrape))
        .routes(routes!(metrics::dashboards::dashboard))
        .routes(routes!(metrics::dashboards::alert_rules))
}

/// Those of jobs, workflows and batches.
fn routes_of_jobs() -> Routes {
    Routes::default()
        .routes(routes!(jobs::create::create, jobs::read::list))
        .routes(routes!(jobs::create::create_batch))
        .routes(routes!(jobs::bulk::cancel))
        .routes(routes!(jobs::bulk::retry))
        .routes(routes!(jobs::bulk::replay))
        .routes(routes!(jobs::read::get, jobs::control::change))
        .routes(routes!(jobs::control::cancel))
        .routes(routes!(jobs::control::retry))
        .routes(routes!(jobs::replay::replay))
        .routes(routes!(jobs::control::cancelled))
        .routes(routes!(jobs::watch::explain))
        .routes(routes!(jobs::events::list))
        .routes(routes!(jobs::watch::job_stream))
        .routes(routes!(jobs::logs::list))
        .routes(routes!(jobs::logs::stream))
        .routes(routes!(jobs::watch::project_stream))
        .routes(routes!(workflows::create, workflows::list))
        .routes(routes!(workflows::get))
        .routes(routes!(workflows::cancel))
        .routes(routes!(batches::create, batches::list))
        .routes(routes!(batches::get))
        .routes(routes!(batches::seal))
        .routes(routes!(alarms::list))
        .routes(routes!(alarms::get, alarms::put, alarms::delete))
        .routes(routes!(incidents::list))
        .routes(routes!(incidents::get))
        .routes(routes!(incidents::mute))
}

/// Routes of accounts: under `/v1` only.
fn people_plane() -> Routes {
    Routes::default()
        .routes(routes!(auth::signup))
        .routes(routes!(auth::login))
        .routes(routes!(auth::second_factor::complete_login))
        .routes(routes!(auth::passkeys::ask))
        .routes(routes!(auth::passkeys::log_in))
        .routes(routes!(auth::second_factor::step_up))
        .routes(routes!(auth::device::begin))
        .routes(routes!(auth::device::collect))
        .routes(routes!(auth::device::preview))
        .routes(routes!(auth::device::refuse))
        .routes(routes!(auth::refresh))
        .routes(routes!(auth::logout))
        .routes(routes!(auth::password))
        .routes(routes!(auth::request_reset))
        .routes(routes!(auth::confirm_reset))
        .routes(routes!(auth::verify))
        .routes(routes!(auth::send_verification))
        .routes(routes!(me::get))
        .routes(routes!(me::sessions))
        .routes(routes!(me::end_session))
        .routes(routes!(me::security_log))
        .routes(routes!(me::email::change))
        .routes(routes!(me::email::confirm))
        .routes(routes!(me::identities::list))
        .routes(routes!(me::identities::unlink))
        .routes(routes!(me::second_factors::get))
        .routes(routes!(me::second_factors::add_totp, me::second_factors::remove_totp))
        .routes(routes!(me::second_factors::confirm_totp))
        .routes(routes!(me::second_factors::new_recovery_codes))
        .routes(routes!(me::passkeys::ask))
        .routes(routes!(me::passkeys::add))
        .routes(routes!(me::passkeys::remove))
        .routes(routes!(me::export))
        .routes(routes!(me::delete))
        .routes(routes!(invitations::preview))
        .routes(routes!(invitations::accept))
        .routes(routes!(projects::list, projects::create))
        .routes(routes!(keys::revoke::report))
        .routes(routes!(keys::exchange::exchange))
        .routes(routes!(keys::scanners::report))
}

/// Routes of one project that need its name: under `/v1/projects/{project}` only.
fn project_plane() -> Routes {
    Routes::default()
        .routes(routes!(projects::get, projects::change, projects::delete))
        .routes(routes!(members::list))
        .routes(routes!(members::change, members::remove))
        .routes(routes!(members::invitations, members::invite))
        .routes(routes!(members::uninvite))
        .routes(routes!(auth::device::approve))
}

/// All routes below `/v1`, without middleware: for calls within the process.
pub fn api(app: App) -> Router {
    v1().with_state(app)
}

fn v1() -> Router<App> {
    let plain = data_plane().merge(people_plane()).below("/v1");
    let scoped = data_plane().merge(project_plane()).below("/v1/projects/{project}");
    plain.merge(scoped)
}

/// Everything that the API's listener answers, including adapters and pages. `handlers` tells when
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
