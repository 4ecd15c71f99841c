//! The e-mail address of an account: it is verified by a link. When it is changed, the new address
//! and the old one confirm it, so that neither a stolen session nor a mistyped address takes the
//! account away.

use fencepost_domain::{
    error::{Error, is_unique_violation},
    ids::ProjectId,
    limits::VERIFY_SECONDS,
};
use fencepost_store::{self as store, people::accounts::Purpose};
use secrecy::SecretString;
use sqlx::Acquire;

use super::{
    Client, LATE_MAILS_TO_EMAIL, MAILS_PER_ASKER,
    base::Base,
    links,
    mailing::{Content, VERIFICATIONS},
    read_email,
    secret::{self, MAIL_PREFIX},
    security::{self, AccountEvent},
    throttle::charge,
    token::Bearer,
};

/// The addresses of accounts.
#[derive(Clone)]
pub struct Addresses {
    pub(super) base: Base,
}

impl Addresses {
    /// Verifies the address of the session's account. A link alone is not enough: a stranger who
    /// signs up with an address would have it verified by its owner's click.
    ///
    /// # Errors
    /// [`Error::InvalidLink`] when the token is unknown, used, expired, or of another account.
    /// [`Error::EmailTaken`] when another account has verified the address.
    /// [`Error::RateLimited`].
    pub async fn verify(
        &self,
        bearer: Bearer,
        token: &SecretString,
        client: &Client,
    ) -> Result<(), Error> {
        self.base.throttle.address(client).await?;
        let mut conn = self.base.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        let account_id = links::follow(&mut tx, Purpose::Verify, token).await?;
        if account_id != bearer.account_id {
            return Err(Error::InvalidLink);
        }
        match store::people::accounts::verify(&mut tx, account_id).await {
            Err(error) if is_unique_violation(&error) => Err(Error::EmailTaken),
            Err(error) => Err(error.into()),
            Ok(false) => Ok(()),
            Ok(true) => {
                // A change that was asked for before may not be by the owner of this address.
                store::people::email_changes::delete(&mut tx, account_id).await?;
                let event = AccountEvent::AddressVerified;
                security::record(&mut tx, account_id, event, Some(client)).await?;
                Ok(tx.commit().await?)
            }
        }
    }

    /// Resends the verification mail, unless the address is verified.
    ///
    /// # Errors
    /// [`Error::RateLimited`].
    pub async fn send_verification(&self, bearer: Bearer, client: &Client) -> Result<(), Error> {
        let mut conn = self.base.pool.acquire().await?;
        let account = store::people::accounts::find(&mut conn, bearer.account_id).await?;
        let account = account.ok_or(Error::Unauthorized)?;
        if account.verified_at.is_some() {
            return Ok(());
        }
        self.base
            .throttle
            .count(&[charge("verify", &account.id.to_string(), MAILS_PER_ASKER)])
            .await?;
        drop(conn);
        if !self.base.throttle.may_mail(VERIFICATIONS, &account.email).await {
            let retry_after_seconds = LATE_MAILS_TO_EMAIL.window_seconds;
            return Err(Error::RateLimited { retry_after_seconds });
        }
        let (account, address) = (account.id.0, client.address.to_string());
        self.base.mailing.send(&Content::Verification { account, address }).await
    }

