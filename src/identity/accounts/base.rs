//! What most use cases of accounts work with.

use fencepost_store::connection::pools::Pool;

use super::{mailing::Mailing, sessions::Sessions, throttle::Throttle};

/// The database, limits, mails and sessions.
#[derive(Clone)]
pub(super) struct Base {
    pub(super) pool: Pool,
    pub(super) throttle: Throttle,
    pub(super) mailing: Mailing,
    pub(super) sessions: Sessions,
}
