//! `/livez` and `/readyz`: for load balancers, without a key.

use axum::extract::State;

use crate::{app::App, error::Error, store};

/// Liveness: the process runs.
pub async fn live() -> &'static str {
    "ok\n"
}

/// Readiness: the node is not stopping, and its database answers and has this binary's schema.
pub async fn ready(State(app): State<App>) -> Result<&'static str, Error> {
    if app.engine.stopping.is_cancelled() {
        return Err(Error::NotReady("the node is stopping"));
    }
    let is_migrated = async {
        let mut conn = app.engine.pools.people.acquire().await?;
        store::pools::is_migrated(&mut conn).await
    };
    match is_migrated.await {
        Ok(true) => Ok("ok\n"),
        Ok(false) => Err(Error::NotReady(
            "the database's schema is older than this node: run `fencepost migrate`",
        )),
        Err(error) => {
            tracing::warn!(error = &error as &dyn std::error::Error, "not ready");
            Err(Error::NotReady(
                "the database does not answer, or was never migrated: run `fencepost check`",
            ))
        }
    }
}
