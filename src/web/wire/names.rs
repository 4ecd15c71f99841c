//! Names in paths.

use axum::{
    extract::{FromRequestParts, RawPathParams},
    http::request::Parts,
};
use fencepost_domain::error::Error;

/// A name in a path, such as a queue's or a worker's.
#[derive(Debug, Clone)]
pub struct NameInPath(pub String);

impl<S: Send + Sync> FromRequestParts<S> for NameInPath {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Error> {
        const PARAMETERS: [&str; 6] =
            ["queue", "job_type", "worker_id", "recurring_id", "alarm", "shared_limit"];
        name_in_path(parts, state, &PARAMETERS).await.map(Self)
    }
}

/// The name of a group in a path, below its queue's.
#[derive(Debug, Clone)]
pub struct GroupInPath(pub String);

impl<S: Send + Sync> FromRequestParts<S> for GroupInPath {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Error> {
        name_in_path(parts, state, &["group"]).await.map(Self)
    }
}

async fn name_in_path<S: Send + Sync>(
    parts: &mut Parts,
    state: &S,
    parameters: &[&str],
) -> Result<String, Error> {
    let params = RawPathParams::from_request_parts(parts, state)
        .await
        .map_err(|_| Error::Unreadable("the path is not valid UTF-8".to_owned()))?;
    let found = params.iter().find(|(name, _)| parameters.contains(name));
    let (parameter, name) = found.ok_or(Error::NoSuchRoute)?;
    refuse_controls(parameter, name)?;
    Ok(name.to_owned())
}

/// Refuses a path parameter with characters that no name and no id has.
///
/// # Errors
/// [`Error::Invalid`].
pub fn refuse_controls(parameter: &str, value: &str) -> Result<(), Error> {
    match value.chars().find(|it| it.is_control()) {
        Some(odd) => Err(Error::invalid(
            parameter,
            format!("must have no control characters, has U+{:04X}", u32::from(odd)),
        )),
        None => Ok(()),
    }
}
