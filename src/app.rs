//! What requests share: the engine, accounts, cached credentials, and the secrets of this instance.

use std::{
    collections::{HashMap, HashSet},
    ops::Deref,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use moka::future::Cache;
use tokio::sync::{Notify, Semaphore};

use crate::{
    accounts::{Accounts, key::SecretHash, token::Bearer},
    domain::{
        access::{Role, Scope},
        limits::MAX_STREAMS,
        plan::Limits,
    },
    engine::Engine,
    error::Error,
    ids::{AccountId, KeyId, ProjectId, ProjectPublicId, SessionId},
    redis_bus::{Bus, Topic},
    store::{self, keys::KeyOwner, members::Membership},
};

/// TTL of cached credentials. Parked polls check as often, so even without Redis a revoked key is
/// refused everywhere after twice this time.
pub const KEY_CACHE_TTL: Duration = Duration::from_secs(2);
/// Keys that one node caches, including unknown ones.
const KEY_CACHE_KEYS: u64 = 100_000;
/// Sessions and memberships that one node caches.
const PEOPLE_CACHE: u64 = 20_000;
/// Keys whose use is not written to the database yet.
const MAX_USED_KEYS: usize = 10_000;

/// The rights and limits of a live key.
#[derive(Debug, Clone)]
pub struct KeyGrant {
    pub owner: KeyOwner,
    /// What it may be used for.
    pub scopes: Vec<Scope>,
    pub limits: Limits,
}

/// A member's role and limits in a project.
#[derive(Debug, Clone)]
pub struct MemberGrant {
    pub membership: Membership,
    pub role: Role,
    pub limits: Limits,
}

/// The handles of one node. Cheap to clone.
#[derive(Clone)]
pub struct App(Arc<Handles>);

pub struct Handles {
    pub engine: Engine,
    pub accounts: Accounts,
    pub bus: Bus,
    pub cursor_key: Vec<u8>,
    pub streams: Arc<Semaphore>,
    keys: Cache<SecretHash, Option<Arc<KeyGrant>>>,
    sessions: Cache<Bearer, bool>,
    members: Cache<(AccountId, String), Option<Arc<MemberGrant>>>,
    forgotten: Notify,
    used_keys: Mutex<HashSet<(ProjectId, KeyId)>>,
    parked: Mutex<HashMap<String, u32>>,
}

impl Deref for App {
    type Target = Handles;

    fn deref(&self) -> &Handles {
        &self.0
    }
}

/// A credential to remove from caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Forget {
    Key(SecretHash),
    Session(SessionId),
    /// All cached members: a role has changed.
    Members,
    /// All cached keys and members: a project or a plan has changed.
    Everybody,
}

impl Forget {
    fn text(self) -> String {
        match self {
            Self::Key(hash) => {
                let hex: String = hash.iter().map(|it| format!("{it:02x}")).collect();
                format!("key {hex}")
            }
            Self::Session(id) => format!("session {id}"),
            Self::Members => "members .".to_owned(),
            Self::Everybody => "everybody".to_owned(),
        }
    }

    /// Parses a message of another node. An unreadable one removes everything.
    fn read(text: &str) -> Self {
        let read = match text.split_once(' ') {
            Some(("key", hex)) => read_hash(hex).map(Self::Key),
            Some(("session", id)) => id.parse().ok().map(Self::Session),
            Some(("members", _)) => Some(Self::Members),
            _ => None,
        };
        read.unwrap_or(Self::Everybody)
    }
}

fn read_hash(hex: &str) -> Option<SecretHash> {
    let bytes: Option<Vec<u8>> = (0..hex.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(hex.get(at..at + 2)?, 16).ok())
        .collect();
    bytes?.try_into().ok()
}

impl App {
    /// Puts the handles together.
    #[must_use]
    pub fn new(engine: Engine, accounts: Accounts, bus: Bus, cursor_key: Vec<u8>) -> Self {
        let people = || Cache::builder().time_to_live(KEY_CACHE_TTL).max_capacity(PEOPLE_CACHE);
        Self(Arc::new(Handles {
            engine,
            accounts,
            bus,
            cursor_key,
            streams: Arc::new(Semaphore::new(MAX_STREAMS)),
            keys: Cache::builder().time_to_live(KEY_CACHE_TTL).max_capacity(KEY_CACHE_KEYS).build(),
            sessions: Cache::builder()
                .time_to_live(KEY_CACHE_TTL)
                .max_capacity(PEOPLE_CACHE)
                .build(),
            members: people().build(),
            forgotten: Notify::new(),
            used_keys: Mutex::default(),
            parked: Mutex::default(),
        }))
    }

    /// The rights of the live key with this hash, as of at most [`KEY_CACHE_TTL`] ago. Concurrent
    /// lookups of one key share a query.
    pub async fn key_grant(&self, hash: SecretHash) -> Result<Option<Arc<KeyGrant>>, Error> {
        if let Some(known) = self.keys.get(&hash).await {
            return Ok(known);
        }
        let look_up = async {
            let mut conn = self.engine.pools.keys.acquire().await?;
            let owner = store::keys::find_by_secret(&mut conn, &hash).await?;
            Ok::<_, sqlx::Error>(owner.map(|it| Arc::new(self.grant(it))))
        };
        // Boxed: a miss is rare, and its ten kilobytes would be part of every parked poll.
        Box::pin(self.keys.try_get_with(hash, look_up)).await.map_err(Error::Unavailable)
    }

