//! The visitor's session: in two cookies that scripts cannot read, with requests that only the
//! console's own pages can make.
//!
//! The short-lived one holds the access token, the other the refresh token. A request without the
//! first gets the next pair with its answer. Tabs share them, so the refresh token may be presented
//! again for a moment ([`Reuse::Tabs`]).

use axum::{
    body::Body,
    extract::{Request, State},
    http::{
        HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri,
        header::{COOKIE, HOST, LOCATION, ORIGIN, REFERER, SET_COOKIE},
    },
    middleware::Next,
    response::{IntoResponse, Response},
};
use fencepost_domain::{
    error::Error,
    limits::{LOGIN_CHALLENGE_SECONDS, SESSION_IDLE_SECONDS},
};
use fencepost_http::routes::auth::SessionReply;
use fencepost_identity::{
    accounts::{Client, Reuse, SignedIn, oidc::LOGIN_SECONDS},
    credentials::Evict,
};
use fencepost_web::{
    app::App,
    wire::{RequestId, errors::ErrorResponse},
};
use secrecy::{ExposeSecret, SecretString};

use super::{
    api::Visitor,
    location::{HX_REQUEST, LOGIN, Link, is_own_page, path_and_query},
    page::{self, Frame, Framed},
};

const ACCESS_COOKIE: &str = "__Host-fencepost-access";
const REFRESH_COOKIE: &str = "__Host-fencepost-refresh";
/// Holds the token of a login that waits for a code.
const LOGIN_COOKIE: &str = "__Host-fencepost-login";
/// Holds what a login with a provider must remember.
const PROVIDER_COOKIE: &str = "__Host-fencepost-provider";
/// Holds a new key until it is shown.
const KEY_COOKIE: &str = "__Host-fencepost-key";
/// Marks a browser that has logged in before.
const DEVICE_COOKIE: &str = "__Host-fencepost-device";
/// A browser keeps the mark for this time after a log-in (180 days).
const DEVICE_SECONDS: i64 = 180 * 86_400;
/// Holds the secret of a mailed link while its visitor logs in or signs up.
const LINK_COOKIE: &str = "__Host-fencepost-link";
/// How long the secret of a link is kept.
const LINK_SECONDS: i64 = 3600;
/// How long a new key waits to be shown.
pub const NEW_KEY_SHOWN_SECONDS: i64 = 120;
/// The cookie expires before the token, so that no expired token is sent.
const EARLY_SECONDS: i64 = 30;
const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
const FETCH_MODE: HeaderName = HeaderName::from_static("sec-fetch-mode");
/// The page of a request by htmx.
const HX_CURRENT_URL: HeaderName = HeaderName::from_static("hx-current-url");
/// The next page, for htmx.
pub const HX_REDIRECT: HeaderName = HeaderName::from_static("hx-redirect");
/// The facts about a request that its refusal depends on.
struct PageRequest {
    /// The requested page, or the one with the form.
    page: String,
    is_fragment: bool,
    is_read: bool,
    is_logged_in: bool,
    request_id: String,
}

impl PageRequest {
    fn of(request: &Request) -> Self {
        let (headers, request_id) = (request.headers(), request.extensions().get::<RequestId>());
        let is_fragment = headers.contains_key(HX_REQUEST);
        let is_read = request.method() == Method::GET || request.method() == Method::HEAD;
        let page = if is_fragment || !is_read {
            let page = headers.get(HX_CURRENT_URL).or(headers.get(REFERER));
            let page = page.and_then(|it| it.to_str().ok()?.parse::<Uri>().ok());
            page.as_ref().map(path_and_query).filter(|it| is_own_page(it)).unwrap_or_default()
        } else {
            path_and_query(request.uri())
        };
        Self {
            page,
            is_fragment,
            is_read,
            is_logged_in: false,
            request_id: request_id.map(|it| it.0.clone()).unwrap_or_default(),
        }
    }

