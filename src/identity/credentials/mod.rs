//! Keys, sessions and members that this node caches, and their removal from the caches of all
//! nodes.

pub mod bodies;
mod local_permits;
mod used_keys;
mod watched_keys;

use std::{
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use fencepost_domain::{
    access::{Role, Scope},
    binding::KeyBinding,
    error::Error,
    ids::{AccountId, ProjectPublicId, SessionId},
    plan::{Limits, ProjectPlans},
};
use fencepost_signals::{
    redis_bus::{Bus, Topic},
    wakeups::keyed::KeyedNotify,
};
use fencepost_store::{
    self as store,
    connection::{deadline::detached_query, pools::Pool},
    people::{keys::KeyOwner, members::Membership},
};
use ipnet::IpNet;
use moka::future::Cache;
use tokio::sync::Notify;

pub use self::{
    local_permits::{LocalPermit, LocalPermits},
    used_keys::UsedKeys,
    watched_keys::{WatchedKey, watch_key},
};

use crate::accounts::{key::SecretHash, keys::read_networks, token::Bearer};

/// TTL of cached credentials. Parked polls check as often, so even without Redis a revoked key is
/// refused everywhere after twice this time.
pub const CREDENTIAL_TTL: Duration = Duration::from_secs(2);
/// Keys that one node caches, including unknown ones.
const MAX_CACHED_KEYS: u64 = 100_000;
/// Sessions that one node caches, and memberships.
const MAX_CACHED_SESSIONS: u64 = 20_000;

/// How long a credential that was found counts as known.
const KNOWN_TTL: Duration = Duration::from_secs(600);
/// How long an address waits that has guessed too often, and how many such addresses are known.
const GUESSER_PAUSE: Duration = Duration::from_secs(1);
const MAX_GUESSERS: u64 = 10_000;

/// The rights and limits of a live key.
#[derive(Debug, Clone, PartialEq)]
pub struct KeyGrant {
    pub owner: KeyOwner,
    /// Scopes of the key.
    pub scopes: Vec<Scope>,
    pub limits: Limits,
    /// Networks from which it may be used; none: all.
    pub allowed_ips: Vec<IpNet>,
    /// Queues and job types that it is bound to; none: all.
    pub binding: Option<KeyBinding>,
}

/// A member's role and limits in a project.
#[derive(Debug, Clone)]
pub struct MemberGrant {
    pub membership: Membership,
    pub role: Role,
    pub limits: Limits,
}

/// Entries to remove from the caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Evict {
    Key(SecretHash),
    Session(SessionId),
    /// All cached members: a role has changed.
    Members,
    /// All cached keys and members: a project or a plan has changed.
    KeysAndMembers,
}

impl Evict {
    /// The message to other nodes.
    fn message(self) -> String {
        match self {
            Self::Key(hash) => {
                let hex: String = hash.iter().map(|it| format!("{it:02x}")).collect();
                format!("key {hex}")
            }
            Self::Session(id) => format!("session {id}"),
            Self::Members => "members .".to_owned(),
            Self::KeysAndMembers => "everybody".to_owned(),
        }
    }

    /// Parses a message of another node. An unreadable one removes everything.
    fn parse(message: &str) -> Self {
        let parsed = match message.split_once(' ') {
            Some(("key", hex)) => parse_hash(hex).map(Self::Key),
            Some(("session", id)) => id.parse().ok().map(Self::Session),
            Some(("members", _)) => Some(Self::Members),
            _ => None,
        };
        parsed.unwrap_or(Self::KeysAndMembers)
    }
}

fn parse_hash(hex: &str) -> Option<SecretHash> {
    let bytes: Option<Vec<u8>> = (0..hex.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(hex.get(at..at + 2)?, 16).ok())
        .collect();
    bytes?.try_into().ok()
}

fn cache<K, V>(max: u64) -> Cache<K, V>
where
    K: Hash + Eq + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
{
    Cache::builder().time_to_live(CREDENTIAL_TTL).max_capacity(max).build()
}

fn known<K: Hash + Eq + Send + Sync + 'static>(max: u64) -> Cache<K, ()> {
    Cache::builder().time_to_live(KNOWN_TTL).max_capacity(max).build()
}

