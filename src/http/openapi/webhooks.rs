//! The requests that the server sends: the section `webhooks` of the document.

use serde_json::{Value, json};

use fencepost_domain::webhook::{EVENT_TYPES, TEST_EVENT, event_types};

/// The test event, and when it is sent.
const TEST: (&str, &str) = (TEST_EVENT, "a test was asked for");

/// Adds a webhook for each type of event. All have the same body.
pub fn add(document: &mut Value) {
    let names: Vec<_> = event_types().chain([TEST_EVENT]).map(|name| format!("`{name}`")).collect();
    document["components"]["schemas"]["WebhookEvent"]["properties"]["type"]["description"] =
        json!(format!(
            "Type of the event: {}, and others later: ignore those that you do not know.",
            names.join(", ")
        ));
    for (kind, when) in EVENT_TYPES.into_iter().chain([TEST]) {
        document["webhooks"][kind] = json!({"post": {
            "operationId": format!("on_{}", kind.replace('.', "_")),
            "tags": ["webhooks"],
            "summary": format!("Notify an endpoint of `{kind}`."),
            "description": format!("Sent when {when}, to each endpoint that asked for it, at least \
                once, in no order."),
            "security": [],
            "parameters": [
                header("webhook-id", "The event: the same for all endpoints and tries."),
                header("webhook-timestamp", "When this try began, in seconds since 1970."),
                header("webhook-signature", "`v1,` and the HMAC-SHA256 of `id.timestamp.body` with \
                    the endpoint's secret, in base64; two of them while the secret is rotated."),
                header("fencepost-delivery", "The delivery."),
                header("fencepost-attempt", "The try, from 1."),
                header("fencepost-hop", "Number of deliveries that have led to this one, itself included."),
            ],
            "requestBody": {
                "required": true,
                "content": {"application/json": {
                    "schema": {"$ref": "#/components/schemas/WebhookEvent"},
                }},
            },
            "responses": {
                "204": {"description": "The event is delivered. Any status from 200 to 299 says so."},
                "410": {"description": "The endpoint asks for no further deliveries: Fencepost disables it."},
                "503": {"description": "It is tried again later, like any other answer: after \
                    `Retry-After`, if that is there."},
            },
        }});
    }
}

fn header(name: &str, about: &str) -> Value {
    json!({"name": name, "in": "header", "required": true, "description": about,
           "schema": {"type": "string"}})
}
