//! `/v1/me/identities`: who the caller is at OpenID Connect providers. The console links them, as
//! that needs a browser.

use axum::{Extension, Json as Reply, extract::State, http::StatusCode};
use chrono::{DateTime, Utc};
use fencepost_domain::error::Error;
use fencepost_identity::accounts::Client;
use fencepost_web::{app::App, auth::Person, wire::extract::IdentityInPath};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::ErrorBody;

/// An account at an OpenID Connect provider.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Identity {
    /// Id of the identity.
    #[schema(example = "idn_01m7w3ha3aextt8pkwwdmxsmqw")]
    pub id: String,
    /// Name of the provider; its URL, if the server does not offer it any more.
    #[schema(example = "Acme")]
    pub provider: String,
    /// Address that the provider verified, at the last login; null: it named none.
    #[schema(required)]
    pub email: Option<String>,
    /// When it was linked.
    pub created_at: DateTime<Utc>,
    /// When it last logged in; null: never.
    #[schema(required)]
    pub last_used_at: Option<DateTime<Utc>>,
}

/// Identities of an account.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct IdentityList {
    /// Identities, oldest first: at most ten.
    pub identities: Vec<Identity>,
}

/// List your identities.
///
/// With each you can log in to the console instead of with your password.
#[utoipa::path(
    get, path = "/me/identities", tag = "accounts", operation_id = "me_identities", security(("session" = [])),
    responses((status = 200, description = "Your identities.", body = IdentityList)),
)]
pub async fn list(person: Person, State(app): State<App>) -> Result<Reply<IdentityList>, Error> {
    let rows = app.accounts.identities.list(person.bearer.account_id).await?;
    let identities = rows.into_iter().map(|it| Identity {
        id: it.id.to_string(),
        provider: app.accounts.providers.label_of(&it.issuer).to_owned(),
        email: it.email,
        created_at: it.created_at,
        last_used_at: it.last_used_at,
    });
    Ok(Reply(IdentityList { identities: identities.collect() }))
}

/// Unlink one of your identities.
///
/// It cannot log in any more. Sessions that it has begun go on. Needs a session that was stepped
/// up.
#[utoipa::path(
    delete, path = "/me/identities/{identity_id}", tag = "accounts", operation_id = "me_unlink_identity", security(("session" = [])),
    params(("identity_id" = String, Path, description = "The identity.", example = "idn_01m7w3ha3aextt8pkwwdmxsmqw")),
    responses(
        (status = 204, description = "Unlinked."),
        (status = 403, description = "The session must be stepped up.", body = ErrorBody),
        (status = 404, description = "You have no such identity.", body = ErrorBody),
    ),
)]
pub async fn unlink(
    person: Person,
    State(app): State<App>,
    Extension(client): Extension<Client>,
    IdentityInPath(id): IdentityInPath,
) -> Result<StatusCode, Error> {
    app.accounts.identities.unlink(person.bearer, id, &client).await?;
    Ok(StatusCode::NO_CONTENT)
}