/// Remembers whether a lookup found something.
async fn remember<K: Hash + Eq + Send + Sync + 'static>(
    known: &Cache<K, ()>,
    key: K,
    is_found: bool,
) {
    match is_found {
        true => known.insert(key, ()).await,
        false => known.invalidate(&key).await,
    }
}

/// The credentials of requests, as of at most [`CREDENTIAL_TTL`] ago. Concurrent lookups of one
/// credential share a query.
pub struct Credentials {
    pool: Pool,
    plans: Arc<ProjectPlans>,
    bus: Bus,
    keys: Cache<SecretHash, Option<Arc<KeyGrant>>>,
    sessions: Cache<Bearer, bool>,
    members: Cache<(AccountId, String), Option<Arc<MemberGrant>>>,
    /// Found when they were last looked up. They prove nothing: they only separate clients that
    /// come back from those that try names and keys.
    known_keys: Cache<SecretHash, ()>,
    known_members: Cache<(AccountId, String), ()>,
    /// Addresses that have guessed too often.
    guessers: moka::sync::Cache<Arc<str>, ()>,
    watched_keys: watched_keys::WatchedKeys,
    /// One key, all members and sessions, or everything was evicted.
    evicted_keys: KeyedNotify<SecretHash>,
    evicted_people: Notify,
    evicted_all: Notify,
}

impl Credentials {
    /// Looks credentials up with connections of `pool`.
    #[must_use]
    pub fn new(pool: Pool, plans: Arc<ProjectPlans>, bus: Bus) -> Self {
        Self {
            pool,
            plans,
            bus,
            keys: cache(MAX_CACHED_KEYS),
            sessions: cache(MAX_CACHED_SESSIONS),
            members: cache(MAX_CACHED_SESSIONS),
            known_keys: known(MAX_CACHED_KEYS),
            known_members: known(MAX_CACHED_SESSIONS),
            guessers: moka::sync::Cache::builder()
                .time_to_live(GUESSER_PAUSE)
                .max_capacity(MAX_GUESSERS)
                .build(),
            watched_keys: watched_keys::WatchedKeys::default(),
            evicted_keys: KeyedNotify::default(),
            evicted_people: Notify::new(),
            evicted_all: Notify::new(),
        }
    }

    /// The rights of the live key with this hash.
    pub async fn key(&self, hash: SecretHash) -> Result<Option<Arc<KeyGrant>>, Error> {
        if let Some(known) = self.keys.get(&hash).await {
            return Ok(known);
        }
        let look_up = async {
            let pool = self.pool.clone();
            let found = detached_query(async move {
                let mut conn = pool.acquire().await?;
                store::people::keys::find_by_secret(&mut conn, &hash).await
            });
            let owner = found.await?;
            remember(&self.known_keys, hash, owner.is_some()).await;
            Ok::<_, sqlx::Error>(owner.map(|it| Arc::new(self.grant(it))))
        };
        // Boxed: a miss is rare, and its ten kilobytes would be part of every parked poll.
        Box::pin(self.keys.try_get_with(hash, look_up)).await.map_err(Error::Unavailable)
    }

    fn grant(&self, owner: KeyOwner) -> KeyGrant {
        let scopes = owner.scopes.iter().filter_map(|it| Scope::of_name(it)).collect();
        let limits = self.plans.limits(&owner.plan, owner.overrides.as_ref(), owner.is_verified);
        let allowed_ips = read_networks(&owner.allowed_ips);
        let binding = KeyBinding::of(owner.queues.clone(), owner.job_types.clone());
        KeyGrant { owner, scopes, limits, allowed_ips, binding }
    }

    /// The cached state of a key: its rights, or that there is none.
    pub async fn cached_key(&self, hash: &SecretHash) -> Option<Option<Arc<KeyGrant>>> {
        self.keys.get(hash).await
    }

    /// Whether this key was found lately: its lookup is no attempt to guess one.
    #[must_use]
    pub fn was_key_found(&self, hash: &SecretHash) -> bool {
        self.known_keys.contains_key(hash)
    }

    /// How long an address has to wait that has guessed too often, in whole seconds.
    #[must_use]
    pub fn guesser_waits(&self, address: &str) -> Option<u32> {
        self.guessers.contains_key(address).then_some(GUESSER_PAUSE.as_secs() as u32)
    }

