//! The OpenAPI document, made from the handlers, and the pages that show it.

mod codes;
mod examples;
mod heartbeats;
mod open_enums;
mod shared;
mod v3_0;
mod webhooks;

use std::sync::LazyLock;

use axum::{
    extract::MatchedPath,
    http::{
        Uri,
        header::{CONTENT_TYPE, HeaderName},
    },
    response::Redirect,
};
use fencepost_domain::error::{Error, KEY_PREFIX};
use fencepost_store::jobs::Order;
use fencepost_web::{
    app::App,
    wire::openapi::{Applies, DerivedResponse, OF_BODIES, add_responses, lift_bounds},
};
use serde_json::{Map, Value, json};
use utoipa::{
    Modify, OpenApi,
    openapi::{
        OpenApi as Document,
        security::{HttpAuthScheme, HttpBuilder, SecurityScheme},
    },
};
use utoipa_axum::router::OpenApiRouter;
use utoipa_swagger_ui::{Config, SwaggerUi};

use crate::{
    deprecation,
    routes::{data_plane, people_plane, project_plane},
};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Fencepost",
        description = "A job queue with an HTTP API. Producers enqueue jobs with one POST; workers \
            poll for them, hold a lease by heartbeat, and acknowledge the outcome. Every lease is \
            fenced by its attempt.\n\nRoutes for a project's jobs exist in two forms: without a prefix, where \
            the key selects the project, and under `/v1/projects/{project}/…` (id or slug), where the project \
            must be the key's, or one that the session's account is a member of. Sessions need the second form, \
            which `/openapi-project.json` describes.\n\nA body may be sent with `Content-Encoding: gzip`; its \
            bounds are those of its content. Large lists are compressed on request. With \
            `Accept: application/problem+json`, errors are problems of RFC 9457.",
        license(name = "MIT OR Apache-2.0", identifier = "MIT OR Apache-2.0"),
    ),
    tags(
        (name = "jobs", description = "Enqueue, read and control jobs."),
        (name = "streams", description = "Server-sent events."),
        (name = "queues", description = "Depth, throughput and settings of queues."),
        (name = "recurring", description = "Recurring schedules (cron)."),
        (name = "dead-letters", description = "Jobs that have failed for the last time."),
        (name = "operations", description = "Bulk operations in the background."),
        (name = "workflows", description = "Jobs with dependencies."),
        (name = "batches", description = "Jobs whose ends are counted."),
        (name = "workers", description = "Register, poll, heartbeat, ack and report."),
        (name = "alarms", description = "Rules that notify people."),
        (name = "webhooks", description = "Endpoints that are notified of what happens to jobs."),
        (name = "keys", description = "API keys."),
        (name = "limits", description = "Limits of a project and their usage."),
        (name = "metrics", description = "Statistics, dashboards and alert rules."),
        (name = "audit", description = "The audit log."),
        (name = "accounts", description = "Accounts: sign-up, login, sessions."),
        (name = "projects", description = "Projects, members and invitations."),
    ),
    servers((url = "/", description = "The server of this document.")),
    // The one schema that only a parameter has.
    components(schemas(Order)),
    security(("api_key" = [])),
    modifiers(&ApiKey),
)]
struct Base;

struct ApiKey;

impl Modify for ApiKey {
    fn modify(&self, document: &mut Document) {
        let bearer = HttpBuilder::new()
            .scheme(HttpAuthScheme::Bearer)
            .description(Some("An API key, `fp_live_…`. Also accepted as `X-Api-Key`, or as the password of HTTP Basic."));
        let components = document.components.get_or_insert_default();
        components.add_security_scheme("api_key", SecurityScheme::Http(bearer.build()));
        let session = HttpBuilder::new()
            .scheme(HttpAuthScheme::Bearer)
            .bearer_format("JWT")
            .description(Some("The access token of a session, from `POST /v1/auth/login`; for a project's routes, below `/v1/projects/{project}`."));
        components.add_security_scheme("session", SecurityScheme::Http(session.build()));
    }
}

