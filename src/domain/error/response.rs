//! A handler answers with an error. The layer of its API renders the body and replaces the status.

use axum_core::response::{IntoResponse, Response};
use http::StatusCode;

use super::Error;

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let mut response = StatusCode::INTERNAL_SERVER_ERROR.into_response();
        response.extensions_mut().insert(self);
        response
    }
}