    /// Mails a link to the new address and, if the old one is verified, to that. The answer does
    /// not show whether another account has the new address.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the address is malformed, or the account has it already, or the
    /// server sends no mail. [`Error::StepUpRequired`], [`Error::RateLimited`].
    pub async fn change(&self, bearer: Bearer, email: &str, client: &Client) -> Result<(), Error> {
        let new_email = read_email("email", email)?;
        if !self.base.mailing.is_used() {
            return Err(Error::invalid("email", "cannot be changed: this server sends no mail"));
        }
        self.base.sessions.require_step_up(bearer).await?;
        let id = bearer.account_id;
        self.base
            .throttle
            .count(&[charge("email-change", &id.to_string(), MAILS_PER_ASKER)])
            .await?;
        let mut conn = self.base.pool.acquire().await?;
        let account =
            store::people::accounts::find(&mut conn, id).await?.ok_or(Error::Unauthorized)?;
        drop(conn);
        if account.email == new_email {
            return Err(Error::invalid("email", "is the address of the account already"));
        }
        // A stranger chooses the address of an account that has verified none.
        let old = account.verified_at.map(|_| account.email);
        // Each mail brings a token of its own; until then no token fits.
        let unknown = || secret::hash(&secret::generate(MAIL_PREFIX));
        let (new_hash, old_hash) = (unknown(), old.as_ref().map(|_| unknown()));
        let hashes = (&new_hash[..], old_hash.as_ref().map(|it| &it[..]));
        let recipients: Vec<_> = std::iter::once(&new_email).chain(&old).cloned().collect();
        for to in &recipients {
            // Without either of the mails the change cannot be confirmed.
            if !self.base.throttle.may_mail("changes", to).await {
                let retry_after_seconds = LATE_MAILS_TO_EMAIL.window_seconds;
                return Err(Error::RateLimited { retry_after_seconds });
            }
        }
        let mut conn = self.base.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        store::people::email_changes::replace(&mut tx, id, &new_email, hashes, VERIFY_SECONDS)
            .await?;
        let event = AccountEvent::AddressChangeRequested;
        security::record(&mut tx, id, event, Some(client)).await?;
        for to in recipients {
            let content = Content::Change {
                account: id.0,
                to,
                old: old.clone(),
                new: new_email.clone(),
                address: client.address.to_string(),
            };
            self.base.mailing.store(&mut tx, &content).await?;
        }
        tx.commit().await?;
        self.base.mailing.hurry();
        Ok(())
    }

    /// Confirms a change with the token of one of the mails, in a session of the account. Returns
    /// whether the address is changed now: else the other address must confirm, too.
    ///
    /// # Errors
    /// [`Error::InvalidLink`] when the token is unknown, used, expired, or of another account.
    /// [`Error::EmailTaken`] when another account has verified the address.
    /// [`Error::RateLimited`].
    pub async fn confirm_change(
        &self,
        bearer: Bearer,
        token: &SecretString,
        client: &Client,
    ) -> Result<bool, Error> {
        self.base.throttle.address(client).await?;
        if !secret::is_well_formed(token, MAIL_PREFIX) {
            return Err(Error::InvalidLink);
        }
        let (id, hash) = (bearer.account_id, secret::hash(token));
        let mut conn = self.base.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        let confirmed = store::people::email_changes::confirm(&mut tx, id, &hash).await?;
        let confirmed = confirmed.ok_or(Error::InvalidLink)?;
        if !confirmed.is_complete {
            tx.commit().await?;
            return Ok(false);
        }
        let old = store::people::accounts::find(&mut tx, id).await?.ok_or(Error::Unauthorized)?;
        match store::people::accounts::set_email(&mut tx, id, &confirmed.new_email).await {
            Err(error) if is_unique_violation(&error) => return Err(Error::EmailTaken),
            changed => changed?,
        }
        // Links that were mailed to the old address.
        store::people::accounts::spend_mail_tokens(&mut tx, id).await?;
        store::people::email_changes::delete(&mut tx, id).await?;
        let event = AccountEvent::AddressChanged;
        security::record(&mut tx, id, event, Some(client)).await?;
        tx.commit().await?;
        drop(conn);
        let subject = "The e-mail address of your account was changed";
        // It is changed, whether or not the mail can be stored.
        if let Err(error) = self.base.mailing.mail_security(&old, subject, client).await {
            let error = fencepost_domain::error::chain(&error);
            tracing::error!(error, "the mail about a change of an account was not stored");
        }
        Ok(true)
    }

    /// Refuses a project that sends requests elsewhere, if no one stands behind it. Where mail is
    /// sent, one of its owners must have a verified address; a project without members is the
    /// operator's.
    ///
    /// # Errors
    /// [`Error::EmailNotVerified`].
    pub async fn require_verified(&self, project_id: ProjectId) -> Result<(), Error> {
        if !self.base.mailing.reaches_others() {
            return Ok(());
        }
        let mut conn = self.base.pool.acquire().await?;
        match store::people::members::is_unverified(&mut conn, project_id).await? {
            true => Err(Error::EmailNotVerified),
            false => Ok(()),
        }
    }
}
