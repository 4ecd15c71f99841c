//! Login, logout, refresh, and changes of passwords.
//!
//! Known and unknown addresses get the same answers and take the same time. A refresh token is
//! valid once; a second use means that it was stolen, so its session is revoked. Tabs of a browser
//! share one, so there a second use is allowed for a moment ([`Reuse::Tabs`]).

use fencepost_domain::{
    error::{Error, is_unique_violation},
    ids::{AccountId, ProjectId, SessionId},
    limits::{SESSION_IDLE_SECONDS, SESSION_SECONDS},
};
use fencepost_store::{
    self as store,
    connection::deadline::bounded,
    people::{accounts::Purpose, audit::NewAuditEntry},
};
use secrecy::SecretString;
use sqlx::{Acquire, PgConnection};

use super::{
    Accounts, Client, LATE, LATE_MAILS_TO_EMAIL, MAILS_PER_EMAIL, REFRESHES_PER_ADDRESS,
    REFRESHES_PER_SESSION, TRIES_PER_EMAIL, TRIES_PER_PAIR, charge, codes,
    mailing::{Content, MAILED_CLAIMS},
    members,
    password::{self, COMPARISONS},
    read_email,
    secret::{self, MAIL_PREFIX, REFRESH_PREFIX},
    security::{self, AccountEvent},
    token::Bearer,
};

/// How mails that verify addresses are counted.
pub(super) const VERIFICATIONS: &str = "verifications";

/// The kind of client that presents a refresh token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reuse {
    /// A program: it stores its token in one place.
    Never,
    /// A browser: its tabs call at the same time, and an aborted answer takes its cookie with it.
    /// Only sessions that began in one: a token of a program gains nothing as a cookie.
    Tabs,
}

impl Reuse {
    const fn grace_seconds(self) -> i64 {
        match self {
            Self::Never => 0,
            Self::Tabs => TABS_GRACE_SECONDS,
        }
    }
}

/// How long a browser may present a refresh token again.
const TABS_GRACE_SECONDS: i64 = 30;

/// The proofs of a login.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Login {
    /// A password or a code.
    Proved,
    /// A provider's word alone: its own session may be old, and the browser unattended.
    Vouched,
}

/// An authenticated person.
#[derive(Debug)]
pub struct SignedIn {
    /// The account and its session.
    pub bearer: Bearer,
    /// The access token.
    pub access_token: SecretString,
    /// The refresh token, valid once.
    pub refresh_token: SecretString,
}

impl Accounts {
    /// Logs in.
    ///
    /// # Errors
    /// [`Error::InvalidCredentials`] when address and password do not match; [`Error::Suspended`]
    /// when the operator has suspended the account; [`Error::CodeRequired`] when it has a second
    /// factor: [`Self::complete_login`]; [`Error::RateLimited`].
    pub async fn log_in(
        &self,
        email: &str,
        password: SecretString,
        client: &Client,
    ) -> Result<SignedIn, Error> {
        let email = read_email("email", email)?;
        self.throttle_address(client).await?;
        let pair = charge("pair", &format!("{email} {}", client.address), TRIES_PER_PAIR);
        self.throttle(std::slice::from_ref(&pair)).await?;
        let tries = charge("tries", &email, TRIES_PER_EMAIL);
        let is_late = self.limiter.charge(&[tries], &[]).await.wait.is_some();
        if is_late {
            tokio::time::sleep(LATE).await;
        }
        let candidates = {
            let mut conn = self.pool.acquire().await?;
            store::people::accounts::candidates(&mut conn, &email, COMPARISONS as i64).await?
        };
        let is_alone = candidates.len() == 1;
        // An account that only claims the address must not learn of its owner's logins.
        let meant = candidates.iter().find(|it| it.is_verified || is_alone).map(|it| it.id);
        let hashes = candidates.iter().map(|it| it.password_hash.clone()).collect();
        let found = self.passwords.compare(&client.address, password.clone(), hashes).await?;
        let account = found.and_then(|it| candidates.into_iter().nth(it));
        let Some(account) = account else {
            if let Some(id) = meant {
                self.note_failed_login(id, client);
            }
            return Err(Error::InvalidCredentials);
        };
        if account.is_suspended {
            return Err(Error::Suspended { what: "account" });
        }
        // Tries with the right password are not counted. An account that only claims the address
        // must not buy tries at the account that has verified it.
        if account.is_verified || is_alone {
            self.limiter.forgive(&pair).await;
        }
        let mut hash = account.password_hash;
        if !password::is_present(&hash) {
            let better = self.passwords.hash(&client.address, password).await?;
            let mut conn = self.pool.acquire().await?;
            if store::people::accounts::replace_hash(&mut conn, account.id, &hash, &better).await? {
                hash = better;
            }
        }
        self.begin_session(account.id, &hash, Login::Proved, client).await
    }

