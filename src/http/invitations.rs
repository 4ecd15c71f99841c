//! `/v1/invitations`: for whoever has the token of one. Inviting is in `members.rs`.

use axum::{Extension, Json as Reply, extract::State};
use chrono::{DateTime, Utc};
use secrecy::SecretString;
use serde::{Deserialize, Serialize};
use sqlx::Acquire;
use utoipa::ToSchema;

use super::{error::ErrorBody, projects::Project};
use crate::{
    accounts::Client,
    app::{App, Forget},
    auth::Person,
    domain::access::Role,
    error::Error,
    store::members::Invited,
    wire::extract::{Json, RequestBody},
};

/// What an invitation's mail brought.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"token": "fp_mail_…"}))]
pub struct InvitationToken {
    /// The invitation's token.
    #[schema(value_type = String, max_length = 128)]
    token: SecretString,
}

impl RequestBody for InvitationToken {}

/// What an invitation leads to.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct InvitationPreview {
    /// The project's name.
    #[schema(example = "Acme")]
    pub project_name: String,
    /// To whom it was sent.
    pub email: String,
    /// What they would be.
    pub role: Role,
    /// Until when it can be accepted.
    pub expires_at: DateTime<Utc>,
}

/// Look at an invitation.
///
/// Before it is accepted: it stays as it is. Whoever has the token may look, with or without an account.
#[utoipa::path(
    post, path = "/invitations/preview", tag = "accounts", operation_id = "invitations_preview",
    request_body = InvitationToken, security(()),
    responses(
        (status = 200, description = "What it leads to.", body = InvitationPreview),
        (status = 400, description = "The invitation is not good.", body = ErrorBody),
        (status = 413, description = "The body is too large.", body = ErrorBody),
        (status = 415, description = "The body is not JSON.", body = ErrorBody),
        (status = 429, description = "Too many requests.", body = ErrorBody),
        (status = 503, description = "Try again later.", body = ErrorBody),
    ),
)]
pub async fn preview(
    State(app): State<App>,
    Extension(client): Extension<Client>,
    Json(request): Json<InvitationToken>,
) -> Result<Reply<InvitationPreview>, Error> {
    let Invited { project_name, email, role, expires_at } =
        app.accounts.preview_invitation(&request.token, &client).await?;
    let role = Role::of_name(&role).unwrap_or(Role::Viewer);
    Ok(Reply(InvitationPreview { project_name, email, role, expires_at }))
}

/// Accept an invitation.
#[utoipa::path(
    post, path = "/invitations/accept", tag = "accounts", operation_id = "invitations_accept", security(("session" = [])),
    request_body = InvitationToken,
    responses(
        (status = 200, description = "You are a member.", body = Project),
        (status = 400, description = "The invitation is not good.", body = ErrorBody),
        (status = 401, description = "No live session.", body = ErrorBody),
        (status = 413, description = "The body is too large.", body = ErrorBody),
        (status = 415, description = "The body is not JSON.", body = ErrorBody),
    ),
)]
pub async fn accept(
    person: Person,
    State(app): State<App>,
    Extension(client): Extension<Client>,
    Json(request): Json<InvitationToken>,
) -> Result<Reply<Project>, Error> {
    let mut conn = app.engine.pools.people.acquire().await?;
    let mut tx = conn.begin().await?;
    let account_id = person.bearer.account_id;
    let (project, role) = app.accounts.accept(&mut tx, account_id, &request.token, &client).await?;
    tx.commit().await?;
    drop(conn);
    app.forget(Forget::Members).await;
    Ok(Reply(Project::of(project, Some(role))))
}
