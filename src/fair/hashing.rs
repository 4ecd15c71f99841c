//! Password hashing, a few at a time. Waiting requests are ordered by the number of hashes that
//! their network got lately, so that a network which guesses passwords does not keep others from
//! logging in. A request that is refused got none: who tries again is ranked no lower.
//! Accounts that have proved themselves go before all strangers, however many networks these have.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    thread::available_parallelism,
    time::Duration,
};

use moka::sync::Cache;
use tokio::{sync::oneshot, time::timeout};

use fencepost_domain::error::Error;

/// Maximum passwords hashed at the same time, and never on more than half of the cores. Each takes
/// a core and 19 MiB.
pub const MAX_HASHING: usize = 2;
/// Maximum requests that wait. When there are more, the last in the order is refused.
pub const MAX_WAITING: usize = 256;
/// How long a request waits for its turn.
const MAX_WAIT: Duration = Duration::from_secs(5);
/// For how long the hashes of a network are counted, from its first one.
const COUNTED_FOR: Duration = Duration::from_secs(60);
/// The hashes of a wide network that weigh as much as one of a narrow network: who has a wide one
/// can spread requests over its narrow ones.
const WIDE_WEIGHT: u32 = 16;
/// The weights of an address's networks, narrow and wide.
const WEIGHTS: [u32; 2] = [1, WIDE_WEIGHT];
/// The hashes of an account that go first. Further ones go as those of strangers, so that no
/// account keeps others from logging in.
const KNOWN_HASHES: u32 = 5;
/// Networks that are counted.
const MAX_NETWORKS: u64 = 100_000;

/// The turns of one node. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Turns(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    queue: Mutex<Queue>,
    /// Hashes of each network within [`COUNTED_FOR`], and its requests that wait for one.
    counts: Cache<String, Arc<AtomicU32>>,
    max_wait: Duration,
}

#[derive(Debug)]
struct Queue {
    free: usize,
    waiting: BTreeMap<Place, oneshot::Sender<Turn>>,
    next: u64,
}

/// A place in the queue: known accounts before strangers, then by the hashes of the account or
/// network, then by arrival.
type Place = (bool, u32, u64);

/// The right to hash on one core, until it is dropped.
#[derive(Debug)]
pub struct Turn(Turns);

impl Drop for Turn {
    fn drop(&mut self) {
        let next = {
            let mut queue = self.0.queue();
            match queue.waiting.pop_first() {
                Some((_, next)) => next,
                None => {
                    queue.free += 1;
                    return;
                }
            }
        };
        // If that request has gone, dropping its turn gives it to the next one.
        drop(next.send(Turn(self.0.clone())));
    }
}

impl Default for Turns {
    fn default() -> Self {
        let half = available_parallelism().map_or(1, |it| it.get().div_ceil(2));
        Self::new(half.min(MAX_HASHING), MAX_WAIT)
    }
}

impl Turns {
    fn new(hashing: usize, max_wait: Duration) -> Self {
        let queue = Queue { free: hashing, waiting: BTreeMap::new(), next: 0 };
        let counts = Cache::builder().max_capacity(MAX_NETWORKS).time_to_live(COUNTED_FOR).build();
        Self(Arc::new(Shared { queue: Mutex::new(queue), counts, max_wait }))
    }

    fn queue(&self) -> std::sync::MutexGuard<'_, Queue> {
        self.0.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a turn of this many hashes, of a stranger with this address, or of the account
    /// with this name: by its session, or by a browser that has logged in before.
    ///
    /// # Errors
    /// [`Error::Overloaded`] when too many would go first.
    pub async fn take_for(&self, client: &str, hashes: u32) -> Result<Turn, Error> {
        let counted = Counted::of(&self.0.counts, client, hashes);
        let rank = counted.rank();
        let is_stranger = address_of(client).is_some() || rank >= KNOWN_HASHES;
        let turn = self.wait(is_stranger, rank).await?;
        counted.keep();
        Ok(turn)
    }

    /// Waits for a turn of one hash.
    ///
    /// # Errors
    /// The errors of [`Self::take_for`].
    pub async fn take(&self, client: &str) -> Result<Turn, Error> {
        self.take_for(client, 1).await
    }

