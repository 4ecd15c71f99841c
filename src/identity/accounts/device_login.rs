//! Logins of terminals, as the device flow of OAuth 2.0 has them (RFC 8628): the terminal shows a
//! short code, its user approves it in the console, and the terminal collects an API key.
//!
//! The key is created when it is collected, so that it is stored nowhere. If that answer is lost, a
//! key remains whose secret is unknown; the console lists it.

use fencepost_domain::{
    access::Scope,
    error::Error,
    ids::ProjectId,
    limits::{DEVICE_KEY_SECONDS, DEVICE_LOGIN_SECONDS},
    plan::Plans,
};
use fencepost_fair::hashing::wide_network;
use fencepost_store::{
    self as store,
    people::{
        audit::NewAuditEntry,
        device_logins::{DeviceLogin, Pending},
        projects::Project,
    },
};
use rand::RngExt;
use secrecy::SecretString;
use serde_json::json;
use sha2::{Digest, Sha256};
use sqlx::Acquire;

use super::{
    Client, DEVICE_COLLECTS_PER_ADDRESS, DEVICE_LOGINS, DEVICE_LOGINS_PER_ADDRESS,
    DEVICE_LOGINS_PER_NETWORK, USER_CODES_PER_ACCOUNT,
    author::{Author, Rights},
    base::Base,
    keys::{self, KeyRequest, MadeKey},
    secret::{self, DEVICE_PREFIX},
    security::{self, AccountEvent},
    sessions::lock_stepped_up,
    throttle::charge,
    token::Bearer,
};

/// Characters of a user code.
pub const USER_CODE_CHARS: usize = 8;
/// No vowels, so that no words come out (RFC 8628, section 6.1).
const USER_CODE_ALPHABET: &[u8; 20] = b"BCDFGHJKLMNPQRSTVWXZ";

/// A login that has begun.
#[derive(Debug)]
pub struct NewDeviceLogin {
    /// For the terminal alone.
    pub device_code: SecretString,
    /// For its user, as `XXXX-XXXX`.
    pub user_code: String,
}

/// The result that a terminal collects.
#[derive(Debug)]
pub struct CollectedKey {
    pub project: Project,
    /// Address of the account that has approved the login.
    pub email: String,
    pub made: MadeKey,
}

/// A code without its hyphen, and with it.
fn new_user_code() -> ([u8; USER_CODE_CHARS], String) {
    let mut rng = rand::rng();
    let code: [u8; USER_CODE_CHARS] =
        std::array::from_fn(|_| USER_CODE_ALPHABET[rng.random_range(0..USER_CODE_ALPHABET.len())]);
    (code, shown(code))
}

/// A user code as people type it: in any case, with or without its hyphen. None: it is no code.
fn typed_user_code(typed: &str) -> Option<[u8; USER_CODE_CHARS]> {
    let kept = typed.trim().bytes().filter(|it| *it != b'-' && *it != b' ');
    // One more than a code has, so that a longer text is none.
    let code: Vec<u8> = kept.take(USER_CODE_CHARS + 1).map(|it| it.to_ascii_uppercase()).collect();
    let code: [u8; USER_CODE_CHARS] = code.try_into().ok()?;
    code.iter().all(|it| USER_CODE_ALPHABET.contains(it)).then_some(code)
}

/// A typed user code as its terminal shows it; another text as it is.
#[must_use]
pub fn as_shown(typed: &str) -> String {
    typed_user_code(typed).map_or_else(|| typed.to_owned(), shown)
}

fn shown(code: [u8; USER_CODE_CHARS]) -> String {
    let mut shown: String = code.iter().copied().map(char::from).collect();
    shown.insert(USER_CODE_CHARS / 2, '-');
    shown
}

fn hash(code: [u8; USER_CODE_CHARS]) -> [u8; 32] {
    Sha256::digest(code).into()
}

fn unknown_user_code() -> Error {
    Error::invalid("user_code", "is wrong, was used or has expired: begin again in the terminal")
}

