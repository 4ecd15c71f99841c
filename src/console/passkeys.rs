//! Passkeys in the console: a page asks, the browser answers, and a form sends the answer.

use askama::Template;
use axum::{
    http::{HeaderMap, Method},
    response::Response,
};
use fencepost_domain::error::Error;
use fencepost_http::routes::{
    auth::{SessionReply, passkeys::PasskeyChallenge},
    me::passkeys::AddedPasskey,
};
use serde_json::{Value, json};

use super::{
    action_table,
    api::Api,
    form::{Fields, encode},
    location::{LOGIN, REFUSED, own_page},
    page::render,
    recovery_codes::Codes,
    session::{self, go},
};

/// In the query of the login, after [`REFUSED`].
const PASSKEY: &str = "passkey";

/// A form that asks for a passkey.
pub struct PasskeyForm {
    pub action: &'static str,
    pub options: String,
    pub challenge_token: String,
    /// Whether the password of the login was right.
    pub is_second_step: bool,
}

impl PasskeyForm {
    /// A form that is sent to this path; none: browsers use no passkeys on this server.
    pub async fn ask(api: &Api, action: &'static str) -> Option<Self> {
        let asked = api.send(Method::POST, "/v1/auth/passkeys/options", None).await;
        let PasskeyChallenge { challenge_token, options } = asked.ok()?;
        let options = options.to_string();
        Some(Self { action, options, challenge_token, is_second_step: false })
    }
}

/// The text of a refusal.
pub fn refusal(asked: Option<&str>) -> Option<&'static str> {
    let text = "The passkey was not accepted, or the page was open for more than five minutes.";
    (asked == Some(PASSKEY)).then_some(text)
}

/// The answer in a form, as the API takes it.
///
/// # Errors
/// [`Error::Invalid`] when it is none.
pub fn answer(form: &Fields) -> Result<Value, Error> {
    let credential: Value = serde_json::from_str(form.text("credential"))
        .map_err(|_| Error::invalid("credential", "is missing: your browser gave no passkey"))?;
    Ok(json!({"challenge_token": form.text("challenge_token"), "credential": credential}))
}

/// Logs in.
pub async fn log_in(api: Api, headers: HeaderMap, form: Fields) -> Result<Response, Error> {
    let mut request = answer(&form)?;
    if form.get("is_second_step").is_some()
        && let Some(token) = session::kept_login(&headers)
    {
        request["login_token"] = token.into();
    }
    let request = Some(request.to_string());
    let session = api.send::<SessionReply>(Method::POST, "/v1/auth/login/passkey", request).await;
    let session = match session {
        Ok(session) => session,
        // The page, or the login, may be too old. The login asks again.
        Err(error @ (Error::PasskeyRefused(_) | Error::InvalidCredentials)) => {
            tracing::debug!(error = &error as &dyn std::error::Error, "a passkey was refused");
            let to = format!("{LOGIN}?{}", encode(&[(REFUSED, PASSKEY)]));
            return Ok(go(false, &to));
        }
        Err(other) => return Err(other),
    };
    let mut response = session::begin(go(false, &own_page(form.get("next"))), &session);
    session::forget_login(response.headers_mut());
    Ok(response)
}

#[derive(Template)]
#[template(path = "passkey.html")]
struct NewPasskey {
    options: String,
    challenge_token: String,
}

/// The page that creates a passkey.
pub async fn ask(api: Api) -> Result<Response, Error> {
    let challenge: PasskeyChallenge =
        api.send(Method::POST, "/v1/me/passkeys/options", None).await?;
    let options = challenge.options.to_string();
    render(&NewPasskey { options, challenge_token: challenge.challenge_token })
}

/// Adds the passkey, and shows the recovery codes of a first second factor, once.
pub async fn add(api: Api, form: Fields) -> Result<Response, Error> {
    let mut request = answer(&form)?;
    request["name"] = form.text("name").into();
    let request = Some(request.to_string());
    let added: AddedPasskey = api.send(Method::POST, "/v1/me/passkeys", request).await?;
    match added.recovery_codes {
        Some(codes) => render(&Codes::first(codes)),
        None => Ok(go(false, &action_table::saying("/console/account", "me_add_passkey"))),
    }
}
