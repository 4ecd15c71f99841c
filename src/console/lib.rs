//! The console: pages for developers who need a key, and for people on call. Every page is made
//! from the API's answers, in this process, with the visitor's own session; every button is one
//! operation of the API (`action_table.rs`). It never touches the engine or the store, and works
//! without scripts.

mod action;
mod action_fields;
pub mod action_table;
mod alarms;
mod api;
mod assets;
mod auth_pages;
mod batches;
mod bulk;
mod chart;
mod dead_letters;
mod device;
mod diagram;
mod form;
mod format;
mod health;
mod job_list;
mod job_types;
mod jobs;
mod links;
mod location;
mod operations;
mod other_actions;
mod overview;
mod page;
mod passkeys;
mod payload_form;
mod provider;
mod push;
mod queues;
mod recovery_codes;
mod recurring;
mod second_factor;
mod session;
mod settings;
mod shared_limits;
mod start;
mod webhooks;
mod workers;
mod workflows;

use axum::{Extension, Router, middleware};
use fencepost_domain::error::Error;
use fencepost_web::{
    app::App,
    wire::{
        compressed,
        routes::{get, post},
    },
};

pub use self::{
    diagram::MAX_SHOWN_ATTEMPTS, format::MAX_SHOWN_BYTES, jobs::SHOWN_EVENTS,
    overview::MAX_QUEUE_PAGES, session::NEW_KEY_SHOWN_SECONDS,
};

/// The pages of a project, below `/console/p/{project}`.
fn of_project() -> Router<App> {
    Router::new()
        .route("/", get(overview::page))
        .route("/do/{operation}", post(action::of_project))
        .route("/start", get(start::page))
        .route("/first", get(start::first_job))
        .route("/stream", get(jobs::stream))
        .route("/jobs", get(job_list::list))
        .route("/jobs/bulk/{operation}", get(bulk::page))
        .route("/jobs/new", get(job_list::new))
        .route("/jobs/{job_id}", get(jobs::detail))
        .route("/jobs/{job_id}/payload", get(jobs::payload))
        .route("/jobs/{job_id}/result", get(jobs::result))
        .route("/jobs/{job_id}/replay", post(jobs::replay))
        .route("/jobs/{job_id}/logs/stream", get(jobs::log_stream))
        .route("/queues", get(queues::list))
        .route("/queues/{queue}", get(queues::detail))
        .route("/queues/{queue}/push", get(push::page).post(push::put))
        .route("/queues/{queue}/push/rotate", post(push::rotate))
        .route("/queues/{queue}/spark.svg", get(queues::spark))
        .route("/dead-letters", get(dead_letters::groups))
        .route("/dead-letters/list", get(dead_letters::letters))
        .route("/dead-letters/bulk/{operation}", get(bulk::page))
        .route("/recurring", get(recurring::list))
        .route("/recurring/new", get(recurring::new).post(recurring::make))
        .route("/recurring/preview", post(recurring::preview))
        // `s`, so that an id cannot be taken for `new` or `preview`.
        .route("/recurring/s/{recurring_id}", get(recurring::detail))
        .route("/recurring/s/{recurring_id}/edit", get(recurring::edit).post(recurring::save))
        .route("/job-types", get(job_types::list))
        .route("/job-types/{job_type}", get(job_types::detail))
        .route("/workers", get(workers::list))
        .route("/workflows", get(workflows::list))
        .route("/workflows/{workflow_id}", get(workflows::detail))
        .route("/batches", get(batches::list))
        .route("/batches/{batch_id}", get(batches::detail))
        .route("/operations", get(operations::list))
        .route("/operations/{operation_id}", get(operations::detail))
        .route("/alarms", get(alarms::page))
        .route("/webhooks", get(webhooks::list).post(webhooks::make))
        .route("/webhooks/{endpoint_id}", get(webhooks::detail))
        .route("/webhooks/{endpoint_id}/rotate", post(webhooks::rotate))
        .route("/webhooks/{endpoint_id}/deliveries/{delivery_id}", get(webhooks::delivery))
        .route("/keys", get(settings::keys).post(settings::make_key))
        .route("/keys/{key_id}/rotate", post(settings::rotate_key))
        .route("/members", get(settings::members).post(settings::invite))
        .route("/limits", get(settings::limits))
        .route("/shared-limits", get(shared_limits::list))
        .route("/shared-limits/{limit}", get(shared_limits::detail))
        .route("/audit-log", get(settings::audit))
        .route("/audit-log/export", get(settings::audit_export))
        .route("/settings", get(settings::project))
}

/// The pages of accounts, below `/console`.
fn of_people() -> Router<App> {
    Router::new()
        .route("/", get(auth_pages::index))
        .route("/do/{operation}", post(action::of_people))
        .route("/signup", get(auth_pages::signup_page).post(auth_pages::signup))
        .route("/login", get(auth_pages::login_page).post(auth_pages::login))
        .route("/login/code", get(second_factor::login_code_page).post(second_factor::login_code))
        .route("/login/with/{provider}", get(provider::log_in))
        .route("/login/with/{provider}/return", get(provider::arrive))
        .route("/account/link/{provider}", post(provider::link))
        .route("/login/passkey", post(passkeys::log_in))
        .route("/device", get(device::page).post(device::decide))
        .route("/step-up", get(second_factor::step_up_page).post(second_factor::step_up))
        .route("/logout", post(auth_pages::logout))
        .route("/reset", get(auth_pages::reset_page).post(auth_pages::reset))
        .route("/reset/confirm", get(links::reset_page).post(links::confirm_reset))
        .route("/verify", get(links::verify_page).post(links::verify))
        .route("/email", get(links::email_page).post(links::confirm_email))
        .route("/invitation", get(links::invitation_page))
        .route("/links/{link}", post(links::open))
        .route("/projects", get(auth_pages::projects))
        .route("/projects/menu", get(auth_pages::project_menu))
        .route("/account", get(auth_pages::account))
        .route("/account/export", get(auth_pages::export))
        .route("/account/passkeys", post(passkeys::add))
        .route("/account/passkeys/new", post(passkeys::ask))
        .route("/account/totp", post(second_factor::add_totp))
        .route("/account/totp/confirm", post(second_factor::confirm_totp))
        .route("/account/recovery-codes", post(second_factor::recovery_codes))
}

/// All pages and their assets. `api` has all routes of the API, for calls within the process.
pub fn router(app: App, api: Router) -> Router<App> {
    let pages = Router::new()
        .nest("/console", of_people())
        .nest("/console/p/{project}", of_project())
        .route("/console/{*anything}", get(auth_pages::nothing).post(auth_pages::nothing))
        .method_not_allowed_fallback(async || Error::MethodNotAllowed)
        .layer(Extension(api::Routes(api)))
        .layer(middleware::from_fn_with_state(app, session::attach));
    Router::new()
        .route("/console/assets/{*name}", get(assets::get))
        .route("/console/examples/{name}", get(assets::worker))
        .layer(middleware::from_fn(compressed::gzip))
        .merge(pages)
}
