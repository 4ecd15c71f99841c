//! Parts of the server that wait for one another, compiled from its own files with the
//! tasks and channels of the crate `shuttle`. Tests run them in many orders, in which a lost
//! wake-up is a deadlock. Bugs that a test switches on show that it would be found.
//!
//! Not in here: threads inside of one step (a step of a task is one act), and time: a sleep ends
//! at once.

pub mod engine;
mod redis_bus;
mod tokio_util;

use std::cell::Cell;

/// `servers_wakeups` has the parts of the server's own module that [`wakeups`] does not compile
/// again.
pub use fencepost_signals::{events_feed, telemetry, traces, wakeups as servers_wakeups};
pub use fencepost_store::faults;

thread_local! {
    static HAS_BUG: Cell<bool> = const { Cell::new(false) };
}

/// Whether the scenario of this thread has its bug.
#[must_use]
pub fn has_bug() -> bool {
    HAS_BUG.get()
}

/// Switches the bug of this thread's scenario on or off.
pub fn set_bug(is_on: bool) {
    HAS_BUG.set(is_on);
}

/// The store without its database.
pub mod store {
    pub use fencepost_store::*;

    pub mod connection {
        pub mod pools;

        /// No database falls silent here.
        pub mod deadline {
            use std::future::Future;

            /// Runs it.
            pub async fn bounded_query<T>(
                work: impl Future<Output = sqlx::Result<T>>,
            ) -> sqlx::Result<T> {
                work.await
            }
        }
    }
}

/// Hints.
pub mod wakeups {
    include!(concat!(env!("OUT_DIR"), "/wakeups.rs"));
}