/// Logins of terminals.
#[derive(Clone)]
pub struct DeviceLogins {
    pub(super) base: Base,
    pub(super) plans: Plans,
}

impl DeviceLogins {
    /// Begins a login; its key will have this name.
    ///
    /// # Errors
    /// [`Error::RateLimited`]; [`Error::Overloaded`] when another stored login has the same code.
    pub async fn begin(&self, name: &str, client: &Client) -> Result<NewDeviceLogin, Error> {
        let counted = [
            charge("device-logins", &client.address, DEVICE_LOGINS_PER_ADDRESS),
            charge("device-logins-wide", &wide_network(&client.address), DEVICE_LOGINS_PER_NETWORK),
            charge("device-logins-all", "", DEVICE_LOGINS),
        ];
        self.base.throttle.count(&counted).await?;
        let device_code = secret::generate(DEVICE_PREFIX);
        let (code, user_code) = new_user_code();
        let hashes = (&secret::hash(&device_code)[..], &hash(code)[..]);
        let of = (name, &*client.address);
        let mut conn = self.base.pool.acquire().await?;
        match store::people::device_logins::insert(&mut conn, hashes, of, DEVICE_LOGIN_SECONDS)
            .await?
        {
            true => Ok(NewDeviceLogin { device_code, user_code }),
            false => Err(Error::Overloaded),
        }
    }

    /// The pending login with this user code.
    ///
    /// # Errors
    /// [`Error::Invalid`] when there is none; [`Error::RateLimited`].
    pub async fn find(&self, bearer: Bearer, user_code: &str) -> Result<Pending, Error> {
        let code_hash = self.throttle_user_code(bearer, user_code).await?;
        let mut conn = self.base.pool.acquire().await?;
        let pending = store::people::device_logins::find_pending(&mut conn, &code_hash).await?;
        pending.ok_or_else(unknown_user_code)
    }

    /// Approves the pending login with this user code: its key will be of this project, and have
    /// these scopes. Whether the session may create such keys is checked when it is collected.
    ///
    /// # Errors
    /// As for [`Self::find`]; [`Error::StepUpRequired`].
    pub async fn approve(
        &self,
        (bearer, project_id): (Bearer, ProjectId),
        user_code: &str,
        scopes: &[Scope],
        client: &Client,
    ) -> Result<(), Error> {
        let code_hash = self.throttle_user_code(bearer, user_code).await?;
        let scopes: Vec<_> = scopes.iter().map(|it| it.name().to_owned()).collect();
        let mut conn = self.base.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        lock_stepped_up(&mut tx, bearer).await?;
        let by = (bearer.session_id, project_id);
        let approved =
            store::people::device_logins::approve(&mut tx, &code_hash, by, &scopes).await?;
        let Pending { name, address, .. } = approved.ok_or_else(unknown_user_code)?;
        let actor = client.actor("account", bearer.account_id.to_string());
        let after = json!({"name": name, "address": address, "scopes": scopes}).to_string();
        let entry =
            NewAuditEntry { after: Some(after), ..NewAuditEntry::to("device.approved", name) };
        store::people::audit::insert(&mut tx, project_id, &actor, &entry).await?;
        let event = AccountEvent::DeviceApproved;
        security::record(&mut tx, bearer.account_id, event, Some(client)).await?;
        tx.commit().await?;
        drop(conn);
        // The terminal's address is what a deceived owner does not know.
        let terminal = Client { address: address.into(), ..client.clone() };
        self.base.mailing.notify_owner(bearer.account_id, event, &terminal);
        Ok(())
    }

    /// Deletes the pending login with this user code.
    ///
    /// # Errors
    /// As for [`Self::find`].
    pub async fn refuse(&self, bearer: Bearer, user_code: &str) -> Result<(), Error> {
        let code_hash = self.throttle_user_code(bearer, user_code).await?;
        let mut conn = self.base.pool.acquire().await?;
        match store::people::device_logins::refuse(&mut conn, &code_hash).await? {
            true => Ok(()),
            false => Err(unknown_user_code()),
        }
    }

