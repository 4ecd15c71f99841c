//! `/livez` and `/readyz`: for load balancers, without a key.

use axum::extract::State;

use crate::{app::App, error::Error, store};

/// The process runs.
pub async fn live() -> &'static str {
    "ok\n"
}

/// The node can serve: it is not stopping, and its store answers and has this binary's schema.
pub async fn ready(State(app): State<App>) -> Result<&'static str, Error> {
    if app.engine.stopping.is_cancelled() {
        return Err(Error::NotReady("the node is stopping"));
    }
    let mut conn = app.engine.pools.people.acquire().await?;
    if !store::pools::is_migrated(&mut conn).await? {
        return Err(Error::NotReady("the database's schema is older than this node"));
    }
    Ok("ok\n")
}
