//! Pages about second factors: the code of a login, the step-up of a session, the authenticator
//! app and recovery codes.

use askama::{Template, filters::Safe};
use axum::{
    http::{HeaderMap, Method},
    response::Response,
};
use fencepost_domain::error::Error;
use fencepost_http::routes::{
    auth::SessionReply,
    me::second_factors::{NewRecoveryCodes, NewTotp, SecondFactors},
};
use qrcode::{QrCode, render::svg};
use secrecy::SecretString;
use serde_json::json;

use super::{
    action_table,
    api::Api,
    form::{AskedFields, Fields},
    location::{LOGIN, own_page},
    page::{refused_page, render},
    passkeys::{self, PasskeyForm},
    recovery_codes::Codes,
    session::{self, go},
};

/// Pixels of a square of the QR code: phones read it, and it fits on them.
const QR_SQUARE_PIXELS: u32 = 4;

#[derive(Template)]
#[template(path = "login_code.html")]
struct LoginCode {
    next: String,
    is_wrong: bool,
    passkey: Option<PasskeyForm>,
}

impl LoginCode {
    async fn of(api: &Api, next: String, is_wrong: bool) -> Self {
        let passkey = PasskeyForm::ask(api, "/console/login/passkey").await;
        let passkey = passkey.map(|it| PasskeyForm { is_second_step: true, ..it });
        Self { next, is_wrong, passkey }
    }
}

/// Leads to the page that asks for a code.
pub fn ask_code(token: &SecretString, next: &str, is_fragment: bool) -> Response {
    let to = format!("/console/login/code?{}", super::form::encode(&[("next", next)]));
    let mut response = go(is_fragment, &to);
    session::keep_login(response.headers_mut(), token);
    response
}

/// The page that asks for the code of a login.
pub async fn login_code_page(
    api: Api,
    headers: HeaderMap,
    AskedFields(asked): AskedFields,
) -> Result<Response, Error> {
    match session::kept_login(&headers) {
        Some(_) => render(&LoginCode::of(&api, own_page(asked.get("next")), false).await),
        None => Ok(go(false, LOGIN)),
    }
}

/// Completes a login.
pub async fn login_code(api: Api, headers: HeaderMap, form: Fields) -> Result<Response, Error> {
    let Some(token) = session::kept_login(&headers) else { return Ok(go(false, LOGIN)) };
    let request = json!({"login_token": token, "code": form.text("code")}).to_string();
    let next = own_page(form.get("next"));
    match api.send::<SessionReply>(Method::POST, "/v1/auth/login/code", Some(request)).await {
        Ok(session) => {
            let response = go(false, &next);
            let mut response = session::begin(response, &session);
            session::forget_login(response.headers_mut());
            Ok(response)
        }
        Err(error @ Error::InvalidCode) => {
            Ok(refused_page(render(&LoginCode::of(&api, next, true).await)?, error))
        }
        // It has expired, or had too many wrong codes.
        Err(Error::InvalidCredentials) => {
            let mut response = go(false, &action_table::saying(LOGIN, "auth_login_code"));
            session::forget_login(response.headers_mut());
            Ok(response)
        }
        Err(other) => Err(other),
    }
}

#[derive(Template)]
#[template(path = "step_up.html")]
struct StepUp {
    next: String,
    needs_code: bool,
    is_wrong: bool,
    passkey: Option<PasskeyForm>,
}

async fn step_up_form(api: &Api, next: String, is_wrong: bool) -> Result<StepUp, Error> {
    let factors: SecondFactors = api.get("/v1/me/second-factors").await?;
    let has_passkey = !factors.passkeys.is_empty();
    let needs_code = factors.totp_confirmed_at.is_some() || has_passkey;
    let passkey = match has_passkey {
        true => PasskeyForm::ask(api, "/console/step-up").await,
        false => None,
    };
    Ok(StepUp { next, needs_code, is_wrong, passkey })
}

/// Asks who the visitor is, before something that a stolen session must not do.
pub async fn step_up_page(api: Api, AskedFields(asked): AskedFields) -> Result<Response, Error> {
    render(&step_up_form(&api, own_page(asked.get("next")), false).await?)
}

/// Steps the session up, and leads back to the page.
pub async fn step_up(api: Api, form: Fields) -> Result<Response, Error> {
    let request = if form.get("credential").is_some() {
        json!({"passkey": passkeys::answer(&form)?})
    } else {
        let name = if form.get("code").is_some() { "code" } else { "password" };
        json!({name: form.text(name)})
    };
    let request = request.to_string();
    let next = own_page(form.get("next"));
    match api.send::<()>(Method::POST, "/v1/auth/step-up", Some(request)).await {
        Ok(()) => Ok(go(false, &action_table::saying(&next, "auth_step_up"))),
        Err(
            error @ (Error::InvalidCode | Error::InvalidCredentials | Error::PasskeyRefused(_)),
        ) => Ok(refused_page(render(&step_up_form(&api, next, true).await?)?, error)),
        Err(other) => Err(other),
    }
}

#[derive(Template)]
#[template(path = "totp.html")]
struct Totp {
    new: NewTotp,
    is_wrong: bool,
}

impl Totp {
    /// The link as a picture; none: it is too long for one.
    fn picture(&self) -> Option<Safe<String>> {
        let code = QrCode::new(&self.new.uri).ok()?;
        let mut picture = code.render::<svg::Color<'_>>();
        let svg = picture.module_dimensions(QR_SQUARE_PIXELS, QR_SQUARE_PIXELS).build();
        // Within a page, it has no declaration of its own.
        Some(Safe(svg.split_once("?>").map_or(svg.clone(), |it| it.1.to_owned())))
    }
}

/// Shows the secret for an authenticator app.
pub async fn add_totp(api: Api) -> Result<Response, Error> {
    let new = api.send(Method::POST, "/v1/me/second-factors/totp", None).await?;
    render(&Totp { new, is_wrong: false })
}

/// Confirms the app, and shows the recovery codes, once. A wrong code shows the secret again, as
/// the form has it.
pub async fn confirm_totp(api: Api, form: Fields) -> Result<Response, Error> {
    let request = json!({"code": form.text("code")}).to_string();
    let path = "/v1/me/second-factors/totp/confirm";
    match api.send(Method::POST, path, Some(request)).await {
        Ok(NewRecoveryCodes { recovery_codes }) => render(&Codes::first(recovery_codes)),
        Err(error @ Error::InvalidCode) => {
            let text = |name| form.text(name).to_owned();
            let new = NewTotp { secret: text("secret"), uri: text("uri") };
            Ok(refused_page(render(&Totp { new, is_wrong: true })?, error))
        }
        Err(other) => Err(other),
    }
}

/// Replaces the recovery codes, and shows them, once.
pub async fn recovery_codes(api: Api) -> Result<Response, Error> {
    let NewRecoveryCodes { recovery_codes: codes } =
        api.send(Method::POST, "/v1/me/second-factors/recovery-codes", None).await?;
    render(&Codes::others(codes))
}
