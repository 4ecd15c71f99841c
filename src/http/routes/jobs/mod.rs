//! `/v1/jobs`: enqueue, read, list, control, watch.

pub mod bulk;
pub mod callbacks;
pub mod control;
pub mod create;
pub mod depends_on;
pub mod events;
pub mod logs;
pub mod pauses;
pub mod read;
pub mod replay;
pub mod request;
pub mod watch;

pub use crate::job::{Job, JobError};
