//! Fencepost: a multi-tenant job queue with an HTTP API over PostgreSQL.
//!
//! `ARCHITECTURE.md` is the map of the code. A module imports only from lower layers.

pub mod cli;
pub mod client;
pub mod dev;
pub mod loops;
pub mod serve;
pub mod worker;
