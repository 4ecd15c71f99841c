//! `callback_url`: only endpoints that a project has set up are called back.

use fencepost_domain::{
    error::{Error, FieldError},
    ids::ProjectId,
    limits::MAX_ENDPOINTS,
    outbound::is_below,
};
use fencepost_store::{self as store, connection::deadline::detached_in};

use crate::Engine;

/// Why a URL is refused.
const NOT_TAKEN: &str = "must be the URL of an endpoint with `callbacks`, or one below it";

/// Whether endpoints of the project take these URLs, each beside the path of its job.
///
/// # Errors
/// [`Error::Invalid`], with each that none takes.
pub async fn check_callback_urls(
    engine: &Engine,
    project_id: ProjectId,
    named: Vec<(String, String)>,
) -> Result<(), Error> {
    if named.is_empty() {
        return Ok(());
    }
    let pools = engine.pools.clone();
    let read = async move {
        let mut conn = pools.read_for(project_id).await?;
        store::outbound::webhooks::callback_urls(&mut conn, project_id, MAX_ENDPOINTS).await
    };
    let bases = detached_in(&engine.tasks, read).await??;
    let is_taken = |url: &str| bases.iter().any(|base| is_below(url, base));
    let refused: Vec<_> = named
        .into_iter()
        .filter(|(_, url)| !is_taken(url))
        .map(|(path, _)| FieldError {
            field: format!("{path}callback_url"),
            message: NOT_TAKEN.to_owned(),
        })
        .collect();
    if refused.is_empty() { Ok(()) } else { Err(Error::Invalid(refused)) }
}
