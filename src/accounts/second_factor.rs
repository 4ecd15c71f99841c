//! Second factors: authenticator apps (TOTP, RFC 6238), recovery codes, and the step-up of a
//! session.
//!
//! A password alone gets the token of a login, a code alone nothing. No code is accepted twice: the
//! account's app remembers the step of its last code, and a recovery code is deleted by its use.

use rand::RngExt;
use secrecy::{ExposeSecret, SecretString};
use sqlx::{Acquire, PgConnection};
use totp_rs::{Builder, Secret, Totp};
use uuid::Uuid;

use super::{
    Accounts, CODES_PER_ACCOUNT, Client, SignedIn, TRIES_PER_PAIR, charge,
    seal::MasterKeys,
    secret::{self, LOGIN_PREFIX},
    security::{self, AccountEvent},
    token::Bearer,
};
use crate::{
    domain::limits::{
        LOGIN_CHALLENGE_SECONDS, MAX_CODE_CHARS, MAX_CODE_TRIES, PENDING_TOTP_SECONDS,
        RECOVERY_CODES, STEP_UP_SECONDS,
    },
    error::Error,
    ids::AccountId,
    limiter::Charge,
    store::{self, second_factors::Overview},
};

/// Bytes of a secret that an app shares: as long as the hash (RFC 4226, section 4).
const TOTP_SECRET_BYTES: usize = 20;
/// How authenticator apps name the account's provider.
const ISSUER: &str = "Fencepost";
/// Characters of a recovery code: 80 bits in base32.
const RECOVERY_CODE_CHARS: usize = 16;
/// Crockford's: people mistake none of them for another.
const BASE32: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
/// Secrets that one statement reads while all are encrypted.
const SEALED_AT_ONCE: i64 = 500;

/// What proves who the person of a session is.
#[derive(Debug)]
pub enum Proof {
    /// For an account without a second factor.
    Password(SecretString),
    /// For one that has a second factor.
    Code(SecretString),
}

/// The secret of an app that is to be confirmed.
#[derive(Debug)]
pub struct NewTotp {
    /// In base32, to be typed.
    pub secret: SecretString,
    /// For a QR code.
    pub uri: SecretString,
}

/// Where an app's secret is stored: its row alone can decrypt it.
fn place(id: AccountId) -> String {
    format!("totp/{}", id.0)
}

fn app(secret: &[u8], email: &str) -> Result<Totp, Error> {
    let secret = Secret::new(secret.into());
    let builder = Builder::new().with_secret(secret).with_issuer(Some(ISSUER));
    // The form `issuer:name` has one colon.
    let name = email.replace(':', " ");
    builder.with_account_name(name).build().map_err(Error::internal)
}

fn new_recovery_code() -> String {
    let mut rng = rand::rng();
    let mut code = String::with_capacity(RECOVERY_CODE_CHARS + RECOVERY_CODE_CHARS / 4);
    for place in 0..RECOVERY_CODE_CHARS {
        if place > 0 && place % 4 == 0 {
            code.push('-');
        }
        code.push(char::from(BASE32[rng.random_range(0..BASE32.len())]));
    }
    code
}

/// A code as it was typed, without spaces and hyphens.
fn typed(code: &SecretString) -> SecretString {
    let kept = code.expose_secret().chars().take(MAX_CODE_CHARS);
    let kept = kept.filter(|it| !it.is_whitespace() && *it != '-');
    kept.collect::<String>().to_lowercase().into()
}

fn is_recovery_code(code: &SecretString) -> bool {
    code.expose_secret().len() == RECOVERY_CODE_CHARS
}

/// Encrypts the secrets of all apps with the first master key. Returns how many.
///
/// # Errors
/// When one is encrypted with a key that is not given, or the database does not answer.
pub async fn seal_totp_secrets(
    conn: &mut PgConnection,
    master_keys: &MasterKeys,
) -> anyhow::Result<usize> {
    let (mut sealed, mut after) = (0, AccountId(Uuid::nil()));
    loop {
        let page = store::second_factors::secrets(conn, after, SEALED_AT_ONCE).await?;
        let Some(last) = page.last() else { return Ok(sealed) };
        after = last.0;
        for (id, stored) in page {
            if master_keys.is_current(&stored, TOTP_SECRET_BYTES) {
                continue;
            }
            let plain = master_keys.open(&place(id), &stored, TOTP_SECRET_BYTES)?;
            let secret = master_keys.seal(&place(id), &plain);
            store::second_factors::replace_secret(conn, id, &stored, &secret).await?;
            sealed += 1;
        }
    }
}