    /// The answer to a refused request: the login, or an error page.
    fn refuse(&self, error: &Error, frame: Option<&Frame>) -> Response {
        if matches!(error, Error::StepUpRequired) {
            let next = super::form::encode(&[("next", &self.page)]);
            return go(self.is_fragment, &format!("/console/step-up?{next}"));
        }
        if !error.is_without_credential() {
            let seen_by = page::SeenBy { page: &self.page, is_logged_in: self.is_logged_in, frame };
            return page::problem(error, &self.request_id, self.is_fragment, seen_by);
        }
        let login = match self.page.as_str() {
            "" | "/console" => LOGIN.to_owned(),
            next => format!("{LOGIN}?{}", super::form::encode(&[("next", next)])),
        };
        let mut response = go(self.is_fragment, &login);
        forget(response.headers_mut());
        response
    }
}

/// Redirects a browser after a form, or htmx for it.
pub fn go(is_fragment: bool, to: &str) -> Response {
    let to = HeaderValue::from_str(to).unwrap_or(HeaderValue::from_static("/console"));
    if is_fragment {
        return (StatusCode::OK, [(HX_REDIRECT, to)]).into_response();
    }
    (StatusCode::SEE_OTHER, [(LOCATION, to)]).into_response()
}

/// Authenticates the visitor, refuses requests from other sites, and renders errors.
pub async fn attach(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let mut asked = PageRequest::of(&request);
    let client = request.extensions().get::<Client>().cloned().unwrap_or_default();
    let device_token = cookie(request.headers(), DEVICE_COOKIE).map(SecretString::from);
    let client = Client { is_browser: true, device_token, ..client };
    request.extensions_mut().insert(client.clone());
    if !asked.is_read && !is_own(request.headers()) {
        let error = Error::Forbidden { needs: "to be sent by a page of the console" };
        return with_error(asked.refuse(&error, None), error);
    }
    if needs_second_look(&request) && !Link::is_page(request.uri().path()) {
        return page::one_moment();
    }
    let found = match find(&app, request.headers(), &client).await {
        Ok(found) => found,
        Err(error) => return with_error(asked.refuse(&error, None), error),
    };
    let mut fresh = None;
    if let Some(found) = found {
        let access_token = match found {
            FoundSession::Goes(it) => it,
            FoundSession::Renewed(signed_in) => {
                let access_token = signed_in.access_token.clone();
                fresh = Some(signed_in);
                access_token
            }
        };
        asked.is_logged_in = true;
        request.extensions_mut().insert(Visitor { access_token });
    }
    let framed = Framed::default();
    request.extensions_mut().insert(framed.clone());
    let mut response = next.run(request).await;
    if let Some(error) = response.extensions_mut().remove::<Error>() {
        response = with_error(asked.refuse(&error, framed.0.get()), error);
    }
    // Even after a failure: the browser's old token is used up. If a session has started or ended,
    // its cookies win.
    if let Some(signed_in) = fresh
        && !begins_or_ends(response.headers())
    {
        remember(response.headers_mut(), &signed_in.into());
    }
    response
}

/// For the log.
fn with_error(mut response: Response, error: Error) -> Response {
    response.extensions_mut().insert(ErrorResponse(error));
    response
}

enum FoundSession {
    Goes(SecretString),
    Renewed(SignedIn),
}

async fn find(
    app: &App,
    headers: &HeaderMap,
    client: &Client,
) -> Result<Option<FoundSession>, Error> {
    if let Some(access) = cookie(headers, ACCESS_COOKIE)
        && app.accounts.tokens.read(&access).is_some()
    {
        return Ok(Some(FoundSession::Goes(access.into())));
    }
    let Some(refresh) = cookie(headers, REFRESH_COOKIE) else { return Ok(None) };
    match app.accounts.sessions.refresh(&refresh.into(), Reuse::Tabs, client).await {
        Ok(Ok(signed_in)) => Ok(Some(FoundSession::Renewed(signed_in))),
        Ok(Err(ended)) => {
            app.credentials.evict(Evict::Session(ended)).await;
            Ok(None)
        }
        Err(Error::InvalidCredentials) => Ok(None),
        Err(error) => Err(error),
    }
}

