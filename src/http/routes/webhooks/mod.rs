//! `/v1/webhooks`: endpoints that are notified of what happens to jobs.

pub mod deliveries;
mod endpoint;
pub mod replay;

use axum::{Json as Reply, extract::State, http::StatusCode};
use fencepost_domain::{
    access::Permission,
    error::Error,
    ids::{EndpointId, ProjectId},
    limits, outbound, webhook,
};
use fencepost_engine::webhooks::{self, EndpointChange, NewEndpoint};
use fencepost_web::{
    app::App,
    auth::{Caller, Subscribing, Webhooks},
    wire::{
        extract::{EndpointInPath, Json, Query, RequestBody},
        openapi::{chars, items},
        validate::Check,
    },
};
use serde::Deserialize;
use serde_json::json;
use sha2::{Digest, Sha256};
use url::Url;
use utoipa::{IntoParams, ToSchema};

pub use self::endpoint::{Endpoint, EndpointState, EndpointWithSecret};
use crate::{
    cursor::{self, List},
    error::ErrorBody,
    page::{PageSize, page},
    routes::audit::{self, NewAuditEntry},
    settings::{self, Preconditions, Tagged},
};

const DEFAULT_PAGE_ENDPOINTS: u32 = 20;
const DEFAULT_IN_FLIGHT: i32 = 5;
const DEFAULT_TIMEOUT_SECONDS: i32 = 10;
const DEFAULT_OVERLAP_SECONDS: i32 = 86_400;
/// Bytes of a URL's hash in the audit log.
const SHOWN_HASH_BYTES: usize = 8;

/// An endpoint to create.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"url": "https://example.com/hooks", "events": ["job.dead_lettered"]}))]
pub struct CreateEndpointRequest {
    /// Where events are sent: `https://`, a host on the public internet, and the port 443 or one
    /// from 1024 on.
    #[schema(extensions(("bounds" = json!(chars(1, outbound::MAX_URL_CHARS)))))]
    url: String,
    /// Types of events: single ones, those of a group (`job.*`), or all (`*`). An empty list is
    /// allowed if `callbacks` is true.
    #[schema(extensions(("bounds" = json!(items(0, limits::MAX_ENDPOINT_NAMES)))))]
    events: Vec<String>,
    /// Of events about jobs, only those of these queues; `mail.*` stands for all that begin so.
    /// Events about no queue are sent anyway. Default: of all.
    #[schema(extensions(("bounds" = json!(items(0, limits::MAX_ENDPOINT_NAMES)))))]
    queues: Option<Vec<String>>,
    /// Of events about jobs, only those of these types; `mail.*` stands for all that begin so.
    /// Events about no job type are sent anyway. Default: of all.
    #[schema(extensions(("bounds" = json!(items(0, limits::MAX_ENDPOINT_NAMES)))))]
    job_types: Option<Vec<String>>,
    /// Description for people.
    #[schema(extensions(("bounds" = json!(chars(0, limits::MAX_DESCRIPTION_CHARS)))))]
    description: Option<String>,
    /// True lets jobs, batches and workflows name its URL as `callback_url`. Default: false.
    callbacks: Option<bool>,
    /// Deliveries that each node sends at a time. Default: 5.
    #[schema(minimum = 1, maximum = 50)]
    max_in_flight: Option<i32>,
    /// Seconds after which a try without an answer has failed. Default: 10.
    #[schema(minimum = 1, maximum = 30)]
    timeout_seconds: Option<i32>,
    /// False stores the endpoint without sending anything to it. Default: true.
    enabled: Option<bool>,
}

impl RequestBody for CreateEndpointRequest {}

