//! The rules: pure functions of plain data. They use no clock, no random numbers and no database;
//! callers pass in what was read and write what was decided.

#![warn(missing_docs)]

pub mod access;
pub mod actor;
pub mod alarm;
pub mod audit;
pub mod backoff;
pub mod binding;
pub mod callbacks;
pub mod constraint_key;
pub mod cron;
pub mod dependency;
#[expect(missing_docs, reason = "the message of a variant says what it means")]
pub mod error;
pub mod explain;
pub mod fingerprint;
pub mod formats;
pub mod group;
pub mod histogram;
pub mod history;
#[expect(missing_docs, reason = "the name of an identifier says what it identifies")]
pub mod ids;
pub mod job;
pub mod lease;
pub mod limits;
pub mod logs;
pub mod networks;
pub mod operation;
pub mod outbound;
pub mod payload_schema;
pub mod plan;
pub mod push;
pub mod rate;
pub mod raw_json;
pub mod schedule;
pub mod search;
pub mod shared_limit;
pub mod stats;
pub mod template;
pub mod text;
pub mod trace;
pub mod turns;
pub mod usage;
pub mod webhook;
pub mod worker;
pub mod workflow;
pub mod zones;
