//! What all pages share: the frame of a project's pages, and error pages.

use std::sync::{Arc, OnceLock};

use askama::{Template, filters::Safe};
use axum::{
    extract::{FromRequestParts, OriginalUri, RawPathParams},
    http::{
        HeaderValue, StatusCode,
        header::{ACCEPT, CONTENT_DISPOSITION, CONTENT_TYPE, HeaderName},
        request::Parts,
    },
    response::{IntoResponse, Response},
};
use chrono::{DateTime, Utc};
use fencepost_domain::{
    access::{Permission, Role, role_may},
    error::Error,
};
use fencepost_http::{
    error,
    routes::{metrics::MetricsSummary, projects::Project},
};
use fencepost_web::{app::App, wire::errors::ErrorResponse};
use serde::de::DeserializeOwned;
use uuid::Uuid;

use super::{
    action_table::{self, Plane},
    api::Api,
    form::{AskedFields, Fields, encode},
    format,
    location::{HX_REQUEST, LOGIN, path_and_query, segment},
};

const HTML: &str = "text/html; charset=utf-8";

/// A page, or a fragment of one.
pub fn render(template: &impl Template) -> Result<Response, Error> {
    let html = template.render().map_err(Error::internal)?;
    Ok(([(CONTENT_TYPE, HTML)], html).into_response())
}

/// A page that shows a refused form again, with the status of the error, and the error for the log.
pub fn refused_page(mut page: Response, error: Error) -> Response {
    *page.status_mut() = error::status(&error);
    page.extensions_mut().insert(ErrorResponse(error));
    page
}

/// An answer of the API as a file with this name.
pub fn as_file(mut response: Response, name: &str) -> Response {
    if let Ok(kept) = HeaderValue::from_str(&format!("attachment; filename=\"{name}\"")) {
        response.headers_mut().insert(CONTENT_DISPOSITION, kept);
    }
    response
}

/// A section of a project's console: its path, and the text of the link.
type Section = (&'static str, &'static str);

/// The sections in their groups.
const SECTIONS: [(&str, &[Section]); 3] = [
    (
        "Work",
        &[
            ("", "Overview"),
            ("jobs", "Jobs"),
            ("queues", "Queues"),
            ("dead-letters", DEAD_LETTERS),
            ("job-types", "Job types"),
            ("workers", "Workers"),
        ],
    ),
    (
        "Plans",
        &[
            ("recurring", "Recurring"),
            ("workflows", "Workflows"),
            ("batches", "Batches"),
            ("operations", "Operations"),
        ],
    ),
    (
        "Project",
        &[
            ("alarms", "Alarms"),
            ("webhooks", "Webhooks"),
            ("keys", "API keys"),
            ("members", "Members"),
            ("limits", "Limits"),
            ("audit-log", "Audit log"),
            ("settings", "Settings"),
        ],
    ),
];
const DEAD_LETTERS: &str = "Dead letters";

/// A link of the menu.
pub struct Link {
    pub path: String,
    pub text: &'static str,
    pub is_here: bool,
    /// How many things wait there; none: nothing, or it is not known.
    pub badge: Option<i64>,
}

/// The frame of a project's pages.
#[derive(Clone)]
pub struct Frame {
    /// The project, and the visitor's role in it.
    pub project: Project,
    /// The path and query of the page.
    pub place: String,
    /// The action that was just done.
    pub done: Option<&'static str>,
    /// Number of dead letters; none: there is none, or only a part of the page is made.
    pub dead_letters: Option<i64>,
    pub now: DateTime<Utc>,
}

/// The frame of the page that is being made, for the page of an error.
#[derive(Clone, Default)]
pub struct Framed(pub Arc<OnceLock<Frame>>);

impl Frame {
    /// The path of a page of the project.
    pub fn to(&self, path: &str) -> String {
        format!("/console/p/{}{path}", segment(&self.project.slug))
    }

    /// The next page of a list at this path, with the same filters.
    pub fn next(&self, path: &str, filters: &str, cursor: Option<&str>) -> Option<String> {
        let separator = if filters.is_empty() { "" } else { "&" };
        let cursor = encode(&[("cursor", cursor?)]);
        Some(self.to(&format!("{path}?{filters}{separator}{cursor}")))
    }