/// New settings of an endpoint. Fields that are left out stay as they are.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"events": ["job.dead_lettered", "job.cancelled"], "enabled": true}))]
pub struct ChangeEndpointRequest {
    /// Where events are sent, from now on: also those that wait.
    #[schema(extensions(("bounds" = json!(chars(1, outbound::MAX_URL_CHARS)))))]
    url: Option<String>,
    /// Types of events.
    #[schema(extensions(("bounds" = json!(items(0, limits::MAX_ENDPOINT_NAMES)))))]
    events: Option<Vec<String>>,
    /// Queues whose events are sent; an empty list: all. If omitted: unchanged.
    #[schema(extensions(("bounds" = json!(items(0, limits::MAX_ENDPOINT_NAMES)))))]
    queues: Option<Vec<String>>,
    /// Job types whose events are sent; an empty list: all. If omitted: unchanged.
    #[schema(extensions(("bounds" = json!(items(0, limits::MAX_ENDPOINT_NAMES)))))]
    job_types: Option<Vec<String>>,
    /// Description for people; an empty text removes it.
    #[schema(extensions(("bounds" = json!(chars(0, limits::MAX_DESCRIPTION_CHARS)))))]
    description: Option<String>,
    /// True lets jobs, batches and workflows name its URL as `callback_url`.
    callbacks: Option<bool>,
    /// Deliveries that each node sends at a time.
    #[schema(minimum = 1, maximum = 50)]
    max_in_flight: Option<i32>,
    /// Seconds after which a try without an answer has failed.
    #[schema(minimum = 1, maximum = 30)]
    timeout_seconds: Option<i32>,
    /// False disables the endpoint. Enabling it sends the deliveries that wait; they are cancelled
    /// after 72 hours.
    enabled: Option<bool>,
}

impl RequestBody for ChangeEndpointRequest {}

/// The settings of a request, checked; those that it does not name are none.
fn check(app: &App, it: ChangeEndpointRequest) -> Result<EndpointChange, Error> {
    let mut check = Check::default();
    let url = it.url.map(|url| match read_url(app, &url) {
        Ok(url) => String::from(url),
        Err(message) => {
            check.refuse("url", message);
            url
        }
    });
    let events = it.events.map(|events| {
        let types = event_types(&events, &mut check);
        (events, types)
    });
    let max = limits::MAX_ENDPOINT_NAMES;
    let queues = it.queues.as_deref().unwrap_or_default();
    check.names("queues", queues, max, limits::MAX_QUEUE_CHARS);
    let job_types = it.job_types.as_deref().unwrap_or_default();
    check.names("job_types", job_types, max, limits::MAX_JOB_TYPE_CHARS);
    for (field, filters) in [("queues", queues), ("job_types", job_types)] {
        if let Some(never) = filters.iter().find(|it| !webhook::is_filter(it)) {
            let message = format!("has `{never}`: `*` must stand alone, or at the end after a dot");
            check.refuse(field, message);
        }
    }
    let text = it.description.as_deref().filter(|it| !it.is_empty());
    check.optional_name("description", text, limits::MAX_DESCRIPTION_CHARS);
    let in_flight = it.max_in_flight.unwrap_or(DEFAULT_IN_FLIGHT);
    check.range("max_in_flight", in_flight, 1, limits::MAX_ENDPOINT_IN_FLIGHT);
    let timeout = it.timeout_seconds.unwrap_or(DEFAULT_TIMEOUT_SECONDS);
    check.range("timeout_seconds", timeout, 1, limits::MAX_ENDPOINT_TIMEOUT_SECONDS);
    check.finish()?;
    Ok(EndpointChange {
        url,
        description: it.description,
        events,
        queues: it.queues,
        job_types: it.job_types,
        takes_callbacks: it.callbacks,
        max_in_flight: it.max_in_flight,
        timeout_seconds: it.timeout_seconds,
        is_enabled: it.enabled,
    })
}

/// A URL of a user that this server may call: it never calls itself, or calls could go around.
pub(super) fn read_url(app: &App, url: &str) -> Result<Url, String> {
    if outbound::is_same_host(url, &app.accounts.public_url) {
        return Err("must not be this server's own".to_owned());
    }
    outbound::read_url(url, &app.outbound.allowed)
}

/// The types that these patterns name, sorted.
fn event_types(events: &[String], check: &mut Check) -> Vec<String> {
    if !events.is_empty() {
        check.count("events", events.len(), limits::MAX_ENDPOINT_NAMES);
    }
    let mut event_types = Vec::new();
    for (place, pattern) in events.iter().enumerate().take(limits::MAX_ENDPOINT_NAMES) {
        let named = webhook::named_by(pattern);
        if named.is_empty() {
            let known = webhook::event_types().collect::<Vec<_>>().join(", ");
            let message = format!("must be one of {known}, or name several as job.* and *");
            check.refuse(&format!("events[{place}]"), message);
        }
        event_types.extend(named.into_iter().map(str::to_owned));
    }
    event_types.sort();
    event_types.dedup();
    event_types
}

