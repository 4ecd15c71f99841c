//! Every caller of a coalescer is answered, and every item written once.

use std::sync::{Arc, Mutex};

use fencepost_domain::{error::Error, ids::ProjectId};
use fencepost_interleavings::{
    engine::group_commit::{Coalescer, GroupCommit},
    store::connection::pools::Connection,
};
use tokio::task::yield_now;

mod orders;

/// An item of this many bytes is a commit of its own.
const HEAVY_BYTES: usize = 2 * 1024 * 1024;

/// Writes numbers down. Those below ten are of one project, and multiples of a hundred are heavy.
#[derive(Clone, Default)]
struct Notes(Arc<Mutex<Vec<u32>>>);

impl GroupCommit for Notes {
    type Item = u32;
    type Answer = u32;
    type Key = u32;
    type Connection = Connection;
    const KIND: &'static str = "notes";
    const MAX_ROWS: usize = 2;

    fn bytes(item: &u32) -> usize {
        if item.is_multiple_of(100) { HEAVY_BYTES } else { 1 }
    }
    fn key(item: &u32) -> u32 {
        *item
    }
    fn project(item: &u32) -> ProjectId {
        ProjectId(if *item < 10 { 1 } else { 2 })
    }
    async fn connect(&self) -> sqlx::Result<Connection> {
        yield_now().await;
        Ok(Connection)
    }
    async fn flush(
        &self,
        _: &mut Connection,
        items: &[u32],
        _: bool,
    ) -> sqlx::Result<Vec<Result<u32, Error>>> {
        yield_now().await;
        self.0.lock().expect("no panic").extend(items);
        Ok(items.iter().map(|it| Ok(it + 1)).collect())
    }
}

/// Several callers at the same time, each with two numbers.
async fn callers() {
    let notes = Notes::default();
    let coalescer = Coalescer::start(notes.clone());
    let caller = |numbers: [u32; 2]| {
        let coalescer = coalescer.clone();
        tokio::spawn(async move {
            for it in numbers {
                assert_eq!(coalescer.submit(it).await.expect("an answer"), it + 1);
            }
        })
    };
    let callers = [[1, 100], [2, 30], [40, 200]].map(caller);
    drop(coalescer);
    for caller in callers {
        caller.await.expect("it ends");
    }
    let mut written = notes.0.lock().expect("no panic").clone();
    written.sort_unstable();
    assert_eq!(written, [1, 2, 30, 40, 100, 200]);
}

#[test]
fn every_caller_is_answered_and_every_item_written_once() {
    orders::hold_in_all(callers);
}

#[test]
fn an_item_that_is_lost_between_two_events_is_found() {
    orders::fail_in_one(callers, "an answer");
}
