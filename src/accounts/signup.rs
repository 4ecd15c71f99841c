//! Sign-up: an account, a project, and a key that is valid immediately.
//!
//! The answer is the same whether or not the address is known: an account with an unverified
//! address works, and the owner of the address is told by mail.

use secrecy::{ExposeSecret, SecretString};
use sqlx::{Acquire, PgConnection};

use super::{
    Accounts, Client, KeyRequest, MAILS_PER_EMAIL, MadeKey, SIGNUPS_PER_ADDRESS, SignedIn, charge,
    mails, make_key, project_facts, read_email,
    secret::{self, MAIL_PREFIX},
};
use crate::{
    config::Signup,
    domain::{
        access::{Role, Scope},
        limits::{MAX_NAME_CHARS, VERIFY_SECONDS},
        text,
    },
    error::Error,
    ids::{AccountId, ProjectPublicId},
    store::{
        self,
        accounts::{Account, Purpose},
        audit::NewAuditEntry,
        members::Invited,
        projects::{NewProject, Project},
    },
};

/// Tries to find a free slug.
const MAX_SLUG_TRIES: usize = 5;
/// Characters of a slug.
const MAX_SLUG_CHARS: usize = 60;
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
    /// A key with all scopes; none after an invitation.
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
        self.begin_session(made.account.id, &made.password_hash, client).await
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
        text::check_name(name, MAX_NAME_CHARS)
            .map_err(|error| Error::invalid("project_name", error.to_string()))?;
        self.throttle_address(client).await?;
        self.passwords.check("password", &request.password, &[&email, name]).await?;
        self.throttle(&[
            charge("signup", &client.address, SIGNUPS_PER_ADDRESS),
            charge("mail", &email, MAILS_PER_EMAIL),
        ])
        .await?;
        let password_hash = self.passwords.hash(request.password).await?;
        let mut conn = self.pool.acquire().await?;
        let mut tx = conn.begin().await?;
        let account =
            store::accounts::insert(&mut tx, AccountId::generate(), &email, &password_hash).await?;
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
        let secret = self.new_mail_secret(&mut tx, account.id, Purpose::Verify).await?;
        tx.commit().await?;
        self.mail_verification(&email, &secret)?;
        Ok(SignedUp { account, project, role, key, password_hash })
    }

    async fn begin_project(
        &self,
        conn: &mut PgConnection,
        account_id: AccountId,
        name: &str,
        client: &Client,
    ) -> Result<(Project, MadeKey), Error> {
        let project = insert_with_free_slug(conn, name, "live", &self.default_plan).await?;
        store::members::upsert(conn, project.id, account_id, Role::Owner.name()).await?;
        let request = KeyRequest {
            name: FIRST_KEY.to_owned(),
            scopes: Scope::ALL.to_vec(),
            created_by: Some(account_id.to_string()),
            ..KeyRequest::default()
        };
        let limits = self.plans.of(&project.plan, project.overrides.as_ref());
        let key = make_key(conn, (project.id, &project.mode), request, limits.max_keys()).await?;
        let entry = NewAuditEntry {
            action: "project.created",
            target: Some(project.public_id.to_string()),
            after: Some(project_facts(&project)),
            ..NewAuditEntry::default()
        };
        let actor = client.actor("account", account_id.to_string());
        store::audit::insert(conn, project.id, &actor, &entry).await?;
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
        let mut conn = self.pool.acquire().await?;
        let invited = store::members::invited(&mut conn, &secret::hash(invitation)).await?;
        invited.ok_or_else(bad_invitation)
    }

    /// Uses up an invitation: the account becomes a member, with the invited role or its present
    /// one, whichever is higher.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the invitation is not valid.
    pub async fn accept(
        &self,
        conn: &mut PgConnection,
        account_id: AccountId,
        invitation: &SecretString,
        client: &Client,
    ) -> Result<(Project, Role), Error> {
        let accepted = store::members::accept(conn, &secret::hash(invitation)).await?;
        let (project_id, role, _) = accepted.ok_or_else(bad_invitation)?;
        let roles = store::members::lock_roles(conn, project_id).await?;
        let present = roles.iter().find(|it| it.0 == account_id);
        let present = present.and_then(|it| Role::of_name(&it.1));
        let role = Role::of_name(&role).max(present).ok_or_else(bad_invitation)?;
        store::members::upsert(conn, project_id, account_id, role.name()).await?;
        let entry = NewAuditEntry {
            action: "member.added",
            target: Some(account_id.to_string()),
            after: Some(serde_json::json!({ "role": role }).to_string()),
            ..NewAuditEntry::default()
        };
        let actor = client.actor("account", account_id.to_string());
        store::audit::insert(conn, project_id, &actor, &entry).await?;
        let project = store::projects::get(conn, project_id).await?.ok_or_else(bad_invitation)?;
        Ok((project, role))
    }

    /// A token to be mailed.
    pub(super) async fn new_mail_secret(
        &self,
        conn: &mut PgConnection,
        account_id: AccountId,
        purpose: Purpose,
    ) -> Result<SecretString, Error> {
        let secret = secret::generate(MAIL_PREFIX);
        let life_seconds = match purpose {
            Purpose::Verify => VERIFY_SECONDS,
            Purpose::Reset => crate::domain::limits::RESET_SECONDS,
        };
        let hash = secret::hash(&secret);
        store::accounts::insert_mail_token(conn, account_id, purpose, &hash, life_seconds).await?;
        Ok(secret)
    }

    pub(super) fn mail_verification(
        &self,
        email: &str,
        secret: &SecretString,
    ) -> Result<(), Error> {
        let mail = mails::verification(email, &self.public_url, secret.expose_secret())?;
        self.mailer.send(mail);
        Ok(())
    }
}

fn bad_invitation() -> Error {
    Error::invalid("invitation", "is unknown, used, revoked or expired")
}

/// Creates a project with a slug derived from its name.
///
/// # Errors
/// [`Error::SlugTaken`] when no free slug was found.
pub async fn insert_with_free_slug(
    conn: &mut PgConnection,
    name: &str,
    mode: &str,
    plan: &str,
) -> Result<Project, Error> {
    let base: String = text::slug(name).chars().take(MAX_SLUG_CHARS).collect();
    let base = if base.is_empty() { "project".to_owned() } else { base };
    let base = base.trim_matches('-').to_owned();
    for attempt in 0..MAX_SLUG_TRIES {
        let slug = match attempt {
            0 => base.clone(),
            _ => format!("{base}-{:06x}", rand::random::<u32>() & 0x00ff_ffff),
        };
        let public_id = ProjectPublicId::generate();
        let new = NewProject { public_id, slug: &slug, name, mode, plan };
        if let Some(project) = store::projects::insert(conn, new).await? {
            return Ok(project);
        }
    }
    Err(Error::SlugTaken)
}
