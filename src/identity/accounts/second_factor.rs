//! The second step of a login, and the step-up of a session.
//!
//! A password alone gets the token of a login, a code alone nothing. No code is accepted twice: the
//! account's app remembers the step of its last code, and a recovery code is deleted by its use. A
//! passkey does without the password, too: `passkeys/`.

use std::sync::Arc;

use fencepost_domain::{error::Error, ids::AccountId, limits::MAX_CODE_TRIES};
use fencepost_net::seal::MasterKeys;
use fencepost_store::{self as store};
use secrecy::SecretString;
use sqlx::{Acquire, PgConnection};

use super::{
    Client,
    base::Base,
    codes::{self, code_charges, is_recovery_code, typed},
    own_password::OwnPassword,
    passkeys::{PasskeyAnswer, Passkeys},
    secret::{self, LOGIN_PREFIX},
    security::{self, AccountEvent},
    sessions::{Login, SignedIn},
    token::Bearer,
};

/// Refused codes of an account within a day, at which its owner gets a mail.
const NOTIFIED_AFTER: i64 = 5;

/// A proof that the person of a session is present.
#[derive(Debug)]
pub enum Proof {
    /// For an account without a second factor.
    Password(SecretString),
    /// For one that has a second factor.
    Code(SecretString),
    Passkey(PasskeyAnswer),
}

/// The second step of a login whose password was right.
#[derive(Debug)]
pub enum SecondStep {
    /// Of the account's app, or a recovery code.
    Code(SecretString),
    Passkey(PasskeyAnswer),
}

/// The code that was used up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CodeUse {
    App,
    Recovery,
    Passkey,
}

/// Second steps of logins, and step-ups of sessions.
#[derive(Clone)]
pub struct SecondFactors {
    pub(super) base: Base,
    pub(super) master_keys: Arc<MasterKeys>,
    pub(super) own: OwnPassword,
    pub(super) passkeys: Passkeys,
}

impl SecondFactors {
    /// Completes a login with the second factor.
    ///
    /// # Errors
    /// [`Error::InvalidCredentials`] when the login is unknown or has expired, was completed or had
    /// too many wrong codes, or the password was changed since. [`Error::InvalidCode`],
    /// [`Error::PasskeyRefused`], [`Error::RateLimited`].
    pub async fn complete_login(
        &self,
        token: &SecretString,
        step: &SecondStep,
        client: &Client,
    ) -> Result<SignedIn, Error> {
        self.base.throttle.address(client).await?;
        if !secret::is_well_formed(token, LOGIN_PREFIX) {
            return Err(Error::InvalidCredentials);
        }
        let hash = secret::hash(token);
        let waiting = {
            let mut conn = self.base.pool.acquire().await?;
            store::people::second_factors::find_challenge(&mut conn, &hash).await?
        };
        let waiting = waiting.ok_or(Error::InvalidCredentials)?;
        let id = waiting.account_id;
        let charged = match step {
            SecondStep::Code(code) => Some(code_charges(id, client, &typed(code))),
            SecondStep::Passkey(_) => None,
        };
        if let Some((_, charges)) = &charged {
            self.base.throttle.count(charges).await?;
        }
        let mut conn = self.base.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        // The account first, as whatever deletes it.
        if !store::people::accounts::lock_if_hash(&mut tx, id, &waiting.password_hash).await? {
            return Err(Error::InvalidCredentials);
        }
        let tries = store::people::second_factors::lock_challenge(&mut tx, &hash).await?;
        if tries.is_none_or(|it| it >= MAX_CODE_TRIES) {
            return Err(Error::InvalidCredentials);
        }
        let used = match step {
            SecondStep::Passkey(answer) => {
                let passkey = self.passkeys.use_up(&mut tx, id, answer, client).await?;
                // The password of now and the passkey were both shown.
                store::people::passkeys::log_in_alone(&mut tx, id, passkey).await?;
                Some(CodeUse::Passkey)
            }
            SecondStep::Code(code) => self.use_code(&mut tx, id, &typed(code)).await?,
        };
        let Some(used) = used else {
            store::people::second_factors::count_try(&mut tx, &hash).await?;
            let event = note_refused(&mut tx, id, client).await?;
            tx.commit().await?;
            drop(conn);
            self.base.mailing.notify_owner(id, event, client);
            return Err(Error::InvalidCode);
        };
        store::people::second_factors::delete_challenge(&mut tx, &hash).await?;
        let (signed_in, event) =
            self.base.sessions.open(&mut tx, id, Login::Proved, client).await?;
        note_used(&mut tx, id, used, client).await?;
        tx.commit().await?;
        drop(conn);
        if let Some((of_client, _)) = charged {
            self.base.throttle.limiter.forgive(&of_client).await;
        }
        self.base.mailing.notify_owner(id, event, client);
        self.notify_of_used_code(id, used, client);
        Ok(signed_in)
    }

    /// Uses up a code; none: it is wrong or was used.
    async fn use_code(
        &self,
        conn: &mut PgConnection,
        id: AccountId,
        code: &SecretString,
    ) -> Result<Option<CodeUse>, Error> {
        if is_recovery_code(code) {
            let hash = secret::hash(code);
            let is_used = store::people::second_factors::use_recovery_code(conn, id, &hash).await?;
            return Ok(is_used.then_some(CodeUse::Recovery));
        }
        let Some(totp) = store::people::second_factors::lock_totp(conn, id).await? else {
            return Ok(None);
        };
        let Some(stored) = &totp.secret else { return Ok(None) };
        let secret = codes::open_totp(&self.master_keys, id, stored)?;
        let Some(step) = codes::step_of(&secret, code, totp.now)? else { return Ok(None) };
        if step <= totp.last_step {
            return Ok(None);
        }
        store::people::second_factors::record_step(conn, id, step).await?;
        Ok(Some(CodeUse::App))
    }

