//! What the native API and the adapters share: reading bodies, validating fields, delivering jobs,
//! streams, and rendering errors.

#![warn(missing_docs)]

pub mod accepted;
pub mod audit;
pub mod body;
pub mod bounds;
mod coding;
pub mod compressed;
pub mod entries;
pub mod errors;
pub mod extract;
pub mod json_words;
pub mod logs;
pub mod names;
pub mod openapi;
pub mod poll_answer;
pub mod produced;
pub mod routes;
pub mod streams;
pub mod templates;
pub mod unknown_fields;
pub mod validate;

use tokio_util::sync::CancellationToken;

/// The id of this request, for handlers that answer with several errors in one body.
#[derive(Debug, Clone, Default)]
pub struct RequestId(pub String);

/// Cancelled when the node stops accepting requests; in the extensions of requests.
#[derive(Debug, Clone)]
pub struct Closing(pub CancellationToken);

/// Cancelled when the client has disconnected.
#[derive(Debug, Clone)]
pub struct ClientGone(pub CancellationToken);
