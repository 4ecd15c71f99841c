//! `/v1/jobs`: enqueue, read, list.

pub mod create;
pub mod read;
mod resource;

pub use resource::{ErrorView, Job};
