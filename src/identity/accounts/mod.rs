//! Accounts: sign-up, login, passwords, tokens, keys, members, invitations and projects. Knows no
//! HTTP; it limits, hashes, mails, and writes what it decides to the database.

pub mod author;
mod codes;
pub mod device_login;
mod email_change;
pub mod key;
pub mod keys;
mod login;
pub mod mailing;
mod mails;
pub mod members;
pub mod oidc;
pub mod passkeys;
pub mod password;
pub mod projects;
mod public_key;
pub mod scanners;
mod second_factor;
pub mod secret;
pub mod security;
mod signup;
pub mod token;
mod token_crypto;
mod totp;

use std::{sync::Arc, time::Duration};

use fencepost_config::Signup;
use fencepost_domain::{
    error::Error,
    ids::{AccountId, InvitationId, ProjectId},
    limits::{ACCESS_TOKEN_SECONDS, MAX_EMAIL_CHARS},
    plan::Plans,
};
use fencepost_net::{
    mail::Mailer,
    seal::{MasterKeys, OtherMasterKey},
};
use fencepost_signals::{
    limiter::{Charge, Limiter, Rate},
    wakeups::Wake,
};
use fencepost_store::{
    self as store,
    connection::{nodes::SigningKey, pools::Pool},
    people::{audit::Actor, sessions::Origin},
};
use lettre::Address;
use secrecy::SecretString;
use sha2::{Digest, Sha256};
use sqlx::PgConnection;
use uuid::Uuid;

use self::{
    mailing::Content,
    oidc::Providers,
    password::Passwords,
    scanners::ScannerKeys,
    token::{Bearer, KEY_BYTES, KNOWN_KEYS, Tokens},
};

pub use self::{
    login::{Reuse, SignedIn},
    second_factor::{Proof, SecondStep},
    signup::{SignUp, SignedUp},
    totp::{NewTotp, seal_totp_secrets},
};

/// Calls per minute from one address to sign-up, login, reset and verification together.
pub const CALLS_PER_ADDRESS: Rate = Rate::per_minute(20);
/// Refreshes from one address.
pub const REFRESHES_PER_ADDRESS: Rate = Rate::per_minute(240);
pub const REFRESHES_PER_SESSION: Rate = Rate { count: 60, window_seconds: 3_600 };
/// Sign-ups from one address.
pub const SIGNUPS_PER_ADDRESS: Rate = Rate { count: 10, window_seconds: 3_600 };
/// Mails of one kind to one e-mail address, from anywhere. Beyond it, as many as
/// [`LATE_MAILS_TO_EMAIL`] allows are sent, and the others are not: their requests are answered all
/// the same, so that strangers cannot keep the owner out.
pub const MAILS_TO_EMAIL: Rate = Rate { count: 20, window_seconds: 86_400 };
pub const LATE_MAILS_TO_EMAIL: Rate = Rate { count: 1, window_seconds: 1_800 };
/// Tokens that one address exchanges for keys: a CI service has few addresses for many runs.
pub const EXCHANGES_PER_ADDRESS: Rate = Rate::per_minute(240);
/// Tokens of one subject.
pub const EXCHANGES_PER_SUBJECT: Rate = Rate::per_minute(60);
/// Logins that terminals at one address begin.
pub const DEVICE_LOGINS_PER_ADDRESS: Rate = Rate { count: 20, window_seconds: 600 };
/// Requests of such terminals for their keys.
pub const DEVICE_COLLECTS_PER_ADDRESS: Rate = Rate::per_minute(240);
/// User codes that one account tries. A guess is right once in 25,600,000,000 tries for each
/// terminal that waits.
pub const USER_CODES_PER_ACCOUNT: Rate = Rate { count: 30, window_seconds: 600 };
/// Invitations that one account sends.
pub const INVITATIONS_PER_ACCOUNT: Rate = Rate { count: 50, window_seconds: 86_400 };
/// The same for an account of at most [`NEW_ACCOUNT_DAYS`].
pub const INVITATIONS_PER_NEW_ACCOUNT: Rate = Rate { count: 5, window_seconds: 86_400 };
/// Days for which an account counts as new.
pub const NEW_ACCOUNT_DAYS: i32 = 7;
/// Exports of one account: each reads entries of all of its projects.
pub const EXPORTS_PER_ACCOUNT: Rate = Rate { count: 10, window_seconds: 86_400 };
/// Lookups of unknown credentials from one address. What was found counts as known for a while.
pub const LOOKUPS_PER_ADDRESS: Rate = Rate::per_minute(1_200);
/// Sign-ups with one e-mail address and resets of it from one client, and invitations to it from
/// one project.
pub const MAILS_PER_EMAIL: Rate = Rate { count: 3, window_seconds: 86_400 };
/// Wrong passwords for one e-mail address from one client.
pub const TRIES_PER_PAIR: Rate = Rate { count: 5, window_seconds: 900 };
/// Wrong passwords for one e-mail address from anywhere, after which each further try is delayed. A
/// delay, not a lock, so that no attacker can lock an account.
pub const TRIES_PER_EMAIL: Rate = Rate { count: 20, window_seconds: 900 };
/// Codes for one account from anywhere, without recovery codes. A guess is right once in 300,000
/// tries, and needs the password or a session.
pub const CODES_PER_ACCOUNT: Rate = Rate { count: 20, window_seconds: 3_600 };
pub const LATE: Duration = Duration::from_secs(2);
/// A signing key is replaced after this many seconds (30 days).
const SIGNING_KEY_SECONDS: i64 = 30 * 86_400;

