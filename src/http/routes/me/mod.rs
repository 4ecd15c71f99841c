//! `/v1/me`: the caller's account, its sessions, export and deletion. For sessions only.

pub mod email;
pub mod identities;
pub mod passkeys;
pub mod second_factors;

use axum::{Extension, Json as Reply, extract::State, http::StatusCode};
use chrono::{DateTime, Utc};
use fencepost_domain::{
    error::Error,
    limits::{self, MAX_SHOWN_SESSIONS, SESSION_IDLE_SECONDS},
};
use fencepost_identity::{
    accounts::{
        Client,
        security::{self, AccountEvent},
    },
    credentials::Evict,
};
use fencepost_store::{
    self as store,
    people::{
        account_log::{self, AccountLogRow},
        audit::{AuditFilter, Place},
        members::Membership,
        sessions,
    },
};
use fencepost_web::{
    app::App,
    auth::Person,
    wire::{
        extract::{Json, RequestBody, SessionInPath},
        openapi::chars,
    },
};
use secrecy::SecretString;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use self::{
    identities::{Identity, IdentityList},
    passkeys::Passkey,
};
use crate::{
    error::ErrorBody,
    routes::{audit::AuditEntry, auth::Account, projects::Project},
};

/// Maximum number of projects in one answer, oldest first.
const MAX_SHOWN_PROJECTS: i64 = 1_000;
/// Maximum number of audit entries in an export: project after project, the newest first.
const MAX_EXPORTED_ENTRIES: i64 = 1_000;

/// The caller.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Me {
    /// The account.
    pub account: Account,
    /// Id of the calling session.
    #[schema(example = "sess_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub session_id: String,
    /// Projects that the account is a member of.
    pub projects: Vec<Project>,
}

async fn find(app: &App, person: Person) -> Result<(Account, Vec<Membership>), Error> {
    let mut conn = app.engine.pools.people.acquire().await?;
    let account = store::people::accounts::find(&mut conn, person.bearer.account_id).await?;
    let account = account.ok_or(Error::Unauthorized)?;
    let memberships =
        store::people::members::of_account(&mut conn, account.id, MAX_SHOWN_PROJECTS).await?;
    Ok((account.into(), memberships))
}

/// Read your account.
#[utoipa::path(
    get, path = "/me", tag = "accounts", operation_id = "me_get", security(("session" = [])),
    responses((status = 200, description = "Your account.", body = Me)),
)]
pub async fn get(person: Person, State(app): State<App>) -> Result<Reply<Me>, Error> {
    let (account, memberships) = find(&app, person).await?;
    let projects = memberships.into_iter().map(Project::from).collect();
    Ok(Reply(Me { account, session_id: person.bearer.session_id.to_string(), projects }))
}

/// A session.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Session {
    /// Id of the session.
    #[schema(example = "sess_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub id: String,
    /// True for the calling session.
    pub is_current: bool,
    /// When it started.
    pub created_at: DateTime<Utc>,
    /// When it was last refreshed.
    pub last_used_at: DateTime<Utc>,
    /// When it expires at the latest.
    pub expires_at: DateTime<Utc>,
    /// User agent of its client.
    #[schema(required)]
    pub user_agent: Option<String>,
    /// IP address of its login.
    #[schema(required)]
    pub address: Option<String>,
}

impl Session {
    fn of(row: sessions::Session, person: Person) -> Self {
        Self {
            is_current: row.id == person.bearer.session_id,
            id: row.id.to_string(),
            created_at: row.created_at,
            last_used_at: row.last_used_at,
            expires_at: row.expires_at,
            user_agent: row.user_agent,
            address: row.address,
        }
    }
}

/// An account's sessions.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct SessionList {
    /// Live sessions, newest first.
    pub sessions: Vec<Session>,
}

