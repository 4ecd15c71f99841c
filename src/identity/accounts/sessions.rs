//! Sessions: they begin with a login, live by their refresh token, and are stepped up.
//!
//! A refresh token is valid once; a second use means that it was stolen, so its session is revoked.
//! Tabs of a browser share one, so there a second use is allowed for a moment ([`Reuse::Tabs`]).

use fencepost_domain::{
    error::Error,
    ids::{AccountId, SessionId},
    limits::{LOGIN_CHALLENGE_SECONDS, SESSION_IDLE_SECONDS, SESSION_SECONDS, STEP_UP_SECONDS},
};
use fencepost_store::{self as store, connection::pools::Pool};
use secrecy::SecretString;
use sqlx::{Acquire, PgConnection};

use super::{
    Client, REFRESHES_PER_ADDRESS, REFRESHES_PER_SESSION,
    mailing::Mailing,
    secret::{self, LOGIN_PREFIX, REFRESH_PREFIX},
    security::{self, AccountEvent},
    throttle::{Throttle, charge},
    token::{Bearer, Tokens},
};

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

/// Seconds for which a browser may present a refresh token again.
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

/// The sessions of people.
#[derive(Clone)]
pub struct Sessions {
    pub(super) pool: Pool,
    pub(super) tokens: Tokens,
    pub(super) throttle: Throttle,
    pub(super) mailing: Mailing,
}

impl Sessions {
    pub(super) async fn begin(
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
            let token = new_challenge(&mut tx, account_id, password_hash).await?;
            tx.commit().await?;
            return Err(Error::CodeRequired(token));
        }
        let (signed_in, event) = self.open(&mut tx, account_id, login, client).await?;
        tx.commit().await?;
        drop(conn);
        self.mailing.notify_owner(account_id, event, client);
        Ok(signed_in)
    }

    /// Stores a session; the caller commits it, and notifies the account's owner.
    pub(super) async fn open(
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
        security::record(conn, account_id, event, Some(client)).await?;
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
        self.throttle.count(&[charge("refresh", &client.address, REFRESHES_PER_ADDRESS)]).await?;
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
            security::record(&mut tx, bearer.account_id, event, Some(client)).await?;
            tx.commit().await?;
            tracing::warn!(session.id = %bearer.session_id, "refresh token reused; session revoked");
            return Ok(Err(bearer.session_id));
        }
        if !presented.is_live {
            return Err(Error::InvalidCredentials);
        }
        let session = bearer.session_id.to_string();
        self.throttle.count(&[charge("session", &session, REFRESHES_PER_SESSION)]).await?;
        let refresh_token = secret::generate(REFRESH_PREFIX);
        let next = secret::hash(&refresh_token);
        store::people::sessions::insert_secret(&mut tx, bearer.session_id, &next).await?;
        store::people::sessions::touch(&mut tx, bearer.session_id).await?;
        tx.commit().await?;
        Ok(Ok(SignedIn { bearer, access_token: self.tokens.sign(bearer)?.into(), refresh_token }))
    }

    /// Refuses a session whose person has not proved lately who they are.
    ///
    /// # Errors
    /// [`Error::StepUpRequired`].
    pub async fn require_step_up(&self, bearer: Bearer) -> Result<(), Error> {
        check_stepped_up(&mut *self.pool.acquire().await?, bearer).await
    }

    /// Refuses such a session of an account with a second factor alone, for what asks for the
    /// password itself.
    pub(super) async fn require_second_factor(&self, bearer: Bearer) -> Result<(), Error> {
        let is_required = {
            let mut conn = self.pool.acquire().await?;
            store::people::second_factors::is_required(&mut conn, bearer.account_id).await?
        };
        if is_required { self.require_step_up(bearer).await } else { Ok(()) }
    }
}

async fn new_challenge(
    conn: &mut PgConnection,
    id: AccountId,
    password_hash: &str,
) -> Result<SecretString, Error> {
    let token = secret::generate(LOGIN_PREFIX);
    let (hash, of) = (secret::hash(&token), (id, password_hash));
    store::people::second_factors::insert_challenge(conn, &hash, of, LOGIN_CHALLENGE_SECONDS)
        .await?;
    Ok(token)
}

async fn check_stepped_up(conn: &mut PgConnection, bearer: Bearer) -> Result<(), Error> {
    let (account, session) = (bearer.account_id, bearer.session_id);
    let is_stepped_up =
        store::people::second_factors::is_stepped_up(conn, account, session, STEP_UP_SECONDS);
    if is_stepped_up.await? { Ok(()) } else { Err(Error::StepUpRequired) }
}

/// Refuses a session as [`Sessions::require_step_up`] does, and locks its account: nothing that was
/// checked before a reset follows it.
///
/// # Errors
/// [`Error::StepUpRequired`].
pub(super) async fn lock_stepped_up(tx: &mut PgConnection, bearer: Bearer) -> Result<(), Error> {
    store::people::accounts::lock(tx, bearer.account_id).await?;
    check_stepped_up(tx, bearer).await
}
