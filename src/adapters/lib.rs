//! Adapters: workers written for other systems connect unchanged except for base URL and key.
//! Each adapter has its own base path and types, one match that renders every error, and one for
//! the names of states. An adapter calls the engine; it has no statements and no rules. See
//! `docs/protocols.md`.

#![warn(missing_docs)]

mod attempt;
mod document;
pub mod mobius;
pub mod ojs;
pub mod orch8;
mod params;
mod plain_errors;
mod work;
pub mod workflow_graph;

use axum::{Router, middleware};
use fencepost_domain::error::Error;
use fencepost_web::{app::App, wire::errors};
use utoipa_axum::router::OpenApiRouter;

/// An adapter: its path, its routes, how it renders errors, and its document.
struct Adapter {
    /// The base path, and the name of its document: `/openapi/{name}.json`.
    name: &'static str,
    routes: fn() -> OpenApiRouter<App>,
    /// Paths below the base path where its routes answer, too.
    also_below: &'static [&'static str],
    render_error: errors::RenderError,
    /// The media type of its answers.
    media_type: &'static str,
    document: fn() -> utoipa::openapi::OpenApi,
    /// The schema of its errors in the document.
    error_schema: &'static str,
}

const ADAPTERS: [Adapter; 4] =
    [mobius::ADAPTER, orch8::ADAPTER, ojs::ADAPTER, workflow_graph::ADAPTER];

/// All adapters, each below its base path, and their documents.
pub fn router() -> Router<App> {
    ADAPTERS.iter().fold(document::router(), |router, adapter| {
        let bases = std::iter::once("").chain(adapter.also_below.iter().copied());
        bases.fold(router, |router, below| {
            let (routes, _) = (adapter.routes)().split_for_parts();
            let routes = routes
                .fallback(async || Error::NoSuchRoute)
                .method_not_allowed_fallback(async || Error::MethodNotAllowed)
                .layer(middleware::from_fn_with_state(adapter.render_error, errors::render));
            router.nest(&format!("/{}{below}", adapter.name), routes)
        })
    })
}

/// The adapters' names.
pub fn names() -> impl Iterator<Item = &'static str> {
    ADAPTERS.iter().map(|it| it.name)
}

/// The adapters' names, each with its OpenAPI document as it is committed and served.
#[must_use]
pub fn documents() -> Vec<(&'static str, String)> {
    ADAPTERS.iter().map(|it| (it.name, document::text(it))).collect()
}
