//! Buttons: the form becomes a call of the API, and the answer decides the next page.

use askama::Template;
use axum::{
    extract::{OriginalUri, Path},
    http::{HeaderMap, Method},
    response::Response,
};
use fencepost_domain::error::Error;
use serde::{Deserialize, de::IgnoredAny};

use super::{
    action_table::{
        Action, Destination, FIELD_IDEMPOTENCY_KEY, NOTHING, Plane, SURE, find, saying,
    },
    api::Api,
    form::{self, Fields},
    location::{HX_REQUEST, LOGIN, is_own_page, segment},
    page::render,
    session,
};

/// In a form: the page that contains it.
const BACK: &str = "back";
/// In a form: the name of its target, where it sends an id.
const NAMED: &str = "named";

/// Parts of answers that decide the next page.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Made {
    id: Option<String>,
    slug: Option<String>,
    operation: Option<MadeOperation>,
}

#[derive(Debug, Deserialize)]
struct MadeOperation {
    id: String,
}

/// Confirmation page for browsers without scripts.
impl Confirm<'_> {
    /// The target of the action: as the form names it, or the values that it sends.
    fn named(&self) -> impl Iterator<Item = &str> {
        let named = self.form.get(NAMED);
        let rest = self.form.0.iter().filter(move |(name, _)| {
            named.is_none() && ![BACK, FIELD_IDEMPOTENCY_KEY].contains(&name.as_str())
        });
        named.into_iter().chain(rest.map(|(_, value)| value.as_str()))
    }
}

#[derive(Template)]
#[template(path = "confirm.html")]
struct Confirm<'a> {
    question: &'a str,
    place: &'a str,
    back: &'a str,
    form: &'a Fields,
}

/// Performs the action of a project's page; asks for confirmation first, if the action needs it.
///
/// # Errors
/// The API's errors; [`Error::NoSuchRoute`] when the action does not exist.
pub async fn of_project(
    api: Api,
    Path((project, operation)): Path<(String, String)>,
    OriginalUri(uri): OriginalUri,
    headers: HeaderMap,
    form: Fields,
) -> Result<Response, Error> {
    let action = find(&operation, Plane::Project).ok_or(Error::NoSuchRoute)?;
    if let Some(question) = action.asks
        && !headers.contains_key(HX_REQUEST)
        && form.get(SURE).is_none()
    {
        return render(&Confirm { question, place: uri.path(), back: back(&form), form: &form });
    }
    act(&api, action, Some(&project), &headers, &form).await
}

/// Performs an action of an account's page.
///
/// # Errors
/// The API's errors; [`Error::NoSuchRoute`] when the action does not exist.
pub async fn of_people(
    api: Api,
    Path(operation): Path<String>,
    headers: HeaderMap,
    form: Fields,
) -> Result<Response, Error> {
    let action = find(&operation, Plane::People).ok_or(Error::NoSuchRoute)?;
    act(&api, action, None, &headers, &form).await
}

async fn act(
    api: &Api,
    action: &Action,
    project: Option<&str>,
    headers: &HeaderMap,
    form: &Fields,
) -> Result<Response, Error> {
    if !api.is_logged_in() {
        return Err(Error::Unauthorized);
    }
    let below = project.map_or_else(String::new, |it| format!("/projects/{}", segment(it)));
    let path = format!("/v1{below}{}", action.fill(form));
    let body = (!action.fields.is_empty()).then(|| form::body(action.fields, form)).transpose()?;
    let method = Method::from_bytes(action.method.as_bytes()).map_err(Error::internal)?;
    // Nothing was changed: no error, if the visitor may see the target.
    if form.says_what_was() && body.as_deref() == Some("{}") {
        api.get::<IgnoredAny>(&path).await?;
        return Ok(session::go(headers.contains_key(HX_REQUEST), &saying(back(form), NOTHING)));
    }
    let made: Option<Made> = api.send_form(method, &path, body, form).await?;
    let made = made.unwrap_or_default();
    let page = |path: &str| {
        let project = project.map(segment).unwrap_or_default();
        format!("/console/p/{project}{path}")
    };
    let to = match (action.then, made) {
        (
            Destination::Operation,
            Made { operation: Some(MadeOperation { id }), .. } | Made { id: Some(id), .. },
        ) => page(&format!("/operations/{}", segment(&id))),
        (Destination::Job, Made { id: Some(id), .. }) => page(&format!("/jobs/{}", segment(&id))),
        (Destination::Project, Made { slug: Some(slug), .. }) => {
            let settings = if project.is_some() { "/settings" } else { "" };
            format!("/console/p/{}{settings}", segment(&slug))
        }
        (Destination::Login, _) => LOGIN.to_owned(),
        _ => back(form).to_owned(),
    };
    let to = saying(&to, action.operation);
    let mut response = session::go(headers.contains_key(HX_REQUEST), &to);
    if action.then == Destination::Login {
        session::forget(response.headers_mut());
    }
    Ok(response)
}

/// The form's page, if it belongs to the console.
pub fn back(form: &Fields) -> &str {
    let wanted = form.text(BACK);
    if is_own_page(wanted) { wanted } else { "/console" }
}