    /// In the background: a known address must not take longer than an unknown one.
    fn note_failed_login(&self, id: AccountId, client: &Client) {
        let (this, client) = (self.clone(), client.clone());
        tokio::spawn(bounded(async move {
            let noted = async {
                let mut conn = this.pool.acquire().await?;
                security::note(&mut conn, id, AccountEvent::LoginFailed, Some(&client)).await
            };
            if let Err(error) = noted.await {
                let error = fencepost_domain::error::chain(&error);
                tracing::error!(error, "failed login was not written to the account log");
            }
        }));
    }

    pub(super) async fn begin_session(
        &self,
        account_id: AccountId,
        password_hash: &str,
        login: Login,
        client: &Client,
    ) -> Result<SignedIn, Error> {
        let mut conn = self.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        // The password was changed since it was compared.
        if !store::people::accounts::lock_if_hash(&mut tx, account_id, password_hash).await? {
            return Err(Error::InvalidCredentials);
        }
        if store::people::second_factors::is_required(&mut tx, account_id).await? {
            let token = self.new_challenge(&mut tx, account_id, password_hash).await?;
            tx.commit().await?;
            return Err(Error::CodeRequired(token));
        }
        let (signed_in, event) = self.open_session(&mut tx, account_id, login, client).await?;
        tx.commit().await?;
        drop(conn);
        self.notify_owner(account_id, event, client);
        Ok(signed_in)
    }

    /// Stores a session; the caller commits it, and notifies the account's owner.
    pub(super) async fn open_session(
        &self,
        conn: &mut PgConnection,
        account_id: AccountId,
        login: Login,
        client: &Client,
    ) -> Result<(SignedIn, AccountEvent), Error> {
        let session_id = SessionId::generate();
        let refresh_token = secret::generate(REFRESH_PREFIX);
        let origin = client.origin();
        let user_agent = origin.user_agent.as_deref();
        let event =
            match store::people::sessions::is_new_device(conn, account_id, user_agent).await? {
                true => AccountEvent::LoginFromNewDevice,
                false => AccountEvent::LoginSucceeded,
            };
        security::note(conn, account_id, event, Some(client)).await?;
        let (life, is_proved) = (SESSION_SECONDS, login == Login::Proved);
        store::people::sessions::insert(conn, account_id, session_id, &origin, life, is_proved)
            .await?;
        store::people::sessions::insert_secret(conn, session_id, &secret::hash(&refresh_token))
            .await?;
        store::people::accounts::record_login(conn, account_id).await?;
        let bearer = Bearer { account_id, session_id };
        let access_token = self.tokens.sign(bearer)?.into();
        Ok((SignedIn { bearer, access_token, refresh_token }, event))
    }

