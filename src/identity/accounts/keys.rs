//! Creating, rotating and revoking API keys. A key never has more rights, or a longer life, than
//! its author.

use std::{
    collections::HashSet,
    net::{IpAddr, Ipv4Addr},
};

use chrono::{DateTime, Utc};
use fencepost_domain::{
    access::{Permission, Scope, may_grant, role_may},
    binding::KeyBinding,
    error::{Error, RemainingKey},
    ids::{KeyId, ProjectId},
    lease::RequireFence,
    limits::MAX_KEY_SECONDS,
    networks,
};
use fencepost_store::{
    self as store,
    people::{
        audit::{Actor, NewAuditEntry},
        keys::{ListedKey, NewKey},
    },
};
use ipnet::IpNet;
use secrecy::{ExposeSecret, SecretString};
use serde_json::json;
use sqlx::{Acquire, PgConnection};

use super::{
    Client,
    author::{Author, Rights, Roles},
    key::{self, SecretHash},
};

/// A key to create.
#[derive(Debug, Clone)]
pub struct KeyRequest {
    pub name: String,
    /// Scopes of the key.
    pub scopes: Vec<Scope>,
    /// None: never, or with the key that creates it.
    pub expires_at: Option<DateTime<Utc>>,
    /// Own rate limits per minute: enqueue, worker and other calls.
    pub per_minute: [Option<i32>; 3],
    pub require_fence: RequireFence,
    /// True if unknown fields in bodies are refused.
    pub strict: bool,
    /// Networks from which it may be used; none: all.
    pub allowed_ips: Vec<IpNet>,
    /// Queues and job types that it is bound to; none: all.
    pub binding: Option<KeyBinding>,
    pub origin: KeyOrigin,
}

/// How the bearer of a key proves it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeyOrigin {
    /// By its secret.
    Secret,
    /// By tokens, which are exchanged for keys of the last kind.
    Tokens(TrustedTokens),
    /// By its secret, which a token was exchanged for.
    Exchanged,
}

/// Tokens of one issuer, for one subject or all that begin alike.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrustedTokens {
    /// URL of the OpenID Connect issuer.
    pub issuer: String,
    /// The `sub` of its tokens, or how it begins: then it ends in `*`.
    pub subject: String,
}

impl TrustedTokens {
    /// Tokens that exchange for a stored key.
    #[must_use]
    pub fn of(key: &ListedKey) -> Option<Self> {
        let (issuer, subject) = (key.token_issuer.clone()?, key.token_subject.clone()?);
        Some(Self { issuer, subject })
    }

    /// Whether a token of this issuer and subject is one of them.
    #[must_use]
    pub fn include(&self, issuer: &str, subject: &str) -> bool {
        let fits = match self.subject.strip_suffix('*') {
            Some(beginning) => subject.starts_with(beginning),
            None => subject == self.subject,
        };
        issuer == self.issuer && fits
    }
}

impl KeyRequest {
    /// A key with these scopes, that never expires, and the defaults of the API.
    #[must_use]
    pub fn named(name: String, scopes: Vec<Scope>) -> Self {
        Self {
            name,
            scopes,
            expires_at: None,
            per_minute: [None; 3],
            require_fence: RequireFence::default(),
            strict: true,
            allowed_ips: Vec::new(),
            binding: None,
            origin: KeyOrigin::Secret,
        }
    }
}

/// A created key, shown only once.
#[derive(Debug, Clone)]
pub struct MadeKey {
    pub listed: ListedKey,
    pub secret: SecretString,
    pub hash: SecretHash,
}

/// Creates a key, unless the project has `max_live` live ones.
///
/// # Errors
/// [`Error::RoleExceedsCaller`] when the author may not grant such scopes. [`Error::Invalid`] when
/// it would expire in the past or too far ahead. [`Error::QuotaExceeded`]. Those of a lost right:
/// [`Error::Unauthorized`], [`Error::Forbidden`], [`Error::ProjectNotFound`].
pub async fn create(
    conn: &mut PgConnection,
    author: &Author<'_>,
    mut request: KeyRequest,
    max_live: i64,
) -> Result<MadeKey, Error> {
    let mut tx = conn.begin().await?;
    let own = check_rights(&mut tx, author).await?;
    if !may_grant(author.rights.scopes(), &request.scopes) {
        return Err(Error::RoleExceedsCaller);
    }
    request.expires_at = [request.expires_at, own.expires_at].into_iter().flatten().min();
    request.allowed_ips = own.bound(request.allowed_ips)?;
    if let Some(expires_at) = request.expires_at {
        let ahead = store::people::keys::seconds_until(&mut tx, expires_at).await?;
        if !(1.0..=MAX_KEY_SECONDS as f64).contains(&ahead) {
            let message = "must be in the future, at most ten years ahead";
            return Err(Error::invalid("expires_at", message));
        }
    }
    let made = insert(&mut tx, author, request, max_live).await?;
    note(&mut tx, author, "key.created", None, Some(&made.listed)).await?;
    tx.commit().await?;
    Ok(made)
}