/// As the audit log shows it. Its readers need not know the rest of the URL, which can be a secret;
/// its hash shows whether it has changed.
fn logged(it: &Endpoint) -> Option<String> {
    let Endpoint { url, events, queues, job_types, callbacks, state, .. } = it;
    let host = outbound::shown_host(url);
    let hash = Sha256::digest(url);
    let hash = hash.iter().take(SHOWN_HASH_BYTES).map(|it| format!("{it:02x}"));
    let hash = hash.collect::<String>();
    let logged = json!({"host": host, "url_hash": hash, "events": events, "queues": queues,
                        "job_types": job_types, "callbacks": callbacks, "state": state});
    Some(logged.to_string())
}

/// List endpoints.
#[utoipa::path(
    get, path = "/webhooks", tag = "webhooks", operation_id = "webhooks_list",
    params(EndpointsQuery),
    security(("api_key" = ["webhooks"]), ("session" = ["admin"])),
    responses(
        (status = 200, description = "A page of endpoints, newest first.", body = EndpointPage),
    ),
)]
pub async fn list(
    caller: Caller<Webhooks>,
    State(app): State<App>,
    Query(query): Query<EndpointsQuery>,
) -> Result<Reply<EndpointPage>, Error> {
    let mut check = Check::default();
    let max = limits::MAX_PAGE_ENDPOINTS;
    let size = PageSize::read(query.limit, DEFAULT_PAGE_ENDPOINTS, max, &mut check);
    check.finish()?;
    let list = List::of(caller.project_id, "webhooks");
    let before = cursor::read_id(&app, list, query.cursor.as_deref())?.map(EndpointId);
    let mut rows = webhooks::list(&app.engine, caller.project_id, before, size.one_more()).await?;
    let next_cursor = size.cut(&mut rows, |it| cursor::write_id(&app, list, it.id.0));
    let endpoints = rows.into_iter().map(Endpoint::from).collect();
    Ok(Reply(EndpointPage::of(endpoints, next_cursor)))
}

/// Page of endpoints.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct EndpointsQuery {
    /// Maximum number of endpoints to return. Default: 20.
    #[param(minimum = 1, maximum = 100)]
    limit: Option<u32>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
}

page! {
    /// A page of endpoints, newest first.
    EndpointPage {
        /// Endpoints of the page.
        endpoints: Endpoint
    }
}

/// Create an endpoint.
///
/// It is notified of events from now on. Its secret is in the answer and nowhere else.
/// Therefore this request cannot be repeated with an `Idempotency-Key`.
#[utoipa::path(
    post, path = "/webhooks", tag = "webhooks", operation_id = "webhooks_create",
    security(("api_key" = ["webhooks", "payload:read"]), ("session" = ["admin"])),
    request_body = CreateEndpointRequest,
    responses(
        (status = 201, description = "The endpoint. Its secret is shown only once.", body = EndpointWithSecret),
    ),
)]
pub async fn create(
    caller: Caller<Subscribing>,
    State(app): State<App>,
    Json(request): Json<CreateEndpointRequest>,
) -> Result<(StatusCode, Reply<EndpointWithSecret>), Error> {
    let asked = ChangeEndpointRequest {
        url: Some(request.url),
        events: Some(request.events),
        queues: request.queues,
        job_types: request.job_types,
        description: request.description,
        callbacks: request.callbacks,
        max_in_flight: request.max_in_flight,
        timeout_seconds: request.timeout_seconds,
        enabled: request.enabled,
    };
    let asked = check(&app, asked)?;
    let takes_callbacks = asked.takes_callbacks.unwrap_or(false);
    let (events, event_types) = asked.events.unwrap_or_default();
    if events.is_empty() && !takes_callbacks {
        return Err(Error::invalid("events", webhooks::NO_EVENTS));
    }
    let new = NewEndpoint {
        url: asked.url.unwrap_or_default(),
        description: asked.description,
        events,
        event_types,
        queues: asked.queues.unwrap_or_default(),
        job_types: asked.job_types.unwrap_or_default(),
        takes_callbacks,
        max_in_flight: asked.max_in_flight.unwrap_or(DEFAULT_IN_FLIGHT),
        timeout_seconds: asked.timeout_seconds.unwrap_or(DEFAULT_TIMEOUT_SECONDS),
        is_enabled: asked.is_enabled.unwrap_or(true),
    };
    app.accounts.addresses.require_verified(caller.project_id).await?;
    caller.require_step_up(&app).await?;
    let keys = &app.accounts.master_keys;
    let made = webhooks::create(&app.engine, caller.tenant(), keys, &new).await?;
    let endpoint = Endpoint::from(made.0);
    let entry = NewAuditEntry {
        after: logged(&endpoint),
        ..NewAuditEntry::to("endpoint.created", &*endpoint.id)
    };
    audit::note(&app, &caller, entry).await;
    let secret = webhook::secret_text(&made.1);
    Ok((StatusCode::CREATED, Reply(EndpointWithSecret { endpoint, secret })))
}

