//! Access and limits: API keys, members, limits, the audit log, the project itself.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use askama::Template;
use axum::{
    extract::{Path, State},
    http::{HeaderMap, Method},
    response::Response,
};
use chrono::{DateTime, TimeDelta, Utc};
use fencepost_domain::{
    access::{Role, Scope, may_change_member},
    error::Error,
    lease::RequireFence,
    limits::{self, MAX_PAGE_KEYS},
};
use fencepost_http::routes::{
    audit::{AuditEntry, AuditPage},
    keys::{ApiKey, CreatedApiKey, KeyPage, KeyState},
    limits::{LimitKind, LimitList, LimitStatus, usage::Usage},
    me::Me,
    members::{CreatedInvitation, Invitation, InvitationList, Member, MemberList},
};
use fencepost_web::app::App;
use serde_json::value::RawValue;

use super::{
    form::{self, Field, Fields},
    format,
    location::segment,
    page::{Frame, Here, as_file, render},
};

#[derive(Template)]
#[template(path = "keys.html")]
struct Keys {
    frame: Frame,
    keys: Vec<ApiKey>,
    next: Option<String>,
    made: Option<CreatedApiKey>,
    url: String,
    /// Whose tokens a key may trust.
    token_issuers: Vec<String>,
}

async fn keys_page(here: Here, app: &App, made: Option<CreatedApiKey>) -> Result<Response, Error> {
    let (page, _): (KeyPage, _) = here.list("/keys", &[]).await?;
    let mut frame = here.frame;
    frame.place = frame.to("/keys");
    let next = frame.next("/keys", "", page.next_cursor.as_deref());
    let url = app.accounts.public_url.clone();
    let token_issuers = app.accounts.providers.token_issuers().map(str::to_owned).collect();
    render(&Keys { frame, keys: page.keys, next, made, url, token_issuers })
}

pub async fn keys(here: Here, State(app): State<App>) -> Result<Response, Error> {
    keys_page(here, &app, None).await
}

/// Scopes that belong together.
struct Preset {
    name: &'static str,
    /// The user of such a key.
    user: &'static str,
    scopes: &'static [Scope],
}

/// The first one is chosen until a visitor chooses another.
const PRESETS: &[Preset] = &[
    Preset {
        name: "both",
        user: "A program that enqueues, works and reads",
        scopes: &[Scope::Produce, Scope::Work, Scope::Read, Scope::PayloadRead],
    },
    Preset { name: "producer", user: "A producer: it only enqueues", scopes: &[Scope::Produce] },
    Preset { name: "worker", user: "A worker: it only works", scopes: &[Scope::Work] },
    Preset {
        name: "dashboard",
        user: "A dashboard: it reads all but payloads",
        scopes: &[Scope::Read],
    },
    Preset {
        name: "operator",
        user: "A person or a script on call: all but webhooks and keys",
        scopes: &[
            Scope::Produce,
            Scope::Work,
            Scope::Read,
            Scope::PayloadRead,
            Scope::Manage,
            Scope::Schedules,
        ],
    },
];

/// Creates a key, and shows it once.
pub async fn make_key(
    here: Here,
    State(app): State<App>,
    mut form: Fields,
) -> Result<Response, Error> {
    const REQUEST_FIELDS: &[Field] = &[
        Field::Text("name"),
        Field::Choices("scopes"),
        Field::Text("require_fence"),
        Field::Json("strict"),
        Field::Words("allowed_ips"),
        Field::Words("queues"),
        Field::Words("job_types"),
        Field::Time("expires_at"),
        Field::Text("trusts.issuer"),
        Field::Text("trusts.subject"),
    ];
    if let Some(preset) = PRESETS.iter().find(|it| form.get("preset") == Some(it.name)) {
        form.0.retain(|it| it.0 != "scopes");
        let scopes = preset.scopes.iter();
        form.0.extend(scopes.map(|it| ("scopes".to_owned(), it.name().to_owned())));
    }
    if let (None, Ok(days)) = (form.get("expires_at"), form.text("lifetime_days").parse()) {
        let end = TimeDelta::try_days(days).and_then(|it| format::now().checked_add_signed(it));
        form.0.extend(end.map(|it| ("expires_at".to_owned(), it.to_rfc3339())));
    }
    let body = form::body(REQUEST_FIELDS, &form)?;
    let made = here.api.send(Method::POST, &here.at("/keys"), Some(body)).await?;
    keys_page(here, &app, Some(made)).await
}