/// Renames a key.
///
/// # Errors
/// [`Error::KeyNotFound`]. [`Error::RoleExceedsCaller`] when it has scopes that the author lacks.
pub async fn rename(
    conn: &mut PgConnection,
    author: &Author<'_>,
    id: KeyId,
    name: String,
) -> Result<ListedKey, Error> {
    let mut tx = conn.begin().await?;
    let before = store::people::keys::lock(&mut tx, author.project_id, id).await?;
    let before = before.ok_or(Error::KeyNotFound)?;
    check_grants(author, &before)?;
    store::people::keys::rename(&mut tx, author.project_id, id, &name).await?;
    let after = ListedKey { name, ..before.clone() };
    note(&mut tx, author, "key.changed", Some(&before), Some(&after)).await?;
    tx.commit().await?;
    Ok(after)
}

/// Creates a key with the same rights, and lets the old one expire after `overlap_seconds`. Also
/// returns the hash of the old one.
///
/// # Errors
/// [`Error::KeyNotFound`] when there is no such live key, and those of [`create`].
pub async fn rotate(
    conn: &mut PgConnection,
    author: &Author<'_>,
    id: KeyId,
    overlap_seconds: i64,
    max_live: i64,
) -> Result<(MadeKey, Option<SecretHash>), Error> {
    let mut tx = conn.begin().await?;
    let own = check_rights(&mut tx, author).await?;
    let old = store::people::keys::lock(&mut tx, author.project_id, id).await?;
    let old = old.filter(|it| it.is_live).ok_or(Error::KeyNotFound)?;
    if old.is_exchanged || old.token_issuer.is_some() {
        return Err(Error::invalid("key_id", "is used with tokens: it has no secret to rotate"));
    }
    let scopes = check_grants(author, &old)?;
    let hash =
        store::people::keys::end_after(&mut tx, author.project_id, id, overlap_seconds).await?;
    let request = KeyRequest {
        name: old.name.clone(),
        scopes,
        expires_at: [old.expires_at, own.expires_at].into_iter().flatten().min(),
        per_minute: [old.produce_per_minute, old.work_per_minute, old.manage_per_minute],
        require_fence: RequireFence::of_name(&old.require_fence),
        strict: old.strict,
        allowed_ips: own.bound(read_networks(&old.allowed_ips))?,
        binding: KeyBinding::of(old.queues.clone(), old.job_types.clone()),
        origin: KeyOrigin::Secret,
    };
    // The replaced key does not count, so that a project with the maximum number of keys can
    // rotate.
    let made = insert(&mut tx, author, request, max_live + 1).await?;
    note(&mut tx, author, "key.rotated", Some(&old), Some(&made.listed)).await?;
    tx.commit().await?;
    Ok((made, secret_hash(hash)))
}

/// Revokes a key. Revoking twice is no error. Returns the hashes of the ended keys. `revoke_keys`
/// says what becomes of live keys that it has created: true ends them, too.
///
/// # Errors
/// [`Error::KeyNotFound`], [`Error::RoleExceedsCaller`] when it has scopes that the author lacks,
/// [`Error::KeysRemain`], and those of a lost right as for [`create`].
pub async fn revoke(
    conn: &mut PgConnection,
    author: &Author<'_>,
    id: KeyId,
    revoke_keys: Option<bool>,
) -> Result<Vec<SecretHash>, Error> {
    let mut tx = conn.begin().await?;
    check_rights(&mut tx, author).await?;
    let row = store::people::keys::lock(&mut tx, author.project_id, id).await?;
    let row = row.ok_or(Error::KeyNotFound)?;
    check_grants(author, &row)?;
    let mut ended = revoke_created(&mut tx, author, id.to_string(), revoke_keys).await?;
    ended.extend(end(&mut tx, author, &row).await?);
    tx.commit().await?;
    Ok(ended)
}

/// Revokes the live keys that an account or key has created, and those created with these, unless
/// `revoke_keys` is false. Returns their hashes.
///
/// # Errors
/// [`Error::KeysRemain`] when there are such keys, and `revoke_keys` does not say what to do.
pub(super) async fn revoke_created(
    conn: &mut PgConnection,
    author: &Author<'_>,
    by: String,
    revoke_keys: Option<bool>,
) -> Result<Vec<SecretHash>, Error> {
    let mut ended = Vec::new();
    take_turn(conn, author.project_id).await?;
    // One of them may create another meanwhile; when it has ended, it cannot.
    loop {
        let mut created = find_created(conn, author.project_id, by.clone()).await?;
        if revoke_keys == Some(false) {
            // Those of tokens live as long as the key that trusts them.
            created.retain(|it| it.is_exchanged && it.created_by.as_ref() == Some(&by));
        }
        if created.is_empty() {
            return Ok(ended);
        }
        // Exchanged ones end within minutes, whatever is decided.
        let lasting: Vec<_> = created.iter().filter(|it| !it.is_exchanged).cloned().collect();
        if revoke_keys.is_none() && !lasting.is_empty() {
            return Err(Error::KeysRemain(lasting.into_iter().map(remaining).collect()));
        }
        for key in created {
            ended.extend(end(conn, author, &key).await?);
        }
    }
}

