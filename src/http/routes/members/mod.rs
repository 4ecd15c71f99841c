//! `/v1/projects/{project}/members` and `…/invitations`: members of a project. For sessions only.

pub mod invitations;

use axum::{Json as Reply, extract::State, http::StatusCode};
use chrono::{DateTime, Utc};
use fencepost_domain::{
    access::Role,
    error::{Error, chain},
    limits::{self, MAX_MEMBERS},
};
use fencepost_identity::{
    accounts::{members, read_email},
    credentials::Evict,
};
use fencepost_store as store;
use fencepost_web::{
    app::App,
    auth::{Anybody, Caller, Govern, Who},
    wire::{
        extract::{AccountInPath, InvitationInPath, Json, Query, RequestBody},
        openapi::chars,
    },
};
use secrecy::ExposeSecret;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::error::ErrorBody;

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

impl From<store::people::members::Member> for Member {
    fn from(row: store::people::members::Member) -> Self {
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
    let rows = store::people::members::list(&mut conn, caller.project_id, MAX_MEMBERS).await?;
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
    patch, path = "/members/{account_id}", tag = "projects", operation_id = "members_update", security(("session" = ["admin"])),
    params(
        ("project" = String, Path, description = "The project's id or slug.", example = "acme"),
        ("account_id" = String, Path, description = "The member.", example = "acct_01m7w3ha3aextt8pkwwdmxsmqw"),
    ),
    request_body = ChangeMemberRequest,
    responses(
        (status = 200, description = "The member.", body = Member),
        (status = 404, description = "The project has no such member.", body = ErrorBody),
        (status = 409, description = "The project would be left without an owner.", body = ErrorBody),
    ),
)]
pub async fn change(
    caller: Caller<Govern>,
    State(app): State<App>,
    AccountInPath(id): AccountInPath,
    Json(request): Json<ChangeMemberRequest>,
) -> Result<Reply<Member>, Error> {
    caller.require_step_up(&app).await?;
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    members::set_role(&mut conn, &caller.author(), id, Some(request.role), None).await?;
    drop(conn);
    app.credentials.evict(Evict::Members).await;
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    let rows = store::people::members::list(&mut conn, caller.project_id, MAX_MEMBERS).await?;
    let member = rows.into_iter().find(|it| it.account_id == id);
    member.map(|it| Reply(it.into())).ok_or(Error::MemberNotFound)
}

/// The treatment of keys that a removed member or key has created.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct RevokeKeysQuery {
    /// True: the live keys that it has created are revoked, too. False: they stay. Required where
    /// there are such keys: without it, the answer is a 409 that lists them.
    pub(super) revoke_keys: Option<bool>,
}

/// Remove a member.
///
/// Every member may leave; a project keeps at least one owner.
#[utoipa::path(
    delete, path = "/members/{account_id}", tag = "projects", operation_id = "members_remove", security(("session" = ["viewer"])),
    params(
        ("project" = String, Path, description = "The project's id or slug.", example = "acme"),
        ("account_id" = String, Path, description = "The member.", example = "acct_01m7w3ha3aextt8pkwwdmxsmqw"),
        RevokeKeysQuery,
    ),
    responses(
        (status = 204, description = "Removed."),
        (status = 404, description = "The project has no such member.", body = ErrorBody),
        (status = 409, description = "The project would be left without an owner, or live keys of the member remain.", body = ErrorBody),
    ),
)]
pub async fn remove(
    caller: Caller<Anybody>,
    State(app): State<App>,
    AccountInPath(id): AccountInPath,
    Query(query): Query<RevokeKeysQuery>,
) -> Result<StatusCode, Error> {
    only_members(&caller)?;
    if caller.who.account_id() != Some(id) {
        caller.require_step_up(&app).await?;
    }
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    let author = caller.author();
    let ended = members::set_role(&mut conn, &author, id, None, query.revoke_keys).await?;
    drop(conn);
    app.credentials.evict(Evict::Members).await;
    for hash in ended {
        app.credentials.evict(Evict::Key(hash)).await;
    }
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

impl From<store::people::invitations::Invitation> for Invitation {
    fn from(row: store::people::invitations::Invitation) -> Self {
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
    let rows = store::people::invitations::list(&mut conn, caller.project_id, MAX_MEMBERS).await?;
    Ok(Reply(InvitationList { invitations: rows.into_iter().map(Invitation::from).collect() }))
}

/// Invitation request.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"email": "grace@example.com", "role": "member"}))]
pub struct InviteRequest {
    /// E-mail address.
    #[schema(extensions(("bounds" = json!(chars(3, limits::MAX_EMAIL_CHARS)))))]
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
    /// Token that accepts the invitation. It is shown only once; the mail has another one.
    pub token: String,
}

/// Invite a member.
///
/// Where this server sends mail, the address of your account must be verified.
#[utoipa::path(
    post, path = "/invitations", tag = "projects", operation_id = "invitations_create", security(("session" = ["admin"])),
    params(("project" = String, Path, description = "The project's id or slug.", example = "acme")),
    request_body = InviteRequest,
    responses(
        (status = 201, description = "The invitation, valid for seven days.", body = CreatedInvitation),
    ),
)]
pub async fn invite(
    caller: Caller<Govern>,
    State(app): State<App>,
    Json(request): Json<InviteRequest>,
) -> Result<(StatusCode, Reply<CreatedInvitation>), Error> {
    let email = read_email("email", &request.email)?;
    let Who::Member(_, bearer) = &caller.who else { return Err(Error::MemberNotFound) };
    caller.require_step_up(&app).await?;
    app.accounts.invitations.count(bearer.account_id, caller.project_id, &email).await?;
    let max = caller.limits.max_members();
    let mut conn = app.engine.pools.read_for(caller.project_id).await?;
    let invited = members::invite(&mut conn, &caller.author(), (&email, request.role), max).await;
    let (row, token) = invited?;
    drop(conn);
    let token = token.expose_secret().to_owned();
    // The invitation exists, and its token is only in this answer.
    if let Err(error) = app.accounts.invitations.mail((caller.project_id, row.id), &email).await {
        tracing::error!(error = chain(&error), "invitation was not mailed");
    }
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
    members::uninvite(&mut conn, &caller.author(), id).await?;
    Ok(StatusCode::NO_CONTENT)
}