/// Signing keys that one command encrypts: there are never as many.
const MAX_SEALED_KEYS: i64 = 1_000;

/// One node's handle on accounts. Cheap to clone.
#[derive(Clone)]
pub struct Accounts {
    pub pool: Pool,
    pub limiter: Limiter,
    pub passwords: Passwords,
    pub tokens: Tokens,
    pub master_keys: Arc<MasterKeys>,
    pub mailer: Mailer,
    pub signup: Signup,
    pub public_url: String,
    /// A URI for people who have found a vulnerability.
    pub security_contact: Option<String>,
    /// A URI for people who want a larger plan.
    pub plan_contact: Option<String>,
    pub scanner_keys: Arc<ScannerKeys>,
    pub providers: Arc<Providers>,
    pub default_plan: String,
    pub plans: Plans,
    /// Has mails sent.
    pub wake: Wake,
}

/// The client of a request.
#[derive(Debug, Clone, Default)]
pub struct Client {
    /// The address, as limits use it.
    pub address: Arc<str>,
    /// The user agent.
    pub user_agent: Option<Arc<str>>,
    pub request_id: Arc<str>,
    /// Whether a page of the console makes the request.
    pub is_browser: bool,
}

impl Client {
    fn origin(&self) -> Origin {
        Origin {
            user_agent: self.user_agent.as_deref().map(str::to_owned),
            address: Some(self.address.to_string()),
            is_browser: self.is_browser,
        }
    }

    /// As the audit log names an account.
    #[must_use]
    pub fn actor(&self, kind: &'static str, id: String) -> Actor {
        Actor {
            kind,
            id: Some(id),
            request_id: Some(self.request_id.to_string()),
            address: Some(self.address.to_string()),
        }
    }
}

/// Encrypts all signing keys with the first master key: those that are plain, and those that
/// another master key has encrypted. Returns how many.
///
/// # Errors
/// When one is encrypted with a key that is not given, or the database does not answer.
pub async fn seal_signing_keys(
    conn: &mut PgConnection,
    master_keys: &MasterKeys,
) -> anyhow::Result<usize> {
    let mut sealed = 0;
    for key in store::connection::nodes::signing_keys(conn, MAX_SEALED_KEYS).await? {
        if master_keys.is_current(&key.secret, KEY_BYTES) {
            continue;
        }
        let place = signing_key_place(key.id);
        let plain = master_keys.open(&place, &key.secret, KEY_BYTES)?;
        let secret = master_keys.seal(&place, &plain);
        store::connection::nodes::replace_signing_key(conn, key.id, &secret).await?;
        sealed += 1;
    }
    Ok(sealed)
}