    fn notify_of_used_code(&self, id: AccountId, used: CodeUse, client: &Client) {
        if used == CodeUse::Recovery {
            self.base.mailing.notify_owner(id, AccountEvent::RecoveryCodeUsed, client);
        }
    }

    /// Proves who the person of a session is: with a code or passkey if the account has a second
    /// factor, else with the password.
    ///
    /// # Errors
    /// [`Error::InvalidCode`], [`Error::InvalidCredentials`], [`Error::PasskeyRefused`];
    /// [`Error::Invalid`] when the other proof is needed; [`Error::RateLimited`].
    pub async fn step_up(
        &self,
        bearer: Bearer,
        proof: Proof,
        client: &Client,
    ) -> Result<(), Error> {
        let is_required = {
            let mut conn = self.base.pool.acquire().await?;
            store::people::second_factors::is_required(&mut conn, bearer.account_id).await?
        };
        match proof {
            Proof::Password(_) if is_required => {
                let message = "is required: the account has a second factor";
                Err(Error::invalid("code", message))
            }
            Proof::Code(_) | Proof::Passkey(_) if !is_required => {
                let message = "is required: the account has no second factor";
                Err(Error::invalid("password", message))
            }
            Proof::Password(password) => self.step_up_by_password(bearer, password, client).await,
            Proof::Code(code) => self.step_up_by_code(bearer, &code, client).await,
            Proof::Passkey(answer) => self.step_up_by_passkey(bearer, &answer, client).await,
        }
    }

    async fn step_up_by_password(
        &self,
        bearer: Bearer,
        password: SecretString,
        client: &Client,
    ) -> Result<(), Error> {
        let showing = self.own.is_right(bearer, password);
        let is_password = self.base.throttle.count_own_try(bearer, showing).await?;
        let mut conn = self.base.pool.acquire().await?;
        if is_password {
            return Ok(note_step_up(&mut conn, bearer, client).await?);
        }
        let event = AccountEvent::PasswordRefused;
        security::record(&mut conn, bearer.account_id, event, Some(client)).await?;
        Err(Error::InvalidCredentials)
    }

    async fn step_up_by_passkey(
        &self,
        bearer: Bearer,
        answer: &PasskeyAnswer,
        client: &Client,
    ) -> Result<(), Error> {
        // Not counted with passwords, which a thief of the session could use up: no one guesses a
        // signature.
        let mut conn = self.base.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        store::people::accounts::lock(&mut tx, bearer.account_id).await?;
        self.passkeys.use_up(&mut tx, bearer.account_id, answer, client).await?;
        note_step_up(&mut tx, bearer, client).await?;
        Ok(tx.commit().await?)
    }

    async fn step_up_by_code(
        &self,
        bearer: Bearer,
        code: &SecretString,
        client: &Client,
    ) -> Result<(), Error> {
        let id = bearer.account_id;
        let code = typed(code);
        let (of_client, charges) = code_charges(id, client, &code);
        self.base.throttle.count(&charges).await?;
        let mut conn = self.base.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        // The account first, as whatever changes its factors and sessions.
        store::people::accounts::lock(&mut tx, id).await?;
        let Some(used) = self.use_code(&mut tx, id, &code).await? else {
            let event = note_refused(&mut tx, id, client).await?;
            tx.commit().await?;
            drop(conn);
            self.base.mailing.notify_owner(id, event, client);
            return Err(Error::InvalidCode);
        };
        note_used(&mut tx, id, used, client).await?;
        note_step_up(&mut tx, bearer, client).await?;
        tx.commit().await?;
        drop(conn);
        self.base.throttle.limiter.forgive(&of_client).await;
        self.notify_of_used_code(id, used, client);
        Ok(())
    }
}

async fn note_step_up(
    conn: &mut PgConnection,
    bearer: Bearer,
    client: &Client,
) -> sqlx::Result<()> {
    store::people::second_factors::step_up(conn, bearer.account_id, bearer.session_id).await?;
    security::record(conn, bearer.account_id, AccountEvent::SteppedUp, Some(client)).await
}

async fn note_used(
    conn: &mut PgConnection,
    id: AccountId,
    used: CodeUse,
    client: &Client,
) -> sqlx::Result<()> {
    match used {
        CodeUse::App | CodeUse::Passkey => Ok(()),
        CodeUse::Recovery => {
            security::record(conn, id, AccountEvent::RecoveryCodeUsed, Some(client)).await
        }
    }
}

/// Notes a refused code. Returns the event that the owner is notified of.
pub(super) async fn note_refused(
    conn: &mut PgConnection,
    id: AccountId,
    client: &Client,
) -> sqlx::Result<AccountEvent> {
    let event = AccountEvent::CodeRefused;
    security::record(conn, id, event, Some(client)).await?;
    if store::people::account_log::count_last_day(conn, id, event.name()).await? != NOTIFIED_AFTER {
        return Ok(event);
    }
    let event = AccountEvent::ManyCodesRefused;
    security::record(conn, id, event, Some(client)).await?;
    Ok(event)
}
