//! Changes of settings: the room that they need, and the number of a day that the audit log shows.

use std::num::NonZeroU32;

use axum::http::{Method, request::Parts};
use fencepost_domain::{
    error::Error,
    ids::ProjectId,
    limits::{DAILY_CHANGES_PER_MANAGE_CALL, MAX_FULL_CHANGE_BYTES},
    plan::{Limits, Tenant},
};
use fencepost_engine::enqueue::quota;
use fencepost_signals::{
    limiter::{Charge, Rate},
    telemetry,
};
use metrics::counter;

use super::Caller;
use crate::app::App;

/// In a request's extensions: its body is a change of the project's settings.
#[derive(Clone)]
pub struct RoomForChange(App, Tenant);

impl RoomForChange {
    pub(super) fn attach(parts: &mut Parts, app: &App, tenant: Tenant) {
        if !parts.method.is_safe() && parts.method != Method::DELETE {
            parts.extensions.insert(Self(app.clone(), tenant));
        }
    }

    /// Refuses a body that adds much while the project has stored all of its bytes.
    ///
    /// # Errors
    /// [`Error::QuotaExceeded`]; [`Error::Unavailable`] when the database does not answer.
    pub async fn check(&self, body_bytes: usize) -> Result<(), Error> {
        if body_bytes <= MAX_FULL_CHANGE_BYTES {
            return Ok(());
        }
        quota::require_room(&self.0.engine, self.1).await
    }
}

/// The budget of a project's changes of a day, as far as the audit log shows what was changed;
/// none: it has no limit.
fn change_charge(project_id: ProjectId, limits: &Limits) -> Option<Charge> {
    let count = limits.manage_per_minute?.saturating_mul(DAILY_CHANGES_PER_MANAGE_CALL);
    let rate = Rate { count, window_seconds: 86_400 };
    Some(Charge {
        name: format!("limit:{{p{}}}:changes", project_id.0),
        rate,
        overdraft_windows: 0,
    })
}

impl<P> Caller<P> {
    /// Counts changes of settings that a call of another budget is about to make.
    ///
    /// # Errors
    /// [`Error::RateLimited`] when the project has made as many as it may in a day.
    pub async fn charge_changes(&self, app: &App, changes: usize) -> Result<(), Error> {
        let charge = change_charge(self.project_id, &self.limits);
        let changes = u32::try_from(changes).ok().and_then(NonZeroU32::new);
        let Some((charge, changes)) = charge.zip(changes) else { return Ok(()) };
        let verdict = app.accounts.limiter.charge_many(&[charge], changes).await;
        match verdict.retry_after_seconds() {
            None => Ok(()),
            Some(retry_after_seconds) => {
                counter!(telemetry::LIMITED, "budget" => "changes").increment(1);
                Err(Error::RateLimited { retry_after_seconds })
            }
        }
    }
}