/// Rotates a key, and shows the new one once.
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

/// Live keys that an account or key has created.
struct CreatedKeys<'a> {
    keys: Vec<&'a ApiKey>,
    /// Whether one of them was used within a day: revoking it stops something.
    is_used: bool,
}

impl<'a> CreatedKeys<'a> {
    fn of(keys: &'a [ApiKey], creator: &str, now: DateTime<Utc>) -> Self {
        let is_of = |it: &&ApiKey| it.created_by.as_deref() == Some(creator);
        let live = keys.iter().filter(|it| it.state == KeyState::Live);
        let keys: Vec<_> = live.filter(is_of).collect();
        let is_recent = |it: DateTime<Utc>| now - it < TimeDelta::days(1);
        let is_used = keys.iter().any(|it| it.last_used_at.is_some_and(is_recent));
        Self { keys, is_used }
    }

    fn count(&self) -> i64 {
        i64::try_from(self.keys.len()).unwrap_or(i64::MAX)
    }
}

impl Keys {
    /// As far as they are on this page.
    fn created_by(&self, creator: &str) -> CreatedKeys<'_> {
        CreatedKeys::of(&self.keys, creator, self.frame.now)
    }
}

impl Members {
    fn created_by(&self, creator: &str) -> CreatedKeys<'_> {
        CreatedKeys::of(&self.keys, creator, self.frame.now)
    }
}

/// Adds to [`ApiKey`] what pages show of it.
trait ApiKeyExt {
    fn scope_names(&self) -> String;
}

impl ApiKeyExt for ApiKey {
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
    /// The roles that the visitor may grant.
    roles: Vec<Role>,
    members: Vec<Member>,
    /// Keys of the project, the newest; none if the visitor may not see them.
    keys: Vec<ApiKey>,
    invitations: Vec<Invitation>,
    made: Option<(CreatedInvitation, String)>,
}

async fn members_page(
    here: Here,
    made: Option<(CreatedInvitation, String)>,
) -> Result<Response, Error> {
    let me: Me = here.api.get("/v1/me").await?;
    let MemberList { members } = here.get("/members").await?;
    let InvitationList { invitations } = match here.frame.may_govern() {
        true => here.get("/invitations").await?,
        false => InvitationList { invitations: Vec::new() },
    };
    let keys = match here.frame.may_govern() {
        true => here.get::<KeyPage>(&format!("/keys?limit={MAX_PAGE_KEYS}")).await?.keys,
        false => Vec::new(),
    };
    let mut frame = here.frame;
    frame.place = frame.to("/members");
    let own_role = frame.role();
    let roles = Role::ALL.into_iter().filter(|it| may_change_member(own_role, None, Some(*it)));
    let roles = roles.collect();
    render(&Members { frame, own_id: me.account.id, roles, members, keys, invitations, made })
}

/// Members and open invitations.
pub async fn members(here: Here) -> Result<Response, Error> {
    members_page(here, None).await
}

/// Invites a person, and shows the link, for instances without a mail server.
pub async fn invite(here: Here, State(app): State<App>, form: Fields) -> Result<Response, Error> {
    let body = form::body(&[Field::Text("email"), Field::Text("role")], &form)?;
    let path = here.at("/invitations");
    let made: CreatedInvitation = here.api.send(Method::POST, &path, Some(body)).await?;
    let url = &app.accounts.public_url;
    let link = format!("{url}/console/invitation#token={}", made.token);
    members_page(here, Some((made, link))).await
}

#[derive(Template)]
#[template(path = "limits.html")]
struct Limits {
    frame: Frame,
    list: LimitList,
    usage: Usage,
}

/// All limits, with their usage, and the usage of the present month.
pub async fn limits(here: Here) -> Result<Response, Error> {
    let list = here.get("/limits").await?;
    let usage = here.get("/usage").await?;
    render(&Limits { frame: here.frame, list, usage })
}

/// Adds to [`LimitStatus`] what pages show of it.
trait LimitStatusExt {
    fn kind_words(&self) -> &'static str;

    fn percent(&self) -> Option<i64>;
}

impl LimitStatusExt for LimitStatus {
    fn kind_words(&self) -> &'static str {
        match self.kind {
            LimitKind::Rate => "calls a minute",
            LimitKind::Quota => "at a time",
            LimitKind::Bound => "each",
        }
    }

    fn percent(&self) -> Option<i64> {
        Some(format::percent(self.used?, self.limit?))
    }
}