/// Read an endpoint.
#[utoipa::path(
    get, path = "/webhooks/{endpoint_id}", tag = "webhooks", operation_id = "webhooks_get",
    security(("api_key" = ["webhooks"]), ("session" = ["admin"])),
    params(("endpoint_id" = String, Path, description = "The endpoint.", example = "ep_01m7w3ha3aextt8pkwwdmxsmqw")),
    responses(
        (status = 200, description = "The endpoint, without its secret.", body = Endpoint),
        (status = 404, description = "The project has no such endpoint.", body = ErrorBody),
    ),
)]
pub async fn get(
    caller: Caller<Webhooks>,
    State(app): State<App>,
    EndpointInPath(id): EndpointInPath,
) -> Result<Tagged<Endpoint>, Error> {
    Ok(Tagged(webhooks::find(&app.engine, caller.project_id, id).await?.into()))
}

async fn stored(
    app: &App,
    project_id: ProjectId,
    id: EndpointId,
) -> Result<Option<Endpoint>, Error> {
    let row = webhooks::find(&app.engine, project_id, id).await?;
    Ok(Some(row.into()))
}

/// Change an endpoint.
///
/// A key that changes what is sent or where needs the scope `payload:read`, too, since error
/// messages are in events. A change of `description` or of a number needs no further scope, and
/// neither does one that switches `callbacks` or the endpoint off.
#[utoipa::path(
    patch, path = "/webhooks/{endpoint_id}", tag = "webhooks", operation_id = "webhooks_update",
    security(("api_key" = ["webhooks"]), ("session" = ["admin"])),
    params(("endpoint_id" = String, Path, description = "The endpoint.", example = "ep_01m7w3ha3aextt8pkwwdmxsmqw"), settings::Header),
    request_body = ChangeEndpointRequest,
    responses(
        (status = 200, description = "The endpoint.", body = Endpoint),
        (status = 404, description = "The project has no such endpoint.", body = ErrorBody),
    ),
)]
pub async fn change(
    caller: Caller<Webhooks>,
    State(app): State<App>,
    EndpointInPath(id): EndpointInPath,
    conditions: Preconditions,
    Json(request): Json<ChangeEndpointRequest>,
) -> Result<Tagged<Endpoint>, Error> {
    let change = check(&app, request)?;
    let names_events =
        change.events.is_some() || change.queues.is_some() || change.job_types.is_some();
    let begins = [change.takes_callbacks, change.is_enabled].contains(&Some(true));
    let sends_more = change.url.is_some() || names_events || begins;
    if sends_more && !caller.who.may(Permission::Subscribe) {
        return Err(Error::Forbidden { needs: Permission::Subscribe.needs() });
    }
    if change.url.is_some() {
        app.accounts.addresses.require_verified(caller.project_id).await?;
        caller.require_step_up(&app).await?;
    }
    let about = (caller.project_id, format!("endpoint {id}"));
    let current = stored(&app, caller.project_id, id);
    let write = webhooks::change(&app.engine, caller.project_id, id, &change);
    let changed = conditions.write(&app, about, current, write).await?;
    let [before, endpoint] = changed.map(Endpoint::from);
    let entry = NewAuditEntry {
        before: logged(&before),
        after: logged(&endpoint),
        ..NewAuditEntry::to("endpoint.changed", &*endpoint.id)
    };
    audit::note(&app, &caller, entry).await;
    Ok(Tagged(endpoint))
}

