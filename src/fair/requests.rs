//! Requests to the outside: a node, a project and an address have a number of them. The last
//! half of a node's are for projects that use less than half of theirs, and the last ones of an
//! address for projects that kept few of them busy there.

use std::{
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use fencepost_domain::ids::ProjectId;
use moka::sync::Cache;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::sleep,
};

use crate::each::{Each, PerProject};

/// Requests that one node sends at a time.
pub const MAX_IN_FLIGHT: usize = 2_000;
/// The same to the endpoints of one project.
pub const MAX_PROJECT_IN_FLIGHT: usize = 200;
/// The same to one address, for all projects: no host is flooded by many of them.
pub const MAX_ADDRESS_IN_FLIGHT: usize = 50;
/// The same for one project.
pub const MAX_PROJECT_ADDRESS_IN_FLIGHT: usize = 20;
/// The last ones of an address: for projects that hold none there, and that held theirs for
/// [`LITTLE_USE`] at most. Long requests leave [`FOR_SHORT_REQUESTS`].
pub const LAST_OF_ADDRESS: usize = 10;
/// The part of an address that long requests leave to short ones: a few projects with requests of
/// ten minutes would soon hold all of it.
pub const FOR_SHORT_REQUESTS: usize = MAX_ADDRESS_IN_FLIGHT / 2;
/// A request that may take longer is long.
pub const MAX_SHORT_TIMEOUT: Duration = Duration::from_secs(30);
/// All requests of a project to an address are long for [`LONG_KEPT_FOR`] after one that took
/// longer than this. Otherwise new projects whose requests hang, one after the other, would hold
/// the last ones.
pub const HUNG_AFTER: Duration = Duration::from_secs(10);
/// See [`HUNG_AFTER`].
pub const LONG_KEPT_FOR: Duration = Duration::from_secs(600);
/// For how long a project may hold requests to an address within [`USE_COUNTED_FOR`], in sum, and
/// still have the last ones. Fifty endpoints that hang, each of a project of its own, hold theirs
/// for longer.
pub const LITTLE_USE: Duration = Duration::from_secs(5);
/// For how long the use of an address is counted, from the end of the first request.
pub const USE_COUNTED_FOR: Duration = Duration::from_secs(60);
/// Projects and addresses whose use is counted.
const MAX_COUNTED: u64 = 100_000;
/// How often a project that uses much looks for a turn of its node's or of an address.
const TURN_PAUSE: Duration = Duration::from_millis(100);

/// The turns of one node.
pub struct Turns {
    of_node: Arc<Semaphore>,
    of_project: PerProject,
    of_project_and_address: Each<(ProjectId, IpAddr)>,
    of_address: Each<IpAddr>,
    history: History,
}

/// A kind of requests to an address.
enum Kind {
    /// Of a project that used little.
    Quick,
    /// Of a project that used more.
    Busy,
    /// Of one whose requests hang, or may hang for long.
    Long,
}

/// How projects used addresses.
#[derive(Clone)]
struct History {
    /// Milliseconds for which a project held requests to an address that have ended.
    used: Cache<(ProjectId, IpAddr), Arc<AtomicU64>>,
    /// Projects that lately held a request to the address for long.
    long: Cache<(ProjectId, IpAddr), ()>,
}

impl History {
    fn note(&self, of: (ProjectId, IpAddr), held: Duration) {
        let millis = u64::try_from(held.as_millis()).unwrap_or(u64::MAX);
        self.used.get_with(of, Arc::default).fetch_add(millis, Ordering::Relaxed);
        if held > HUNG_AFTER {
            self.long.insert(of, ());
        }
    }

    /// The kind of a request that takes this time at most.
    fn kind(&self, of: (ProjectId, IpAddr), within: Duration) -> Kind {
        let used = self.used.get(&of).map_or(0, |it| it.load(Ordering::Relaxed));
        if within > MAX_SHORT_TIMEOUT || self.long.contains_key(&of) {
            Kind::Long
        } else if Duration::from_millis(used) <= LITTLE_USE {
            Kind::Quick
        } else {
            Kind::Busy
        }
    }
}

