//! All tests that need a database, a socket or the binary: one program, one PostgreSQL.

mod harness;

mod acks;
mod auth;
mod binary;
mod docs;
mod heartbeats;
mod jobs;
mod limits;
mod loops;
mod plans;
mod polls;
mod races;
mod readme;
mod statements;
mod tidy;
mod wire;
