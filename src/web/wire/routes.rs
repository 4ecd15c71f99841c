//! Routes of handlers that are erased first: each handler is an opaque type of its own, and without
//! this the router's layers are compiled for each of them, a third of the build.

use std::{pin::Pin, sync::Arc};

use axum::{
    Router,
    extract::Request,
    handler::Handler,
    response::Response,
    routing::{self, MethodRouter},
};
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouter};

use crate::app::App;

type Answering = Pin<Box<dyn Future<Output = Response> + Send>>;

/// A handler of any type.
#[derive(Clone)]
pub struct Erased(Arc<dyn Fn(Request, App) -> Answering + Send + Sync>);

impl Handler<(), App> for Erased {
    type Future = Answering;

    fn call(self, request: Request, app: App) -> Answering {
        (self.0)(request, app)
    }
}

/// Erases a handler.
pub fn erased<T, H: Handler<T, App, Future = Answering>>(handler: H) -> Erased {
    Erased(Arc::new(move |request, app| handler.clone().call(request, app)))
}

/// A route that answers GET.
pub fn get<T, H: Handler<T, App, Future = Answering>>(handler: H) -> MethodRouter<App> {
    routing::get(erased(handler))
}

/// A route that answers POST.
pub fn post<T, H: Handler<T, App, Future = Answering>>(handler: H) -> MethodRouter<App> {
    routing::post(erased(handler))
}

/// Documented routes. Axum's nesting would wrap each route in two more services, and rewrite the
/// path of each request.
#[derive(Default)]
pub struct Routes(Vec<UtoipaMethodRouter<App>>);

impl Routes {
    /// Adds the handlers of one path.
    #[must_use]
    pub fn routes(mut self, methods: UtoipaMethodRouter<App>) -> Self {
        self.0.push(methods);
        self
    }

    /// Adds others.
    #[must_use]
    pub fn merge(mut self, others: Self) -> Self {
        self.0.extend(others.0);
        self
    }

    /// The routes below this path.
    pub fn below(self, base: &str) -> Router<App> {
        self.0.into_iter().fold(Router::new(), |router, (_, paths, methods)| {
            let path = paths.paths.keys().next().map_or("", |it| it.trim_end_matches('/'));
            router.route(&format!("{base}{path}"), methods)
        })
    }

    /// The same with their part of the document.
    pub fn documented(self) -> OpenApiRouter<App> {
        self.0.into_iter().fold(OpenApiRouter::new(), OpenApiRouter::routes)
    }
}

/// The routes of documented handlers with the same path, and their part of the document: as
/// [`utoipa_axum::routes`], of which this uses the inner part.
#[macro_export]
macro_rules! routes {
    ($($handler:path),+ $(,)?) => {{
        use utoipa_axum::PathItemExt;
        let mut schemas = Vec::new();
        let mut paths = utoipa::openapi::path::Paths::new();
        let mut router = axum::routing::MethodRouter::new();
        $(
            let (path, operation, methods) = utoipa_axum::routes!(@resolve_types $handler : schemas);
            for method in &methods {
                let handler = $crate::wire::routes::erased($handler);
                router = router.on(method.to_method_filter(), handler);
            }
            paths.add_path_operation(&path, methods, operation);
        )+
        (schemas, paths, router)
    }};
}
pub use crate::routes;
