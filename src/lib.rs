//! Fencepost: a multi-tenant job queue with an HTTP API over PostgreSQL.
//!
//! `ARCHITECTURE.md` is the map of the code. What a node does is in the crates below `src/`; this
//! package starts it, and has the command line.

pub mod cli;
pub mod client;
pub mod dev;
pub mod loops;
pub mod scaler;
pub mod serve;
pub mod worker;
pub mod zone_files;
