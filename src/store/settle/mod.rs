//! The ends of attempts, and heartbeats: statements that carry the fence of a lease.

pub mod checkpoints;
pub mod heartbeats;
pub mod losses;
pub mod settle_failure;
pub mod settle_success;
pub mod standings;
pub mod uncounted;
