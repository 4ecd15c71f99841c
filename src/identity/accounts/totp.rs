//! Adding and removing an authenticator app and its recovery codes.

use std::sync::Arc;

use fencepost_domain::{error::Error, ids::AccountId, limits::PENDING_TOTP_SECONDS};
use fencepost_net::seal::MasterKeys;
use fencepost_store::{
    self as store,
    people::{passkeys::PasskeyRow, second_factors::Overview},
};
use secrecy::SecretString;
use sqlx::{Acquire, PgConnection};
use totp_rs::Secret;
use uuid::Uuid;

use super::{
    Client,
    base::Base,
    codes::{
        self, TOTP_SECRET_BYTES, app, code_charges, remove_unneeded_recovery_codes,
        replace_recovery_codes, row_of_secret, typed,
    },
    second_factor::note_refused,
    security::{self, AccountEvent},
    sessions::lock_stepped_up,
    token::Bearer,
};

/// Secrets that one statement reads while all are encrypted again.
const SEALED_AT_ONCE: i64 = 500;

/// The secret of an app that is to be confirmed.
#[derive(Debug)]
pub struct NewTotp {
    /// In base32, to be typed.
    pub secret: SecretString,
    /// For a QR code.
    pub uri: SecretString,
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
        let page = store::people::second_factors::secrets(conn, after, SEALED_AT_ONCE).await?;
        let Some(last) = page.last() else { return Ok(sealed) };
        after = last.0;
        for (id, stored) in page {
            if master_keys.is_current(&stored, TOTP_SECRET_BYTES) {
                continue;
            }
            let plain = master_keys.open(&row_of_secret(id), &stored, TOTP_SECRET_BYTES)?;
            let secret = master_keys.seal(&row_of_secret(id), &plain);
            store::people::second_factors::replace_secret(conn, id, &stored, &secret).await?;
            sealed += 1;
        }
    }
}

/// Authenticator apps of accounts, and their recovery codes.
#[derive(Clone)]
pub struct Authenticators {
    pub(super) base: Base,
    pub(super) master_keys: Arc<MasterKeys>,
}

impl Authenticators {
    /// Returns the second factors of the account.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn second_factors(
        &self,
        id: AccountId,
    ) -> Result<(Overview, Vec<PasskeyRow>), Error> {
        let mut conn = self.base.pool.acquire().await?;
        let overview = store::people::second_factors::overview(&mut conn, id).await?;
        Ok((overview, store::people::passkeys::list(&mut conn, id).await?))
    }

    /// A new secret for an authenticator app. It replaces that of an earlier app when a code has
    /// confirmed it.
    ///
    /// # Errors
    /// [`Error::StepUpRequired`].
    pub async fn begin(&self, bearer: Bearer) -> Result<NewTotp, Error> {
        self.base.sessions.require_step_up(bearer).await?;
        let id = bearer.account_id;
        let mut conn = self.base.pool.acquire().await?;
        let account =
            store::people::accounts::find(&mut conn, id).await?.ok_or(Error::Unauthorized)?;
        let secret: [u8; TOTP_SECRET_BYTES] = rand::random();
        let sealed = self.master_keys.seal(&row_of_secret(id), &secret);
        store::people::second_factors::set_pending(&mut conn, id, &sealed, PENDING_TOTP_SECONDS)
            .await?;
        let uri = app(&secret, &account.email)?.to_url().map_err(Error::internal)?;
        let secret = Secret::new(secret.into()).to_base32();
        Ok(NewTotp { secret: secret.into(), uri: uri.into() })
    }

    /// Confirms a new app with its first code: from now on, logins need one. Other sessions must
    /// step up again, with a code. Returns new recovery codes.
    ///
    /// # Errors
    /// [`Error::StepUpRequired`]; [`Error::InvalidCode`] when the code is wrong, or no new app
    /// waits; [`Error::RateLimited`].
    pub async fn confirm(
        &self,
        bearer: Bearer,
        code: &SecretString,
        client: &Client,
    ) -> Result<Vec<String>, Error> {
        self.base.sessions.require_step_up(bearer).await?;
        let id = bearer.account_id;
        let code = typed(code);
        let (of_client, charges) = code_charges(id, client, &code);
        self.base.throttle.count(&charges).await?;
        let mut conn = self.base.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        lock_stepped_up(&mut tx, bearer).await?;
        let totp = store::people::second_factors::lock_totp(&mut tx, id).await?;
        let totp = totp.ok_or(Error::InvalidCode)?;
        let pending = totp.pending_secret.ok_or(Error::InvalidCode)?;
        let secret = codes::open_totp(&self.master_keys, id, &pending)?;
        let Some(time_step) = codes::step_of(&secret, &code, totp.now)? else {
            let event = note_refused(&mut tx, id, client).await?;
            tx.commit().await?;
            drop(conn);
            self.base.mailing.notify_owner(id, event, client);
            return Err(Error::InvalidCode);
        };
        // The master key may have been replaced meanwhile.
        let sealed = self.master_keys.seal(&row_of_secret(id), &secret);
        store::people::second_factors::confirm_totp(&mut tx, id, &sealed, time_step).await?;
        store::people::second_factors::step_down_others(&mut tx, id, bearer.session_id).await?;
        let codes = replace_recovery_codes(&mut tx, id).await?;
        let event = AccountEvent::TotpAdded;
        security::record(&mut tx, id, event, Some(client)).await?;
        tx.commit().await?;
        drop(conn);
        self.base.throttle.limiter.forgive(&of_client).await;
        self.base.mailing.notify_owner(id, event, client);
        Ok(codes)
    }

    /// Removes the account's app; with the last second factor, the recovery codes, too.
    ///
    /// # Errors
    /// [`Error::StepUpRequired`].
    pub async fn remove(&self, bearer: Bearer, client: &Client) -> Result<(), Error> {
        let id = bearer.account_id;
        let mut conn = self.base.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        lock_stepped_up(&mut tx, bearer).await?;
        let was_confirmed = store::people::second_factors::remove_totp(&mut tx, id).await?;
        remove_unneeded_recovery_codes(&mut tx, id).await?;
        let event = AccountEvent::TotpRemoved;
        if was_confirmed {
            security::record(&mut tx, id, event, Some(client)).await?;
        }
        tx.commit().await?;
        drop(conn);
        if was_confirmed {
            self.base.mailing.notify_owner(id, event, client);
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
        let id = bearer.account_id;
        let mut conn = self.base.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        // Locked, so that no second factor is removed meanwhile.
        lock_stepped_up(&mut tx, bearer).await?;
        if !store::people::second_factors::is_required(&mut tx, id).await? {
            return Err(Error::invalid("second_factor", "must be added first"));
        }
        let codes = replace_recovery_codes(&mut tx, id).await?;
        let event = AccountEvent::RecoveryCodesReplaced;
        security::record(&mut tx, id, event, Some(client)).await?;
        tx.commit().await?;
        drop(conn);
        self.base.mailing.notify_owner(id, event, client);
        Ok(codes)
    }
}
