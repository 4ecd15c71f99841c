//! The OpenAPI documents of the adapters, made from their handlers, separate from the native API.

use axum::{Router, http::header::CONTENT_TYPE, middleware::from_fn, routing};
use fencepost_web::{
    app::App,
    wire::{
        compressed,
        openapi::{Applies, DerivedResponse, OF_BODIES, add_responses, lift_bounds},
    },
};
use serde_json::{Map, Value, json};
use utoipa_axum::router::OpenApiRouter;

use super::{ADAPTERS, Adapter};

/// Responses that need no line at each operation.
const DERIVED: [DerivedResponse; 5] = [
    (Applies::Authenticated, "400", "Invalid request."),
    (Applies::Authenticated, "401", "No live API key."),
    (Applies::Authenticated, "403", "The key lacks the scope that this operation needs."),
    (Applies::Authenticated, "429", "Rate limit or quota exceeded."),
    (Applies::Authenticated, "503", "Try again later."),
];

/// An adapter's document as it is committed and served.
pub fn text(adapter: &Adapter) -> String {
    format!("{:#}\n", of(adapter))
}

fn of(adapter: &Adapter) -> Value {
    let base = (adapter.document)();
    let (_, document) =
        OpenApiRouter::with_openapi(base).merge((adapter.routes)()).split_for_parts();
    let mut document = serde_json::to_value(document).unwrap_or_default();
    lift_bounds(&mut document);
    let Some(top) = document.as_object_mut() else { return document };
    let bases = std::iter::once("").chain(adapter.also_below.iter().copied());
    let servers: Vec<_> =
        bases.map(|below| json!({ "url": format!("/{}{below}", adapter.name) })).collect();
    top.insert("servers".to_owned(), Value::Array(servers));
    top.insert(
        "security".to_owned(),
        json!([{ "api_key": [] }, { "basic": [] }, { "header": [] }]),
    );
    let components = top.entry("components").or_insert_with(|| json!({}));
    if let Some(components) = components.as_object_mut() {
        components.insert("securitySchemes".to_owned(), security_schemes());
    }
    let paths = document.get_mut("paths").and_then(Value::as_object_mut);
    let operations = paths.into_iter().flat_map(Map::values_mut).filter_map(Value::as_object_mut);
    for operation in operations.flat_map(Map::values_mut) {
        for derived in [&DERIVED[..], &OF_BODIES] {
            add_responses(operation, derived, adapter.error_schema);
        }
        let requests = operation.pointer_mut("/requestBody/content");
        requests.into_iter().for_each(|it| rename_json(it, adapter.media_type));
        let responses = operation.get_mut("responses").and_then(Value::as_object_mut);
        for response in responses.into_iter().flat_map(Map::values_mut) {
            response
                .get_mut("content")
                .into_iter()
                .for_each(|it| rename_json(it, adapter.media_type));
        }
    }
    document
}

/// Replaces the media type of JSON with the adapter's own.
fn rename_json(content: &mut Value, media_type: &str) {
    if let Some(content) = content.as_object_mut()
        && let Some(json) = content.remove("application/json")
    {
        content.insert(media_type.to_owned(), json);
    }
}

fn security_schemes() -> Value {
    json!({
        "api_key": {"type": "http", "scheme": "bearer", "description": "An API key, `fp_live_…`."},
        "basic": {
            "type": "http", "scheme": "basic",
            "description": "The key as the password, or alone as the user: `http://KEY@host`.",
        },
        "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
    })
}

/// `/openapi/{adapter}.json`.
pub fn router() -> Router<App> {
    let documents = ADAPTERS.iter().fold(Router::new(), |router, adapter| {
        let text = text(adapter);
        let page = async move || ([(CONTENT_TYPE, "application/json")], text.clone());
        router.route(&format!("/openapi/{}.json", adapter.name), routing::get(page))
    });
    documents.layer(from_fn(compressed::gzip))
}
