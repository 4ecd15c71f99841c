//! What is written down of what people and keys do, whichever wire they do it on.

use crate::{app::App, auth::Caller, error::chain, store};

pub use crate::store::audit::NewAuditEntry;

/// Writes down what was done. It is done already: when it cannot be written down, that is said loudly in the log,
/// and whoever did it is answered all the same.
pub async fn note<P>(app: &App, caller: &Caller<P>, entry: NewAuditEntry) {
    let noted = async {
        let mut conn = app.engine.pools.read_for(caller.project_id).await?;
        store::audit::insert(&mut conn, caller.project_id, &caller.actor(), &entry).await
    };
    if let Err(error) = noted.await {
        tracing::error!(
            error = chain(&error),
            action = entry.action,
            target = entry.target,
            actor = caller.who.id(),
            request.id = &*caller.client.request_id,
            "a deed is not in the audit log"
        );
    }
}
