//! Invitations to projects: who sends one, what it offers, and who accepts it.

use fencepost_domain::{
    access::Role,
    error::Error,
    ids::{AccountId, InvitationId, ProjectId},
};
use fencepost_store::{
    self as store,
    people::{audit::NewAuditEntry, invitations::Invited, projects::Project},
};
use secrecy::SecretString;
use sqlx::{Acquire, PgConnection};

use super::{
    Client, INVITATIONS_PER_ACCOUNT, INVITATIONS_PER_NEW_ACCOUNT, MAILS_PER_ASKER,
    NEW_ACCOUNT_DAYS, base::Base, mailing::Content, secret, throttle::charge,
};

/// Invitations to projects.
#[derive(Clone)]
pub struct Invitations {
    pub(super) base: Base,
}

impl Invitations {
    /// Counts an invitation, by sender, project and recipient. Where mail is sent, only an account
    /// with a verified address may have it sent.
    ///
    /// # Errors
    /// [`Error::EmailNotVerified`], [`Error::RateLimited`].
    pub async fn count(
        &self,
        by: AccountId,
        project_id: ProjectId,
        email: &str,
    ) -> Result<(), Error> {
        let mut conn = self.base.pool.acquire().await?;
        let sender = store::people::accounts::sender(&mut conn, by, NEW_ACCOUNT_DAYS).await?;
        drop(conn);
        let sender = sender.ok_or(Error::Unauthorized)?;
        if self.base.mailing.reaches_others() && !sender.is_verified {
            return Err(Error::EmailNotVerified);
        }
        let of_account =
            if sender.is_new { INVITATIONS_PER_NEW_ACCOUNT } else { INVITATIONS_PER_ACCOUNT };
        self.base
            .throttle
            .count(&[
                charge("invitations", &by.to_string(), of_account),
                charge("invited", &format!("{} {email}", project_id.0), MAILS_PER_ASKER),
            ])
            .await
    }

    /// Mails an invitation to a project.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn mail(
        &self,
        (project_id, id): (ProjectId, InvitationId),
        email: &str,
    ) -> Result<(), Error> {
        if !self.base.throttle.may_mail("invitations", email).await {
            return Ok(());
        }
        let to = email.to_owned();
        self.base
            .mailing
            .send(&Content::Invitation { project: project_id.0, invitation: id.0, to })
            .await
    }

    /// The content of an invitation, without using it up.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the invitation is not valid. [`Error::RateLimited`].
    pub async fn preview(
        &self,
        invitation: &SecretString,
        client: &Client,
    ) -> Result<Invited, Error> {
        self.base.throttle.address(client).await?;
        self.find(invitation).await
    }

    pub(super) async fn find(&self, invitation: &SecretString) -> Result<Invited, Error> {
        let mut conn = self.base.pool.acquire().await?;
        let invited =
            store::people::invitations::invited(&mut conn, &secret::hash(invitation)).await?;
        invited.ok_or_else(bad_invitation)
    }

    /// Uses up an invitation: the account becomes a member, with the invited role or its present
    /// one, whichever is higher.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the invitation is not valid.
    pub async fn accept(
        &self,
        account_id: AccountId,
        invitation: &SecretString,
        client: &Client,
    ) -> Result<(Project, Role), Error> {
        let mut conn = self.base.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        let accepted = self.accept_in(&mut tx, account_id, invitation, client).await?;
        tx.commit().await?;
        Ok(accepted)
    }

    /// Uses up an invitation in a transaction of the caller.
    pub(super) async fn accept_in(
        &self,
        conn: &mut PgConnection,
        account_id: AccountId,
        invitation: &SecretString,
        client: &Client,
    ) -> Result<(Project, Role), Error> {
        let accepted = store::people::invitations::accept(conn, &secret::hash(invitation)).await?;
        let (project_id, role, _) = accepted.ok_or_else(bad_invitation)?;
        let roles = store::people::members::lock_roles(conn, project_id).await?;
        let present = roles.iter().find(|it| it.0 == account_id);
        let present = present.and_then(|it| Role::of_name(&it.1));
        let role = Role::of_name(&role).max(present).ok_or_else(bad_invitation)?;
        store::people::members::upsert(conn, project_id, account_id, role.name()).await?;
        let entry = NewAuditEntry {
            action: "member.added",
            target: Some(account_id.to_string()),
            after: Some(serde_json::json!({ "role": role }).to_string()),
            ..NewAuditEntry::default()
        };
        let actor = client.actor("account", account_id.to_string());
        store::people::audit::insert(conn, project_id, &actor, &entry).await?;
        let project =
            store::people::projects::get(conn, project_id).await?.ok_or_else(bad_invitation)?;
        Ok((project, role))
    }
}

fn bad_invitation() -> Error {
    Error::invalid("invitation", "is unknown, used, revoked or expired")
}