    /// Lets an address wait.
    pub fn let_guesser_wait(&self, address: Arc<str>) {
        self.guessers.insert(address, ());
    }

    /// Whether this membership is cached, or was found lately.
    #[must_use]
    pub fn is_member_known(&self, account_id: AccountId, project: &str) -> bool {
        let key = (account_id, project.to_owned());
        self.members.contains_key(&key) || self.known_members.contains_key(&key)
    }

    /// Whether a session is live.
    pub async fn is_session_live(&self, bearer: Bearer) -> Result<bool, Error> {
        let pool = self.pool.clone();
        let look_up = detached_query(async move {
            let mut conn = pool.acquire().await?;
            store::people::sessions::is_live(&mut conn, bearer.account_id, bearer.session_id).await
        });
        Box::pin(self.sessions.try_get_with(bearer, look_up)).await.map_err(Error::Unavailable)
    }

    /// An account's role in the project with this slug or id.
    pub async fn member(
        &self,
        account_id: AccountId,
        project: &str,
    ) -> Result<Option<Arc<MemberGrant>>, Error> {
        let look_up = async {
            let (pool, name) = (self.pool.clone(), project.to_owned());
            let found = detached_query(async move {
                let mut conn = pool.acquire().await?;
                let public_id: Option<ProjectPublicId> = name.parse().ok();
                store::people::members::find(&mut conn, account_id, &name, public_id).await
            });
            let found = found.await?;
            let key = (account_id, project.to_owned());
            remember(&self.known_members, key, found.is_some()).await;
            Ok::<_, sqlx::Error>(found.and_then(|membership| {
                let role = Role::of_name(&membership.role)?;
                let Membership { plan, overrides, is_verified, .. } = &membership;
                let limits = self.plans.limits(plan, overrides.as_ref(), *is_verified);
                Some(Arc::new(MemberGrant { membership, role, limits }))
            }))
        };
        let key = (account_id, project.to_owned());
        Box::pin(self.members.try_get_with(key, look_up)).await.map_err(Error::Unavailable)
    }

    /// Removes a credential from the caches of all nodes, of this one immediately.
    pub async fn evict(&self, evict: Evict) {
        self.evict_here(evict).await;
        self.bus.publish(Topic::Evict, &evict.message()).await;
    }

    /// Does what another node has published.
    pub async fn on_message(&self, message: &str) {
        self.evict_here(Evict::parse(message)).await;
    }

    async fn evict_here(&self, evict: Evict) {
        match evict {
            Evict::Key(hash) => {
                self.keys.invalidate(&hash).await;
                self.evicted_keys.wake(&hash);
            }
            // There are few sessions, and this one's account is unknown: drop all.
            Evict::Session(_) => {
                self.sessions.invalidate_all();
                self.evicted_people.notify_waiters();
            }
            Evict::Members => {
                self.members.invalidate_all();
                self.evicted_people.notify_waiters();
            }
            Evict::KeysAndMembers => {
                self.keys.invalidate_all();
                self.members.invalidate_all();
                self.evicted_all.notify_waiters();
            }
        }
    }

    /// Resolves when a credential should be checked again: a key, or else a session.
    pub async fn until_recheck(&self, key: Option<SecretHash>) {
        let of_key = key.map(|it| self.evicted_keys.of(it));
        let own = of_key.as_deref().unwrap_or(&self.evicted_people).notified();
        tokio::select! {
            () = own => (),
            () = self.evicted_all.notified() => (),
            () = tokio::time::sleep(CREDENTIAL_TTL) => (),
        }
    }
}

/// Code that holds these locks cannot panic in the middle of a change.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_parsed_as_written_and_an_unreadable_one_evicts_the_most() {
        let session = SessionId::generate();
        for evict in
            [Evict::Key([7; 32]), Evict::Session(session), Evict::Members, Evict::KeysAndMembers]
        {
            assert_eq!(Evict::parse(&evict.message()), evict);
        }
        for junk in ["", "key", "key zz", "key 00", "session x", "something else"] {
            assert_eq!(Evict::parse(junk), Evict::KeysAndMembers, "{junk}");
        }
    }
}
