//! Pages about accounts: sign-up, login and logout, the visitor's own account.

use askama::Template;
use axum::{
    Extension,
    extract::State,
    http::{HeaderMap, Method},
    response::Response,
};
use chrono::{DateTime, Utc};
use fencepost_config::Signup;
use fencepost_domain::error::Error;
use fencepost_http::{
    error::ApiError,
    routes::{
        auth::SessionReply,
        me::{
            Me, SecurityEntry, SecurityLog, Session, SessionList,
            identities::{Identity, IdentityList},
            second_factors::SecondFactors,
        },
        members::invitations::InvitationPreview,
        projects::{Project, ProjectList},
    },
};
use fencepost_identity::accounts::{Client, SignUp};
use fencepost_web::app::App;
use secrecy::ExposeSecret;
use serde_json::json;

use super::{
    action_table,
    api::Api,
    form::{AskedFields, Fields, encode},
    format, links,
    links::{InvitationPreviewExt, look_at},
    location::{HX_REQUEST, LOGIN, Link, REFUSED, is_own_page, segment},
    page::{as_file, in_words, refused_page, render},
    passkeys::{self, PasskeyForm},
    provider::{self, Button},
    second_factor,
    session::{self, go},
    start::Start,
};

/// In the query of the page after a login: a visitor without a session then has a browser that
/// refused the cookie.
const FROM_LOGIN: (&str, &str) = ("from", "login");

/// Projects in the menu, oldest first: the list has all.
const MENU_PROJECTS: usize = 20;

/// Entries of the security log on the page of the account.
const SHOWN_SECURITY_ENTRIES: usize = 20;

/// The first page: the visitor's project, the list of projects, or the login.
pub async fn index(
    State(app): State<App>,
    api: Api,
    AskedFields(asked): AskedFields,
) -> Result<Response, Error> {
    if !api.is_logged_in() {
        if asked.get(FROM_LOGIN.0) == Some(FROM_LOGIN.1) {
            return render(&Login {
                has_lost_cookie: true,
                ..Login::new(&app, &api, String::new()).await
            });
        }
        return Err(Error::Unauthorized);
    }
    let ProjectList { projects } = api.get("/v1/projects").await?;
    let to = match projects.as_slice() {
        [only] => format!("/console/p/{}", segment(&only.slug)),
        _ => "/console/projects".to_owned(),
    };
    Ok(go(
        false,
        &asked.get(action_table::DONE).map_or(to.clone(), |it| action_table::saying(&to, it)),
    ))
}

#[derive(Template)]
#[template(path = "login.html")]
struct Login {
    next: String,
    done: Option<&'static str>,
    refused: Option<&'static str>,
    has_lost_cookie: bool,
    providers: Vec<Button>,
    passkey: Option<PasskeyForm>,
}

impl Login {
    async fn new(app: &App, api: &Api, next: String) -> Self {
        let providers = provider::buttons(app);
        let passkey = PasskeyForm::ask(api, "/console/login/passkey").await;
        Self { next, done: None, refused: None, has_lost_cookie: false, providers, passkey }
    }

    /// The query of a provider's button.
    fn query(&self) -> String {
        match self.next.as_str() {
            "" => String::new(),
            next => format!("?{}", encode(&[("next", next)])),
        }
    }
}

/// The login page says this when too many passwords wait to be checked.
const TOO_MANY: &str = "Too many people log in at the moment, and your password was not checked. \
                        Try again in a few seconds. A passkey works at once.";

/// The login page.
pub async fn login_page(
    State(app): State<App>,
    api: Api,
    AskedFields(asked): AskedFields,
) -> Result<Response, Error> {
    let next = asked.get("next").filter(|it| is_own_page(it)).unwrap_or_default().to_owned();
    if api.is_logged_in() {
        return Ok(go(false, if next.is_empty() { "/console" } else { &next }));
    }
    let done = asked.get(action_table::DONE).and_then(action_table::said);
    let refused = asked.get(REFUSED);
    let refused = provider::refusal(refused).or(passkeys::refusal(refused));
    render(&Login { done, refused, ..Login::new(&app, &api, next).await })
}