/// Delete an endpoint.
///
/// Deliveries to it that wait are cancelled.
#[utoipa::path(
    delete, path = "/webhooks/{endpoint_id}", tag = "webhooks", operation_id = "webhooks_delete",
    security(("api_key" = ["webhooks"]), ("session" = ["admin"])),
    params(("endpoint_id" = String, Path, description = "The endpoint.", example = "ep_01m7w3ha3aextt8pkwwdmxsmqw"), settings::Header),
    responses(
        (status = 204, description = "It is deleted."),
        (status = 404, description = "The project has no such endpoint.", body = ErrorBody),
    ),
)]
pub async fn delete(
    caller: Caller<Webhooks>,
    State(app): State<App>,
    EndpointInPath(id): EndpointInPath,
    conditions: Preconditions,
) -> Result<StatusCode, Error> {
    let about = (caller.project_id, format!("endpoint {id}"));
    let current = stored(&app, caller.project_id, id);
    let delete = webhooks::delete(&app.engine, caller.project_id, id);
    let gone = conditions.write(&app, about, current, delete).await?;
    let entry = NewAuditEntry {
        before: logged(&gone.into()),
        ..NewAuditEntry::to("endpoint.deleted", id.to_string())
    };
    audit::note(&app, &caller, entry).await;
    Ok(StatusCode::NO_CONTENT)
}

/// Replacement of an endpoint's signing secret.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"overlap_seconds": 86400}))]
pub struct RotateSecretRequest {
    /// For how many seconds the present secret signs as well. Default: 86400, a day.
    #[schema(minimum = 0, maximum = 604_800)]
    overlap_seconds: Option<i32>,
}

impl RequestBody for RotateSecretRequest {}

impl RotateSecretRequest {
    /// The seconds, checked.
    pub(super) fn overlap_seconds(&self) -> Result<i32, Error> {
        let overlap = self.overlap_seconds.unwrap_or(DEFAULT_OVERLAP_SECONDS);
        let mut check = Check::default();
        check.range("overlap_seconds", overlap, 0, limits::MAX_SECRET_OVERLAP_SECONDS);
        check.finish().map(|()| overlap)
    }
}

/// Rotate an endpoint's secret.
///
/// Until the overlap ends, each delivery has two signatures, one with each secret: receivers accept
/// it when one of them is right.
#[utoipa::path(
    post, path = "/webhooks/{endpoint_id}/secret/rotate", tag = "webhooks",
    operation_id = "webhooks_rotate_secret",
    security(("api_key" = ["webhooks"]), ("session" = ["admin"])),
    params(("endpoint_id" = String, Path, description = "The endpoint.", example = "ep_01m7w3ha3aextt8pkwwdmxsmqw")),
    request_body = RotateSecretRequest,
    responses(
        (status = 200, description = "The endpoint. Its new secret is shown only once.", body = EndpointWithSecret),
        (status = 404, description = "The project has no such endpoint.", body = ErrorBody),
    ),
)]
pub async fn rotate(
    caller: Caller<Webhooks>,
    State(app): State<App>,
    EndpointInPath(id): EndpointInPath,
    Json(request): Json<RotateSecretRequest>,
) -> Result<Reply<EndpointWithSecret>, Error> {
    let overlap = request.overlap_seconds()?;
    caller.require_step_up(&app).await?;
    let (keys, key) = (&app.accounts.master_keys, (caller.project_id, id));
    let secret = webhooks::rotate(&app.engine, keys, key, overlap).await?;
    audit::note(&app, &caller, NewAuditEntry::to("endpoint.secret_rotated", id.to_string())).await;
    let endpoint = webhooks::find(&app.engine, caller.project_id, id).await?.into();
    Ok(Reply(EndpointWithSecret { endpoint, secret: webhook::secret_text(&secret) }))
}