    async fn throttle_user_code(&self, by: Bearer, user_code: &str) -> Result<[u8; 32], Error> {
        let code = typed_user_code(user_code).ok_or_else(unknown_user_code)?;
        let account_id = by.account_id.to_string();
        self.base
            .throttle
            .count(&[charge("user-codes", &account_id, USER_CODES_PER_ACCOUNT)])
            .await?;
        Ok(hash(code))
    }

    /// Creates the key of an approved login; none: it is pending. The session that has approved it
    /// must be live, and its account must still have the right to create keys.
    ///
    /// # Errors
    /// [`Error::Invalid`] when there is no such login; [`Error::Suspended`];
    /// [`Error::RateLimited`]; those of [`keys::create`].
    pub async fn collect_key(
        &self,
        device_code: &SecretString,
        client: &Client,
    ) -> Result<Option<CollectedKey>, Error> {
        self.base
            .throttle
            .count(&[charge("device-keys", &client.address, DEVICE_COLLECTS_PER_ADDRESS)])
            .await?;
        let unknown =
            || Error::invalid("device_code", "is unknown, was used or refused, or has expired");
        if !secret::is_well_formed(device_code, DEVICE_PREFIX) {
            return Err(unknown());
        }
        let hash = secret::hash(device_code);
        let mut conn = self.base.pool.acquire().await?;
        let login =
            store::people::device_logins::find(&mut conn, &hash).await?.ok_or_else(unknown)?;
        let DeviceLogin { name, session_id, account_id, project_id, scopes } = login;
        let (Some(session_id), Some(account_id), Some(project_id)) =
            (session_id, account_id, project_id)
        else {
            return Ok(None);
        };
        let project = store::people::projects::get(&mut conn, project_id).await?;
        let project = project.ok_or(Error::ProjectNotFound)?;
        if project.suspended_at.is_some() {
            return Err(Error::Suspended { what: "project" });
        }
        let account =
            store::people::accounts::find(&mut conn, account_id).await?.ok_or_else(unknown)?;
        let limits = self.plans.of(&project.plan, project.overrides.as_ref());
        let actor = client.actor("account", account_id.to_string());
        let author = Author { project_id, actor, rights: Rights::Member(account_id) };
        let expires_at =
            store::people::keys::end_within(&mut conn, DEVICE_KEY_SECONDS, &[]).await?;
        let scopes = scopes.iter().filter_map(|it| Scope::of_name(it)).collect();
        let request =
            KeyRequest { expires_at: Some(expires_at), ..KeyRequest::named(name, scopes) };
        let mut tx = conn.begin().await?;
        // Members, account and login are locked in this order, as by the account's deletion.
        let made = keys::create(&mut tx, &author, request, limits.max_keys()).await?;
        store::people::accounts::lock(&mut tx, account_id).await?;
        let is_live = store::people::sessions::is_live(&mut tx, account_id, session_id).await?;
        if !is_live || !store::people::device_logins::delete(&mut tx, &hash).await? {
            return Err(unknown());
        }
        tx.commit().await?;
        Ok(Some(CollectedKey { project, email: account.email, made }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_code_is_read_as_people_type_it() {
        let (code, shown) = new_user_code();
        assert_eq!(shown.len(), USER_CODE_CHARS + 1);
        for typed in [
            shown.clone(),
            format!(" {} ", shown.to_lowercase().replace('-', "")),
            shown.replace('-', " "),
        ] {
            assert_eq!(typed_user_code(&typed), Some(code), "{typed}");
            assert_eq!(as_shown(&typed), shown);
        }
        for wrong in ["", "BCDF-GHJ", "BCDF-GHJKL", "ACDF-GHJK", "BCDF-GHJ\u{212a}"] {
            assert_eq!(typed_user_code(wrong), None, "{wrong}");
            assert_eq!(as_shown(wrong), wrong);
        }
    }
}
