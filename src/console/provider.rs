//! Logging in with an OpenID Connect provider, and linking one to the visitor's account.

use askama::Template;
use axum::{
    Extension,
    extract::{Path, State},
    http::{HeaderMap, HeaderName, HeaderValue},
    response::Response,
};
use fencepost_domain::error::Error;
use fencepost_identity::accounts::{
    Client,
    oidc::{Answer, Arrival, Departure, Refusal},
    token::Bearer,
};
use fencepost_web::app::App;
use secrecy::ExposeSecret;

use super::{
    action_table,
    api::Visitor,
    form::{AskedFields, encode},
    location::{LOGIN, REFUSED, is_own_page},
    page::render,
    second_factor::ask_code,
    session::{self, go},
};

const ACCOUNT: &str = "/console/account";
/// Sends a browser on. A form must not be redirected to another site: the content policy of our
/// pages forbids it.
const REFRESH: HeaderName = HeaderName::from_static("refresh");

/// A provider's button.
pub struct Button {
    pub name: String,
    pub label: String,
}

/// The buttons of all providers.
pub fn buttons(app: &App) -> Vec<Button> {
    let labels = app.accounts.providers.labels();
    labels.map(|(name, label)| Button { name: name.to_owned(), label: label.to_owned() }).collect()
}

/// The name of a refusal in a query, and its text.
const REFUSALS: &[(Refusal, &str, &str)] = &[
    (
        Refusal::NotBegun,
        "expired",
        "The login has expired, or began in another browser. Try again.",
    ),
    (Refusal::ByProvider, "provider", "The provider did not confirm who you are. Try again."),
    (Refusal::Unreachable, "silent", "The provider does not answer. Try again later."),
    (
        Refusal::Domain,
        "domain",
        "The operator of this server does not accept your address at the provider.",
    ),
    (
        Refusal::NotLinked,
        "unlinked",
        "No account is linked to this login. Log in with your password, and link it on the page \
         of your account.",
    ),
    (Refusal::Taken, "taken", "This login is linked to an account already."),
    (Refusal::TooMany, "many", "Your account has ten linked logins: remove one first."),
];

/// The text of a refusal.
pub fn refusal(asked: Option<&str>) -> Option<&'static str> {
    REFUSALS.iter().find(|it| Some(it.1) == asked).map(|it| it.2)
}

fn refuse(page: &str, refusal: Refusal) -> Response {
    let name = REFUSALS.iter().find(|it| it.0 == refusal).map_or("provider", |it| it.1);
    go(false, &format!("{page}?{}", encode(&[(REFUSED, name)])))
}

/// Sends the visitor to a provider, to log in.
pub async fn log_in(
    State(app): State<App>,
    Extension(client): Extension<Client>,
    Path(provider): Path<String>,
    AskedFields(asked): AskedFields,
) -> Result<Response, Error> {
    let next = asked.get("next").filter(|it| is_own_page(it)).unwrap_or_default();
    let departure = app.accounts.identities.leave(&provider, next, None, &client).await?;
    let mut response = go(false, &departure.url);
    session::keep_departure(response.headers_mut(), &departure.kept);
    Ok(response)
}

#[derive(Template)]
#[template(path = "leave.html")]
struct Leave<'a> {
    url: &'a str,
}

/// Sends the visitor to a provider, to link it. Only a page of the console can post this, so no
/// other site can link its own login to a visitor's account.
pub async fn link(
    State(app): State<App>,
    Extension(client): Extension<Client>,
    visitor: Option<Extension<Visitor>>,
    Path(provider): Path<String>,
) -> Result<Response, Error> {
    let bearer = bearer_of(&app, visitor).ok_or(Error::Unauthorized)?;
    let departure = app.accounts.identities.leave(&provider, "", Some(bearer), &client).await?;
    let Departure { url, kept } = &departure;
    let mut response = render(&Leave { url })?;
    let refresh = HeaderValue::from_str(&format!("0; url={url}")).map_err(Error::internal)?;
    response.headers_mut().insert(REFRESH, refresh);
    session::keep_departure(response.headers_mut(), kept);
    Ok(response)
}

/// Where a provider sends the visitor back to.
pub async fn arrive(
    State(app): State<App>,
    Extension(client): Extension<Client>,
    visitor: Option<Extension<Visitor>>,
    Path(provider): Path<String>,
    headers: HeaderMap,
    AskedFields(asked): AskedFields,
) -> Result<Response, Error> {
    let kept = session::kept_departure(&headers).unwrap_or_default();
    let answer = Answer {
        state: asked.get("state").unwrap_or_default(),
        code: asked.get("code").unwrap_or_default(),
        issuer: asked.get("iss"),
    };
    let bearer = bearer_of(&app, visitor);
    let arrived =
        app.accounts.identities.arrive(&provider, &kept, &answer, bearer, &client).await?;
    let mut response = match arrived {
        Ok((Arrival::Linked, _)) => go(false, &action_table::saying(ACCOUNT, action_table::LINKED)),
        Ok((Arrival::SignedIn(signed_in), next)) => {
            session::begin(go(false, own_page(&next)), &signed_in.into())
        }
        Ok((Arrival::SecondFactorRequired(token), next)) => {
            ask_code(&token, own_page(&next), false)
        }
        // A person who is logged in already has come from the page that links identities.
        Err(refusal) => refuse(if bearer.is_some() { ACCOUNT } else { LOGIN }, refusal),
    };
    session::forget_departure(response.headers_mut());
    Ok(response)
}

fn own_page(next: &str) -> &str {
    if is_own_page(next) { next } else { "/console" }
}

fn bearer_of(app: &App, visitor: Option<Extension<Visitor>>) -> Option<Bearer> {
    visitor.and_then(|it| app.accounts.tokens.read(it.access_token.expose_secret()))
}