impl Accounts {
    pub(super) async fn new_challenge(
        &self,
        conn: &mut PgConnection,
        id: AccountId,
        password_hash: &str,
    ) -> Result<SecretString, Error> {
        let token = secret::generate(LOGIN_PREFIX);
        let (hash, of) = (secret::hash(&token), (id, password_hash));
        store::second_factors::insert_challenge(conn, &hash, of, LOGIN_CHALLENGE_SECONDS).await?;
        Ok(token)
    }

    /// Completes a login with a code of the account's app, or a recovery code.
    ///
    /// # Errors
    /// [`Error::InvalidCredentials`] when the login is unknown or has expired, was completed or had
    /// too many wrong codes, or the password was changed since. [`Error::InvalidCode`],
    /// [`Error::RateLimited`].
    pub async fn complete_login(
        &self,
        token: &SecretString,
        code: &SecretString,
        client: &Client,
    ) -> Result<SignedIn, Error> {
        self.throttle_address(client).await?;
        if !secret::is_well_formed(token, LOGIN_PREFIX) {
            return Err(Error::InvalidCredentials);
        }
        let hash = secret::hash(token);
        let waiting = {
            let mut conn = self.pool.acquire().await?;
            store::second_factors::lock_challenge(&mut conn, &hash).await?
        };
        let id = waiting.ok_or(Error::InvalidCredentials)?.account_id;
        let charges = code_charges(id, client);
        self.throttle(&charges).await?;
        let mut conn = self.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        let challenge = store::second_factors::lock_challenge(&mut tx, &hash).await?;
        let challenge = challenge.filter(|it| it.tries < MAX_CODE_TRIES);
        let challenge = challenge.ok_or(Error::InvalidCredentials)?;
        if !store::accounts::lock_if_hash(&mut tx, id, &challenge.password_hash).await? {
            return Err(Error::InvalidCredentials);
        }
        let Some(code_event) = self.use_code(&mut tx, id, code).await? else {
            store::second_factors::count_try(&mut tx, &hash).await?;
            let is_last = challenge.tries + 1 == MAX_CODE_TRIES;
            let event =
                if is_last { AccountEvent::TooManyCodes } else { AccountEvent::CodeRefused };
            security::note(&mut tx, id, event, Some(client)).await?;
            tx.commit().await?;
            drop(conn);
            self.tell_owner(id, event, client);
            return Err(Error::InvalidCode);
        };
        store::second_factors::delete_challenge(&mut tx, &hash).await?;
        let (signed_in, event) = self.open_session(&mut tx, id, client).await?;
        self.note_code(&mut tx, id, code_event, client).await?;
        tx.commit().await?;
        drop(conn);
        self.forgive_codes(&charges).await;
        self.tell_owner(id, event, client);
        self.tell_code(id, code_event, client);
        Ok(signed_in)
    }

    /// Uses up a code; none: it is wrong or was used. A recovery code leaves an event.
    async fn use_code(
        &self,
        conn: &mut PgConnection,
        id: AccountId,
        code: &SecretString,
    ) -> Result<Option<CodeUse>, Error> {
        let code = typed(code);
        if is_recovery_code(&code) {
            let hash = secret::hash(&code);
            let is_used = store::second_factors::use_recovery_code(conn, id, &hash).await?;
            return Ok(is_used.then_some(CodeUse::Recovery));
        }
        let Some(totp) = store::second_factors::lock_totp(conn, id).await? else { return Ok(None) };
        let Some(stored) = &totp.secret else { return Ok(None) };
        let Some(step) = self.step_of(id, stored, &code, totp.now)? else { return Ok(None) };
        if step <= totp.last_step {
            return Ok(None);
        }
        store::second_factors::record_step(conn, id, step).await?;
        Ok(Some(CodeUse::App))
    }

    /// The time step of a code, if it is one of now, or of 30 s earlier or later.
    fn step_of(
        &self,
        id: AccountId,
        stored: &[u8],
        code: &SecretString,
        now: i64,
    ) -> Result<Option<i64>, Error> {
        let secret = self.master_keys.open(&place(id), stored, TOTP_SECRET_BYTES);
        let secret = secret.map_err(|_| {
            tracing::error!(account.id = %id, "the secret of an app has another master key");
            Error::NotReady("this node cannot check codes: it has another master key")
        })?;
        let step = app(&secret, "")?.check(code.expose_secret(), u64::try_from(now).unwrap_or(0));
        Ok(step.and_then(|it| i64::try_from(it).ok()))
    }

    async fn note_code(
        &self,
        conn: &mut PgConnection,
        id: AccountId,
        used: CodeUse,
        client: &Client,
    ) -> sqlx::Result<()> {
        match used {
            CodeUse::App => Ok(()),
            CodeUse::Recovery => {
                security::note(conn, id, AccountEvent::RecoveryCodeUsed, Some(client)).await
            }
        }
    }