    /// The links of the menu in their groups.
    pub fn sections(&self) -> Vec<(&'static str, Vec<Link>)> {
        let base = self.to("");
        let below = self.place.strip_prefix(&base).unwrap_or_default();
        let own = below.trim_start_matches('/').split(['/', '?']).next().unwrap_or_default();
        let link = |(path, text): &Section| {
            let slash = if path.is_empty() { "" } else { "/" };
            let badge = self.dead_letters.filter(|_| *text == DEAD_LETTERS);
            Link { path: format!("{base}{slash}{path}"), text, is_here: own == *path, badge }
        };
        let is_hidden = |path: &str| {
            ["webhooks", "keys", "audit-log"].contains(&path) && !self.may_administer()
        };
        let links = |all: &[Section]| all.iter().filter(|it| !is_hidden(it.0)).map(link).collect();
        SECTIONS.into_iter().map(|(group, all)| (group, links(all))).collect()
    }

    /// The visitor's role.
    pub fn role(&self) -> Role {
        self.project.role.unwrap_or(Role::Viewer)
    }

    /// Whether the visitor has this permission.
    pub fn may(&self, permission: Permission) -> bool {
        role_may(self.role(), permission)
    }

    /// Whether the visitor may manage jobs, queues, dead letters and schedules.
    pub fn may_manage(&self) -> bool {
        self.may(Permission::Manage)
    }

    /// Whether the visitor may manage keys and webhooks, and read the audit log.
    pub fn may_administer(&self) -> bool {
        self.may(Permission::Administer)
    }

    /// The page of a queue's push.
    pub fn place_of_push(&self, queue: &str) -> String {
        self.to(&format!("/queues/{}/push", segment(queue)))
    }

    /// Whether the visitor may manage members and settings.
    pub fn may_govern(&self) -> bool {
        self.may(Permission::Govern)
    }

    /// Whether the visitor may delete the project.
    pub fn may_own(&self) -> bool {
        self.may(Permission::Own)
    }

    /// The path of a page of the project, with a query if there is one.
    pub fn with_query(&self, path: &str, query: &str) -> String {
        let path = self.to(path);
        if query.is_empty() { path } else { format!("{path}?{query}") }
    }

    /// The start of a form for this operation that returns to this page.
    pub fn form(&self, operation: &str) -> Safe<String> {
        self.form_back(operation, &self.place)
    }

    /// The same, but it returns to another page of the project.
    pub fn form_to(&self, operation: &str, path: &str) -> Safe<String> {
        self.form_back(operation, &self.to(path))
    }

    /// The same, but it returns to any page of the console.
    pub fn form_back(&self, operation: &str, back: &str) -> Safe<String> {
        let asks = action_table::find(operation, Plane::Project).and_then(|it| it.asks);
        self.begin_form(&self.to(&format!("/do/{operation}")), back, asks)
    }

    /// The start of a form that is sent to a page of the project.
    pub fn form_at(&self, path: impl AsRef<str>) -> Safe<String> {
        self.begin_form(&self.to(path.as_ref()), &self.place, None)
    }

    /// All forms start alike: live refresh may turn one into another.
    fn begin_form(&self, action: &str, back: &str, asks: Option<&str>) -> Safe<String> {
        let (action, back) = (format::escape(action), format::escape(&without_done(back)));
        let asks = asks.map(|it| format!(" data-confirm=\"{}\"", format::escape(it)));
        let asks = asks.unwrap_or_default();
        Safe(format!(
            "<form method=\"post\" action=\"{action}\"{asks} hx-post=\"{action}\" hx-target=\"#problem\">\
             <input type=\"hidden\" name=\"back\" value=\"{back}\">{}",
            self.once()
        ))
    }

    /// Hidden idempotency key of the form. Live refresh keeps it, so a resubmit after a lost answer
    /// repeats the same request.
    pub fn once(&self) -> Safe<String> {
        let (name, value) = (action_table::FIELD_IDEMPOTENCY_KEY, Uuid::new_v4().simple());
        Safe(format!("<input type=\"hidden\" name=\"{name}\" value=\"{value}\" hx-morph-skip>"))
    }

    /// Hidden tag of the settings that a form changes: if another has changed them, it does not.
    /// Live refresh keeps it beside what was typed.
    pub fn unchanged(&self, etag: impl AsRef<str>) -> Safe<String> {
        let (name, tag) = (action_table::FIELD_IF_MATCH, format::escape(etag.as_ref()));
        Safe(format!("<input type=\"hidden\" name=\"{name}\" value=\"{tag}\" hx-morph-skip>"))
    }

    /// Makes a form create only.
    pub fn only_new(&self) -> Safe<String> {
        Safe(format!(
            "<input type=\"hidden\" name=\"{}\" value=\"*\">",
            action_table::FIELD_IF_NONE_MATCH
        ))
    }

    /// The minute in which the page was made: images requested with it are new each minute.
    pub fn minute(&self) -> String {
        self.now.format("%H%M").to_string()
    }

