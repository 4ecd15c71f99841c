//! Messages between nodes and to their operator: wake-ups and events, through Redis or without it;
//! rate limits, metrics, logs and traces. All of it may be lost: PostgreSQL has what counts.

pub mod events_feed;
pub mod limiter;
pub mod redis_bus;
pub mod telemetry;
pub mod traces;
pub mod wakeups;
