//! Changes of passwords: with the current one, or with a mailed link.
//!
//! Known and unknown addresses get the same answers and take the same time.

use fencepost_domain::{
    error::{Error, is_unique_violation},
    ids::{AccountId, SessionId},
};
use fencepost_store::{
    self as store,
    connection::deadline::bounded,
    people::{accounts::Purpose, audit::NewAuditEntry},
};
use secrecy::SecretString;
use sqlx::Acquire;

use super::{
    Client, MAILS_PER_ASKER,
    base::Base,
    codes, links,
    mailing::{Content, MAILED_ACCOUNTS},
    own_password::OwnPassword,
    read_email,
    security::{self, AccountEvent},
    throttle::charge,
    token::Bearer,
};

/// Changes of passwords.
#[derive(Clone)]
pub struct PasswordChanges {
    pub(super) base: Base,
    pub(super) own: OwnPassword,
}

/// A new password, and what else ends with the old one.
#[derive(Debug)]
pub struct PasswordChange {
    pub current: SecretString,
    pub new: SecretString,
    pub removes_passkeys: bool,
    pub removes_identities: bool,
}

impl PasswordChanges {
    /// Changes a password, and revokes all other sessions.
    ///
    /// # Errors
    /// [`Error::InvalidCredentials`] when the current password is wrong; [`Error::Invalid`] when
    /// the new one is weak; [`Error::StepUpRequired`]; [`Error::RateLimited`].
    pub async fn change(
        &self,
        bearer: Bearer,
        change: PasswordChange,
        client: &Client,
    ) -> Result<Vec<SessionId>, Error> {
        let PasswordChange { current, new, .. } = change;
        self.base.sessions.require_second_factor(bearer).await?;
        let showing = async {
            self.check_strength(bearer.account_id, &new, "new_password").await?;
            self.own.is_right(bearer, current).await
        };
        if !self.base.throttle.count_own_try(bearer, showing).await? {
            return Err(Error::InvalidCredentials);
        }
        let hash = self.own.passwords.hash(&bearer.account_id.to_string(), new).await?;
        let mut conn = self.base.pool.acquire().await?;
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
        let (id, mut events) = (bearer.account_id, vec![AccountEvent::PasswordChanged]);
        if change.removes_passkeys && store::people::passkeys::delete_all(&mut tx, id).await? > 0 {
            codes::remove_unneeded_recovery_codes(&mut tx, id).await?;
            events.push(AccountEvent::PasskeyRemoved);
        }
        if change.removes_identities
            && store::people::identities::delete_all(&mut tx, id).await? > 0
        {
            events.push(AccountEvent::IdentityRemoved);
        }
        for event in events {
            security::record(&mut tx, bearer.account_id, event, Some(client)).await?;
        }
        tx.commit().await?;
        drop(conn);
        let event = AccountEvent::PasswordChanged;
        self.base.mailing.notify_owner(bearer.account_id, event, client);
        Ok(ended)
    }

    async fn check_strength(
        &self,
        account_id: AccountId,
        password: &SecretString,
        field: &str,
    ) -> Result<(), Error> {
        let account = {
            let mut conn = self.base.pool.acquire().await?;
            store::people::accounts::find(&mut conn, account_id).await?
        };
        let email = account.map(|it| it.email).unwrap_or_default();
        self.own.passwords.check(&account_id.to_string(), (field, password), &[&email]).await
    }

    /// Mails a reset link, if an account has the address. Returns before that is known.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the address is malformed; [`Error::RateLimited`].
    pub async fn request_reset(&self, email: &str, client: &Client) -> Result<(), Error> {
        let email = read_email("email", email)?;
        self.base.throttle.address(client).await?;
        // Counted by address and client, so that one client cannot use up another's resets.
        let pair = format!("{email} {}", client.address);
        self.base.throttle.count(&[charge("reset", &pair, MAILS_PER_ASKER)]).await?;
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
        let mut conn = self.base.pool.acquire().await?;
        let accounts =
            store::people::accounts::with_address(&mut conn, email, MAILED_ACCOUNTS).await?;
        // An earlier mail of the last half-hour has links that are valid.
        if accounts.is_empty() || !self.base.throttle.may_mail("resets", email).await {
            return Ok(());
        }
        self.base.mailing.store(&mut conn, &Content::Reset { to: email.to_owned() }).await?;
        self.base.mailing.hurry();
        Ok(())
    }

    /// Resets a password, and revokes all sessions. The holder of the mailed token reads the
    /// address. If the address was not verified before, a stranger may have created the account, so
    /// all keys, other members and invitations of its projects are revoked, and its second factor
    /// is removed. Identities at login providers are removed in any case, and passkeys log in only
    /// together with the new password.
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
        self.base.throttle.address(client).await?;
        // Before the password is hashed: a wrong link must not take the time of a hash.
        links::check(&self.base.pool, Purpose::Reset, token).await?;
        self.own.passwords.check(&client.address, ("new_password", &new), &[]).await?;
        let hash = self.own.passwords.hash(&client.address, new).await?;
        let mut conn = self.base.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        let account_id = links::follow(&mut tx, Purpose::Reset, token).await?;
        store::people::accounts::set_password(&mut tx, account_id, &hash).await?;
        store::people::accounts::spend_resets(&mut tx, account_id).await?;
        store::people::email_changes::delete(&mut tx, account_id).await?;
        // A person with the old password may have linked an identity of their own.
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
                for project_id in store::people::members::remove_others(&mut tx, account_id).await?
                {
                    store::people::audit::insert(&mut tx, project_id, &actor, &entry).await?;
                }
            }
            Ok(false) => (),
        }
        let event = AccountEvent::PasswordReset;
        security::record(&mut tx, account_id, event, Some(client)).await?;
        tx.commit().await?;
        drop(conn);
        self.base.mailing.notify_owner(account_id, event, client);
        Ok(ended)
    }
}