/// The document, as in `openapi/openapi.json`.
///
/// # Panics
/// When the document is not JSON, which a test would have found.
#[must_use]
pub fn document() -> &'static Value {
    static DOCUMENT: LazyLock<Value> = LazyLock::new(|| {
        let routes = OpenApiRouter::with_openapi(Base::openapi())
            .nest("/v1", data_plane().merge(people_plane()).documented())
            .nest("/v1/projects/{project}", project_plane().documented());
        let mut document = made_of(routes);
        without_sessions(&mut document);
        document
    });
    &DOCUMENT
}

/// The document of a project's routes below `/v1/projects/{project}`, where sessions work as well,
/// as in `openapi/openapi-project.json`.
#[must_use]
pub fn project_document() -> &'static Value {
    static DOCUMENT: LazyLock<Value> = LazyLock::new(|| {
        let routes = OpenApiRouter::with_openapi(Base::openapi())
            .nest("/v1/projects/{project}", data_plane().documented());
        let mut document = made_of(routes);
        document["info"]["title"] = json!("Fencepost: routes of a project");
        document["info"]["description"] = json!(OF_PROJECT);
        let parameter = json!({
            "name": "project", "in": "path", "required": true, "schema": {"type": "string"},
            "description": "The project: its id or slug.", "example": "main",
        });
        for operation in shared::operations(&mut document) {
            match operation["parameters"].as_array_mut() {
                Some(parameters) => parameters.insert(0, parameter.clone()),
                None => operation["parameters"] = json!([parameter]),
            }
        }
        document
    });
    &DOCUMENT
}

/// The description of the document of a project's routes.
const OF_PROJECT: &str = "The routes of `/openapi.json` that are about a project, below \
    `/v1/projects/{project}`. An API key must be the project's own; a session works for every \
    project that its account is a member of. Use it to generate clients for people who have logged in.";

fn made_of(routes: OpenApiRouter<App>) -> Value {
    let (_, document) = routes.split_for_parts();
    let mut document = serde_json::to_value(document).unwrap_or_default();
    tidy(&mut document);
    deprecation::mark(&mut document, deprecation::DEPRECATED);
    document
}

/// A session must name its project: without one in the path, only keys work.
fn without_sessions(document: &mut Value) {
    let paths = document.get_mut("paths").and_then(Value::as_object_mut);
    let unnamed = paths.into_iter().flatten().filter(|it| !it.0.starts_with("/v1/projects/"));
    for operation in unnamed.filter_map(|it| it.1.as_object_mut()).flat_map(Map::values_mut) {
        let security = operation.get_mut("security").and_then(Value::as_array_mut);
        let Some(security) = security else { continue };
        if security.iter().any(|it| it.get("api_key").is_some()) {
            security.retain(|it| it.get("session").is_none());
        }
    }
}

/// The operations of a route by their methods in lower case; none: it is not in the document.
#[must_use]
pub fn operations(route: &str) -> Option<&'static Map<String, Value>> {
    let paths = document()["paths"].as_object()?;
    let path = paths.get(route).or_else(|| {
        // Routes that exist with and without a project are listed once.
        let below = route.strip_prefix("/v1/projects/{project}/")?;
        paths.get(&format!("/v1/{below}"))
    });
    path?.as_object()
}

/// The document as text, as it is committed and served.
#[must_use]
pub fn text() -> String {
    format!("{:#}\n", document())
}

/// The same for generators that read OpenAPI 3.0 only, as in `openapi/openapi-3.0.json`.
#[must_use]
pub fn older_text() -> String {
    format!("{:#}\n", v3_0::of(document()))
}

/// The document of a project's routes as text.
#[must_use]
pub fn project_text() -> String {
    format!("{:#}\n", project_document())
}

