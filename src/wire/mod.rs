//! What all wires share: how bodies are read and fields checked, how jobs are handed over, how streams are
//! written, and where the error of a request goes. It speaks no wire itself.

#![warn(missing_docs)]

pub mod audit;
pub mod delivery;
pub mod errors;
pub mod extract;
pub mod logs;
pub mod streams;
pub mod validate;

use tokio_util::sync::CancellationToken;

/// This request's id, for handlers that answer with several errors in one body.
#[derive(Debug, Clone)]
pub struct RequestId(pub String);

/// Cancelled when the client has closed its connection.
#[derive(Debug, Clone)]
pub struct ClientGone(pub CancellationToken);
