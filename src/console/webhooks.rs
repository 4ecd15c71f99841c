//! Webhooks: the endpoints, one with what it was sent, and one delivery.

use askama::Template;
use axum::{extract::Path, http::Method, response::Response};
use fencepost_domain::{
    error::Error,
    limits,
    webhook::{EVENT_TYPES, event_types, named_by},
};
use fencepost_http::routes::webhooks::{
    Endpoint, EndpointPage, EndpointState, EndpointWithSecret,
    deliveries::{DeliveryDetails, DeliveryPage, DeliveryState},
};

use super::{
    action_fields::ENDPOINT,
    form::{self, Field, Fields},
    format,
    location::segment,
    page::{Frame, Here, render},
};

/// States of deliveries that have a tab; the first shows all.
const TABS: [&str; 4] = ["", "waiting", "delivered", "failed"];

#[derive(Template)]
#[template(path = "webhooks.html")]
struct List {
    frame: Frame,
    endpoints: Vec<Endpoint>,
    next: Option<String>,
}

/// The event that most endpoints are for.
fn is_usual(kind: &str) -> bool {
    kind == "job.dead_lettered"
}

/// The endpoints, newest first.
pub async fn list(here: Here) -> Result<Response, Error> {
    let (page, _): (EndpointPage, _) = here.list("/webhooks", &[]).await?;
    let frame = here.frame;
    let next = frame.next("/webhooks", "", page.next_cursor.as_deref());
    render(&List { frame, endpoints: page.endpoints, next })
}

/// Creates an endpoint, and shows it with its secret.
pub async fn make(here: Here, form: Fields) -> Result<Response, Error> {
    let body = form::body(ENDPOINT, &form)?;
    let made: EndpointWithSecret =
        here.api.send(Method::POST, &here.at("/webhooks"), Some(body)).await?;
    one(here, made.endpoint, Some(made.secret)).await
}

/// Rotates a secret, and shows the new one.
pub async fn rotate(
    here: Here,
    Path((_, id)): Path<(String, String)>,
    form: Fields,
) -> Result<Response, Error> {
    let body = form::body(&[Field::Number("overlap_seconds")], &form)?;
    let path = here.at(&format!("/webhooks/{}/secret/rotate", segment(&id)));
    let made: EndpointWithSecret = here.api.send(Method::POST, &path, Some(body)).await?;
    one(here, made.endpoint, Some(made.secret)).await
}

#[derive(Template)]
#[template(path = "webhook.html")]
struct One {
    frame: Frame,
    endpoint: Endpoint,
    /// Shown once.
    secret: Option<String>,
    state: String,
    deliveries: DeliveryPage,
    next: Option<String>,
}

/// One endpoint, and its deliveries.
pub async fn detail(here: Here, Path((_, id)): Path<(String, String)>) -> Result<Response, Error> {
    let endpoint: Endpoint = here.get(&format!("/webhooks/{}", segment(&id))).await?;
    one(here, endpoint, None).await
}

async fn one(here: Here, endpoint: Endpoint, secret: Option<String>) -> Result<Response, Error> {
    let path = format!("/webhooks/{}", segment(&endpoint.id));
    let (deliveries, filters): (DeliveryPage, _) =
        here.list(&format!("{path}/deliveries"), &["state"]).await?;
    let state = here.asked.text("state").to_owned();
    let mut frame = here.frame;
    if secret.is_some() {
        frame.place = frame.to(&path);
    }
    let next = frame.next(&path, &filters, deliveries.next_cursor.as_deref());
    render(&One { frame, endpoint, secret, state, deliveries, next })
}

impl One {
    /// The tabs: name, path, and whether it is this one.
    fn tabs(&self) -> Vec<(&'static str, String, bool)> {
        let path = format!("/webhooks/{}", self.endpoint.id);
        let tab = |state: &'static str| {
            let query = form::encode(&[("state", state)]);
            let query = if state.is_empty() { "" } else { &query };
            (state, self.frame.with_query(&path, query), self.state == state)
        };
        TABS.map(tab).into()
    }

    /// The types that its boxes show.
    fn events(&self) -> Vec<&'static str> {
        event_types().filter(|it| self.endpoint.wants(it)).collect()
    }
}

/// Adds to [`Endpoint`] what pages show of it.
trait EndpointExt {
    fn is_enabled(&self) -> bool;

    /// Whether events of this type are sent to it.
    fn wants(&self, kind: &str) -> bool;
}

impl EndpointExt for Endpoint {
    fn is_enabled(&self) -> bool {
        self.state == EndpointState::Enabled
    }

    fn wants(&self, kind: &str) -> bool {
        self.events.iter().any(|it| named_by(it).contains(&kind))
    }
}

#[derive(Template)]
#[template(path = "delivery.html")]
struct Sent {
    frame: Frame,
    endpoint: Endpoint,
    it: DeliveryDetails,
}

/// One delivery.
pub async fn delivery(
    here: Here,
    Path((_, endpoint, id)): Path<(String, String, String)>,
) -> Result<Response, Error> {
    let path = format!("/webhooks/{}", segment(&endpoint));
    let endpoint: Endpoint = here.get(&path).await?;
    let it: DeliveryDetails = here.get(&format!("{path}/deliveries/{}", segment(&id))).await?;
    render(&Sent { frame: here.frame, endpoint, it })
}

impl Sent {
    /// Its body, on several lines.
    fn body(&self) -> String {
        let body: Option<serde_json::Value> = serde_json::from_str(self.it.body.get()).ok();
        body.map_or_else(|| self.it.body.get().to_owned(), |it| format!("{it:#}"))
    }

    fn may_be_retried(&self) -> bool {
        let state = self.it.delivery.state;
        matches!(state, DeliveryState::Waiting | DeliveryState::Failed | DeliveryState::Cancelled)
    }
}