    /// A time relative to when the page was made.
    pub fn time(&self, at: impl format::Plain<DateTime<Utc>>) -> Safe<String> {
        format::time(self.now, at)
    }
}

/// A path without the message about the last action.
pub fn without_done(place: &str) -> String {
    let Some((path, query)) = place.split_once('?') else { return place.to_owned() };
    let kept =
        form_urlencoded::parse(query.as_bytes()).filter(|(name, _)| name != action_table::DONE);
    let kept: Vec<_> = kept.collect();
    let pairs: Vec<_> = kept.iter().map(|(name, value)| (&**name, &**value)).collect();
    if pairs.is_empty() { path.to_owned() } else { format!("{path}?{}", encode(&pairs)) }
}

/// A page of a project: the visitor, the query, and the API.
pub struct Here {
    pub api: Api,
    /// The frame of the page.
    pub frame: Frame,
    pub asked: Fields,
    /// Whether only a part of the page is made anew.
    pub is_fragment: bool,
}

impl Here {
    /// Reads something of the project.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Error> {
        self.api.get(&self.at(path)).await
    }

    /// Reads a page of one of the project's lists, from the query's cursor and with those of its
    /// filters that have these names; and returns the filters as a query.
    pub async fn list<T: DeserializeOwned>(
        &self,
        path: &str,
        names: &[&str],
    ) -> Result<(T, String), Error> {
        let (filters, cursor) = (self.asked.query(names), self.asked.query(&["cursor"]));
        let separator = if path.contains('?') { '&' } else { '?' };
        let page = self.get(&format!("{path}{separator}{filters}&{cursor}")).await?;
        Ok((page, filters))
    }

    /// The rows of a list, of as many pages of it as `max_pages`, and whether there are more.
    pub async fn pages<P: DeserializeOwned, R>(
        &self,
        path: &str,
        max_pages: usize,
        rows: fn(P) -> (Vec<R>, Option<String>),
    ) -> Result<(Vec<R>, bool), Error> {
        let (mut all, mut cursor) = (Vec::new(), None);
        for _ in 0..max_pages {
            let after = cursor.map(|it: String| encode(&[("cursor", &it)])).unwrap_or_default();
            let (found, next) = rows(self.get(&format!("{path}&{after}")).await?);
            all.extend(found);
            cursor = next;
            if cursor.is_none() {
                break;
            }
        }
        Ok((all, cursor.is_some()))
    }

    /// The API path of something of the project.
    pub fn at(&self, path: &str) -> String {
        format!("/v1/projects/{}{path}", segment(&self.frame.project.slug))
    }
}

impl FromRequestParts<App> for Here {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Error> {
        let api = Api::from_request_parts(parts, app).await?;
        if !api.is_logged_in() {
            return Err(Error::Unauthorized);
        }
        let params = RawPathParams::from_request_parts(parts, app).await;
        let params = params.map_err(|_| Error::ProjectNotFound)?;
        let slug = params.iter().find(|it| it.0 == "project").map_or("", |it| it.1);
        let project: Project = api.get(&format!("/v1/projects/{}", segment(slug))).await?;
        let AskedFields(asked) = AskedFields::from_request_parts(parts, app).await?;
        let done = asked.get(action_table::DONE).and_then(action_table::said);
        let OriginalUri(uri) = OriginalUri::from_request_parts(parts, app)
            .await
            .unwrap_or_else(|never| match never {});
        // A project may be named by its id; links use its slug.
        let named = format!("/console/p/{slug}");
        let below =
            path_and_query(&uri).strip_prefix(&named).map(str::to_owned).unwrap_or_default();
        let own = format!("/console/p/{}{below}", segment(&project.slug));
        let is_fragment = parts.headers.contains_key(HX_REQUEST);
        // Only a whole page shows the menu: pictures, streams and parts of pages do not.
        let accepted = parts.headers.get(ACCEPT).and_then(|it| it.to_str().ok());
        let has_menu = !is_fragment && accepted.is_some_and(|it| it.contains("text/html"));
        let dead_letters = match has_menu {
            true => dead_letters(&api, &project).await,
            false => None,
        };
        let frame = Frame { project, place: own, done, dead_letters, now: format::now() };
        if let Some(Framed(cell)) = parts.extensions.get() {
            // It is the first one: each request has a cell of its own.
            let _ = cell.set(frame.clone());
        }
        Ok(Self { api, frame, asked, is_fragment })
    }
}