/// List your sessions.
#[utoipa::path(
    get, path = "/me/sessions", tag = "accounts", operation_id = "me_sessions", security(("session" = [])),
    responses((status = 200, description = "Your sessions.", body = SessionList)),
)]
pub async fn sessions(person: Person, State(app): State<App>) -> Result<Reply<SessionList>, Error> {
    let mut conn = app.engine.pools.people.acquire().await?;
    let id = person.bearer.account_id;
    let rows = sessions::list(&mut conn, id, SESSION_IDLE_SECONDS, MAX_SHOWN_SESSIONS).await?;
    let sessions = rows.into_iter().map(|it| Session::of(it, person)).collect();
    Ok(Reply(SessionList { sessions }))
}

/// Revoke one of your sessions.
#[utoipa::path(
    delete, path = "/me/sessions/{session_id}", tag = "accounts", operation_id = "me_end_session", security(("session" = [])),
    params(("session_id" = String, Path, description = "The session.", example = "sess_01m7w3ha3aextt8pkwwdmxsmqw")),
    responses(
        (status = 204, description = "Revoked."),
        (status = 404, description = "You have no such session.", body = ErrorBody),
    ),
)]
pub async fn end_session(
    person: Person,
    State(app): State<App>,
    Extension(client): Extension<Client>,
    SessionInPath(id): SessionInPath,
) -> Result<StatusCode, Error> {
    let account_id = person.bearer.account_id;
    let mut conn = app.engine.pools.people.acquire().await?;
    if !sessions::revoke(&mut conn, account_id, id).await? {
        return Err(Error::SessionNotFound);
    }
    security::record(&mut conn, account_id, AccountEvent::SessionEnded, Some(&client)).await?;
    drop(conn);
    app.credentials.evict(Evict::Session(id)).await;
    Ok(StatusCode::NO_CONTENT)
}

/// An entry of an account's security log.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct SecurityEntry {
    /// Id of the entry.
    #[schema(example = "aud_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub id: String,
    /// When it happened.
    pub at: DateTime<Utc>,
    /// Type of the entry, such as `login.failed`.
    #[schema(example = "login.succeeded")]
    pub action: String,
    /// IP address of the client; null: the operator of the server.
    #[schema(required)]
    pub address: Option<String>,
    /// User agent of the client.
    #[schema(required)]
    pub user_agent: Option<String>,
    /// Finds the request in the server's log.
    #[schema(required)]
    pub request_id: Option<String>,
}

impl From<AccountLogRow> for SecurityEntry {
    fn from(row: AccountLogRow) -> Self {
        let AccountLogRow { id, at, action, address, user_agent, request_id } = row;
        Self { id: id.to_string(), at, action, address, user_agent, request_id }
    }
}

/// Entries of an account's security log.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct SecurityLog {
    /// The newest 200 entries of the last 90 days, newest first.
    pub entries: Vec<SecurityEntry>,
}

async fn security_entries(app: &App, person: Person) -> Result<Vec<SecurityEntry>, Error> {
    let mut conn = app.engine.pools.people.acquire().await?;
    let (id, limit) = (person.bearer.account_id, limits::MAX_SHOWN_SECURITY_ENTRIES);
    let rows = account_log::newest(&mut conn, id, limit).await?;
    Ok(rows.into_iter().map(SecurityEntry::from).collect())
}

/// Read your security log.
///
/// Logins, failed logins, refused codes, ended sessions, and changes of the password, the address,
/// the second factor and the identities at login providers. Of each kind, at most ten a
/// day are noted. Failed logins are noted only for the account that has verified the address, or
/// for the only one that claims it.
#[utoipa::path(
    get, path = "/me/security-log", tag = "accounts", operation_id = "me_security_log", security(("session" = [])),
    responses((status = 200, description = "What happened to your account.", body = SecurityLog)),
)]
pub async fn security_log(
    person: Person,
    State(app): State<App>,
) -> Result<Reply<SecurityLog>, Error> {
    let entries = security_entries(&app, person).await?;
    Ok(Reply(SecurityLog { entries }))
}

