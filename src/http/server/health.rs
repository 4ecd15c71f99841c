//! `/livez` and `/readyz`: for load balancers, without a key.

use axum::extract::{Query, State};
use fencepost_domain::error::Error;
use fencepost_store::connection::{
    migrate::{self, Schema},
    roles::Role,
};
use serde::Deserialize;

use fencepost_web::app::App;

/// Liveness: the process runs.
pub async fn live() -> &'static str {
    "ok\n"
}

/// A probe that wants to know more.
#[derive(Debug, Deserialize)]
pub struct ReadyQuery {
    verbose: Option<String>,
}

/// Readiness. With `?verbose`, the answer also says what this node and its others agree on.
pub async fn ready(
    State(app): State<App>,
    Query(query): Query<ReadyQuery>,
) -> Result<String, Error> {
    let ready = check(&app).await?;
    if query.verbose.is_none() {
        return Ok(ready.to_owned());
    }
    let (zones, nodes) = (app.engine.zones.agreed(), app.bus.nodes());
    Ok(format!("{ready}nodes: {nodes}\nzone rules: {}\n", zones.rules().release()))
}

/// The node is not stopping, and its database answers and has this binary's schema.
async fn check(app: &App) -> Result<&'static str, Error> {
    if app.engine.stopping.is_cancelled() {
        return Err(Error::NotReady("the node is stopping"));
    }
    if let Some(role) = app.engine.pools.refused_role().await {
        return Err(Error::NotReady(match role {
            Role::Hot => "the database refuses the login of fencepost_hot",
            Role::Console => "the database refuses the login of fencepost_console",
            Role::People => "the database refuses the login of fencepost_people",
            Role::Maint => "the database refuses the login of fencepost_maint",
        }));
    }
    if app.accounts.tokens.has_unknown() {
        return Err(Error::NotReady(
            "a key that signs access tokens is encrypted with another master key",
        ));
    }
    let schema = async {
        let mut conn = app.engine.pools.people.acquire().await?;
        migrate::schema(&mut conn).await
    };
    match schema.await {
        Ok(Schema::Current) => Ok("ok\n"),
        Ok(Schema::Older) => Err(Error::NotReady(
            "the database's schema is older than this node: run `fencepost migrate`",
        )),
        Ok(Schema::Missing) => {
            Err(Error::NotReady("the database was never migrated: run `fencepost migrate`"))
        }
        Ok(Schema::OtherHistory) => {
            Err(Error::NotReady("the database's schema is not this node's: run `fencepost check`"))
        }
        Err(error) => {
            tracing::warn!(error = &error as &dyn std::error::Error, "not ready");
            Err(Error::NotReady("the database does not answer: run `fencepost check`"))
        }
    }
}
