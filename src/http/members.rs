//! `/v1/projects/{project}/members` and `…/invitations`: members of a project. For sessions only.

use axum::{Json as Reply, extract::State, http::StatusCode};
use chrono::{DateTime, Utc};
use secrecy::ExposeSecret;
use serde::{Deserialize, Serialize};
use serde_json::json;
use sqlx::Acquire;
use utoipa::ToSchema;

use super::error::ErrorBody;
use crate::{
    accounts::{mails, read_email, secret},
    app::App,
    auth::{Anybody, Caller, Govern, Who},
    credentials::Evict,
    domain::{
        access::{Role, may_change_member},
        limits::{INVITATION_SECONDS, MAX_MEMBERS},
    },
    error::Error,
    ids::{AccountId, InvitationId},
    store::{self, audit::NewAuditEntry, members},
    wire::extract::{AccountInPath, InvitationInPath, Json, RequestBody},
};

/// A member.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Member {
    /// The account.
    #[schema(example = "acct_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub account_id: String,
    /// E-mail address.
    pub email: String,
    /// Role in the project.
    pub role: Role,
    /// Member since.
    pub created_at: DateTime<Utc>,
}

impl From<members::Member> for Member {
    fn from(row: members::Member) -> Self {
        Self {
            account_id: row.account_id.to_string(),
            email: row.email,
            role: Role::of_name(&row.role).unwrap_or(Role::Viewer),
            created_at: row.created_at,
        }
    }
}

/// Members.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct MemberList {
    /// Oldest first.
    pub members: Vec<Member>,
}

/// List members.
#[utoipa::path(
    get, path = "/members", tag = "projects", operation_id = "members_list", security(("session" = ["viewer"])),
    params(("project" = String, Path, description = "The project's id or slug.", example = "acme")),
    responses((status = 200, description = "The members.", body = MemberList)),
)]
pub async fn list(
    caller: Caller<Anybody>,
    State(app): State<App>,
) -> Result<Reply<MemberList>, Error> {
    only_members(&caller)?;
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    let rows = members::list(&mut conn, caller.project_id, MAX_MEMBERS).await?;
    Ok(Reply(MemberList { members: rows.into_iter().map(Member::from).collect() }))
}

/// The calling account: no key is a member.
fn only_members(caller: &Caller<Anybody>) -> Result<(), Error> {
    match &caller.who {
        Who::Member(..) => Ok(()),
        Who::Key(..) => Err(Error::Forbidden { needs: "a session of a member" }),
    }
}

/// A new role.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"role": "viewer"}))]
pub struct ChangeMemberRequest {
    /// New role.
    role: Role,
}

impl RequestBody for ChangeMemberRequest {}

/// Change a member's role.
///
/// You cannot grant or revoke a role above your own; a project keeps at least one owner.
#[utoipa::path(
    patch, path = "/members/{account_id}", tag = "projects", operation_id = "members_change", security(("session" = ["admin"])),
    params(
        ("project" = String, Path, description = "The project's id or slug.", example = "acme"),
        ("account_id" = String, Path, description = "The member.", example = "acct_01m7w3ha3aextt8pkwwdmxsmqw"),
    ),
    request_body = ChangeMemberRequest,
    responses(
        (status = 200, description = "The member.", body = Member),
        (status = 400, description = "Invalid request.", body = ErrorBody),
        (status = 404, description = "The project has no such member.", body = ErrorBody),
        (status = 409, description = "The project would be left without an owner.", body = ErrorBody),
        (status = 413, description = "The body is too large.", body = ErrorBody),
        (status = 415, description = "The body is not JSON.", body = ErrorBody),
    ),
)]
pub async fn change(
    caller: Caller<Govern>,
    State(app): State<App>,
    AccountInPath(id): AccountInPath,
    Json(request): Json<ChangeMemberRequest>,
) -> Result<Reply<Member>, Error> {
    set_role(&app, &caller, id, Some(request.role)).await?;
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    let rows = members::list(&mut conn, caller.project_id, MAX_MEMBERS).await?;
    let member = rows.into_iter().find(|it| it.account_id == id);
    member.map(|it| Reply(it.into())).ok_or(Error::MemberNotFound)
}