fn cookie(headers: &HeaderMap, name: &str) -> Option<String> {
    let all = headers.get_all(COOKIE).iter().filter_map(|it| it.to_str().ok());
    let mut pairs = all.flat_map(|it| it.split(';')).filter_map(|it| it.trim().split_once('='));
    pairs.find(|(it, _)| *it == name).map(|(_, value)| value.to_owned())
}

/// Whether one of our own pages sent this request. Browsers say so themselves; old ones name the
/// page's origin.
fn is_own(headers: &HeaderMap) -> bool {
    let text = |name: HeaderName| headers.get(name).and_then(|it| it.to_str().ok());
    match (text(FETCH_SITE), text(ORIGIN), text(HOST)) {
        (Some(site), ..) => site == "same-origin",
        (None, Some(origin), Some(host)) => {
            origin.split_once("://").is_some_and(|(_, it)| it.eq_ignore_ascii_case(host))
        }
        _ => false,
    }
}

/// Strict cookies are not sent with a link from another site, such as a mail: the page then
/// requests itself again.
fn needs_second_look(request: &Request<Body>) -> bool {
    let is = |name: HeaderName, value: &str| {
        request.headers().get(name).is_some_and(|it| it.as_bytes() == value.as_bytes())
    };
    request.method() == Method::GET
        && is(FETCH_SITE, "cross-site")
        && is(FETCH_MODE, "navigate")
        && cookie(request.headers(), REFRESH_COOKIE).is_none()
}

/// Whether an answer sets the cookies of a session.
fn begins_or_ends(headers: &HeaderMap) -> bool {
    let mut all = headers.get_all(SET_COOKIE).iter();
    all.any(|it| it.as_bytes().starts_with(ACCESS_COOKIE.as_bytes()))
}

/// Whether the browser keeps cookies for secure connections: on insecure ones it does not send
/// `Sec-Fetch-Site`.
pub fn keeps_cookies(headers: &HeaderMap) -> bool {
    headers.contains_key(FETCH_SITE)
}

/// Keeps the token of a login for the page that asks for a code.
pub fn keep_login(headers: &mut HeaderMap, token: &SecretString) {
    set(headers, LOGIN_COOKIE, token.expose_secret(), LOGIN_CHALLENGE_SECONDS);
}

/// The token of a login that waits for a code.
pub fn kept_login(headers: &HeaderMap) -> Option<String> {
    cookie(headers, LOGIN_COOKIE)
}

/// Deletes the token of a login.
pub fn forget_login(headers: &mut HeaderMap) {
    set(headers, LOGIN_COOKIE, "", 0);
}

/// Keeps what a login with a provider must remember while the visitor is there.
pub fn keep_departure(headers: &mut HeaderMap, kept: &SecretString) {
    set(headers, PROVIDER_COOKIE, kept.expose_secret(), LOGIN_SECONDS as i64);
}

/// The state that a login with a provider has kept.
pub fn kept_departure(headers: &HeaderMap) -> Option<String> {
    cookie(headers, PROVIDER_COOKIE)
}

/// Deletes it.
pub fn forget_departure(headers: &mut HeaderMap) {
    set(headers, PROVIDER_COOKIE, "", 0);
}

/// Keeps the secret of a mailed link, which is for the page `name`.
pub fn keep_link(headers: &mut HeaderMap, name: &str, secret: &str) {
    set(headers, LINK_COOKIE, &format!("{name}:{secret}"), LINK_SECONDS);
}

/// The secret of the mailed link that was opened for the page `name`.
pub fn kept_link(headers: &HeaderMap, name: &str) -> Option<String> {
    let kept = cookie(headers, LINK_COOKIE)?;
    let (of, secret) = kept.split_once(':')?;
    (of == name).then(|| secret.to_owned())
}

