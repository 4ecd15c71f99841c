//! The identities of accounts.

use fencepost_domain::{
    error::{Error, is_unique_violation},
    ids::{AccountId, IdentityId},
    limits::MAX_IDENTITIES,
};
use fencepost_store::{
    self as store,
    people::identities::{IdentityRow, Subject},
};
use sqlx::Acquire;

use super::{Arrival, Identities, Refusal};
use crate::accounts::{
    Client,
    security::{self, AccountEvent},
    sessions::lock_stepped_up,
    token::Bearer,
};

impl Identities {
    /// An account's identities.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn list(&self, id: AccountId) -> Result<Vec<IdentityRow>, Error> {
        let mut conn = self.base.pool.acquire().await?;
        Ok(store::people::identities::list(&mut conn, id).await?)
    }

    pub(super) async fn link(
        &self,
        bearer: Bearer,
        subject: &Subject<'_>,
        client: &Client,
    ) -> Result<Result<Arrival, Refusal>, Error> {
        let mut conn = self.base.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        // Two links at the same time must not exceed the bound, and none must follow a reset.
        lock_stepped_up(&mut tx, bearer).await?;
        let (id, max) = (IdentityId::generate(), MAX_IDENTITIES);
        match store::people::identities::insert(&mut tx, bearer.account_id, id, subject, max).await
        {
            Ok(true) => (),
            Ok(false) => return Ok(Err(Refusal::TooMany)),
            Err(error) if is_unique_violation(&error) => return Ok(Err(Refusal::Taken)),
            Err(error) => return Err(error.into()),
        }
        let event = AccountEvent::IdentityLinked;
        security::record(&mut tx, bearer.account_id, event, Some(client)).await?;
        tx.commit().await?;
        drop(conn);
        self.base.mailing.notify_owner(bearer.account_id, event, client);
        Ok(Ok(Arrival::Linked))
    }

    /// Removes an identity of the account.
    ///
    /// # Errors
    /// [`Error::IdentityNotFound`], [`Error::StepUpRequired`].
    pub async fn unlink(
        &self,
        bearer: Bearer,
        id: IdentityId,
        client: &Client,
    ) -> Result<(), Error> {
        self.base.sessions.require_step_up(bearer).await?;
        let mut conn = self.base.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        if !store::people::identities::delete(&mut tx, bearer.account_id, id).await? {
            return Err(Error::IdentityNotFound);
        }
        let event = AccountEvent::IdentityRemoved;
        security::record(&mut tx, bearer.account_id, event, Some(client)).await?;
        tx.commit().await?;
        drop(conn);
        self.base.mailing.notify_owner(bearer.account_id, event, client);
        Ok(())
    }
}