/// The right to send one request, as long as it is kept.
pub struct Turn {
    /// How long the caller waited for it, with the look-up of the host. The caller sets it.
    pub waited: Duration,
    since: Instant,
    of: (ProjectId, IpAddr),
    history: History,
    _permits: [OwnedSemaphorePermit; 4],
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.history.note(self.of, self.since.elapsed());
    }
}

impl Default for Turns {
    fn default() -> Self {
        Self {
            of_node: Arc::new(Semaphore::new(MAX_IN_FLIGHT)),
            of_project: PerProject::new(MAX_PROJECT_IN_FLIGHT),
            of_project_and_address: Each::new(MAX_PROJECT_ADDRESS_IN_FLIGHT),
            of_address: Each::new(MAX_ADDRESS_IN_FLIGHT),
            history: History {
                used: Cache::builder()
                    .max_capacity(MAX_COUNTED)
                    .time_to_live(USE_COUNTED_FOR)
                    .build(),
                long: Cache::builder()
                    .max_capacity(MAX_COUNTED)
                    .time_to_live(LONG_KEPT_FOR)
                    .build(),
            },
        }
    }
}

impl Turns {
    /// Waits until the project may send at least one request to this address, if it is known, and
    /// answers with how many of this length. Nothing is taken: each job that is
    /// leased for them takes its own turn.
    pub async fn room(
        &self,
        project_id: ProjectId,
        address: Option<IpAddr>,
        within: Duration,
    ) -> usize {
        self.of_project.until_free(project_id).await;
        let mut room = self.of_project.free(project_id);
        if let Some(address) = address {
            let own = (project_id, address);
            self.of_project_and_address.until_free(own).await;
            while self.room_at(own, within) == 0 {
                sleep(TURN_PAUSE).await;
            }
            room = room.min(self.room_at(own, within));
        }
        while !self.may_use_node(project_id) {
            sleep(TURN_PAUSE).await;
        }
        room.min(self.of_node.available_permits()).max(1)
    }

    fn may_use_node(&self, project_id: ProjectId) -> bool {
        let free = self.of_node.available_permits();
        let uses_much = self.of_project.free(project_id) < MAX_PROJECT_IN_FLIGHT / 2;
        free > 0 && (free >= MAX_IN_FLIGHT / 2 || !uses_much)
    }

    /// How many more requests a project may send to an address. It leaves as many free as it holds,
    /// so there is always one for a project that holds none.
    fn room_at(&self, of: (ProjectId, IpAddr), within: Duration) -> usize {
        let own = self.of_project_and_address.free(of);
        let held = MAX_PROJECT_ADDRESS_IN_FLIGHT - own;
        let free = self.of_address.free(of.1);
        let for_others = match self.history.kind(of, within) {
            Kind::Quick if held == 0 => 0,
            Kind::Quick | Kind::Busy => LAST_OF_ADDRESS,
            Kind::Long => FOR_SHORT_REQUESTS,
        };
        let open = free.saturating_sub(for_others);
        own.min(open.saturating_sub(held).div_ceil(2))
    }

