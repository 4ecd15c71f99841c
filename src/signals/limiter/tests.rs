//! Limits of a node on its own.

use super::*;
use uuid::Uuid;

use crate::redis_bus::DEFAULT_BUDGET;

fn alone() -> Limiter {
    Limiter::new(Bus::new(None, Uuid::nil(), DEFAULT_BUDGET).expect("a bus"))
}

fn charge(count: u32, overdraft_windows: u32) -> Charge {
    Charge { name: "x".to_owned(), rate: Rate::per_minute(count), overdraft_windows }
}

#[tokio::test]
async fn a_node_on_its_own_lets_through_what_the_limit_says_and_then_says_when_to_come_again() {
    let limiter = alone();
    for left in (0..3).rev() {
        let verdict = limiter.charge(&[charge(3, 0)], &[]).await;
        assert_eq!(verdict.retry_after_seconds(), None);
        assert_eq!(verdict.tightest().map(|it| it.remaining), Some(left));
    }
    let verdict = limiter.charge(&[charge(3, 0)], &[]).await;
    assert!(verdict.retry_after_seconds().is_some_and(|it| (1..=20).contains(&it)));
}

#[tokio::test]
async fn an_overdraft_lets_more_through() {
    let limiter = alone();
    for _ in 0..6 {
        assert_eq!(limiter.charge(&[charge(2, 2)], &[]).await.retry_after_seconds(), None);
    }
    assert!(limiter.charge(&[charge(2, 2)], &[]).await.retry_after_seconds().is_some());
    let without = limiter.charge(&[charge(2, 0)], &[]).await;
    assert!(without.retry_after_seconds().is_some(), "one purse for all that is within the limit");
}

#[tokio::test]
async fn a_node_on_its_own_takes_a_cost_wholly_or_not_at_all() {
    let limiter = alone();
    let take = async |cost| {
        let cost = NonZeroU32::new(cost).expect("a cost");
        let verdict = limiter.charge_many(&[charge(10, 0)], cost).await;
        (verdict.retry_after_seconds().is_none(), verdict.tightest().map(|it| it.remaining))
    };
    assert_eq!(take(6).await, (true, Some(4)));
    let many = NonZeroU32::new(50).expect("a cost");
    let other = || Charge { name: "y".to_owned(), ..charge(10, 0) };
    let one = limiter.charge(&[other()], &[]).await;
    let rest = limiter.charge_many(&[other()], many).await;
    assert_eq!((one.retry_after_seconds(), rest.retry_after_seconds()), (None, None));
    assert_eq!(take(5).await, (false, Some(0)));
    assert_eq!(take(4).await, (true, Some(0)));
}

#[test]
fn a_share_of_a_limit_is_never_nothing() {
    assert_eq!((share(600, 3), share(10, 3), share(1, 3), share(5, 0)), (200, 4, 1, 5));
}

#[tokio::test]
async fn a_call_whose_rest_is_refused_waits_for_all_that_it_costs() {
    let limiter = alone();
    let daily = || Charge { rate: Rate { count: 10, window_seconds: 86_400 }, ..charge(1, 0) };
    let cost = |calls| NonZeroU32::new(calls).expect("a cost");
    assert!(limiter.charge_many(&[daily()], cost(4)).await.wait.is_none());
    assert!(limiter.charge(&[daily()], &[]).await.wait.is_none());
    // Five are left, and the call has used 1 of its 7: the next try needs two that come back.
    let wait = limiter.charge_rest(&[daily()], cost(6)).await.wait.expect("a refusal");
    let interval = Duration::from_secs(8_640);
    assert!(wait > interval && wait <= interval * 2, "{wait:?}");
}