/// Logs in.
pub async fn login(
    State(app): State<App>,
    api: Api,
    headers: HeaderMap,
    form: Fields,
) -> Result<Response, Error> {
    let (email, password) = (form.text("email").trim(), form.text("password"));
    let request = json!({"email": email, "password": password}).to_string();
    let next = form.get("next").filter(|it| is_own_page(it)).map(str::to_owned);
    let next = next.unwrap_or_else(|| format!("/console?{}", encode(&[FROM_LOGIN])));
    let is_fragment = headers.contains_key(HX_REQUEST);
    match api.send::<SessionReply>(Method::POST, "/v1/auth/login", Some(request)).await {
        Ok(session) => Ok(session::begin(go(is_fragment, &next), &session)),
        Err(refused @ Error::Overloaded) => {
            let login = Login { refused: Some(TOO_MANY), ..Login::new(&app, &api, next).await };
            Ok(refused_page(render(&login)?, refused))
        }
        Err(Error::CodeRequired(token)) => Ok(second_factor::ask_code(&token, &next, is_fragment)),
        Err(other) => Err(other),
    }
}

/// Ends the session.
pub async fn logout(api: Api, headers: HeaderMap) -> Result<Response, Error> {
    match api.send::<()>(Method::POST, "/v1/auth/logout", None).await {
        Err(error) if !error.is_without_credential() => return Err(error),
        Ok(()) | Err(_) => (),
    }
    let mut response = go(headers.contains_key(HX_REQUEST), LOGIN);
    session::forget(response.headers_mut());
    session::forget_link(response.headers_mut());
    Ok(response)
}

#[derive(Template)]
#[template(path = "signup.html")]
struct SignUpPage {
    is_open: bool,
    invitation: String,
    invited: Option<InvitationPreview>,
    is_void: bool,
    email: String,
    project_name: String,
    info: Option<ApiError>,
}

/// The sign-up page; with the invitation whose link was opened, to join its project.
pub async fn signup_page(
    State(app): State<App>,
    api: Api,
    headers: HeaderMap,
    AskedFields(asked): AskedFields,
) -> Result<Response, Error> {
    let is_invited = asked.get(links::INVITED).is_some();
    if api.is_logged_in() && !is_invited {
        return Ok(go(false, "/console"));
    }
    let kept = is_invited.then(|| session::kept_link(&headers, Link::Invitation.name())).flatten();
    let invitation = kept.map(|it| ("invitation".to_owned(), it));
    signup_form(&app, &api, &Fields(invitation.into_iter().collect()), None).await
}

/// The form; after a refused try, with the entered values except the password, and with the errors.
async fn signup_form(
    app: &App,
    api: &Api,
    typed: &Fields,
    info: Option<ApiError>,
) -> Result<Response, Error> {
    let text = |name| typed.get(name).unwrap_or_default().to_owned();
    let invitation = text("invitation");
    // A refused try reports itself if the invitation is the problem.
    let (invited, is_void) = match &info {
        Some(info) => (None, info.details.iter().any(|it| it.field == "invitation")),
        None if invitation.is_empty() => (None, false),
        None => {
            let invited = look_at(&invitation, api).await?;
            let is_void = invited.is_none();
            (invited, is_void)
        }
    };
    let invitation = if is_void { String::new() } else { invitation };
    let is_open = match app.accounts.signup {
        Signup::Open => true,
        Signup::Invite => !invitation.is_empty(),
        Signup::Closed => false,
    };
    let address = invited.as_ref().and_then(|it| it.address()).map(str::to_owned);
    let email = typed.get("email").map(str::to_owned).or(address).unwrap_or_default();
    let project_name = text("project_name");
    render(&SignUpPage { is_open, invitation, invited, is_void, email, project_name, info })
}