#[derive(Template)]
#[template(path = "audit.html")]
struct Audit {
    frame: Frame,
    entries: Vec<AuditEntry>,
    /// The addresses of current members.
    emails: HashMap<String, String>,
    asked: Fields,
    filters: String,
    next: Option<String>,
}

const AUDIT_FILTERS: [&str; 3] = ["action", "actor_id", "target"];

impl Audit {
    fn changes(&self, entry: &AuditEntry) -> Vec<String> {
        changes(entry.before.as_deref(), entry.after.as_deref())
    }

    fn name_of<'a>(&'a self, id: &'a str) -> &'a str {
        self.emails.get(id).map_or(id, String::as_str)
    }
}

/// Characters of a value that the audit log shows.
const MAX_SHOWN_VALUE: usize = 120;

/// The changes of an entry, field by field.
fn changes(before: Option<&RawValue>, after: Option<&RawValue>) -> Vec<String> {
    type State<'a> = BTreeMap<String, &'a RawValue>;
    let state = |it: Option<&'_ RawValue>| -> Option<BTreeMap<String, String>> {
        let fields: State<'_> = serde_json::from_str(it?.get()).ok()?;
        Some(fields.into_iter().map(|(name, value)| (name, value.get().to_owned())).collect())
    };
    let shown = |value: Option<&String>| match value.map_or("none", String::as_str) {
        "null" => "none".to_owned(),
        value => value.chars().take(MAX_SHOWN_VALUE).collect(),
    };
    let (was, is) = (state(before), state(after));
    if was.is_none() && is.is_none() {
        let whole = |it: &RawValue| it.get().chars().take(MAX_SHOWN_VALUE).collect();
        return before.into_iter().chain(after).map(whole).collect();
    }
    let is_change = was.is_some() && is.is_some();
    let (was, is) = (was.unwrap_or_default(), is.unwrap_or_default());
    let names: BTreeSet<_> = was.keys().chain(is.keys()).collect();
    let differs = names.into_iter().filter(|it| was.get(*it) != is.get(*it));
    let changes = differs.map(|name| match (was.get(name), is.get(name)) {
        (one, other) if is_change => format!("{name}: {} → {}", shown(one), shown(other)),
        (one, other) => format!("{name}: {}", shown(other.or(one))),
    });
    changes.collect()
}

/// The audit log. A member may be named by address.
pub async fn audit(mut here: Here) -> Result<Response, Error> {
    let MemberList { members } = here.get("/members").await?;
    for (name, value) in &mut here.asked.0 {
        if let Some(member) = members.iter().find(|it| name == "actor_id" && it.email == *value) {
            value.clone_from(&member.account_id);
        }
    }
    let emails = members.into_iter().map(|it| (it.account_id, it.email)).collect();
    let (page, filters): (AuditPage, _) = here.list("/audit-log", &AUDIT_FILTERS).await?;
    let Here { frame, asked, .. } = here;
    let next = frame.next("/audit-log", &filters, page.next_cursor.as_deref());
    render(&Audit { frame, entries: page.entries, emails, asked, filters, next })
}

/// The same as a file.
pub async fn audit_export(here: Here) -> Result<Response, Error> {
    let query = here.asked.query(&AUDIT_FILTERS);
    let path = here.at(&format!("/audit-log/export?{query}"));
    let response = here.api.call(Method::GET, &path, None, HeaderMap::new()).await?;
    Ok(as_file(response, "audit-log.ndjson"))
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

#[cfg(test)]
mod tests {
    use super::*;

    fn check(before: Option<&str>, after: Option<&str>, expected: &[&str]) {
        let raw = |it: Option<&str>| it.map(|it| RawValue::from_string(it.into()).expect("JSON"));
        assert_eq!(changes(raw(before).as_deref(), raw(after).as_deref()), expected);
    }

    #[test]
    fn a_change_is_shown_by_its_fields() {
        let before = r#"{"max_concurrency": null, "paused": false, "name": "a"}"#;
        let after = r#"{"max_concurrency": 4, "paused": false, "name": "b"}"#;
        let changes = ["max_concurrency: none → 4", "name: \"a\" → \"b\""];
        check(Some(before), Some(after), &changes);
        check(None, Some(r#"{"name": "k"}"#), &["name: \"k\""]);
        check(Some("[1]"), None, &["[1]"]);
        check(None, None, &[]);
    }
}
