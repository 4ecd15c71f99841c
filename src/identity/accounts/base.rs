//! The parts that most use cases of accounts share.

use fencepost_store::connection::pools::Pool;

use super::{mailing::Mailing, sessions::Sessions, throttle::Throttle, token::Tokens};

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
}
