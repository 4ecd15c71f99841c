//! The security log of an account, and the mails about what its owner should notice.

use fencepost_domain::{error::Error, ids::AccountId};
use fencepost_store::{
    self as store,
    connection::deadline::bounded,
    people::{
        account_log::{self, NewAccountEntry},
        accounts::Account,
    },
};
use sqlx::{Acquire, PgConnection};

use super::{
    Client, codes,
    mailing::{Content, Mailing},
};

/// Entries of one action that an account gets within a day: strangers cause failed logins, which
/// must not hide the others.
pub const MAX_ENTRIES_A_DAY: i64 = 10;

/// Entries of an account's security log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccountEvent {
    Created,
    LoginSucceeded,
    /// The first login with this browser or program.
    LoginFromNewDevice,
    LoginFailed,
    LoggedOut,
    SessionEnded,
    /// A refresh token was used twice, so its session ended.
    TokenReused,
    AddressVerified,
    AddressChangeRequested,
    AddressChanged,
    PasswordChanged,
    PasswordReset,
    /// At the second step of a login, or to prove who a session's person is.
    CodeRefused,
    /// Several codes were refused within a day.
    ManyCodesRefused,
    /// The password that should prove who a session's person is.
    PasswordRefused,
    RecoveryCodeUsed,
    RecoveryCodesReplaced,
    SteppedUp,
    /// A terminal gets a key.
    DeviceApproved,
    TotpAdded,
    TotpRemoved,
    PasskeyAdded,
    PasskeyRemoved,
    /// A passkey that may be a copy was refused.
    PasskeySuspicious,
    /// With an OpenID Connect provider.
    IdentityLinked,
    IdentityRemoved,
    /// By the operator; so for the next three.
    SessionsEnded,
    Suspended,
    Resumed,
    SecondFactorReset,
}

impl AccountEvent {
    /// Its name in the log.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Created => "account.created",
            Self::LoginSucceeded => "login.succeeded",
            Self::LoginFromNewDevice => "login.new_device",
            Self::LoginFailed => "login.failed",
            Self::LoggedOut => "session.logged_out",
            Self::SessionEnded => "session.ended",
            Self::TokenReused => "session.token_reused",
            Self::AddressVerified => "address.verified",
            Self::AddressChangeRequested => "address.change_requested",
            Self::AddressChanged => "address.changed",
            Self::PasswordChanged => "password.changed",
            Self::PasswordReset => "password.reset",
            Self::CodeRefused => "code.refused",
            Self::ManyCodesRefused => "code.many_refused",
            Self::PasswordRefused => "password.refused",
            Self::RecoveryCodeUsed => "recovery_code.used",
            Self::RecoveryCodesReplaced => "recovery_codes.replaced",
            Self::SteppedUp => "session.stepped_up",
            Self::DeviceApproved => "device.approved",
            Self::TotpAdded => "totp.added",
            Self::TotpRemoved => "totp.removed",
            Self::PasskeyAdded => "passkey.added",
            Self::PasskeyRemoved => "passkey.removed",
            Self::PasskeySuspicious => "passkey.suspicious",
            Self::IdentityLinked => "identity.linked",
            Self::IdentityRemoved => "identity.removed",
            Self::SessionsEnded => "operator.sessions_ended",
            Self::Suspended => "operator.suspended",
            Self::Resumed => "operator.resumed",
            Self::SecondFactorReset => "operator.second_factor_reset",
        }
    }

    /// The text of the mail to its owner.
    const fn mailed(self) -> Option<&'static str> {
        match self {
            Self::LoginFromNewDevice => Some("A new device logged in to your account"),
            Self::PasswordChanged => Some("The password of your account was changed"),
            Self::PasswordReset => Some("The password of your account was reset"),
            Self::ManyCodesRefused => Some("Someone tries codes of your account"),
            Self::RecoveryCodeUsed => Some("A recovery code of your account was used"),
            Self::RecoveryCodesReplaced => Some("Your account has new recovery codes"),
            Self::DeviceApproved => Some("A terminal was logged in with your account"),
            Self::TotpAdded => Some("Your account has a new authenticator app"),
            Self::PasskeyAdded => Some("Your account has a new passkey"),
            Self::PasskeyRemoved => Some("A passkey of your account was removed"),
            Self::PasskeySuspicious => Some("A passkey of your account may have been copied"),
            Self::TotpRemoved => Some("The authenticator app of your account was removed"),
            Self::IdentityLinked => {
                Some("A login with another provider was linked to your account")
            }
            Self::IdentityRemoved => Some("A login with another provider was removed"),
            _ => None,
        }
    }
}