/// Deletes the secret of a link.
pub fn forget_link(headers: &mut HeaderMap) {
    set(headers, LINK_COOKIE, "", 0);
}

/// Keeps a project's new key for the page that shows it.
pub fn hand_over_key(headers: &mut HeaderMap, slug: &str, key: &str) {
    set(headers, KEY_COOKIE, &format!("{slug}:{key}"), NEW_KEY_SHOWN_SECONDS);
}

/// A project's new key that was not shown yet.
pub fn new_key(headers: &HeaderMap, slug: &str) -> Option<String> {
    let kept = cookie(headers, KEY_COOKIE)?;
    let (of, key) = kept.split_once(':')?;
    (of == slug).then(|| key.to_owned())
}

/// Deletes a key that was shown.
pub fn forget_key(headers: &mut HeaderMap) {
    set(headers, KEY_COOKIE, "", 0);
}

/// An answer that starts a session. After a log-in with a password it marks the browser: its next
/// log-ins go before those of strangers when many wait.
pub fn begin(mut response: Response, session: &SessionReply) -> Response {
    remember(response.headers_mut(), session);
    if let Some(token) = &session.device_token {
        set(response.headers_mut(), DEVICE_COOKIE, token, DEVICE_SECONDS);
    }
    response
}

/// Stores a session in cookies.
fn remember(headers: &mut HeaderMap, session: &SessionReply) {
    set(headers, ACCESS_COOKIE, &session.access_token, session.expires_in_seconds - EARLY_SECONDS);
    set(headers, REFRESH_COOKIE, &session.refresh_token, SESSION_IDLE_SECONDS);
}

/// Deletes the cookies.
pub fn forget(headers: &mut HeaderMap) {
    set(headers, ACCESS_COOKIE, "", 0);
    set(headers, REFRESH_COOKIE, "", 0);
}

fn set(headers: &mut HeaderMap, name: &str, value: &str, seconds: i64) {
    let text =
        format!("{name}={value}; Path=/; Max-Age={seconds}; Secure; HttpOnly; SameSite=Strict");
    if let Ok(mut value) = HeaderValue::from_str(&text) {
        value.set_sensitive(true);
        headers.append(SET_COOKIE, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_page_of_the_same_origin_may_send_a_form() {
        let check = |lines: &[(&'static str, &'static str)], expected: bool| {
            let mut headers = HeaderMap::new();
            for (name, value) in lines {
                headers.insert(*name, HeaderValue::from_static(value));
            }
            assert_eq!(is_own(&headers), expected, "{lines:?}");
        };
        check(&[("sec-fetch-site", "same-origin")], true);
        check(&[("sec-fetch-site", "same-site")], false);
        check(&[("sec-fetch-site", "cross-site")], false);
        check(&[("sec-fetch-site", "none")], false);
        check(&[("origin", "https://a.example"), ("host", "a.example")], true);
        check(&[("origin", "https://b.example"), ("host", "a.example")], false);
        check(&[("origin", "null"), ("host", "a.example")], false);
        check(&[("host", "a.example")], false);
        // `Sec-Fetch-Site` wins.
        let lines = [
            ("sec-fetch-site", "cross-site"),
            ("origin", "https://a.example"),
            ("host", "a.example"),
        ];
        check(&lines, false);
    }

    #[test]
    fn a_cookie_is_found_among_others_and_under_its_full_name_only() {
        let mut headers = HeaderMap::new();
        let value = "a=b; __Host-fencepost-access=one; x__Host-fencepost-refresh=two";
        headers.insert(COOKIE, HeaderValue::from_static(value));
        assert_eq!(cookie(&headers, ACCESS_COOKIE).as_deref(), Some("one"));
        assert_eq!(cookie(&headers, REFRESH_COOKIE), None);
    }
}
