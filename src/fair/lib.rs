//! Resources of a node that projects share, and callers without a project by their addresses; and
//! how they take turns, so that the burst of one does not keep others waiting. Group commits and
//! the pump share rows and claims by rules of their own, next to their queues. Rates are the
//! limiter's, in `signals`.

pub mod connections;
pub mod each;
pub mod hashing;
pub mod memory;
pub mod requests;