/// `GET /openapi-3.0.json`.
pub async fn serve_older() -> ([(HeaderName, &'static str); 1], &'static str) {
    static TEXT: LazyLock<String> = LazyLock::new(older_text);
    ([(CONTENT_TYPE, "application/json")], TEXT.as_str())
}

/// `GET /openapi-project.json`.
pub async fn serve_of_project() -> ([(HeaderName, &'static str); 1], &'static str) {
    static TEXT: LazyLock<String> = LazyLock::new(project_text);
    ([(CONTENT_TYPE, "application/json")], TEXT.as_str())
}

/// How similar a path must be for a suggestion, from 0 to 1.
const MIN_SIMILARITY: f64 = 0.85;
/// Longer paths are compared with none.
const MAX_COMPARED_BYTES: usize = 200;

/// The answer to a path that no route has, with a similar path that has one.
pub async fn no_such_route(uri: Uri) -> Error {
    similar_path(uri.path()).map_or(Error::NoSuchRoute, |meant| Error::UnknownRoute { meant })
}

/// The answer to a method that the route does not have, with those that it has.
pub async fn wrong_method(path: Option<MatchedPath>) -> Error {
    let operations = path.as_ref().and_then(|it| operations(it.as_str()));
    let allowed: Vec<_> = operations.into_iter().flatten().map(|it| it.0.to_uppercase()).collect();
    match allowed.as_slice() {
        [] => Error::MethodNotAllowed,
        _ => Error::WrongMethod { allowed: allowed.join(", ") },
    }
}

/// The path of the API that was probably meant. Its parameters are those that were sent.
fn similar_path(sent: &str) -> Option<String> {
    const PREFIX: &str = "/v1/";
    // Errors are logged: what may be a key is not repeated.
    if sent.len() > MAX_COMPARED_BYTES || sent.contains(KEY_PREFIX) {
        return None;
    }
    let segments: Vec<_> =
        sent.strip_prefix(PREFIX).unwrap_or(sent).trim_matches('/').split('/').collect();
    let paths = document()["paths"].as_object()?.keys();
    let known = paths.filter_map(|it| it.strip_prefix(PREFIX));
    let scored = known.filter_map(|route| {
        // The routes of a project's jobs are listed once, without it.
        let (project, below) = match segments.as_slice() {
            ["projects", project, below @ ..] if !route.starts_with("projects/") => {
                (Some(*project), below)
            }
            all => (None, all),
        };
        let (score, path) = fill(route, below)?;
        let path = project.map_or_else(|| path.clone(), |name| format!("projects/{name}/{path}"));
        Some((score, path))
    });
    let best = scored.max_by(|one, other| one.0.total_cmp(&other.0))?;
    (best.0 >= MIN_SIMILARITY).then(|| format!("{PREFIX}{}", best.1))
}

/// A known path with the parameters that were sent, and how similar the least similar of its other
/// segments is. None: it has another number of segments.
fn fill(known: &str, sent: &[&str]) -> Option<(f64, String)> {
    let known: Vec<_> = known.split('/').collect();
    if known.len() != sent.len() || sent.contains(&"") {
        return None;
    }
    let mut least = f64::INFINITY;
    let mut filled = Vec::with_capacity(known.len());
    for (known, sent) in known.into_iter().zip(sent) {
        let is_parameter = known.starts_with('{');
        if !is_parameter {
            least = least.min(strsim::jaro_winkler(known, sent));
        }
        filled.push(if is_parameter { *sent } else { known });
    }
    least.is_finite().then(|| (least, filled.join("/")))
}

/// Removes what client generators cannot handle: `null` where a field may simply be absent, in
/// parameters and requests, and `propertyNames`.
fn tidy(document: &mut Value) {
    lift_bounds(document);
    if let Some(paths) = document.get_mut("paths").and_then(Value::as_object_mut) {
        let operations =
            paths.values_mut().filter_map(Value::as_object_mut).flat_map(Map::values_mut);
        for operation in operations {
            for derived in [&DERIVED[..], &OF_BODIES] {
                add_responses(operation, derived, "ErrorBody");
            }
            let parameters = operation.get_mut("parameters").and_then(Value::as_array_mut);
            for parameter in parameters.into_iter().flatten() {
                parameter.get_mut("schema").into_iter().for_each(without_null);
            }
        }
    }
    let schemas = document.pointer_mut("/components/schemas").and_then(Value::as_object_mut);
    for (name, schema) in schemas.into_iter().flatten() {
        // Null removes a setting.
        let has_nulls = name == "ChangeQueueRequest";
        let is_request = (name.ends_with("Request") && !has_nulls) || name == "AckError";
        let properties = schema.get_mut("properties").and_then(Value::as_object_mut);
        for property in properties.into_iter().flat_map(Map::values_mut) {
            if let Some(property) = property.as_object_mut() {
                property.remove("propertyNames");
            }
            if is_request {
                without_null(property);
            }
        }
    }
    // A filter by queue alone is of both kinds.
    let filter =
        document.pointer_mut("/components/schemas/BulkFilter").and_then(Value::as_object_mut);
    if let Some(filter) = filter
        && let Some(alternatives) = filter.remove("oneOf")
    {
        filter.insert("anyOf".to_owned(), alternatives);
    }
    codes::list(document);
    heartbeats::split(document);
    examples::add(document);
    open_enums::mark(document);
    shared::share(document);
    webhooks::add(document);
}

/// Responses that need no line at each operation.
const DERIVED: [DerivedResponse; 10] = [
    (Applies::Authenticated, "400", "Invalid request."),
    (Applies::Authenticated, "401", "No live API key or session."),
    (
        Applies::Authenticated,
        "403",
        "The key lacks the scope, the member lacks the role, or a session is required.",
    ),
    (Applies::InProject, "404", "No such project for this key or session."),
    (Applies::Repeatable, "409", "The idempotency key was used with another request."),
    (
        Applies::Conditional,
        "412",
        "The settings have changed since `If-Match`, or exist already with `If-None-Match: *`.",
    ),
    (Applies::PublicWithBody, "429", "Too many requests from this client."),
    (Applies::Authenticated, "429", "Rate limit or quota exceeded: see `GET /v1/limits`."),
    (Applies::PublicWithBody, "503", "Try again later."),
    (Applies::Authenticated, "503", "Try again later."),
];

fn without_null(schema: &mut Value) {
    let Some(object) = schema.as_object_mut() else { return };
    only_type(object);
    let alternatives = object.get("oneOf").and_then(Value::as_array);
    let reference = alternatives.and_then(|schemas| {
        let mut others = schemas.iter().filter(|it| it.get("type").is_none_or(|it| it != "null"));
        others.next().filter(|_| others.next().is_none()).and_then(Value::as_object).cloned()
    });
    if let Some(reference) = reference {
        object.remove("oneOf");
        object.extend(reference);
    }
}

/// Removes null from the types of a schema; a single one remains as a string. Returns whether the
/// schema listed types.
fn only_type(schema: &mut Map<String, Value>) -> bool {
    let Some(Value::Array(types)) = schema.get_mut("type") else { return false };
    types.retain(|it| it != "null");
    if let [only] = types.as_slice() {
        let only = only.clone();
        schema.insert("type".to_owned(), only);
    }
    true
}

/// `/docs/api` and `/openapi.json`; nothing is loaded from other sites.
#[must_use]
pub fn docs() -> SwaggerUi {
    SwaggerUi::new("/docs/api")
        .external_url_unchecked("/openapi.json", document().clone())
        .config(Config::from("/openapi.json").try_it_out_enabled(true))
}

/// `/`: for visitors with a browser.
pub async fn front_door() -> Redirect {
    Redirect::temporary("/console")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_similar_path_is_suggested_with_the_parameters_that_were_sent() {
        for (sent, meant) in [
            ("/jobs", Some("/v1/jobs")),
            ("/v1/job", Some("/v1/jobs")),
            ("/v1/jobs/", Some("/v1/jobs")),
            ("/v1/jobs/job_1/cancle", Some("/v1/jobs/job_1/cancel")),
            ("/v1/worker/poll", Some("/v1/workers/poll")),
            ("/v1/projects/main/job", Some("/v1/projects/main/jobs")),
            ("/v1/jobs/job_01m7w3ha3aextt8pkwwdmxsmqw/foo", None),
            ("/v1/jobs//cancel", None),
            ("/v1/key/fp_live_abc", None),
            ("/favicon.ico", None),
            ("/wp-login.php", None),
            ("/", None),
        ] {
            assert_eq!(similar_path(sent).as_deref(), meant, "{sent}");
        }
        assert_eq!(similar_path(&"a".repeat(100_000)), None);
    }
}
