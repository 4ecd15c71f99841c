//! Sign-up: an account, a project, and a key that is valid immediately.
//!
//! The answer is the same whether or not the address is known: an account with an unverified
//! address works, and the owner of the address gets a mail.

use fencepost_config::Signup;
use fencepost_domain::{
    access::{Role, Scope},
    error::Error,
    ids::AccountId,
    limits::MAX_NAME_CHARS,
    text,
};
use fencepost_store::{
    self as store,
    people::{accounts::Account, audit::NewAuditEntry, invitations::Invited, projects::Project},
};
use secrecy::SecretString;
use sqlx::{Acquire, PgConnection};

use super::{
    Accounts, Client, MAILS_PER_EMAIL, SIGNUPS_PER_ADDRESS, SignedIn, charge,
    keys::{KeyRequest, MadeKey, insert_first},
    login::{Login, VERIFICATIONS},
    mailing::Content,
    projects::LIVE,
    read_email, secret,
    security::{self, AccountEvent},
};

/// Name of the first key.
const FIRST_KEY: &str = "first";
/// Name of a project without a name.
const DEFAULT_PROJECT: &str = "default";

/// A sign-up.
#[derive(Debug)]
pub struct SignUp {
    pub email: String,
    /// The password.
    pub password: SecretString,
    /// Name of the first project.
    pub project_name: Option<String>,
    /// An invitation to another project.
    pub invitation: Option<SecretString>,
}

/// The result of a sign-up.
#[derive(Debug)]
pub struct SignedUp {
    pub account: Account,
    /// The first project, or the one of the invitation.
    pub project: Project,
    pub role: Role,
    /// A key with all scopes but `keys`; none after an invitation.
    pub key: Option<MadeKey>,
    password_hash: String,
}

impl Accounts {
    /// Starts a session of an account that was just created. A login could find an earlier account
    /// with the same unverified address and the same password.
    ///
    /// # Errors
    /// [`Error::InvalidCredentials`] when its password was changed meanwhile.
    pub async fn begin_first_session(
        &self,
        made: &SignedUp,
        client: &Client,
    ) -> Result<SignedIn, Error> {
        self.begin_session(made.account.id, &made.password_hash, Login::Proved, client).await
    }

    /// Signs up.
    ///
    /// # Errors
    /// [`Error::SignupClosed`] when sign-up is closed or needs an invitation. [`Error::Invalid`]
    /// when the address or invitation is invalid, or the password is weak. [`Error::RateLimited`].
    pub async fn sign_up(&self, request: SignUp, client: &Client) -> Result<SignedUp, Error> {
        let is_invited = request.invitation.is_some();
        if self.signup == Signup::Closed || (self.signup == Signup::Invite && !is_invited) {
            return Err(Error::SignupClosed);
        }
        let email = read_email("email", &request.email)?;
        let name = request.project_name.as_deref().unwrap_or(DEFAULT_PROJECT);
        text::check_public_name(name, MAX_NAME_CHARS)
            .map_err(|error| Error::invalid("project_name", error.to_string()))?;
        self.throttle_address(client).await?;
        if let Some(invitation) = &request.invitation {
            // Before the password is hashed: junk must not cost a turn.
            self.find_invitation(invitation).await?;
        }
        let password = ("password", &request.password);
        self.passwords.check(&client.address, password, &[&email, name]).await?;
        self.throttle(&[
            charge("signup", &client.address, SIGNUPS_PER_ADDRESS),
            // With the client: a stranger must not use up what the owner may ask for.
            charge("mail", &format!("{email} {}", client.address), MAILS_PER_EMAIL),
        ])
        .await?;
        let password_hash = self.passwords.hash(&client.address, request.password).await?;
        let is_mailed = self.may_mail(VERIFICATIONS, &email).await;
        let mut conn = self.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        let account =
            store::people::accounts::insert(&mut tx, AccountId::generate(), &email, &password_hash)
                .await?;
        let (project, role, key) = match &request.invitation {
            Some(invitation) => {
                let (project, role) = self.accept(&mut tx, account.id, invitation, client).await?;
                (project, role, None)
            }
            None => {
                let (project, key) = self.begin_project(&mut tx, account.id, name, client).await?;
                (project, Role::Owner, Some(key))
            }
        };
        let has_owner = store::people::accounts::is_address_verified(&mut tx, &email).await?;
        security::note(&mut tx, account.id, AccountEvent::Created, Some(client)).await?;
        if is_mailed {
            let (account, address) = (account.id.0, client.address.to_string());
            // The answer does not show that the address has an account; if the new one is not used,
            // it is deleted.
            let content = match has_owner {
                true => Content::Known { account, address },
                false => Content::Verification { account, address },
            };
            self.store_mail(&mut tx, &content).await?;
        }
        tx.commit().await?;
        drop(conn);
        self.hurry_mails();
        Ok(SignedUp { account, project, role, key, password_hash })
    }

    async fn begin_project(
        &self,
        conn: &mut PgConnection,
        account_id: AccountId,
        name: &str,
        client: &Client,
    ) -> Result<(Project, MadeKey), Error> {
        let project = self.insert_project(conn, account_id, (name, LIVE), client).await?;
        let request = KeyRequest::named(FIRST_KEY.to_owned(), Scope::OF_FIRST_KEY.to_vec());
        let limits = self.plans.of(&project.plan, project.overrides.as_ref());
        let (target, by) = ((project.id, &*project.mode), Some(account_id.to_string()));
        let key = insert_first(conn, target, request, by, limits.max_keys()).await?;
        Ok((project, key))
    }

    /// The content of an invitation, without using it up.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the invitation is not valid. [`Error::RateLimited`].
    pub async fn preview_invitation(
        &self,
        invitation: &SecretString,
        client: &Client,
    ) -> Result<Invited, Error> {
        self.throttle_address(client).await?;
        self.find_invitation(invitation).await
    }

    async fn find_invitation(&self, invitation: &SecretString) -> Result<Invited, Error> {
        let mut conn = self.pool.acquire().await?;
        let invited =
            store::people::invitations::invited(&mut conn, &secret::hash(invitation)).await?;
        invited.ok_or_else(bad_invitation)
    }

    /// Uses up an invitation: the account becomes a member, with the invited role or its present
    /// one, whichever is higher.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the invitation is not valid.
    pub async fn accept_invitation(
        &self,
        account_id: AccountId,
        invitation: &SecretString,
        client: &Client,
    ) -> Result<(Project, Role), Error> {
        let mut conn = self.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        let accepted = self.accept(&mut tx, account_id, invitation, client).await?;
        tx.commit().await?;
        Ok(accepted)
    }

    async fn accept(
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
