//! Handlers, by the path of their routes, and the three tables that list them all.

pub mod alarms;
pub mod audit;
pub mod auth;
pub mod batches;
pub mod dead_letters;
pub mod job_types;
pub mod jobs;
pub mod keys;
pub mod limits;
pub mod me;
pub mod members;
pub mod metrics;
pub mod operations;
pub mod projects;
pub mod queues;
pub mod recurring;
pub mod shared_limits;
pub mod webhooks;
pub mod workers;
pub mod workflows;

use fencepost_web::wire::routes::{Routes, routes};

/// Routes of the data plane. Each answers twice: under `/v1`, and under `/v1/projects/{project}`,
/// where the project must agree with the key.
pub(crate) fn data_plane() -> Routes {
    Routes::default()
        .merge(routes_of_jobs())
        .routes(routes!(queues::list))
        .routes(routes!(queues::get, queues::change::change, queues::delete::delete))
        .routes(routes!(queues::backlog::get))
        .routes(routes!(queues::groups::list))
        .routes(routes!(queues::groups::get, queues::group_rules::put))
        .routes(routes!(queues::group_rules::reset))
        .routes(routes!(queues::groups::pause))
        .routes(routes!(queues::groups::resume))
        .routes(routes!(queues::groups::unblock))
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
        .routes(routes!(workers::take_back::of_worker))
        .routes(routes!(workers::take_back::in_queue))
        .routes(routes!(workers::poll::poll))
        .routes(routes!(workers::heartbeat::heartbeat))
        .routes(routes!(workers::ack::ack))
        .routes(routes!(workers::ack_batch::ack_batch))
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
        .routes(routes!(limits::usage::get))
        .routes(routes!(metrics::summary))
        .routes(routes!(metrics::throughput))
        .routes(routes!(job_types::list))
        .routes(routes!(job_types::schema::get, job_types::schema::put))
        .routes(routes!(metrics::prometheus::scrape))
        .routes(routes!(metrics::dashboards::dashboard))
        .routes(routes!(metrics::dashboards::alert_rules))
}

/// Routes of jobs, workflows, batches, alarms and shared limits.
fn routes_of_jobs() -> Routes {
    Routes::default()
        .routes(routes!(shared_limits::list))
        .routes(routes!(shared_limits::get, shared_limits::put, shared_limits::delete))
        .routes(routes!(shared_limits::reset))
        .routes(routes!(shared_limits::groups::list))
        .routes(routes!(shared_limits::groups::get, shared_limits::groups::put))
        .routes(routes!(shared_limits::groups::reset))
        .routes(routes!(jobs::create::create, jobs::read::list))
        .routes(routes!(jobs::create::create_batch))
        .routes(routes!(jobs::bulk::cancel))
        .routes(routes!(jobs::bulk::retry))
        .routes(routes!(jobs::bulk::pause))
        .routes(routes!(jobs::bulk::resume))
        .routes(routes!(jobs::bulk::replay))
        .routes(routes!(jobs::read::get, jobs::control::change))
        .routes(routes!(jobs::control::cancel))
        .routes(routes!(jobs::control::retry))
        .routes(routes!(jobs::pauses::pause))
        .routes(routes!(jobs::pauses::resume))
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
        .routes(routes!(batches::cancel::cancel))
        .routes(routes!(alarms::list))
        .routes(routes!(alarms::get, alarms::put, alarms::delete))
        .routes(routes!(alarms::incidents::list))
        .routes(routes!(alarms::incidents::get))
        .routes(routes!(alarms::incidents::mute))
}

/// Routes of accounts: under `/v1` only.
pub(crate) fn people_plane() -> Routes {
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
        .routes(routes!(members::invitations::preview))
        .routes(routes!(members::invitations::accept))
        .routes(routes!(projects::list, projects::create))
        .routes(routes!(keys::revoke::report))
        .routes(routes!(keys::exchange::exchange))
        .routes(routes!(keys::scanners::report))
}

/// Routes of one project that need its name: under `/v1/projects/{project}` only.
pub(crate) fn project_plane() -> Routes {
    Routes::default()
        .routes(routes!(projects::get, projects::change, projects::delete))
        .routes(routes!(members::list))
        .routes(routes!(members::change, members::remove))
        .routes(routes!(members::invitations, members::invite))
        .routes(routes!(members::uninvite))
        .routes(routes!(auth::device::approve))
}
