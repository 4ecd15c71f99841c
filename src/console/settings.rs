//! Who may come in and what they may use: API keys, members, limits, the audit log, the project itself.

use askama::Template;
use axum::{
    extract::{Path, State},
    http::{HeaderMap, HeaderValue, Method, header::CONTENT_DISPOSITION},
    response::Response,
};

use super::{
    api::segment,
    form::{self, Field, Fields, encode},
    page::{Frame, Here, render},
    show,
};
use crate::{
    app::App,
    domain::access::{Role, Scope},
    error::Error,
    http::{
        audit::{AuditEntry, AuditPage},
        keys::{ApiKey, KeyPage, KeyState, MadeApiKey},
        limits::{Limit, LimitKind, LimitList},
        me::Me,
        members::{Invitation, InvitationList, MadeInvitation, Member, MemberList},
    },
};

#[derive(Template)]
#[template(path = "keys.html")]
struct Keys {
    frame: Frame,
    keys: Vec<ApiKey>,
    next: Option<String>,
    made: Option<MadeApiKey>,
    url: String,
}

async fn keys_page(here: Here, app: &App, made: Option<MadeApiKey>) -> Result<Response, Error> {
    let cursor = here.asked.query(&["cursor"]);
    let page: KeyPage = here.get(&format!("/keys?{cursor}")).await?;
    let mut frame = here.frame;
    frame.place = frame.to("/keys");
    let next = frame.next("/keys", "", page.next_cursor.as_deref());
    let url = app.accounts.public_url.clone();
    render(&Keys { frame, keys: page.keys, next, made, url })
}

/// The keys.
pub async fn keys(here: Here, State(app): State<App>) -> Result<Response, Error> {
    keys_page(here, &app, None).await
}

/// Makes a key, and shows it, once.
pub async fn make_key(here: Here, State(app): State<App>, form: Fields) -> Result<Response, Error> {
    const WISH: &[Field] =
        &[Field::Text("name"), Field::Choices("scopes"), Field::Time("expires_at")];
    let body = form::body(WISH, &form)?;
    let made = here.api.send(Method::POST, &here.at("/keys"), Some(body)).await?;
    keys_page(here, &app, Some(made)).await
}

/// Makes the successor of a key, and shows it, once.
pub async fn rotate_key(
    here: Here,
    State(app): State<App>,
    Path((_, id)): Path<(String, String)>,
    form: Fields,
) -> Result<Response, Error> {
    let body = form::body(&[Field::Number("overlap_seconds")], &form)?;
    let path = here.at(&format!("/keys/{}/rotate", segment(&id)));
    let made = here.api.send(Method::POST, &path, Some(body)).await?;
    keys_page(here, &app, Some(made)).await
}

impl ApiKey {
    fn state_word(&self) -> &'static str {
        match self.state {
            KeyState::Live => "live",
            KeyState::Expired => "expired",
            KeyState::Revoked => "revoked",
        }
    }

    fn scope_names(&self) -> String {
        let names: Vec<_> = self.scopes.iter().map(|it| it.name()).collect();
        names.join(", ")
    }
}

#[derive(Template)]
#[template(path = "members.html")]
struct Members {
    frame: Frame,
    own_id: String,
    members: Vec<Member>,
    invitations: Vec<Invitation>,
    made: Option<(MadeInvitation, String)>,
}

async fn members_page(
    here: Here,
    made: Option<(MadeInvitation, String)>,
) -> Result<Response, Error> {
    let me: Me = here.api.get("/v1/me").await?;
    let MemberList { members } = here.get("/members").await?;
    let InvitationList { invitations } = match here.frame.may_govern() {
        true => here.get("/invitations").await?,
        false => InvitationList { invitations: Vec::new() },
    };
    let mut frame = here.frame;
    frame.place = frame.to("/members");
    render(&Members { frame, own_id: me.account.id, members, invitations, made })
}

/// The members, and who is invited.
pub async fn members(here: Here) -> Result<Response, Error> {
    members_page(here, None).await
}

/// Invites somebody, and shows the link, for who has no mail server.
pub async fn invite(here: Here, State(app): State<App>, form: Fields) -> Result<Response, Error> {
    let body = form::body(&[Field::Text("email"), Field::Text("role")], &form)?;
    let path = here.at("/invitations");
    let made: MadeInvitation = here.api.send(Method::POST, &path, Some(body)).await?;
    let url = &app.accounts.public_url;
    let token = encode(&[("token", &made.token)]);
    let link = format!("{url}/console/invitation?{token}");
    members_page(here, Some((made, link))).await
}

#[derive(Template)]
#[template(path = "limits.html")]
struct Limits {
    frame: Frame,
    list: LimitList,
}

/// Every limit, and how much of it is used.
pub async fn limits(here: Here) -> Result<Response, Error> {
    let list = here.get("/limits").await?;
    render(&Limits { frame: here.frame, list })
}

impl Limit {
    fn kind_words(&self) -> &'static str {
        match self.kind {
            LimitKind::Rate => "calls a minute",
            LimitKind::Quota => "at a time",
            LimitKind::Bound => "each",
        }
    }

    fn percent(&self) -> Option<i64> {
        Some(show::percent(self.used?, self.limit?))
    }
}

#[derive(Template)]
#[template(path = "audit.html")]
struct Audit {
    frame: Frame,
    entries: Vec<AuditEntry>,
    asked: Fields,
    next: Option<String>,
}

const AUDIT_FILTERS: [&str; 3] = ["action", "actor_id", "target"];

/// Who did what.
pub async fn audit(here: Here) -> Result<Response, Error> {
    let query = here.asked.query(&["action", "actor_id", "target", "cursor"]);
    let page: AuditPage = here.get(&format!("/audit-log?{query}")).await?;
    let Here { frame, asked, .. } = here;
    let filters = asked.query(&AUDIT_FILTERS);
    let next = frame.next("/audit-log", &filters, page.next_cursor.as_deref());
    render(&Audit { frame, entries: page.entries, asked, next })
}

/// The same as a file.
pub async fn audit_export(here: Here) -> Result<Response, Error> {
    let query = here.asked.query(&AUDIT_FILTERS);
    let path = here.at(&format!("/audit-log/export?{query}"));
    let mut response = here.api.call(Method::GET, &path, None, HeaderMap::new()).await?;
    let name = HeaderValue::from_static("attachment; filename=\"audit-log.ndjson\"");
    response.headers_mut().insert(CONTENT_DISPOSITION, name);
    Ok(response)
}

#[derive(Template)]
#[template(path = "settings.html")]
struct Settings {
    frame: Frame,
}

/// The project itself.
pub async fn project(here: Here) -> Result<Response, Error> {
    render(&Settings { frame: here.frame })
}