    /// Returns the next pair of tokens for a refresh token, and a session that this has revoked, if
    /// any. `reuse` says how long the token may be presented again.
    ///
    /// # Errors
    /// [`Error::InvalidCredentials`] when the token is unknown or used, or its session has ended;
    /// [`Error::RateLimited`].
    pub async fn refresh(
        &self,
        token: &SecretString,
        reuse: Reuse,
        client: &Client,
    ) -> Result<Result<SignedIn, SessionId>, Error> {
        self.throttle(&[charge("refresh", &client.address, REFRESHES_PER_ADDRESS)]).await?;
        if !secret::is_well_formed(token, REFRESH_PREFIX) {
            return Err(Error::InvalidCredentials);
        }
        let hash = secret::hash(token);
        let mut conn = self.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        let grace = reuse.grace_seconds();
        let presented =
            store::people::sessions::use_secret(&mut tx, &hash, SESSION_IDLE_SECONDS, grace)
                .await?;
        let presented = presented.ok_or(Error::InvalidCredentials)?;
        let bearer = Bearer { account_id: presented.account_id, session_id: presented.session_id };
        if presented.is_used {
            store::people::sessions::revoke(&mut tx, bearer.account_id, bearer.session_id).await?;
            let event = AccountEvent::TokenReused;
            security::note(&mut tx, bearer.account_id, event, Some(client)).await?;
            tx.commit().await?;
            tracing::warn!(session.id = %bearer.session_id, "refresh token reused; session revoked");
            return Ok(Err(bearer.session_id));
        }
        if !presented.is_live {
            return Err(Error::InvalidCredentials);
        }
        let session = bearer.session_id.to_string();
        self.throttle(&[charge("session", &session, REFRESHES_PER_SESSION)]).await?;
        let refresh_token = secret::generate(REFRESH_PREFIX);
        let next = secret::hash(&refresh_token);
        store::people::sessions::insert_secret(&mut tx, bearer.session_id, &next).await?;
        store::people::sessions::touch(&mut tx, bearer.session_id).await?;
        tx.commit().await?;
        Ok(Ok(SignedIn { bearer, access_token: self.tokens.sign(bearer)?.into(), refresh_token }))
    }

    /// Changes a password, and revokes all other sessions.
    ///
    /// # Errors
    /// [`Error::InvalidCredentials`] when the current password is wrong; [`Error::Invalid`] when
    /// the new one is weak; [`Error::StepUpRequired`]; [`Error::RateLimited`].
    pub async fn change_password(
        &self,
        bearer: Bearer,
        present: SecretString,
        new: SecretString,
        client: &Client,
    ) -> Result<Vec<SessionId>, Error> {
        self.require_second_factor(bearer).await?;
        self.throttle_own(bearer).await?;
        self.check_strength(bearer.account_id, &new, "new_password").await?;
        if !self.is_password(bearer, present).await? {
            return Err(Error::InvalidCredentials);
        }
        let hash = self.passwords.hash(&bearer.account_id.to_string(), new).await?;
        let mut conn = self.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        store::people::accounts::set_password(&mut tx, bearer.account_id, &hash).await?;
        store::people::accounts::spend_resets(&mut tx, bearer.account_id).await?;
        store::people::email_changes::delete(&mut tx, bearer.account_id).await?;
        let ended = store::people::sessions::revoke_others(
            &mut tx,
            bearer.account_id,
            Some(bearer.session_id),
        )
        .await?;
        let event = AccountEvent::PasswordChanged;
        security::note(&mut tx, bearer.account_id, event, Some(client)).await?;
        tx.commit().await?;
        drop(conn);
        self.notify_owner(bearer.account_id, event, client);
        Ok(ended)
    }

    pub(super) async fn throttle_own(&self, bearer: Bearer) -> Result<(), Error> {
        self.throttle(&[charge("own", &bearer.account_id.to_string(), TRIES_PER_PAIR)]).await
    }

    async fn check_strength(
        &self,
        account_id: AccountId,
        password: &SecretString,
        field: &str,
    ) -> Result<(), Error> {
        let account = {
            let mut conn = self.pool.acquire().await?;
            store::people::accounts::find(&mut conn, account_id).await?
        };
        let email = account.map(|it| it.email).unwrap_or_default();
        self.passwords.check(&account_id.to_string(), (field, password), &[&email]).await
    }

