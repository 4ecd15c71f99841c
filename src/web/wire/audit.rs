//! Audit entries, for the native API and all adapters.

use fencepost_domain::error::chain;
use fencepost_store as store;

use crate::{app::App, auth::Caller};

pub use fencepost_store::people::audit::NewAuditEntry;

/// Writes an audit entry. The change has happened already: if the entry cannot be written, an error
/// is logged, and the caller is answered all the same.
pub async fn note<P>(app: &App, caller: &Caller<P>, entry: NewAuditEntry) {
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