/// Adds an entry to an account's log; without a client, it is the operator's.
pub async fn record(
    conn: &mut PgConnection,
    account_id: AccountId,
    event: AccountEvent,
    client: Option<&Client>,
) -> sqlx::Result<()> {
    let entry = NewAccountEntry {
        action: event.name(),
        address: client.map(|it| it.address.to_string()),
        user_agent: client.and_then(|it| it.user_agent.as_deref().map(str::to_owned)),
        request_id: client.map(|it| it.request_id.to_string()),
    };
    account_log::insert(conn, account_id, &entry, MAX_ENTRIES_A_DAY).await
}

/// Suspends an account and ends its sessions, or ends its suspension, for the operator. Returns how
/// many sessions it ended.
pub async fn suspend(
    conn: &mut PgConnection,
    id: AccountId,
    is_suspended: bool,
) -> sqlx::Result<usize> {
    let event = if is_suspended { AccountEvent::Suspended } else { AccountEvent::Resumed };
    let mut tx = conn.begin().await?;
    store::people::accounts::suspend(&mut tx, id, is_suspended).await?;
    let ended = match is_suspended {
        true => store::people::sessions::revoke_others(&mut tx, id, None).await?.len(),
        false => 0,
    };
    record(&mut tx, id, event, None).await?;
    tx.commit().await?;
    Ok(ended)
}

/// Ends all sessions of an account, for the operator. Returns how many.
pub async fn end_sessions(conn: &mut PgConnection, id: AccountId) -> sqlx::Result<usize> {
    let mut tx = conn.begin().await?;
    let ended = store::people::sessions::revoke_others(&mut tx, id, None).await?.len();
    record(&mut tx, id, AccountEvent::SessionsEnded, None).await?;
    tx.commit().await?;
    Ok(ended)
}

/// Removes the second factor of an account whose owner has lost it, and ends its sessions, for the
/// operator. Returns whether it had one.
pub async fn reset_second_factor(conn: &mut PgConnection, id: AccountId) -> sqlx::Result<bool> {
    let mut tx = conn.begin().await?;
    let was_required = codes::remove_all(&mut tx, id).await?;
    store::people::identities::delete_all(&mut tx, id).await?;
    if was_required {
        store::people::sessions::revoke_others(&mut tx, id, None).await?;
        record(&mut tx, id, AccountEvent::SecondFactorReset, None).await?;
    }
    tx.commit().await?;
    Ok(was_required)
}

impl Mailing {
    /// Mails the owner of a verified address what happened, in the background: it is committed, and
    /// a failure must not look like one of the request.
    pub(super) fn notify_owner(&self, account_id: AccountId, event: AccountEvent, client: &Client) {
        let Some(subject) = event.mailed() else { return };
        let (this, client) = (self.clone(), client.clone());
        tokio::spawn(bounded(async move {
            if let Err(error) = this.mail_owner(account_id, subject, &client).await {
                let error = fencepost_domain::error::chain(&error);
                tracing::error!(error, "the mail about a change of an account was not stored");
            }
        }));
    }

    async fn mail_owner(
        &self,
        account_id: AccountId,
        subject: &str,
        client: &Client,
    ) -> Result<(), Error> {
        let account = {
            let mut conn = self.pool.acquire().await?;
            store::people::accounts::find(&mut conn, account_id).await?
        };
        match account {
            Some(account) => self.mail_security(&account, subject, client).await,
            None => Ok(()),
        }
    }

    /// Mails the address of an account, if it is verified, what happened.
    pub(super) async fn mail_security(
        &self,
        account: &Account,
        subject: &str,
        client: &Client,
    ) -> Result<(), Error> {
        if account.verified_at.is_some() && self.throttle.may_mail("security", &account.email).await
        {
            let (to, what) = (account.email.clone(), subject.to_owned());
            let address = client.address.to_string();
            self.send(&Content::Security { to, what, address }).await?;
        }
        Ok(())
    }
}