/// All data of an account.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct AccountExport {
    /// The account.
    pub account: Account,
    /// Sessions.
    pub sessions: Vec<Session>,
    /// Identities of the account at login providers.
    pub identities: Vec<Identity>,
    /// Passkeys of the account.
    pub passkeys: Vec<Passkey>,
    /// Projects that it is a member of.
    pub projects: Vec<Project>,
    /// Security log of the account.
    pub security_log: Vec<SecurityEntry>,
    /// Audit entries of the account: at most 1,000, project after project, each
    /// project's newest first.
    pub audit_entries: Vec<AuditEntry>,
}

/// Export your account.
///
/// Jobs and settings belong to projects, not to accounts. At most ten exports a day.
#[utoipa::path(
    get, path = "/me/export", tag = "accounts", operation_id = "me_export", security(("session" = [])),
    responses((status = 200, description = "All data of the account.", body = AccountExport)),
)]
pub async fn export(person: Person, State(app): State<App>) -> Result<Reply<AccountExport>, Error> {
    let id = person.bearer.account_id;
    app.accounts.throttle.export(id).await?;
    let (account, memberships) = find(&app, person).await?;
    let mut conn = app.engine.pools.people.acquire().await?;
    let rows = sessions::list(&mut conn, id, SESSION_IDLE_SECONDS, MAX_SHOWN_SESSIONS).await?;
    // Logins and the console need it.
    drop(conn);
    let sessions = rows.into_iter().map(|it| Session::of(it, person)).collect();
    let Reply(IdentityList { identities }) = identities::list(person, State(app.clone())).await?;
    let passkeys =
        app.accounts.authenticators.second_factors(id).await?.1.into_iter().map(Passkey::from);
    let passkeys = passkeys.collect();
    let security_log = security_entries(&app, person).await?;
    let mine = AuditFilter { actor_id: Some(id.to_string()), ..AuditFilter::default() };
    let mut audit_entries = Vec::new();
    for it in &memberships {
        let left = MAX_EXPORTED_ENTRIES - audit_entries.len() as i64;
        if left == 0 {
            break;
        }
        let mut conn = app.engine.pools.read_for(it.project_id).await?;
        let rows = store::people::audit::page(&mut conn, it.project_id, &mine, Place::Newest, left)
            .await?;
        drop(conn);
        for row in rows {
            audit_entries.push(AuditEntry::of(row)?);
        }
    }
    let projects = memberships.into_iter().map(Project::from).collect();
    let export = AccountExport {
        account,
        sessions,
        identities,
        passkeys,
        projects,
        security_log,
        audit_entries,
    };
    Ok(Reply(export))
}

/// Account deletion.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"password": "quiet otters borrow umbrellas"}))]
pub struct DeleteAccountRequest {
    /// Password, as a confirmation.
    #[schema(value_type = String, extensions(("bounds" = json!(chars(0, limits::MAX_PASSWORD_CHARS)))))]
    password: SecretString,
    /// True: the live keys that you have created in other projects are revoked, too. False: they
    /// stay. Required where there are such keys: without it, the answer is a 409 that lists them.
    revoke_keys: Option<bool>,
}

impl RequestBody for DeleteAccountRequest {}

/// Delete your account.
///
/// Projects without another member are deleted with it, including all jobs; their keys stop working
/// within five seconds. A project with other members needs another owner first.
#[utoipa::path(
    post, path = "/me/delete", tag = "accounts", operation_id = "me_delete", security(("session" = [])),
    request_body = DeleteAccountRequest,
    responses(
        (status = 204, description = "Deleted."),
        (status = 401, description = "No live session, or wrong password.", body = ErrorBody),
        (status = 409, description = "A project would be left without an owner, or live keys remain.", body = ErrorBody),
    ),
)]
pub async fn delete(
    person: Person,
    State(app): State<App>,
    Extension(client): Extension<Client>,
    Json(request): Json<DeleteAccountRequest>,
) -> Result<StatusCode, Error> {
    let DeleteAccountRequest { password, revoke_keys } = request;
    app.accounts.removals.delete(person.bearer, password, revoke_keys, &client).await?;
    app.credentials.evict(Evict::Session(person.bearer.session_id)).await;
    app.credentials.evict(Evict::KeysAndMembers).await;
    Ok(StatusCode::NO_CONTENT)
}