async fn dead_letters(api: &Api, project: &Project) -> Option<i64> {
    let path = format!("/v1/projects/{}/metrics/summary?period=1h", segment(&project.slug));
    let summary: MetricsSummary = api.get(&path).await.ok()?;
    Some(summary.current.dead_letter).filter(|it| *it > 0)
}

#[derive(Template)]
#[template(path = "problem_here.html")]
struct ProblemHere<'a> {
    frame: &'a Frame,
    title: &'static str,
    info: &'a error::ApiError,
}

#[derive(Template)]
#[template(path = "problem.html")]
struct Problem<'a> {
    title: &'static str,
    info: &'a error::ApiError,
    /// A way to continue: a link and its text.
    ways: Vec<(String, &'static str)>,
}

#[derive(Template)]
#[template(path = "problem_fragment.html")]
struct ProblemFragment<'a> {
    info: &'a error::ApiError,
}

/// The visitor of an error page.
pub struct SeenBy<'a> {
    /// The page that was requested, or left.
    pub page: &'a str,
    pub is_logged_in: bool,
    /// The frame, if the error is one of a project's page.
    pub frame: Option<&'a Frame>,
}

impl SeenBy<'_> {
    /// To the surroundings of the page: its list, its project, all projects; or to the login.
    fn ways(&self) -> Vec<(String, &'static str)> {
        if !self.is_logged_in {
            return vec![(LOGIN.to_owned(), "Log in")];
        }
        let path = self.page.split('?').next().unwrap_or_default();
        let mut parts = path.strip_prefix("/console/p/").into_iter().flat_map(|it| it.split('/'));
        let (project, section) =
            (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let mut sections = SECTIONS.into_iter().flat_map(|it| it.1);
        let known = sections.find(|it| it.0 == section && !section.is_empty());
        let list = known.map(|it| (format!("/console/p/{project}/{section}"), it.1));
        let own = (!project.is_empty()).then(|| (format!("/console/p/{project}"), "Overview"));
        let all = ("/console/projects".to_owned(), "All projects");
        list.into_iter().chain(own).chain([all]).collect()
    }
}

/// The error for people; errors of fields are listed below it.
pub fn in_words(failure: &Error, request_id: &str, is_logged_in: bool) -> error::ApiError {
    let mut info = error::info(failure, request_id);
    match failure {
        Error::InvalidCredentials if is_logged_in => "The current password is wrong.",
        Error::InvalidCredentials => "The e-mail address or the password is wrong.",
        Error::NoSuchRoute | Error::UnknownRoute { .. } => "Page not found.",
        _ if info.details.first().is_some_and(|it| info.message.starts_with(&it.field)) => {
            "Please correct:"
        }
        _ => return info,
    }
    .clone_into(&mut info.message);
    info
}

/// The error page, or a fragment with the error.
pub fn problem(
    failure: &Error,
    request_id: &str,
    is_fragment: bool,
    seen_by: SeenBy<'_>,
) -> Response {
    let info = in_words(failure, request_id, seen_by.is_logged_in);
    let status = error::status(failure);
    let title = match status {
        StatusCode::NOT_FOUND => "Not found",
        StatusCode::FORBIDDEN => "Not allowed",
        StatusCode::TOO_MANY_REQUESTS => "Too many requests",
        it if it.is_server_error() => "Server error",
        _ => "Request refused",
    };
    let rendered = if is_fragment {
        render(&ProblemFragment { info: &info })
    } else if let Some(frame) = seen_by.frame {
        render(&ProblemHere { frame, title, info: &info })
    } else {
        render(&Problem { title, info: &info, ways: seen_by.ways() })
    };
    let mut response = rendered.unwrap_or_else(|_| info.message.into_response());
    *response.status_mut() = status;
    fencepost_web::wire::errors::add_retry_after(failure, &mut response);
    response
}

/// A page that requests itself again: then the request comes from our own page, with cookies.
pub fn one_moment() -> Response {
    const REFRESH: HeaderName = HeaderName::from_static("refresh");
    let page = "<!doctype html><html lang=\"en\"><title>One moment</title><p>One moment… <a href=\"/console\">Continue</a></p></html>";
    ([(CONTENT_TYPE, HTML)], [(REFRESH, HeaderValue::from_static("0"))], page).into_response()
}

#[cfg(test)]
mod tests {
    use super::without_done;

    #[test]
    fn what_a_button_has_said_is_said_once() {
        assert_eq!(without_done("/console/p/a/jobs?done=jobs_cancel"), "/console/p/a/jobs");
        assert_eq!(without_done("/a?queue=x+y&done=z&tag=%26"), "/a?queue=x+y&tag=%26");
        assert_eq!(without_done("/a"), "/a");
    }
}