/// Where a signing key is stored: its row alone can decrypt it.
fn signing_key_place(id: Uuid) -> String {
    format!("signing_keys/{id}")
}

impl Accounts {
    /// Refreshes the signing keys: replaces an old one, and reads those of other nodes. A key that
    /// this node cannot decrypt is none to it: it refuses the tokens.
    pub async fn refresh_signing_keys(&self) -> sqlx::Result<()> {
        let mut conn = self.pool.acquire().await?;
        let stored = store::connection::nodes::signing_keys(&mut conn, KNOWN_KEYS).await?;
        // With another master key than the other nodes, it would lock them out.
        if stored.iter().all(|it| self.open(it).is_ok()) {
            let (id, bytes) = token::new_key();
            let secret = self.master_keys.seal(&signing_key_place(id), &bytes);
            let (max_age, keep) = (SIGNING_KEY_SECONDS, ACCESS_TOKEN_SECONDS * 2);
            store::connection::nodes::rotate_signing_keys(&mut conn, id, &secret, max_age, keep)
                .await?;
        }
        let stored = store::connection::nodes::signing_keys(&mut conn, KNOWN_KEYS).await?;
        let (stored_keys, mut known) = (stored.len(), Vec::new());
        for key in stored {
            match self.open(&key) {
                Ok(secret) => known.push(SigningKey { secret, ..key }),
                Err(error) => {
                    tracing::error!(key.id = %key.id, %error, "signing key cannot be decrypted");
                }
            }
        }
        self.tokens.know(&known, stored_keys);
        Ok(())
    }

    fn open(&self, key: &SigningKey) -> Result<Vec<u8>, OtherMasterKey> {
        self.master_keys.open(&signing_key_place(key.id), &key.secret, KEY_BYTES)
    }

    async fn throttle(&self, charges: &[Charge]) -> Result<(), Error> {
        match self.limiter.charge(charges, &[]).await.retry_after_seconds() {
            Some(retry_after_seconds) => Err(Error::RateLimited { retry_after_seconds }),
            None => Ok(()),
        }
    }

    /// Counts a call by its address.
    ///
    /// # Errors
    /// [`Error::RateLimited`].
    pub async fn throttle_address(&self, client: &Client) -> Result<(), Error> {
        self.throttle(&[charge("auth", &client.address, CALLS_PER_ADDRESS)]).await
    }

    /// Counts an invitation, by sender, project and recipient. Where mail is sent, only an account
    /// with a verified address may have it sent.
    ///
    /// # Errors
    /// [`Error::EmailNotVerified`], [`Error::RateLimited`].
    pub async fn throttle_invitation(
        &self,
        by: AccountId,
        project_id: ProjectId,
        email: &str,
    ) -> Result<(), Error> {
        let mut conn = self.pool.acquire().await?;
        let sender = store::people::accounts::sender(&mut conn, by, NEW_ACCOUNT_DAYS).await?;
        drop(conn);
        let sender = sender.ok_or(Error::Unauthorized)?;
        if self.mailer.reaches_others() && !sender.is_verified {
            return Err(Error::EmailNotVerified);
        }
        let of_account =
            if sender.is_new { INVITATIONS_PER_NEW_ACCOUNT } else { INVITATIONS_PER_ACCOUNT };
        self.throttle(&[
            charge("invitations", &by.to_string(), of_account),
            charge("invited", &format!("{} {email}", project_id.0), MAILS_PER_EMAIL),
        ])
        .await
    }

