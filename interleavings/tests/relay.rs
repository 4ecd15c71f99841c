//! A node hears what another one publishes.

use std::collections::BTreeSet;

use fencepost_domain::ids::ProjectId;
use fencepost_interleavings::{
    engine::notify::pair::Pair, store::connection::pools::Table, wakeups::Hint,
};

mod orders;

/// Two commits arrive at the same time, each in a queue of its own.
async fn hints() {
    let mut pair = Pair::start();
    for queue in ["a", "b", "c"] {
        let wake = pair.wake.clone();
        tokio::spawn(async move {
            tokio::task::yield_now().await;
            wake.hint_others(Hint::Arrived(vec![Table::arrival((ProjectId(1), queue))]));
        });
    }
    let mut heard = BTreeSet::new();
    while heard.len() < 3 {
        heard.extend(pair.next_queue().await);
    }
}

#[test]
fn every_hint_reaches_the_other_node() {
    orders::hold_in_all(hints);
}

#[test]
fn a_hint_that_is_not_published_is_found() {
    orders::fail_in_one(hints, "deadlock");
}