/// The live keys that an account or key has created, and those created with these.
pub(super) async fn find_created(
    conn: &mut PgConnection,
    project_id: ProjectId,
    by: String,
) -> sqlx::Result<Vec<ListedKey>> {
    let (mut live, mut seen, mut creators) = (Vec::new(), HashSet::new(), vec![by]);
    while !creators.is_empty() {
        let created = store::people::keys::created_by(conn, project_id, &creators).await?;
        let ids = created.iter().map(|it| it.id.to_string());
        creators = ids.filter(|it| seen.insert(it.clone())).collect();
        live.extend(created.into_iter().filter(|it| it.is_live));
    }
    Ok(live)
}

pub(super) fn remaining(key: ListedKey) -> RemainingKey {
    let ListedKey { id, name, scopes, last_used_at, .. } = key;
    RemainingKey { id, name, scopes, last_used_at }
}

async fn end(
    conn: &mut PgConnection,
    author: &Author<'_>,
    key: &ListedKey,
) -> Result<Option<SecretHash>, Error> {
    let hash = store::people::keys::revoke(conn, author.project_id, key.id).await?;
    note(conn, author, "key.revoked", Some(key), None).await?;
    Ok(secret_hash(hash))
}

/// Revokes a leaked key: its possession is the proof. The finder may have created others with it,
/// so these are revoked, too. Returns the hashes of the ended keys.
pub async fn report(
    conn: &mut PgConnection,
    key: &SecretString,
    client: &Client,
) -> Result<Vec<SecretHash>, Error> {
    let mut tx = conn.begin().await?;
    let hash = key::hash(key.expose_secret());
    // Also one that has ended: those that were created with it may be live.
    let Some((project_id, id)) = store::people::keys::find_id_by_secret(&mut tx, &hash).await?
    else {
        return Ok(Vec::new());
    };
    take_turn(&mut tx, project_id).await?;
    let hash = store::people::keys::revoke(&mut tx, project_id, id).await?;
    let entry = NewAuditEntry::to("key.reported", id.to_string());
    let actor = Actor {
        request_id: Some(client.request_id.to_string()),
        address: Some(client.address.to_string()),
        ..Actor::SYSTEM
    };
    store::people::audit::insert(&mut tx, project_id, &actor, &entry).await?;
    let author = Author { project_id, actor, rights: Rights::Operator };
    let mut ended = revoke_created(&mut tx, &author, id.to_string(), Some(true)).await?;
    tx.commit().await?;
    ended.extend(secret_hash(hash));
    Ok(ended)
}

/// The scopes of a key, if the author may grant them all.
fn check_grants(author: &Author<'_>, key: &ListedKey) -> Result<Vec<Scope>, Error> {
    let scopes: Vec<_> = key.scopes.iter().filter_map(|it| Scope::of_name(it)).collect();
    if may_grant(author.rights.scopes(), &scopes) {
        Ok(scopes)
    } else {
        Err(Error::RoleExceedsCaller)
    }
}

fn secret_hash(stored: Option<Vec<u8>>) -> Option<SecretHash> {
    stored.and_then(|it| it.try_into().ok())
}

/// The bounds of an author's keys.
#[derive(Debug, Default)]
struct OwnBounds {
    expires_at: Option<DateTime<Utc>>,
    allowed_ips: Vec<IpNet>,
}

impl OwnBounds {
    /// The networks of a key that the author creates.
    fn bound(&self, wanted: Vec<IpNet>) -> Result<Vec<IpNet>, Error> {
        if wanted.is_empty() {
            return Ok(self.allowed_ips.clone());
        }
        if networks::are_within(&wanted, &self.allowed_ips) {
            return Ok(wanted);
        }
        let message = "must be within those of the key that creates it";
        Err(Error::invalid("allowed_ips", message))
    }
}

/// Networks as they are stored. One that cannot be read allows no address: without it, the key
/// might be good from everywhere.
#[must_use]
pub fn read_networks(stored: &[String]) -> Vec<IpNet> {
    let none = IpNet::from(IpAddr::V4(Ipv4Addr::BROADCAST));
    stored.iter().map(|it| networks::parse(it).unwrap_or(none)).collect()
}