    /// Whether someone stands behind a project that sends requests elsewhere. Where mail is sent,
    /// one of its owners must have a verified address; a project without members is the operator's.
    ///
    /// # Errors
    /// [`Error::EmailNotVerified`].
    pub async fn require_verified(&self, project_id: ProjectId) -> Result<(), Error> {
        if !self.mailer.reaches_others() {
            return Ok(());
        }
        let mut conn = self.pool.acquire().await?;
        match store::people::members::is_unverified(&mut conn, project_id).await? {
            true => Err(Error::EmailNotVerified),
            false => Ok(()),
        }
    }

    /// Whether one more mail of this kind may be sent to an address now.
    async fn may_mail(&self, kind: &str, email: &str) -> bool {
        let is_allowed = async |rate: Rate| {
            let name = format!("mailed-{kind}-{}", rate.count);
            let verdict = self.limiter.charge(&[charge(&name, email, rate)], &[]).await;
            verdict.wait.is_none()
        };
        let may = is_allowed(MAILS_TO_EMAIL).await || is_allowed(LATE_MAILS_TO_EMAIL).await;
        if !may {
            tracing::warn!("too many mails to one address: one was not sent");
        }
        may
    }

    /// Counts an export of an account.
    ///
    /// # Errors
    /// [`Error::RateLimited`].
    pub async fn throttle_export(&self, account_id: AccountId) -> Result<(), Error> {
        self.throttle(&[charge("exports", &account_id.to_string(), EXPORTS_PER_ACCOUNT)]).await
    }

    /// Mails an invitation to a project.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn mail_invitation(
        &self,
        (project_id, id): (ProjectId, InvitationId),
        email: &str,
    ) -> Result<(), Error> {
        if !self.may_mail("invitations", email).await {
            return Ok(());
        }
        let to = email.to_owned();
        self.mail(&Content::Invitation { project: project_id.0, invitation: id.0, to }).await
    }

    async fn is_password(&self, bearer: Bearer, password: SecretString) -> Result<bool, Error> {
        let credentials = {
            let mut conn = self.pool.acquire().await?;
            store::people::accounts::credentials(&mut conn, bearer.account_id).await?
        };
        let hashes = credentials.into_iter().map(|it| it.password_hash).collect();
        let client = bearer.account_id.to_string();
        Ok(self.passwords.compare(&client, password, hashes).await?.is_some())
    }
}

/// A limit on a value that the caller chooses. Its name is hashed, so that it is bounded and
/// reveals nothing.
fn charge(kind: &str, what: &str, rate: Rate) -> Charge {
    let hash = Sha256::digest(what.as_bytes());
    let hash: String = hash.iter().take(16).map(|it| format!("{it:02x}")).collect();
    // The part in braces decides which node of a Redis cluster holds a name: some calls use two.
    Charge { name: format!("limit:{{accounts}}:{kind}:{hash}"), rate, overdraft_windows: 0 }
}

/// Normalises an address.
///
/// # Errors
/// [`Error::Invalid`] when it is malformed.
pub fn read_email(field: &str, email: &str) -> Result<String, Error> {
    let email = email.trim().to_lowercase();
    if email.chars().count() > MAX_EMAIL_CHARS {
        let message = format!("must be at most {MAX_EMAIL_CHARS} characters");
        return Err(Error::invalid(field, message));
    }
    let address: Result<Address, _> = email.parse();
    let is_plain = !email.chars().any(|it| it.is_control() || it.is_whitespace());
    match address {
        Ok(_) if is_plain => Ok(email),
        _ => Err(Error::invalid(field, "must be an e-mail address")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_kept_in_lower_case_and_junk_is_refused() {
        assert_eq!(
            read_email("email", " Ada@Example.COM ").ok().as_deref(),
            Some("ada@example.com")
        );
        let long = format!("{}@example.com", "x".repeat(MAX_EMAIL_CHARS));
        for junk in ["", "ada", "ada@", "@example.com", "a b@example.com", "a@b\0.com", &long] {
            assert!(read_email("email", junk).is_err(), "{junk}");
        }
    }
}