    /// Mails a reset link, if an account has the address. Returns before that is known.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the address is malformed; [`Error::RateLimited`].
    pub async fn request_reset(&self, email: &str, client: &Client) -> Result<(), Error> {
        let email = read_email("email", email)?;
        self.throttle_address(client).await?;
        // Counted by address and client, so that one client cannot use up another's resets.
        let pair = format!("{email} {}", client.address);
        self.throttle(&[charge("reset", &pair, MAILS_PER_EMAIL)]).await?;
        let this = self.clone();
        tokio::spawn(bounded(async move {
            if let Err(error) = this.mail_reset(&email).await {
                let error = fencepost_domain::error::chain(&error);
                tracing::error!(error, "password reset failed");
            }
        }));
        Ok(())
    }

    async fn mail_reset(&self, email: &str) -> Result<(), Error> {
        let mut conn = self.pool.acquire().await?;
        let claims = store::people::accounts::claims(&mut conn, email, MAILED_CLAIMS).await?;
        // An earlier mail of the last half-hour has links that are valid.
        if claims.is_empty() || !self.may_mail("resets", email).await {
            return Ok(());
        }
        self.store_mail(&mut conn, &Content::Reset { to: email.to_owned() }).await?;
        self.hurry_mails();
        Ok(())
    }

    /// Resets a password, and revokes all sessions. The holder of the mailed token reads the
    /// address. If the address was not verified before, a stranger may have created the account, so
    /// all keys, other members and invitations of its projects are revoked, and its second factor
    /// is removed. Identities at login providers always are.
    ///
    /// # Errors
    /// [`Error::InvalidLink`] when the token is unknown, used or expired; [`Error::Invalid`] when
    /// the password is weak; [`Error::EmailTaken`] when another account has the address;
    /// [`Error::RateLimited`].
    pub async fn confirm_reset(
        &self,
        token: &SecretString,
        new: SecretString,
        client: &Client,
    ) -> Result<Vec<SessionId>, Error> {
        self.throttle_address(client).await?;
        // Before the password is hashed: junk must not cost a turn.
        self.check_link(Purpose::Reset, token).await?;
        self.passwords.check(&client.address, ("new_password", &new), &[]).await?;
        let hash = self.passwords.hash(&client.address, new).await?;
        let mut conn = self.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        let account_id = self.use_link(&mut tx, Purpose::Reset, token).await?;
        store::people::accounts::set_password(&mut tx, account_id, &hash).await?;
        store::people::accounts::spend_resets(&mut tx, account_id).await?;
        store::people::email_changes::delete(&mut tx, account_id).await?;
        // A person with the old password may have linked one of their own.
        store::people::identities::delete_all(&mut tx, account_id).await?;
        store::people::passkeys::require_password(&mut tx, account_id).await?;
        let ended = store::people::sessions::revoke_others(&mut tx, account_id, None).await?;
        match store::people::accounts::verify(&mut tx, account_id).await {
            Err(error) if is_unique_violation(&error) => return Err(Error::EmailTaken),
            Err(error) => return Err(error.into()),
            Ok(true) => {
                codes::remove_all(&mut tx, account_id).await?;
                let entry = NewAuditEntry::to("project.reclaimed", account_id.to_string());
                let actor = client.actor("account", account_id.to_string());
                for project_id in store::people::members::take_back(&mut tx, account_id).await? {
                    store::people::audit::insert(&mut tx, project_id, &actor, &entry).await?;
                }
            }
            Ok(false) => (),
        }
        let event = AccountEvent::PasswordReset;
        security::note(&mut tx, account_id, event, Some(client)).await?;
        tx.commit().await?;
        drop(conn);
        self.notify_owner(account_id, event, client);
        Ok(ended)
    }

    async fn check_link(&self, purpose: Purpose, token: &SecretString) -> Result<(), Error> {
        let mut conn = self.pool.acquire().await?;
        let hash = secret::hash(token);
        match store::people::accounts::has_mail_token(&mut conn, purpose, &hash).await? {
            true => Ok(()),
            false => Err(Error::InvalidLink),
        }
    }

