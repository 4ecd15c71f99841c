//! The parts that most use cases of accounts share.

use fencepost_domain::ids::AccountId;
use fencepost_store::connection::{deadline::bounded, pools::Pool};

use super::{
    Client,
    mailing::Mailing,
    security::{self, AccountEvent},
    sessions::Sessions,
    throttle::Throttle,
    token::Tokens,
};

/// The database, limits, mails and sessions.
#[derive(Clone)]
pub(super) struct Base {
    pub(super) pool: Pool,
    pub(super) throttle: Throttle,
    pub(super) mailing: Mailing,
    pub(super) sessions: Sessions,
}

impl Base {
    pub(super) fn of(pool: Pool, tokens: Tokens, mailing: Mailing) -> Self {
        let throttle = mailing.throttle.clone();
        let sessions = Sessions {
            pool: pool.clone(),
            tokens,
            throttle: throttle.clone(),
            mailing: mailing.clone(),
        };
        Self { pool, throttle, mailing, sessions }
    }

    /// Writes an entry to an account's log in the background: the request is not longer for it, and
    /// the entry stays if the request's transaction is undone.
    pub(super) fn note_later(&self, id: AccountId, event: AccountEvent, client: &Client) {
        let (pool, client) = (self.pool.clone(), client.clone());
        tokio::spawn(bounded(async move {
            let noted = async {
                let mut conn = pool.acquire().await?;
                security::record(&mut conn, id, event, Some(&client)).await
            };
            if let Err(error) = noted.await {
                let error = fencepost_domain::error::chain(&error);
                tracing::error!(
                    error,
                    action = event.name(),
                    "an entry was not written to the account log"
                );
            }
        }));
    }
}
