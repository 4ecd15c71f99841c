//! No loop misses what it is asked for.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use fencepost_interleavings::wakeups::{BackgroundTask, channel};
use tokio::task::yield_now;

mod orders;

/// Two commits leave a row each and ask for a loop, which must handle both.
async fn commits_and_a_loop() {
    let (wake, _hints) = channel();
    let rows = Arc::new(AtomicUsize::new(0));
    for _ in 0..2 {
        let (wake, rows) = (wake.clone(), Arc::clone(&rows));
        tokio::spawn(async move {
            rows.fetch_add(1, Ordering::SeqCst);
            yield_now().await;
            wake.ask(BackgroundTask::Events);
        });
    }
    let mut handled = 0;
    while handled < 2 {
        wake.asked(BackgroundTask::Events).await;
        handled += rows.swap(0, Ordering::SeqCst);
        yield_now().await;
    }
}

#[test]
fn a_loop_does_all_that_it_is_asked_for() {
    orders::hold_in_all(commits_and_a_loop);
}

/// With the bug, only a loop that waits at this moment is woken.
#[test]
fn a_lost_wake_up_is_found() {
    orders::fail_in_one(commits_and_a_loop, "deadlock");
}