    async fn wait(&self, is_stranger: bool, rank: u32) -> Result<Turn, Error> {
        let (place, mut turn) = {
            let mut queue = self.queue();
            if queue.free > 0 {
                queue.free -= 1;
                return Ok(Turn(self.clone()));
            }
            let place = (is_stranger, rank, queue.next);
            queue.next += 1;
            if queue.waiting.len() >= MAX_WAITING {
                let is_last = queue.waiting.last_key_value().is_none_or(|it| *it.0 < place);
                if is_last {
                    return Err(Error::Overloaded);
                }
                queue.waiting.pop_last();
            }
            let (sender, turn) = oneshot::channel();
            queue.waiting.insert(place, sender);
            (place, turn)
        };
        match timeout(self.0.max_wait, &mut turn).await {
            Ok(given) => given.map_err(|_| Error::Overloaded),
            Err(_) => {
                self.queue().waiting.remove(&place);
                // It may have been given just now.
                turn.try_recv().map_err(|_| Error::Overloaded)
            }
        }
    }
}

/// A request that is counted for its networks, unless it is dropped without a hash.
struct Counted {
    /// The networks' counts, each with the count before this request.
    networks: Vec<(Arc<AtomicU32>, u32)>,
    hashes: u32,
    is_kept: bool,
}

impl Counted {
    fn of(counts: &Cache<String, Arc<AtomicU32>>, client: &str, hashes: u32) -> Self {
        let networks = networks(client).into_iter().map(|network| {
            let count = counts.get_with(network, Arc::default);
            let before = count.fetch_add(hashes, Ordering::Relaxed);
            (count, before)
        });
        Self { networks: networks.collect(), hashes, is_kept: false }
    }

    fn rank(&self) -> u32 {
        let weighed = self.networks.iter().zip(WEIGHTS);
        weighed.map(|((_, before), weight)| before / weight).max().unwrap_or_default()
    }

    fn keep(mut self) {
        self.is_kept = true;
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        if !self.is_kept {
            for (count, _) in &self.networks {
                count.fetch_sub(self.hashes, Ordering::Relaxed);
            }
        }
    }
}

/// The networks of an address, narrow and wide: the first 24 and 16 bits of IPv4, 48 and 32 bits of
/// IPv6. A name stands for itself.
fn networks(client: &str) -> Vec<String> {
    match address_of(client) {
        Some(IpAddr::V4(it)) => {
            let [a, b, c, _] = it.octets();
            vec![format!("{a}.{b}.{c}"), format!("{a}.{b}")]
        }
        Some(IpAddr::V6(it)) => {
            let [a, b, c, ..] = it.segments();
            vec![format!("{a:x}:{b:x}:{c:x}"), format!("{a:x}:{b:x}")]
        }
        None => vec![client.to_owned()],
    }
}

/// The wide network of an address; a name stands for itself.
#[must_use]
pub fn wide_network(client: &str) -> String {
    networks(client).pop().unwrap_or_default()
}

