//! Statistics and usage: what this node counts in memory, and how it is written to the database.

pub mod flush;
pub mod recorder;
pub mod usage;
