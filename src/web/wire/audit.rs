//! Audit entries, for the native API and all adapters.

use fencepost_domain::error::chain;
use fencepost_store::{self as store, connection::deadline::detached};

use crate::{app::App, auth::Caller};

pub use fencepost_store::people::audit::NewAuditEntry;

/// Writes an audit entry, unless nothing was changed. Beyond the project's daily allowance of
/// changes, the entry has no `before` and `after`: entries cannot be deleted, and would fill the
/// database.
pub async fn note<P>(app: &App, caller: &Caller<P>, mut entry: NewAuditEntry) {
    if entry.before.is_some() && entry.before == entry.after {
        return;
    }
    let has_states = entry.before.is_some() || entry.after.is_some();
    if has_states && caller.charge_changes(app, 1).await.is_err() {
        (entry.before, entry.after) = (None, None);
    }
    note_charged(app, caller, entry).await;
}

/// The same for a handler that may be dropped at any point: see [`detached`].
pub async fn note_detached<P>(app: &App, caller: &Caller<P>, entry: NewAuditEntry)
where
    P: Send + Sync + 'static,
    Caller<P>: Clone,
{
    let (app, caller) = (app.clone(), caller.clone());
    // What was done stands, whatever becomes of its entry.
    let _ = detached(async move { note(&app, &caller, entry).await }).await;
}

/// Writes the entry of a change that was counted against that allowance before it was made. It has
/// happened already: if the entry cannot be written, an error is logged, and the caller is answered
/// all the same.
pub async fn note_charged<P>(app: &App, caller: &Caller<P>, entry: NewAuditEntry) {
    let noted = async {
        let mut conn = app.engine.pools.read_for(caller.project_id).await?;
        store::people::audit::insert(&mut conn, caller.project_id, &caller.actor(), &entry).await
    };
    if let Err(error) = noted.await {
        tracing::error!(
            error = chain(&error),
            action = entry.action,
            target = entry.target,
            actor = caller.who.id(),
            request.id = &*caller.client.request_id,
            "audit entry was not written"
        );
    }
}
