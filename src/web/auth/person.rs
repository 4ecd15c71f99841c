//! Persons with a session, and the client of a request.

use std::net::{IpAddr, Ipv4Addr};

use axum::{
    extract::FromRequestParts,
    http::{Extensions, HeaderMap, header::USER_AGENT, request::Parts},
};
use fencepost_domain::{error::Error, text};
use fencepost_identity::accounts::{Client, token::Bearer};
use fencepost_signals::{
    limiter::{Charge, Rate, client_of},
    telemetry,
};
use metrics::counter;

use super::{
    CallReport,
    credential::{check_form, presented},
};
use crate::app::App;

/// Calls per minute of one account to routes about itself.
pub const CALLS_PER_ACCOUNT: Rate = Rate::per_minute(120);
/// Maximum bytes of a stored user agent.
const MAX_USER_AGENT_BYTES: usize = 200;
const NO_SESSION: &str = "no session was sent: log in at /v1/auth/login, and add the header \
                          `Authorization: Bearer ACCESS_TOKEN`";

/// A request with a live session. No key is a person.
#[derive(Debug, Clone, Copy)]
pub struct Person {
    /// The account and its session.
    pub bearer: Bearer,
}

impl FromRequestParts<App> for Person {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Error> {
        let token = presented(&parts.headers).map_err(|error| match error {
            // The words of other routes ask for a key.
            Error::NoCredential(_) => Error::NoCredential(NO_SESSION),
            other => other,
        })?;
        let Some(bearer) = app.accounts.tokens.read(&token) else {
            // A live key may learn that it is valid, but not sufficient.
            let hash = super::key::hash(&token);
            check_form(&token)?;
            return Err(if app.credentials.key(hash).await?.is_some() {
                Error::Forbidden { needs: "a session: log in at /v1/auth/login" }
            } else {
                Error::Unauthorized
            });
        };
        if !app.credentials.is_session_live(bearer).await? {
            return Err(Error::Unauthorized);
        }
        let charge = Charge {
            name: format!("limit:{{{}}}", bearer.account_id),
            rate: CALLS_PER_ACCOUNT,
            overdraft_windows: 0,
        };
        let verdict = app.accounts.limiter.charge(&[charge], &[]).await;
        let report = parts.extensions.get::<CallReport>().cloned().unwrap_or_default();
        report.record("account", verdict.tightest());
        if let Some(retry_after_seconds) = verdict.retry_after_seconds() {
            counter!(telemetry::LIMITED, "budget" => "account").increment(1);
            return Err(Error::RateLimited { retry_after_seconds });
        }
        Ok(Self { bearer })
    }
}

/// The client of a request: its address and user agent.
#[derive(Debug, Clone, Copy)]
pub struct ClientAddress(pub IpAddr);

/// The address of a request's client.
pub(super) fn address_of(extensions: &Extensions) -> IpAddr {
    extensions.get::<ClientAddress>().map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |it| it.0)
}

/// The address and user agent.
#[must_use]
pub fn client_of_request(extensions: &Extensions, headers: &HeaderMap, request_id: &str) -> Client {
    let user_agent = headers.get(USER_AGENT).and_then(|it| it.to_str().ok());
    Client {
        address: client_of(address_of(extensions)).into(),
        user_agent: user_agent.map(|it| text::cut(it, MAX_USER_AGENT_BYTES).into()),
        request_id: request_id.into(),
        is_browser: false,
        device_token: None,
    }
}
