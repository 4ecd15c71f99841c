//! `/v1/jobs`: enqueue, read, list, control, watch.

pub mod accept;
pub mod control;
pub mod create;
pub mod events;
pub mod logs;
pub mod many;
pub mod read;
mod resource;
pub mod watch;

pub use resource::{ErrorView, Job};