/// The address of a client as limits write it, with the bits that count (`2001:db8::/64`); none for
/// the name of an account.
fn address_of(client: &str) -> Option<IpAddr> {
    client.split('/').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[tokio::test]
    async fn whose_network_asked_less_goes_first() {
        let turns = Turns::new(MAX_HASHING, MAX_WAIT);
        let mut held = vec![turns.take("192.0.2.1").await, turns.take("192.0.2.1").await];
        let mut again = Box::pin(turns.take("192.0.2.9"));
        let mut other = Box::pin(turns.take("198.51.100.1"));
        assert!(again.as_mut().now_or_never().is_none() && other.as_mut().now_or_never().is_none());
        held.pop();
        assert!(again.as_mut().now_or_never().is_none(), "its network had more");
        let other = other.now_or_never().expect("a turn").expect("a turn");
        held.pop();
        let again = again.now_or_never().expect("the second free turn").expect("a turn");
        drop((other, again));
        assert_eq!(turns.queue().free, MAX_HASHING);
    }

    #[tokio::test]
    async fn a_newcomer_takes_the_place_of_who_would_go_last() {
        let turns = Turns::new(MAX_HASHING, MAX_WAIT);
        let held = [turns.take("a").await, turns.take("a").await];
        let crowd: Vec<_> = (0..MAX_WAITING)
            .map(|_| {
                let turns = turns.clone();
                tokio::spawn(async move { turns.take("a").await.map(drop) })
            })
            .collect();
        while turns.queue().waiting.len() < MAX_WAITING {
            tokio::task::yield_now().await;
        }
        assert!(matches!(turns.take("a").await, Err(Error::Overloaded)), "it would go last");
        let newcomer = tokio::spawn({
            let turns = turns.clone();
            async move { turns.take("b").await.map(drop) }
        });
        while turns.queue().next == MAX_WAITING as u64 + 1 {
            tokio::task::yield_now().await;
        }
        drop(held);
        assert!(newcomer.await.expect("it ends").is_ok());
        let mut refused = 0;
        for it in crowd {
            refused += usize::from(it.await.expect("it ends").is_err());
        }
        assert_eq!(refused, 1);
    }

    #[tokio::test]
    async fn a_request_that_waits_too_long_or_goes_away_loses_no_turn() {
        let turns = Turns::new(MAX_HASHING, Duration::ZERO);
        let held = [turns.take("a").await, turns.take("b").await];
        assert!(matches!(turns.take("c").await, Err(Error::Overloaded)));
        let mut gone = Box::pin(turns.take("d"));
        assert!(gone.as_mut().now_or_never().is_none());
        drop(gone);
        drop(held);
        assert_eq!(turns.queue().free, MAX_HASHING);
    }

    #[tokio::test]
    async fn who_was_refused_goes_before_who_got_a_hash() {
        let turns = Turns::new(1, Duration::from_secs(3_600));
        drop(turns.take("192.0.2.1").await);
        let held = turns.take("203.0.113.1").await;
        for _ in 0..9 {
            let mut refused = Box::pin(turns.take("198.51.100.1"));
            assert!(refused.as_mut().now_or_never().is_none());
        }
        let mut guesser = Box::pin(turns.take("192.0.2.9"));
        let mut person = Box::pin(turns.take("198.51.100.1"));
        assert!(guesser.as_mut().now_or_never().is_none());
        assert!(person.as_mut().now_or_never().is_none());
        drop(held);
        assert!(guesser.as_mut().now_or_never().is_none());
        assert!(person.now_or_never().expect("a turn").is_ok());
    }

    #[tokio::test]
    async fn a_wide_network_cannot_spread_its_guesses_without_end() {
        let turns = Turns::new(1, Duration::from_secs(3_600));
        for network in 0..2 * WIDE_WEIGHT {
            drop(turns.take(&format!("2001:db8:{network:x}::1")).await);
        }
        drop(turns.take("192.0.2.1").await);
        let held = turns.take("203.0.113.1").await;
        let mut fresh = Box::pin(turns.take("2001:db8:ffff::1"));
        let mut other = Box::pin(turns.take("192.0.2.2"));
        assert!(fresh.as_mut().now_or_never().is_none());
        assert!(other.as_mut().now_or_never().is_none());
        drop(held);
        assert!(fresh.as_mut().now_or_never().is_none());
        assert!(other.now_or_never().expect("a turn").is_ok());
    }

    #[tokio::test]
    async fn an_account_that_is_known_goes_before_fresh_networks() {
        let turns = Turns::new(1, Duration::from_secs(3_600));
        drop(turns.take("acct_1").await);
        let held = turns.take("203.0.113.1").await;
        let mut stranger = Box::pin(turns.take("198.51.100.1"));
        let mut again = Box::pin(turns.take("acct_1"));
        let mut known = Box::pin(turns.take("acct_2"));
        for it in [&mut stranger, &mut again, &mut known] {
            assert!(it.as_mut().now_or_never().is_none());
        }
        drop(held);
        assert!(again.as_mut().now_or_never().is_none(), "it had a hash");
        let known = known.now_or_never().expect("a turn").expect("a turn");
        assert!(stranger.as_mut().now_or_never().is_none());
        drop(known);
        assert!(stranger.as_mut().now_or_never().is_none());
        assert!(again.now_or_never().expect("a turn").is_ok());
    }

    #[tokio::test]
    async fn an_account_with_many_hashes_goes_behind_strangers() {
        let turns = Turns::new(1, Duration::from_secs(3_600));
        for _ in 0..KNOWN_HASHES {
            drop(turns.take("acct_1").await);
        }
        let held = turns.take("203.0.113.1").await;
        let mut account = Box::pin(turns.take("acct_1"));
        let mut stranger = Box::pin(turns.take("198.51.100.1"));
        assert!(account.as_mut().now_or_never().is_none());
        assert!(stranger.as_mut().now_or_never().is_none());
        drop(held);
        assert!(account.as_mut().now_or_never().is_none());
        assert!(stranger.now_or_never().expect("a turn").is_ok());
    }

    #[test]
    fn networks_are_wider_than_addresses() {
        assert_eq!(networks("192.0.2.7"), ["192.0.2", "192.0"]);
        assert_eq!(networks("2001:db8:1:2::/64"), ["2001:db8:1", "2001:db8"]);
        assert_eq!(networks("acct_1"), ["acct_1"]);
        assert_eq!(wide_network("192.0.2.7"), "192.0");
    }
}