/// Signs up with the same function as `POST /v1/auth/signup`, and leads to the page that shows the
/// first key, once.
pub async fn signup(
    State(app): State<App>,
    Extension(client): Extension<Client>,
    api: Api,
    headers: HeaderMap,
    form: Fields,
) -> Result<Response, Error> {
    let request = SignUp {
        email: form.text("email").trim().to_owned(),
        password: form.text("password").to_owned().into(),
        project_name: form.get("project_name").map(str::to_owned),
        invitation: form.get("invitation").map(|it| it.to_owned().into()),
    };
    let made = match app.accounts.sign_ups.sign_up(request, &client).await {
        Ok(made) => made,
        Err(refused @ Error::Invalid(_)) => {
            let info = in_words(&refused, &api.request_id().0, false);
            let page = signup_form(&app, &api, &form, Some(info)).await?;
            return Ok(refused_page(page, refused));
        }
        Err(other) => return Err(other),
    };
    let begun = app.accounts.sign_ups.begin_first_session(&made, &client).await?;
    let session = SessionReply::with_device_token(&app, begun).await;
    let project = Project::of(made.project, Some(made.role));
    let base = format!("/console/p/{}", segment(&project.slug));
    let Some(key) = made.key else {
        return Ok(session::begin(go(false, &base), &session));
    };
    let key = key.secret.expose_secret().to_owned();
    // A browser that sends `Sec-Fetch-Site` keeps our cookies. Another one gets the key
    // immediately, and may see it again after a reload.
    if !session::keeps_cookies(&headers) {
        let start = Start::of(project, &app.accounts.public_url, Some(key));
        return Ok(session::begin(render(&start)?, &session));
    }
    let response = go(false, &format!("{base}/start"));
    let mut response = session::begin(response, &session);
    session::hand_over_key(response.headers_mut(), &project.slug, &key);
    Ok(response)
}

#[derive(Template)]
#[template(path = "reset.html")]
struct Reset {
    is_asked: bool,
    sends_mail: bool,
}

/// The page to request a password reset.
pub async fn reset_page(State(app): State<App>) -> Result<Response, Error> {
    render(&Reset { is_asked: false, sends_mail: app.accounts.mailer.is_used() })
}

/// Requests the mail.
pub async fn reset(State(app): State<App>, api: Api, form: Fields) -> Result<Response, Error> {
    let request = json!({"email": form.text("email").trim()}).to_string();
    api.send::<()>(Method::POST, "/v1/auth/password/reset", Some(request)).await?;
    render(&Reset { is_asked: true, sends_mail: app.accounts.mailer.is_used() })
}

#[derive(Template)]
#[template(path = "projects.html")]
struct Projects {
    list: ProjectList,
    done: Option<&'static str>,
    now: DateTime<Utc>,
}

/// The visitor's projects.
pub async fn projects(api: Api, AskedFields(asked): AskedFields) -> Result<Response, Error> {
    let list = api.get("/v1/projects").await?;
    let done = asked.get(action_table::DONE).and_then(action_table::said);
    render(&Projects { list, done, now: format::now() })
}

#[derive(Template)]
#[template(path = "project_menu.html")]
struct ProjectMenu {
    projects: Vec<Project>,
}

/// The visitor's projects, to switch between them.
pub async fn project_menu(api: Api) -> Result<Response, Error> {
    let ProjectList { mut projects } = api.get("/v1/projects").await?;
    projects.truncate(MENU_PROJECTS);
    render(&ProjectMenu { projects })
}

#[derive(Template)]
#[template(path = "account.html")]
struct Account {
    me: Me,
    sessions: Vec<Session>,
    entries: Vec<SecurityEntry>,
    factors: SecondFactors,
    identities: Vec<Identity>,
    providers: Vec<Button>,
    can_have_passkeys: bool,
    refused: Option<&'static str>,
    done: Option<&'static str>,
    now: DateTime<Utc>,
}

/// The visitor's account: sessions, password, export, deletion.
pub async fn account(
    State(app): State<App>,
    api: Api,
    AskedFields(asked): AskedFields,
) -> Result<Response, Error> {
    let me = api.get("/v1/me").await?;
    let SessionList { sessions } = api.get("/v1/me/sessions").await?;
    let SecurityLog { mut entries } = api.get("/v1/me/security-log").await?;
    entries.truncate(SHOWN_SECURITY_ENTRIES);
    let factors = api.get("/v1/me/second-factors").await?;
    let done = asked.get(action_table::DONE).and_then(action_table::said);
    let IdentityList { identities } = api.get("/v1/me/identities").await?;
    render(&Account {
        me,
        sessions,
        entries,
        factors,
        identities,
        providers: provider::buttons(&app),
        can_have_passkeys: PasskeyForm::ask(&api, "").await.is_some(),
        refused: provider::refusal(asked.get(REFUSED)),
        done,
        now: format::now(),
    })
}

/// The account's data as a file.
pub async fn export(api: Api) -> Result<Response, Error> {
    let response = api.call(Method::GET, "/v1/me/export", None, HeaderMap::new()).await?;
    Ok(as_file(response, "account.json"))
}

/// Paths below `/console` without a page.
pub async fn nothing() -> Error {
    Error::NoSuchRoute
}