    async fn use_link(
        &self,
        conn: &mut PgConnection,
        purpose: Purpose,
        token: &SecretString,
    ) -> Result<AccountId, Error> {
        if !secret::is_well_formed(token, MAIL_PREFIX) {
            return Err(Error::InvalidLink);
        }
        let used =
            store::people::accounts::use_mail_token(conn, purpose, &secret::hash(token)).await?;
        used.ok_or(Error::InvalidLink)
    }

    /// Verifies the address of the session's account. A link alone is not enough: a stranger who
    /// signs up with an address would have it verified by its owner's click.
    ///
    /// # Errors
    /// [`Error::InvalidLink`] when the token is unknown, used, expired, or of another account.
    /// [`Error::EmailTaken`] when another account has the address. [`Error::RateLimited`].
    pub async fn verify(
        &self,
        bearer: Bearer,
        token: &SecretString,
        client: &Client,
    ) -> Result<(), Error> {
        self.throttle_address(client).await?;
        let mut conn = self.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        let account_id = self.use_link(&mut tx, Purpose::Verify, token).await?;
        if account_id != bearer.account_id {
            return Err(Error::InvalidLink);
        }
        match store::people::accounts::verify(&mut tx, account_id).await {
            Err(error) if is_unique_violation(&error) => Err(Error::EmailTaken),
            Err(error) => Err(error.into()),
            Ok(_) => {
                // A change that was asked for before it need not have been by this address.
                store::people::email_changes::delete(&mut tx, account_id).await?;
                let event = AccountEvent::AddressVerified;
                security::note(&mut tx, account_id, event, Some(client)).await?;
                Ok(tx.commit().await?)
            }
        }
    }

    /// Resends the verification mail.
    ///
    /// # Errors
    /// [`Error::RateLimited`].
    pub async fn send_verification(&self, bearer: Bearer, client: &Client) -> Result<(), Error> {
        let mut conn = self.pool.acquire().await?;
        let account = store::people::accounts::find(&mut conn, bearer.account_id).await?;
        let account = account.ok_or(Error::Unauthorized)?;
        self.throttle(&[charge("verify", &account.id.to_string(), MAILS_PER_EMAIL)]).await?;
        drop(conn);
        if !self.may_mail(VERIFICATIONS, &account.email).await {
            let retry_after_seconds = LATE_MAILS_TO_EMAIL.window_seconds;
            return Err(Error::RateLimited { retry_after_seconds });
        }
        let (account, address) = (account.id.0, client.address.to_string());
        self.mail(&Content::Verification { account, address }).await
    }

    /// Deletes an account, and the projects without another member. Returns those.
    ///
    /// # Errors
    /// [`Error::InvalidCredentials`] when the password is wrong. [`Error::LastOwner`] when a
    /// project with other members would have no owner. [`Error::KeysRemain`] when live keys that it
    /// has created remain in other projects. [`Error::StepUpRequired`], [`Error::RateLimited`].
    pub async fn delete(
        &self,
        bearer: Bearer,
        password: SecretString,
        revoke_keys: Option<bool>,
        client: &Client,
    ) -> Result<Vec<ProjectId>, Error> {
        self.require_second_factor(bearer).await?;
        self.throttle_own(bearer).await?;
        if !self.is_password(bearer, password).await? {
            return Err(Error::InvalidCredentials);
        }
        let mut conn = self.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        store::people::members::lock_owned(&mut tx, bearer.account_id).await?;
        let owned = store::people::accounts::solely_owned(&mut tx, bearer.account_id).await?;
        if owned.iter().any(|(_, has_others)| *has_others) {
            return Err(Error::LastOwner);
        }
        let actor = client.actor("account", bearer.account_id.to_string());
        for (project_id, _) in &owned {
            store::people::projects::delete(&mut tx, *project_id).await?;
            let entry = NewAuditEntry::to("project.deleted", bearer.account_id.to_string());
            store::people::audit::insert(&mut tx, *project_id, &actor, &entry).await?;
        }
        members::leave_all(&mut tx, bearer.account_id, client, revoke_keys).await?;
        store::people::accounts::delete(&mut tx, bearer.account_id).await?;
        tx.commit().await?;
        Ok(owned.into_iter().map(|it| it.0).collect())
    }
}
