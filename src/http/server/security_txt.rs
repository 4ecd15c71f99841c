//! `/.well-known/security.txt` (RFC 9116): the contact for a vulnerability of this instance.

use axum::{
    extract::State,
    http::header::CONTENT_TYPE,
    response::{IntoResponse, Response},
};
use chrono::{SecondsFormat, TimeDelta, Utc};
use fencepost_domain::error::Error;

use fencepost_web::app::App;

/// How long readers may keep the file. The RFC recommends less than a year.
const VALID_DAYS: i64 = 90;

/// The file; not found if the operator has named no contact.
pub async fn get(State(app): State<App>) -> Result<Response, Error> {
    let contact = app.accounts.security_contact.as_deref().ok_or(Error::NoSuchRoute)?;
    #[expect(clippy::disallowed_methods, reason = "nothing is decided by it")]
    let now = Utc::now();
    let expires = (now + TimeDelta::days(VALID_DAYS)).to_rfc3339_opts(SecondsFormat::Secs, true);
    let url = &app.accounts.public_url;
    let text = format!(
        "Contact: {contact}\nExpires: {expires}\nPreferred-Languages: en\n\
         Canonical: {url}/.well-known/security.txt\n"
    );
    Ok(([(CONTENT_TYPE, "text/plain; charset=utf-8")], text).into_response())
}