/// Waits for the others that change keys of the project: two that revoke each other, or what the
/// other one created, must not wait for one another. The roles of members are locked before.
async fn take_turn(conn: &mut PgConnection, project_id: ProjectId) -> sqlx::Result<()> {
    store::settings_turns::take(conn, project_id, "keys").await
}

/// Checks the author's rights again.
async fn check_rights(conn: &mut PgConnection, author: &Author<'_>) -> Result<OwnBounds, Error> {
    match author.rights {
        Rights::Operator => {
            take_turn(conn, author.project_id).await?;
            Ok(OwnBounds::default())
        }
        Rights::Key(id, _) => {
            take_turn(conn, author.project_id).await?;
            let key = store::people::keys::lock(conn, author.project_id, id).await?;
            let key = key.filter(|it| it.is_live).ok_or(Error::Unauthorized)?;
            let allowed_ips = read_networks(&key.allowed_ips);
            Ok(OwnBounds { expires_at: key.expires_at, allowed_ips })
        }
        Rights::Member(_) => {
            let role = Roles::lock(conn, author.project_id).await?.of_author(author)?;
            let permission = Permission::Administer;
            if !role_may(role, permission) {
                return Err(Error::Forbidden { needs: permission.needs() });
            }
            take_turn(conn, author.project_id).await?;
            Ok(OwnBounds::default())
        }
    }
}

/// Stores the first key of a project, without the checks and the audit entry of [`create`].
///
/// # Errors
/// [`Error::QuotaExceeded`].
pub async fn insert_first(
    conn: &mut PgConnection,
    (project_id, mode): (ProjectId, &str),
    request: KeyRequest,
    created_by: Option<String>,
    max_live: i64,
) -> Result<MadeKey, Error> {
    let secret = key::generate(mode);
    let (shown_prefix, shown_end) = key::shown_parts(&secret);
    let hash = key::hash(&secret);
    let [produce_per_minute, work_per_minute, manage_per_minute] = request.per_minute;
    let is_exchanged = request.origin == KeyOrigin::Exchanged;
    let tokens = match request.origin {
        KeyOrigin::Tokens(it) => Some((it.issuer, it.subject)),
        KeyOrigin::Secret | KeyOrigin::Exchanged => None,
    };
    let (token_issuer, token_subject) = tokens.unzip();
    let (queues, job_types) =
        request.binding.map(|it| (it.queues, it.job_types)).unwrap_or_default();
    let new = NewKey {
        name: request.name,
        shown_prefix,
        shown_end,
        secret_hash: hash.to_vec(),
        scopes: request.scopes.iter().map(|it| it.name().to_owned()).collect(),
        expires_at: request.expires_at,
        created_by,
        produce_per_minute,
        work_per_minute,
        manage_per_minute,
        require_fence: request.require_fence.name().to_owned(),
        strict: request.strict,
        allowed_ips: request.allowed_ips.iter().map(ToString::to_string).collect(),
        queues,
        job_types,
        token_issuer,
        token_subject,
        is_exchanged,
    };
    let kept =
        store::people::keys::insert(conn, project_id, KeyId::generate(), &new, max_live).await?;
    let listed = kept.ok_or(Error::QuotaExceeded { what: "live keys", max: max_live })?;
    Ok(MadeKey { listed, secret: secret.into(), hash })
}

async fn insert(
    conn: &mut PgConnection,
    author: &Author<'_>,
    request: KeyRequest,
    max_live: i64,
) -> Result<MadeKey, Error> {
    let project = store::people::projects::get(conn, author.project_id).await?;
    let project = project.ok_or(Error::ProjectNotFound)?;
    let created_by = author.actor.id.clone();
    insert_first(conn, (project.id, &project.mode), request, created_by, max_live).await
}

async fn note(
    conn: &mut PgConnection,
    author: &Author<'_>,
    action: &'static str,
    before: Option<&ListedKey>,
    after: Option<&ListedKey>,
) -> Result<(), Error> {
    let entry = NewAuditEntry {
        action,
        target: before.or(after).map(|it| it.id.to_string()),
        before: before.map(facts),
        after: after.map(facts),
    };
    store::people::audit::insert(conn, author.project_id, &author.actor, &entry).await?;
    Ok(())
}

/// The audit log's view of a key.
fn facts(key: &ListedKey) -> String {
    let shown = format!("{}…{}", key.shown_prefix, key.shown_end);
    json!({
        "name": key.name, "shown": shown, "scopes": key.scopes, "expires_at": key.expires_at,
        "require_fence": key.require_fence, "strict": key.strict, "allowed_ips": key.allowed_ips,
        "queues": key.queues, "job_types": key.job_types,
        "token_issuer": key.token_issuer, "token_subject": key.token_subject,
    })
    .to_string()
}
