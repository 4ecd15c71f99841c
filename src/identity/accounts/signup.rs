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
    plan::Plans,
    text,
};
use fencepost_store::{
    self as store,
    people::{accounts::Account, projects::Project},
};
use secrecy::SecretString;
use sqlx::{Acquire, PgConnection};

use super::{
    Client, MAILS_PER_ASKER, SIGNUPS_PER_ADDRESS,
    base::Base,
    invitation::Invitations,
    keys::{KeyRequest, MadeKey, insert_first},
    mailing::{Content, VERIFICATIONS},
    password::Passwords,
    projects::{LIVE, Projects},
    read_email,
    security::{self, AccountEvent},
    sessions::{Login, SignedIn},
    throttle::charge,
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

/// Sign-ups.
#[derive(Clone)]
pub struct SignUps {
    pub(super) base: Base,
    pub(super) signup: Signup,
    pub(super) passwords: Passwords,
    pub(super) plans: Plans,
    pub(super) invitations: Invitations,
    pub(super) projects: Projects,
}

impl SignUps {
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
        self.base.sessions.begin(made.account.id, &made.password_hash, Login::Proved, client).await
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
        self.base.throttle.address(client).await?;
        if let Some(invitation) = &request.invitation {
            // Before the password is hashed: junk must not cost a turn.
            self.invitations.find(invitation).await?;
        }
        let password = ("password", &request.password);
        self.passwords.check(&client.address, password, &[&email, name]).await?;
        self.base
            .throttle
            .count(&[
                charge("signup", &client.address, SIGNUPS_PER_ADDRESS),
                // With the client: a stranger must not use up what the owner may ask for.
                charge("mail", &format!("{email} {}", client.address), MAILS_PER_ASKER),
            ])
            .await?;
        let password_hash = self.passwords.hash(&client.address, request.password).await?;
        let is_mailed = self.base.throttle.may_mail(VERIFICATIONS, &email).await;
        let mut conn = self.base.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        let account =
            store::people::accounts::insert(&mut tx, AccountId::generate(), &email, &password_hash)
                .await?;
        let (project, role, key) = match &request.invitation {
            Some(invitation) => {
                let (project, role) =
                    self.invitations.accept_in(&mut tx, account.id, invitation, client).await?;
                (project, role, None)
            }
            None => {
                let (project, key) = self.begin_project(&mut tx, account.id, name, client).await?;
                (project, Role::Owner, Some(key))
            }
        };
        let has_owner = store::people::accounts::is_address_verified(&mut tx, &email).await?;
        security::record(&mut tx, account.id, AccountEvent::Created, Some(client)).await?;
        if is_mailed {
            let (account, address) = (account.id.0, client.address.to_string());
            // The answer does not show that the address has an account; if the new one is not used,
            // it is deleted.
            let content = match has_owner {
                true => Content::Known { account, address },
                false => Content::Verification { account, address },
            };
            self.base.mailing.store(&mut tx, &content).await?;
        }
        tx.commit().await?;
        drop(conn);
        self.base.mailing.hurry();
        Ok(SignedUp { account, project, role, key, password_hash })
    }

    async fn begin_project(
        &self,
        conn: &mut PgConnection,
        account_id: AccountId,
        name: &str,
        client: &Client,
    ) -> Result<(Project, MadeKey), Error> {
        let project = self.projects.insert(conn, account_id, (name, LIVE), client).await?;
        let request = KeyRequest::named(FIRST_KEY.to_owned(), Scope::OF_FIRST_KEY.to_vec());
        let limits = self.plans.of(&project.plan, project.overrides.as_ref());
        let (target, by) = ((project.id, &*project.mode), Some(account_id.to_string()));
        let key = insert_first(conn, target, request, by, limits.max_keys()).await?;
        Ok((project, key))
    }
}
