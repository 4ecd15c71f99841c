//! The end of an account, by its owner.

use fencepost_domain::{error::Error, ids::ProjectId};
use fencepost_store::{self as store, people::audit::NewAuditEntry};
use secrecy::SecretString;
use sqlx::Acquire;

use super::{Client, base::Base, members, own_password::OwnPassword, token::Bearer};

/// Removals of accounts.
#[derive(Clone)]
pub struct Removals {
    pub(super) base: Base,
    pub(super) own: OwnPassword,
}

impl Removals {
    /// Deletes an account, and the projects without another member. Returns those.
    ///
    /// # Errors
    /// [`Error::InvalidCredentials`] when the password is wrong. [`Error::LastOwner`] when a
    /// project with other members would have no owner. [`Error::KeysRemain`] when live keys that it
    /// has created remain in other projects. [`Error::StepUpRequired`], [`Error::RateLimited`].
    pub async fn delete(
        &self,
        bearer: Bearer,
        password: SecretString,
        revoke_keys: Option<bool>,
        client: &Client,
    ) -> Result<Vec<ProjectId>, Error> {
        self.base.sessions.require_second_factor(bearer).await?;
        let showing = self.own.is_right(bearer, password);
        if !self.base.throttle.count_own_try(bearer, showing).await? {
            return Err(Error::InvalidCredentials);
        }
        let mut conn = self.base.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        store::people::members::lock_owned(&mut tx, bearer.account_id).await?;
        let owned = store::people::accounts::solely_owned(&mut tx, bearer.account_id).await?;
        if owned.iter().any(|(_, has_others)| *has_others) {
            return Err(Error::LastOwner);
        }
        let actor = client.actor("account", bearer.account_id.to_string());
        for (project_id, _) in &owned {
            store::people::projects::delete(&mut tx, *project_id).await?;
            let entry = NewAuditEntry::to("project.deleted", bearer.account_id.to_string());
            store::people::audit::insert(&mut tx, *project_id, &actor, &entry).await?;
        }
        members::leave_all(&mut tx, bearer.account_id, client, revoke_keys).await?;
        store::people::accounts::delete(&mut tx, bearer.account_id).await?;
        tx.commit().await?;
        Ok(owned.into_iter().map(|it| it.0).collect())
    }
}
