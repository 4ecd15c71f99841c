//! All tests that need a database, a socket or the binary: one program, one PostgreSQL.

mod harness;

mod acks;
mod auth;
mod binary;
mod control;
mod dead_letters;
mod docs;
mod duel;
mod events;
mod examples;
mod family;
mod gates;
mod heartbeats;
mod jobs;
mod limits;
mod limits_page;
mod loops;
mod model;
mod nodes;
mod once;
mod operations;
mod people;
mod plans;
mod polls;
mod queues;
mod races;
mod rates;
mod readme;
mod recurring;
mod registry;
mod statements;
mod surface;
mod tidy;
mod wire;
mod worker;
