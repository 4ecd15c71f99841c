//! `/v1/invitations`: for the holder of an invitation's token. Creating invitations is in
//! `members.rs`.

use axum::{Extension, Json as Reply, extract::State};
use chrono::{DateTime, Utc};
use fencepost_domain::{access::Role, error::Error, limits};
use fencepost_identity::{accounts::Client, credentials::Evict};
use fencepost_store::people::invitations::Invited;
use fencepost_web::{
    app::App,
    auth::Person,
    wire::{
        extract::{Json, RequestBody},
        openapi::chars,
    },
};
use secrecy::SecretString;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{error::ErrorBody, routes::projects::Project};

/// Token of an invitation.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"token": "fp_mail_…"}))]
pub struct InvitationToken {
    /// Token from the mail.
    #[schema(value_type = String, extensions(("bounds" = json!(chars(0, limits::MAX_SECRET_BYTES)))))]
    token: SecretString,
}

impl RequestBody for InvitationToken {}

/// Content of an invitation.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct InvitationPreview {
    /// Name of the project.
    #[schema(example = "Acme")]
    pub project_name: String,
    /// Invited address.
    pub email: String,
    /// Role in the project.
    pub role: Role,
    /// When the invitation expires.
    pub expires_at: DateTime<Utc>,
}

/// Preview an invitation.
///
/// Does not change it, and needs no account.
#[utoipa::path(
    post, path = "/invitations/preview", tag = "accounts", operation_id = "invitations_preview",
    request_body = InvitationToken, security(()),
    responses(
        (status = 200, description = "Content of the invitation.", body = InvitationPreview),
        (status = 400, description = "Invalid invitation.", body = ErrorBody),
    ),
)]
pub async fn preview(
    State(app): State<App>,
    Extension(client): Extension<Client>,
    Json(request): Json<InvitationToken>,
) -> Result<Reply<InvitationPreview>, Error> {
    let Invited { project_name, email, role, expires_at } =
        app.accounts.invitations.preview(&request.token, &client).await?;
    let role = Role::of_name(&role).unwrap_or(Role::Viewer);
    Ok(Reply(InvitationPreview { project_name, email, role, expires_at }))
}

/// Accept an invitation.
#[utoipa::path(
    post, path = "/invitations/accept", tag = "accounts", operation_id = "invitations_accept", security(("session" = [])),
    request_body = InvitationToken,
    responses(
        (status = 200, description = "Accepted.", body = Project),
        (status = 400, description = "Invalid invitation.", body = ErrorBody),
    ),
)]
pub async fn accept(
    person: Person,
    State(app): State<App>,
    Extension(client): Extension<Client>,
    Json(request): Json<InvitationToken>,
) -> Result<Reply<Project>, Error> {
    let account_id = person.bearer.account_id;
    let accepted = app.accounts.invitations.accept(account_id, &request.token, &client).await;
    let (project, role) = accepted?;
    app.credentials.evict(Evict::Members).await;
    Ok(Reply(Project::of(project, Some(role))))
}
