//! The rates of what people ask for, and strangers who may become some.

use fencepost_domain::{error::Error, ids::AccountId};
use fencepost_signals::limiter::{Charge, Limiter, Rate};
use sha2::{Digest, Sha256};

use super::{
    CALLS_PER_ADDRESS, Client, EXPORTS_PER_ACCOUNT, LATE_MAILS_TO_EMAIL, MAILS_TO_EMAIL,
    TRIES_PER_PAIR, token::Bearer,
};

/// The limits of accounts, which nodes count together.
#[derive(Clone)]
pub struct Throttle {
    pub(super) limiter: Limiter,
}

impl Throttle {
    pub(super) async fn count(&self, charges: &[Charge]) -> Result<(), Error> {
        match self.limiter.charge(charges, &[]).await.retry_after_seconds() {
            Some(retry_after_seconds) => Err(Error::RateLimited { retry_after_seconds }),
            None => Ok(()),
        }
    }

    /// Counts a call by its address.
    ///
    /// # Errors
    /// [`Error::RateLimited`].
    pub async fn address(&self, client: &Client) -> Result<(), Error> {
        self.count(&[charge("auth", &client.address, CALLS_PER_ADDRESS)]).await
    }

    /// Counts an export of an account.
    ///
    /// # Errors
    /// [`Error::RateLimited`].
    pub async fn export(&self, account_id: AccountId) -> Result<(), Error> {
        self.count(&[charge("exports", &account_id.to_string(), EXPORTS_PER_ACCOUNT)]).await
    }

    /// Counts a try of the session's person to show the password, unless too many wait for one to
    /// be compared: that was no try.
    pub(super) async fn count_own_try<T>(
        &self,
        bearer: Bearer,
        showing: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        let tried = [charge("own", &bearer.account_id.to_string(), TRIES_PER_PAIR)];
        self.count(&tried).await?;
        let shown = showing.await;
        if matches!(shown, Err(Error::Overloaded)) {
            self.limiter.refund(&tried).await;
        }
        shown
    }

    /// True if one more mail of this kind may be sent to an address now.
    pub(super) async fn may_mail(&self, kind: &str, email: &str) -> bool {
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
}

/// A limit on a value that the caller chooses. Its name is hashed, so that it is bounded and
/// reveals nothing.
pub(super) fn charge(kind: &str, what: &str, rate: Rate) -> Charge {
    let hash = Sha256::digest(what.as_bytes());
    let hash: String = hash.iter().take(16).map(|it| format!("{it:02x}")).collect();
    // The part in braces decides which node of a Redis cluster holds a name: some calls use two.
    Charge { name: format!("limit:{{accounts}}:{kind}:{hash}"), rate, overdraft_windows: 0 }
}
