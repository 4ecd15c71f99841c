//! A parked poll gets a job that has arrived, in every order of polls, hints and claims.

use fencepost_domain::ids::JobId;
use fencepost_interleavings::engine::dispatch::node::Node;
use tokio::task::{JoinHandle, yield_now};

mod orders;

fn store(node: &Node) -> JoinHandle<JobId> {
    let node = node.clone();
    tokio::spawn(async move { node.store().await })
}

fn store_matched(node: &Node) -> JoinHandle<JobId> {
    let node = node.clone();
    tokio::spawn(async move { node.store_matched().await })
}

fn poll(node: &Node, id: u64) -> JoinHandle<Vec<JobId>> {
    let node = node.clone();
    tokio::spawn(async move { node.park(id).jobs().await })
}

/// Each poll must get one of the jobs.
async fn jobs_go_to_polls(node: Node, stored: [JoinHandle<JobId>; 2]) {
    let polls = [poll(&node, 1), poll(&node, 2)];
    let (mut jobs, mut taken) = (Vec::new(), Vec::new());
    for it in stored {
        jobs.push(it.await.expect("it is stored"));
    }
    for it in polls {
        taken.extend(it.await.expect("it is answered"));
    }
    jobs.sort_unstable();
    taken.sort_unstable();
    assert_eq!(taken, jobs);
    node.finish().await;
}

async fn two_polls() {
    let node = Node::start();
    let stored = [store(&node), store(&node)];
    jobs_go_to_polls(node, stored).await;
}

async fn a_match_and_a_claim() {
    let node = Node::start();
    let stored = [store_matched(&node), store(&node)];
    jobs_go_to_polls(node, stored).await;
}

async fn a_poll_that_leaves() {
    let node = Node::start();
    let gone = node.park(1);
    let (stored, other) = (store(&node), poll(&node, 2));
    yield_now().await;
    drop(gone);
    let job = stored.await.expect("it is stored");
    assert_eq!(other.await.expect("it is answered"), [job]);
    node.finish().await;
}

async fn a_stop() {
    /// Steps in which releases end that go on after the pump.
    const STEPS: usize = 100;
    let node = Node::start();
    let (parked, stored) = (node.park(1), store(&node));
    drop(node.park(2));
    node.leave(&parked);
    let taken = parked.jobs().await;
    stored.await.expect("it is stored");
    node.finish().await;
    for _ in 0..STEPS {
        if taken.len() + node.table.waiting() == 1 {
            return;
        }
        yield_now().await;
    }
    panic!("the job is neither taken nor free");
}

#[test]
fn two_polls_get_two_jobs() {
    orders::hold_in_all(two_polls);
}

#[test]
fn a_job_that_is_forgotten_while_a_claim_is_under_way_is_found() {
    orders::fail_in_one(two_polls, "deadlock");
}

#[test]
fn a_job_is_matched_or_claimed_and_never_both() {
    orders::hold_in_all(a_match_and_a_claim);
}

#[test]
fn a_job_of_a_poll_that_has_left_goes_to_another() {
    orders::hold_in_all(a_poll_that_leaves);
}

#[test]
fn a_stopping_pump_leaves_no_lease_without_a_worker() {
    orders::hold_in_all(a_stop);
}