/// Changes or ends a membership, and writes the audit entry.
async fn set_role<P>(
    app: &App,
    caller: &Caller<P>,
    id: AccountId,
    to: Option<Role>,
) -> Result<(), Error> {
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    let mut tx = conn.begin().await?;
    let roles = members::lock_roles(&mut tx, caller.project_id).await?;
    let role_of = |name: &str| Role::of_name(name);
    let role_now = |id: AccountId| roles.iter().find(|it| it.0 == id).and_then(|it| role_of(&it.1));
    // The caller's role may have changed since the request began.
    let actor = caller.who.account_id().and_then(role_now).ok_or(Error::ProjectNotFound)?;
    let from = role_now(id).ok_or(Error::MemberNotFound)?;
    let is_leaving = to.is_none() && caller.who.id() == id.to_string();
    if !is_leaving && !may_change_member(actor, Some(from), to) {
        return Err(Error::RoleExceedsCaller);
    }
    let owners = roles.iter().filter(|it| role_of(&it.1) == Some(Role::Owner)).count();
    if from == Role::Owner && to != Some(Role::Owner) && owners == 1 {
        return Err(Error::LastOwner);
    }
    match to {
        Some(to) => members::upsert(&mut tx, caller.project_id, id, to.name()).await?,
        None => members::delete(&mut tx, caller.project_id, id).await?,
    }
    if to < Some(from) {
        // Invitations that the member made with the old role end with it.
        members::uninvite_by(&mut tx, caller.project_id, id).await?;
    }
    let facts = |role: Role| json!({ "role": role }).to_string();
    let entry = NewAuditEntry {
        action: if to.is_some() { "member.changed" } else { "member.removed" },
        target: Some(id.to_string()),
        before: Some(facts(from)),
        after: to.map(facts),
    };
    store::audit::insert(&mut tx, caller.project_id, &caller.actor(), &entry).await?;
    tx.commit().await?;
    drop(conn);
    app.credentials.evict(Evict::Members).await;
    Ok(())
}

/// Remove a member.
///
/// Every member may leave; a project keeps at least one owner.
#[utoipa::path(
    delete, path = "/members/{account_id}", tag = "projects", operation_id = "members_remove", security(("session" = ["viewer"])),
    params(
        ("project" = String, Path, description = "The project's id or slug.", example = "acme"),
        ("account_id" = String, Path, description = "The member.", example = "acct_01m7w3ha3aextt8pkwwdmxsmqw"),
    ),
    responses(
        (status = 204, description = "Removed."),
        (status = 404, description = "The project has no such member.", body = ErrorBody),
        (status = 409, description = "The project would be left without an owner.", body = ErrorBody),
    ),
)]
pub async fn remove(
    caller: Caller<Anybody>,
    State(app): State<App>,
    AccountInPath(id): AccountInPath,
) -> Result<StatusCode, Error> {
    only_members(&caller)?;
    set_role(&app, &caller, id, None).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// An open invitation.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Invitation {
    /// Id of the invitation.
    #[schema(example = "inv_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub id: String,
    /// Invited address.
    pub email: String,
    /// Role in the project.
    pub role: Role,
    /// When it was created.
    pub created_at: DateTime<Utc>,
    /// When it expires.
    pub expires_at: DateTime<Utc>,
}

impl From<members::Invitation> for Invitation {
    fn from(row: members::Invitation) -> Self {
        Self {
            id: row.id.to_string(),
            email: row.email,
            role: Role::of_name(&row.role).unwrap_or(Role::Viewer),
            created_at: row.created_at,
            expires_at: row.expires_at,
        }
    }
}

/// Invitations.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct InvitationList {
    /// Oldest first.
    pub invitations: Vec<Invitation>,
}

/// List invitations.
#[utoipa::path(
    get, path = "/invitations", tag = "projects", operation_id = "invitations_list", security(("session" = ["admin"])),
    params(("project" = String, Path, description = "The project's id or slug.", example = "acme")),
    responses((status = 200, description = "Open invitations.", body = InvitationList)),
)]
pub async fn invitations(
    caller: Caller<Govern>,
    State(app): State<App>,
) -> Result<Reply<InvitationList>, Error> {
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    let rows = members::invitations(&mut conn, caller.project_id, MAX_MEMBERS).await?;
    Ok(Reply(InvitationList { invitations: rows.into_iter().map(Invitation::from).collect() }))
}

/// Invitation request.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"email": "grace@example.com", "role": "member"}))]
pub struct InviteRequest {
    /// E-mail address.
    #[schema(min_length = 3, max_length = 254)]
    email: String,
    /// Role in the project.
    role: Role,
}