    /// Waits for the right to send one request to this address, which takes this time at most.
    pub async fn take(&self, project_id: ProjectId, address: IpAddr, within: Duration) -> Turn {
        let of = (project_id, address);
        let of_project = self.of_project.take(project_id, 1).await;
        while self.room_at(of, within) == 0 || !self.may_use_node(project_id) {
            sleep(TURN_PAUSE).await;
        }
        let own = self.of_project_and_address.take(of, 1).await;
        let of_node = Arc::clone(&self.of_node).acquire_owned().await;
        let of_node = of_node.unwrap_or_else(|_| unreachable!("it is never closed"));
        let of_address = self.of_address.take(address, 1).await;
        Turn {
            waited: Duration::ZERO,
            since: Instant::now(),
            of,
            history: self.history.clone(),
            _permits: [of_project, own, of_node, of_address],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);
    const SHORT: Duration = MAX_SHORT_TIMEOUT;

    /// The value of a future that is ready at once. Tokio would make a task wait that takes many
    /// permits in a row.
    fn now<T>(future: impl Future<Output = T>) -> Option<T> {
        tokio::task::unconstrained(future).now_or_never()
    }

    #[tokio::test]
    async fn a_project_that_uses_its_part_leaves_the_rest_to_others() {
        let turns = Turns::default();
        let take = |id, address| now(turns.take(ProjectId(id), address, SHORT));
        let held: Vec<_> = (0..60).filter_map(|_| take(1, HERE)).collect();
        assert_eq!(held.len(), MAX_PROJECT_ADDRESS_IN_FLIGHT);
        assert!(take(2, HERE).is_some(), "another project, the same address");
        let other = IpAddr::V4(std::net::Ipv4Addr::new(8, 8, 8, 8));
        assert!(take(1, other).is_some(), "the same project, another address");
        assert!(now(turns.room(ProjectId(1), Some(HERE), SHORT)).is_none());
        assert_eq!(now(turns.room(ProjectId(3), Some(HERE), SHORT)), Some(15));
        drop(held);
        assert_eq!(now(turns.room(ProjectId(1), Some(HERE), SHORT)), Some(20));
    }

    #[tokio::test]
    async fn an_address_has_a_turn_for_a_project_that_has_none() {
        let turns = Turns::default();
        let mut held = Vec::new();
        for project in (1..=20).cycle().take(400) {
            held.extend(now(turns.take(ProjectId(project), HERE, SHORT)));
        }
        assert!(held.len() > MAX_ADDRESS_IN_FLIGHT / 2, "{} of them", held.len());
        assert!(now(turns.take(ProjectId(99), HERE, SHORT)).is_some());
    }

    #[tokio::test]
    async fn projects_that_kept_an_address_busy_leave_its_last_turns_to_others() {
        let turns = Turns::default();
        let take = |id| now(turns.take(ProjectId(id), HERE, SHORT));
        let crowd = 1..=MAX_ADDRESS_IN_FLIGHT as i32;
        let mut hanging: Vec<_> = crowd.clone().filter_map(take).collect();
        assert_eq!(hanging.len(), MAX_ADDRESS_IN_FLIGHT);
        assert!(take(98).is_none(), "all are held");
        for turn in &mut hanging {
            turn.since -= LITTLE_USE + Duration::from_millis(1);
        }
        drop(hanging);

        let again: Vec<_> = crowd.filter_map(take).collect();
        assert_eq!(again.len(), MAX_ADDRESS_IN_FLIGHT - LAST_OF_ADDRESS);
        for quick in 0..20 {
            let turn = take(99);
            assert!(turn.is_some(), "request {quick} of a project that answers at once");
        }
    }

    #[tokio::test]
    async fn long_requests_leave_half_of_an_address_to_short_ones() {
        let turns = Turns::default();
        let take = |id, within| now(turns.take(ProjectId(id), HERE, within));
        let long = SHORT + Duration::from_secs(1);
        let held: Vec<_> = (1..=90).filter_map(|it| take(it, long)).collect();
        assert_eq!(held.len(), MAX_ADDRESS_IN_FLIGHT - FOR_SHORT_REQUESTS);
        let mut hangs = take(99, SHORT).expect("a turn for a short request");
        hangs.since -= HUNG_AFTER + Duration::from_millis(1);
        drop(hangs);
        turns.history.used.invalidate_all();
        assert!(take(99, SHORT).is_none(), "it held one for long");
        let short: Vec<_> = (101..=200).filter_map(|it| take(it, SHORT)).collect();
        assert_eq!(short.len(), FOR_SHORT_REQUESTS, "other projects");
    }

    #[tokio::test]
    async fn the_last_half_of_a_node_is_for_projects_that_use_little() {
        let turns = Turns::default();
        let address = |it: u32| IpAddr::V4(std::net::Ipv4Addr::from_bits(it));
        let mut held = Vec::new();
        for project in 1..=10 {
            held.extend(
                (0..MAX_PROJECT_IN_FLIGHT as u32)
                    .filter_map(|it| now(turns.take(ProjectId(project), address(it), SHORT))),
            );
        }
        assert!(held.len() < MAX_IN_FLIGHT, "{} of them", held.len());
        assert!(now(turns.take(ProjectId(99), HERE, SHORT)).is_some());
    }
}
