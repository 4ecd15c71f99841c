//! Path parameters of the adapters' routes.

use std::collections::HashMap;

use axum::{
    extract::{FromRequestParts, RawPathParams},
    http::request::Parts,
};

use fencepost_domain::error::Error;
use fencepost_web::wire::extract::refuse_controls;

/// The parameters of a path.
#[derive(Debug)]
pub struct PathParams(HashMap<String, String>);

impl PathParams {
    /// The parameter with this name; empty if the route has none.
    #[must_use]
    pub fn get(&self, name: &str) -> &str {
        self.0.get(name).map_or("", String::as_str)
    }
}

impl<S: Send + Sync> FromRequestParts<S> for PathParams {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Error> {
        let params = RawPathParams::from_request_parts(parts, state)
            .await
            .map_err(|_| Error::NoSuchRoute)?;
        for (name, value) in &params {
            refuse_controls(name, value)?;
        }
        let named = params.iter().map(|(name, value)| (name.to_owned(), value.to_owned()));
        Ok(Self(named.collect()))
    }
}