    fn tell_code(&self, id: AccountId, used: CodeUse, client: &Client) {
        if used == CodeUse::Recovery {
            self.tell_owner(id, AccountEvent::RecoveryCodeUsed, client);
        }
    }

    async fn forgive_codes(&self, charges: &[Charge]) {
        for charge in charges {
            self.limiter.forgive(charge).await;
        }
    }

    /// Proves who the person of a session is: with a code if the account has a second factor, else
    /// with the password.
    ///
    /// # Errors
    /// [`Error::InvalidCode`], [`Error::InvalidCredentials`]; [`Error::Invalid`] when the other
    /// proof is needed; [`Error::RateLimited`].
    pub async fn step_up(
        &self,
        bearer: Bearer,
        proof: Proof,
        client: &Client,
    ) -> Result<(), Error> {
        let id = bearer.account_id;
        let is_required = {
            let mut conn = self.pool.acquire().await?;
            store::second_factors::is_required(&mut conn, id).await?
        };
        let mut code_event = None;
        match proof {
            Proof::Password(_) if is_required => {
                let message = "is required: the account has a second factor";
                return Err(Error::invalid("code", message));
            }
            Proof::Code(_) if !is_required => {
                let message = "is required: the account has no second factor";
                return Err(Error::invalid("password", message));
            }
            Proof::Password(password) => {
                self.throttle_own(bearer).await?;
                if !self.is_password(bearer, password).await? {
                    return Err(Error::InvalidCredentials);
                }
            }
            Proof::Code(code) => {
                let charges = code_charges(id, client);
                self.throttle(&charges).await?;
                let mut conn = self.pool.acquire().await?;
                let mut tx = conn.begin().await?;
                let Some(used) = self.use_code(&mut tx, id, &code).await? else {
                    let event = AccountEvent::CodeRefused;
                    security::note(&mut tx, id, event, Some(client)).await?;
                    tx.commit().await?;
                    return Err(Error::InvalidCode);
                };
                self.note_code(&mut tx, id, used, client).await?;
                tx.commit().await?;
                drop(conn);
                self.forgive_codes(&charges).await;
                code_event = Some(used);
            }
        }
        let mut conn = self.pool.acquire().await?;
        store::second_factors::step_up(&mut conn, id, bearer.session_id).await?;
        security::note(&mut conn, id, AccountEvent::SteppedUp, Some(client)).await?;
        drop(conn);
        if let Some(used) = code_event {
            self.tell_code(id, used, client);
        }
        Ok(())
    }

    /// Refuses a session whose person has not proved lately who they are.
    ///
    /// # Errors
    /// [`Error::StepUpRequired`].
    pub async fn require_step_up(&self, bearer: Bearer) -> Result<(), Error> {
        let mut conn = self.pool.acquire().await?;
        let (account, session) = (bearer.account_id, bearer.session_id);
        let is_stepped_up =
            store::second_factors::is_stepped_up(&mut conn, account, session, STEP_UP_SECONDS);
        if is_stepped_up.await? { Ok(()) } else { Err(Error::StepUpRequired) }
    }

    /// The same, for what asks for the password itself: only an account with a second factor needs
    /// more.
    pub(super) async fn require_second_factor(&self, bearer: Bearer) -> Result<(), Error> {
        let is_required = {
            let mut conn = self.pool.acquire().await?;
            store::second_factors::is_required(&mut conn, bearer.account_id).await?
        };
        if is_required { self.require_step_up(bearer).await } else { Ok(()) }
    }

