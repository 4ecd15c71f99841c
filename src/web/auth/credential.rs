//! Where a request carries its key or token, and whether that has the form of one.

use axum::http::{HeaderMap, header::AUTHORIZATION};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use fencepost_domain::error::Error;

use super::key;

/// A key may be sent in this header instead of `Authorization`.
const API_KEY_HEADER: &str = "x-api-key";
const MISTYPED: &str = "the API key is mistyped or cut off: its checksum does not match";
const NOT_A_KEY: &str =
    "this is not an API key, which begins with fp_live_ or fp_test_, and not a live session";

/// Whether it may be a key, by its form alone.
pub(super) fn check_form(secret: &str) -> Result<(), Error> {
    match key::is_well_formed(secret) {
        true => Ok(()),
        false if key::has_prefix(secret) => Err(Error::MalformedCredential(MISTYPED)),
        false => Err(Error::MalformedCredential(NOT_A_KEY)),
    }
}

const NO_KEY: &str = "no API key was sent: add the header `Authorization: Bearer fp_live_…`";
const NO_SCHEME: &str = "the header must be `Authorization: Bearer fp_live_…`: `Bearer` is missing";
const WRONG_SCHEME: &str = "the header must be `Authorization: Bearer fp_live_…`";

/// The key or token from `Authorization: Bearer`, from `X-Api-Key`, or from HTTP Basic as the
/// password.
pub(super) fn presented(headers: &HeaderMap) -> Result<String, Error> {
    let Some(value) = headers.get(AUTHORIZATION) else {
        let key = headers.get(API_KEY_HEADER).and_then(|it| it.to_str().ok());
        return key.map(str::to_owned).ok_or(Error::NoCredential(NO_KEY));
    };
    let value = value.to_str().unwrap_or_default().trim();
    let Some((scheme, rest)) = value.split_once(' ') else {
        let is_key = key::has_prefix(value);
        return Err(Error::NoCredential(if is_key { NO_SCHEME } else { WRONG_SCHEME }));
    };
    if scheme.eq_ignore_ascii_case("bearer") {
        return Ok(rest.trim().to_owned());
    }
    let is_basic = scheme.eq_ignore_ascii_case("basic");
    let basic = is_basic.then(|| read_basic(rest.trim())).flatten();
    basic.ok_or(Error::NoCredential(WRONG_SCHEME))
}

/// The password, or the user name: some clients can only set that.
fn read_basic(encoded: &str) -> Option<String> {
    let decoded = String::from_utf8(BASE64_STANDARD.decode(encoded).ok()?).ok()?;
    let (user, password) = decoded.split_once(':')?;
    Some(if password.is_empty() { user } else { password }.to_owned())
}