impl RequestBody for InviteRequest {}

/// A created invitation.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct CreatedInvitation {
    /// The invitation.
    pub invitation: Invitation,
    /// Token that accepts the invitation. It is shown only once, and also mailed.
    pub token: String,
}

/// Invite a member.
#[utoipa::path(
    post, path = "/invitations", tag = "projects", operation_id = "invitations_create", security(("session" = ["admin"])),
    params(("project" = String, Path, description = "The project's id or slug.", example = "acme")),
    request_body = InviteRequest,
    responses(
        (status = 201, description = "The invitation, valid for seven days.", body = CreatedInvitation),
        (status = 400, description = "Invalid request.", body = ErrorBody),
        (status = 413, description = "The body is too large.", body = ErrorBody),
        (status = 415, description = "The body is not JSON.", body = ErrorBody),
    ),
)]
pub async fn invite(
    caller: Caller<Govern>,
    State(app): State<App>,
    Json(request): Json<InviteRequest>,
) -> Result<(StatusCode, Reply<CreatedInvitation>), Error> {
    let email = read_email("email", &request.email)?;
    let Who::Member(grant, bearer) = &caller.who else { return Err(Error::MemberNotFound) };
    app.accounts.throttle_invitation(bearer.account_id, &email).await?;
    let max = caller.limits.max_members();
    let secret = secret::generate(secret::MAIL_PREFIX);
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    let mut tx = conn.begin().await?;
    let roles = members::lock_roles(&mut tx, caller.project_id).await?;
    let role = roles.iter().find(|it| it.0 == bearer.account_id);
    let role = role.and_then(|it| Role::of_name(&it.1)).ok_or(Error::ProjectNotFound)?;
    if !may_change_member(role, None, Some(request.role)) {
        return Err(Error::RoleExceedsCaller);
    }
    if members::count(&mut tx, caller.project_id).await? >= max {
        return Err(Error::QuotaExceeded { what: "members and open invitations", max });
    }
    // An open invitation for the address is replaced: an earlier one with a higher role must not
    // stay valid.
    members::uninvite_address(&mut tx, caller.project_id, &email).await?;
    let row = members::invite(
        &mut tx,
        caller.project_id,
        InvitationId::generate(),
        (&email, request.role.name()),
        &secret::hash(&secret),
        Some(bearer.account_id),
        INVITATION_SECONDS,
    )
    .await?;
    let entry = NewAuditEntry {
        action: "invitation.created",
        target: Some(row.id.to_string()),
        after: Some(json!({ "email": email, "role": request.role }).to_string()),
        ..NewAuditEntry::default()
    };
    store::audit::insert(&mut tx, caller.project_id, &caller.actor(), &entry).await?;
    tx.commit().await?;
    let (url, token) = (&app.accounts.public_url, secret.expose_secret().to_owned());
    let project = &grant.membership.name;
    app.accounts.mailer.send(mails::invitation(&email, url, project, &token)?);
    Ok((StatusCode::CREATED, Reply(CreatedInvitation { invitation: row.into(), token })))
}

/// Revoke an invitation.
#[utoipa::path(
    delete, path = "/invitations/{invitation_id}", tag = "projects", operation_id = "invitations_revoke", security(("session" = ["admin"])),
    params(
        ("project" = String, Path, description = "The project's id or slug.", example = "acme"),
        ("invitation_id" = String, Path, description = "The invitation.", example = "inv_01m7w3ha3aextt8pkwwdmxsmqw"),
    ),
    responses(
        (status = 204, description = "Revoked."),
        (status = 404, description = "The project has no such invitation.", body = ErrorBody),
    ),
)]
pub async fn uninvite(
    caller: Caller<Govern>,
    State(app): State<App>,
    InvitationInPath(id): InvitationInPath,
) -> Result<StatusCode, Error> {
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    let mut tx = conn.begin().await?;
    let row = members::uninvite(&mut tx, caller.project_id, id).await?;
    let row = row.ok_or(Error::InvitationNotFound)?;
    let entry = NewAuditEntry {
        action: "invitation.revoked",
        target: Some(id.to_string()),
        before: Some(json!({ "email": row.email, "role": row.role }).to_string()),
        ..NewAuditEntry::default()
    };
    store::audit::insert(&mut tx, caller.project_id, &caller.actor(), &entry).await?;
    tx.commit().await?;
    Ok(StatusCode::NO_CONTENT)
}