    /// What the account has as a second factor.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn second_factors(&self, id: AccountId) -> Result<Overview, Error> {
        let mut conn = self.pool.acquire().await?;
        Ok(store::second_factors::overview(&mut conn, id).await?)
    }

    /// A new secret for an authenticator app. It replaces that of an earlier app when a code has
    /// confirmed it.
    ///
    /// # Errors
    /// [`Error::StepUpRequired`].
    pub async fn new_totp(&self, bearer: Bearer) -> Result<NewTotp, Error> {
        self.require_step_up(bearer).await?;
        let id = bearer.account_id;
        let mut conn = self.pool.acquire().await?;
        let account = store::accounts::find(&mut conn, id).await?.ok_or(Error::Unauthorized)?;
        let secret: [u8; TOTP_SECRET_BYTES] = rand::random();
        let sealed = self.master_keys.seal(&place(id), &secret);
        store::second_factors::set_pending(&mut conn, id, &sealed, PENDING_TOTP_SECONDS).await?;
        let uri = app(&secret, &account.email)?.to_url().map_err(Error::internal)?;
        let secret = Secret::new(secret.into()).to_base32();
        Ok(NewTotp { secret: secret.into(), uri: uri.into() })
    }

    /// Confirms a new app with its first code: from now on, logins need one. Returns new recovery
    /// codes.
    ///
    /// # Errors
    /// [`Error::InvalidCode`] when the code is wrong, or no new app waits. [`Error::RateLimited`].
    pub async fn confirm_totp(
        &self,
        bearer: Bearer,
        code: &SecretString,
        client: &Client,
    ) -> Result<Vec<String>, Error> {
        let id = bearer.account_id;
        let charges = code_charges(id, client);
        self.throttle(&charges).await?;
        let mut conn = self.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        let totp = store::second_factors::lock_totp(&mut tx, id).await?;
        let totp = totp.ok_or(Error::InvalidCode)?;
        let pending = totp.pending_secret.ok_or(Error::InvalidCode)?;
        let step = self.step_of(id, &pending, &typed(code), totp.now)?;
        let step = step.ok_or(Error::InvalidCode)?;
        store::second_factors::confirm_totp(&mut tx, id, step).await?;
        let codes = replace_recovery_codes(&mut tx, id).await?;
        let event = AccountEvent::TotpAdded;
        security::note(&mut tx, id, event, Some(client)).await?;
        tx.commit().await?;
        drop(conn);
        self.forgive_codes(&charges).await;
        self.tell_owner(id, event, client);
        Ok(codes)
    }

    /// Removes the account's app and its recovery codes: logins need the password alone.
    ///
    /// # Errors
    /// [`Error::StepUpRequired`].
    pub async fn remove_totp(&self, bearer: Bearer, client: &Client) -> Result<(), Error> {
        self.require_step_up(bearer).await?;
        let id = bearer.account_id;
        let mut conn = self.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        let was_required = store::second_factors::remove(&mut tx, id).await?;
        let event = AccountEvent::TotpRemoved;
        if was_required {
            security::note(&mut tx, id, event, Some(client)).await?;
        }
        tx.commit().await?;
        drop(conn);
        if was_required {
            self.tell_owner(id, event, client);
        }
        Ok(())
    }

    /// Replaces the recovery codes.
    ///
    /// # Errors
    /// [`Error::StepUpRequired`]; [`Error::Invalid`] when the account has no second factor.
    pub async fn new_recovery_codes(
        &self,
        bearer: Bearer,
        client: &Client,
    ) -> Result<Vec<String>, Error> {
        self.require_step_up(bearer).await?;
        let id = bearer.account_id;
        let mut conn = self.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        // Locked, so that it is not removed meanwhile.
        let totp = store::second_factors::lock_totp(&mut tx, id).await?;
        if totp.and_then(|it| it.secret).is_none() {
            return Err(Error::invalid("second_factor", "must be added first"));
        }
        let codes = replace_recovery_codes(&mut tx, id).await?;
        let event = AccountEvent::RecoveryCodesReplaced;
        security::note(&mut tx, id, event, Some(client)).await?;
        tx.commit().await?;
        drop(conn);
        self.tell_owner(id, event, client);
        Ok(codes)
    }
}

/// What was used up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CodeUse {
    App,
    Recovery,
}

/// The limits on codes: a client that tries them has the password, or a session.
fn code_charges(id: AccountId, client: &Client) -> [Charge; 2] {
    [
        charge("code-pair", &format!("{id} {}", client.address), TRIES_PER_PAIR),
        charge("codes", &id.to_string(), CODES_PER_ACCOUNT),
    ]
}

async fn replace_recovery_codes(
    conn: &mut PgConnection,
    id: AccountId,
) -> sqlx::Result<Vec<String>> {
    let codes: Vec<String> = (0..RECOVERY_CODES).map(|_| new_recovery_code()).collect();
    let hash = |code: &String| secret::hash(&typed(&code.as_str().into())).to_vec();
    let hashes: Vec<Vec<u8>> = codes.iter().map(hash).collect();
    store::second_factors::replace_recovery_codes(conn, id, &hashes).await?;
    Ok(codes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recovery_code_is_read_as_people_type_it() {
        let code = new_recovery_code();
        assert_eq!(code.len(), RECOVERY_CODE_CHARS + 3);
        let loud = format!(" {} ", code.to_uppercase().replace('-', " "));
        let [plain, loud] = [code.as_str(), &loud].map(|it| typed(&it.into()));
        assert_eq!(plain.expose_secret(), loud.expose_secret());
        assert!(is_recovery_code(&plain) && !is_recovery_code(&"123456".into()));
    }

    #[test]
    fn an_app_makes_the_codes_of_rfc_6238() {
        // Its test vectors have eight digits; the last six are ours.
        let app = app(b"12345678901234567890", "ada@example.com").expect("an app");
        assert_eq!(app.check("287082", 59), Some(1));
        assert_eq!(app.check("005924", 1_234_567_890), Some(41_152_263));
        assert_eq!(app.check("005924", 1_234_567_890 + 60), None);
    }
}