    fn grant(&self, owner: KeyOwner) -> KeyGrant {
        let scopes = owner.scopes.iter().filter_map(|it| Scope::of_name(it)).collect();
        let plans = &self.accounts.plans;
        let limits = plans.of(&owner.plan, owner.overrides.as_ref());
        KeyGrant { owner, scopes, limits }
    }

    /// Whether this key is not cached.
    #[must_use]
    pub fn is_new_key(&self, hash: &SecretHash) -> bool {
        !self.keys.contains_key(hash)
    }

    /// Whether this membership is not cached.
    #[must_use]
    pub fn is_new_member(&self, account_id: AccountId, project: &str) -> bool {
        !self.members.contains_key(&(account_id, project.to_owned()))
    }

    /// Whether a session is live, as of at most [`KEY_CACHE_TTL`] ago.
    pub async fn is_session_live(&self, bearer: Bearer) -> Result<bool, Error> {
        let look_up = async {
            let mut conn = self.engine.pools.keys.acquire().await?;
            store::sessions::is_live(&mut conn, bearer.account_id, bearer.session_id).await
        };
        Box::pin(self.sessions.try_get_with(bearer, look_up)).await.map_err(Error::Unavailable)
    }

    /// An account's role in the project with this slug or id, as of at most [`KEY_CACHE_TTL`] ago.
    pub async fn member_grant(
        &self,
        account_id: AccountId,
        project: &str,
    ) -> Result<Option<Arc<MemberGrant>>, Error> {
        let look_up = async {
            let mut conn = self.engine.pools.keys.acquire().await?;
            let public_id: Option<ProjectPublicId> = project.parse().ok();
            let found = store::members::find(&mut conn, account_id, project, public_id).await?;
            Ok::<_, sqlx::Error>(found.and_then(|membership| {
                let role = Role::of_name(&membership.role)?;
                let plans = &self.accounts.plans;
                let limits = plans.of(&membership.plan, membership.overrides.as_ref());
                Some(Arc::new(MemberGrant { membership, role, limits }))
            }))
        };
        let key = (account_id, project.to_owned());
        Box::pin(self.members.try_get_with(key, look_up)).await.map_err(Error::Unavailable)
    }

    /// Removes a credential from the caches of all nodes, of this one immediately.
    pub async fn forget(&self, forget: Forget) {
        self.forget_here(forget).await;
        self.bus.tell(Topic::Forget, &forget.text()).await;
    }

    /// Another node has changed a credential.
    pub async fn forget_as_told(&self, text: &str) {
        self.forget_here(Forget::read(text)).await;
    }

    async fn forget_here(&self, forget: Forget) {
        match forget {
            Forget::Key(hash) => self.keys.invalidate(&hash).await,
            // There are few sessions, and this one's account is unknown: drop all.
            Forget::Session(_) => self.sessions.invalidate_all(),
            Forget::Members => self.members.invalidate_all(),
            Forget::Everybody => {
                self.keys.invalidate_all();
                self.members.invalidate_all();
            }
        }
        self.forgotten.notify_waiters();
    }

    /// Records that this node is running, and counts the running nodes.
    pub async fn count_nodes(&self) -> sqlx::Result<()> {
        let mut conn = self.engine.pools.background.acquire().await?;
        let nodes = store::nodes::beat(&mut conn, self.bus.node()).await?;
        drop(conn);
        self.bus.record_nodes(u32::try_from(nodes).unwrap_or(1));
        Ok(())
    }

    /// Resolves when a credential should be checked again.
    pub async fn until_recheck(&self) {
        let _ = tokio::time::timeout(KEY_CACHE_TTL, self.forgotten.notified()).await;
    }

    /// Records that a key was used.
    pub fn record_used(&self, key: (ProjectId, KeyId)) {
        let mut used = lock(&self.used_keys);
        if used.len() < MAX_USED_KEYS {
            used.insert(key);
        }
    }

    /// Writes which keys were used.
    pub async fn write_used_keys(&self) -> sqlx::Result<()> {
        let used: Vec<_> = lock(&self.used_keys).drain().collect();
        if used.is_empty() {
            return Ok(());
        }
        let mut conn = self.engine.pools.background.acquire().await?;
        store::keys::record_used(&mut conn, &used).await
    }

    /// Takes a permit on this node; none if `max` are taken.
    #[must_use]
    pub fn take_permit(&self, name: &str, max: u32) -> Option<LocalPermit> {
        let mut parked = lock(&self.parked);
        let taken = parked.entry(name.to_owned()).or_default();
        if *taken >= max {
            return None;
        }
        *taken += 1;
        Some(LocalPermit { app: self.clone(), name: name.to_owned() })
    }

    /// How many of these permits are taken on this node.
    #[must_use]
    pub fn permits_taken(&self, name: &str) -> u32 {
        lock(&self.parked).get(name).copied().unwrap_or_default()
    }
}

/// A permit on this node; released when dropped.
pub struct LocalPermit {
    app: App,
    name: String,
}

impl Drop for LocalPermit {
    fn drop(&mut self) {
        let mut parked = lock(&self.app.parked);
        if let Some(taken) = parked.get_mut(&self.name) {
            *taken -= 1;
            if *taken == 0 {
                parked.remove(&self.name);
            }
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
    fn what_is_told_reads_back_and_what_cannot_be_read_is_taken_for_the_most() {
        let session = SessionId::generate();
        for forget in
            [Forget::Key([7; 32]), Forget::Session(session), Forget::Members, Forget::Everybody]
        {
            assert_eq!(Forget::read(&forget.text()), forget);
        }
        for junk in ["", "key", "key zz", "key 00", "session x", "something else"] {
            assert_eq!(Forget::read(junk), Forget::Everybody, "{junk}");
        }
    }
}
