//! The API as pages call it: the same routes in the same process, with the visitor's session. So a
//! page can do nothing that the API cannot, and every check, limit and audit entry is the API's
//! own.

use axum::{
    Extension, Router,
    body::{Body, to_bytes},
    extract::FromRequestParts,
    http::{
        HeaderMap, HeaderName, HeaderValue, Method, Request,
        header::{AUTHORIZATION, CONTENT_TYPE, IF_MATCH, IF_NONE_MATCH},
        request::Parts,
    },
    response::Response,
};
use fencepost_domain::error::Error;
use fencepost_identity::accounts::Client;
use secrecy::{ExposeSecret, SecretString};
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};
use tower::ServiceExt;

use fencepost_web::{
    app::App,
    auth::FromConsole,
    wire::{ClientGone, RequestId},
};

use super::{
    action_table::{FIELD_IDEMPOTENCY_KEY, FIELD_IF_MATCH, FIELD_IF_NONE_MATCH},
    form::Fields,
};

/// Maximum bytes of an answer: a full page of jobs with the largest payloads and results.
const MAX_ANSWER_BYTES: usize = 64 * 1024 * 1024;
const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// Maximum characters of a form's idempotency key.
const MAX_FORM_KEY_CHARS: usize = 64;

/// A visitor with a session.
#[derive(Clone)]
pub struct Visitor {
    pub access_token: SecretString,
}

/// All routes of the API, for calls within the process.
#[derive(Clone)]
pub struct Routes(pub Router);

/// The API, for one request.
#[derive(Clone)]
pub struct Api {
    routes: Routes,
    visitor: Option<Visitor>,
    client: Client,
    request_id: RequestId,
    gone: ClientGone,
}

impl Api {
    /// Sends a GET request.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Error> {
        self.send(Method::GET, path, None).await
    }

    /// Sends JSON, or nothing, and reads the answer.
    pub async fn send<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<String>,
    ) -> Result<T, Error> {
        self.send_form(method, path, body, &Fields::default()).await
    }

    /// Sends JSON with the form's idempotency key, `If-Match` and `If-None-Match`. The form's
    /// content is part of the key: a corrected form is another request.
    pub async fn send_form<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<String>,
        form: &Fields,
    ) -> Result<T, Error> {
        let mut headers = HeaderMap::new();
        for (field, name) in [(FIELD_IF_MATCH, IF_MATCH), (FIELD_IF_NONE_MATCH, IF_NONE_MATCH)] {
            if let Some(value) = form.get(field).and_then(|it| HeaderValue::from_str(it).ok()) {
                headers.insert(name, value);
            }
        }
        if let Some(once) =
            form.get(FIELD_IDEMPOTENCY_KEY).filter(|it| it.len() <= MAX_FORM_KEY_CHARS)
        {
            let hash = Sha256::digest(body.as_deref().unwrap_or_default());
            let hash = u64::from_be_bytes(std::array::from_fn(|place| hash[place]));
            if let Ok(key) = HeaderValue::from_str(&format!("{once}-{hash:016x}")) {
                headers.insert(IDEMPOTENCY_KEY, key);
            }
        }
        let response = self.call(method, path, body, headers).await?;
        let read = to_bytes(response.into_body(), MAX_ANSWER_BYTES).await;
        let read = read.map_err(Error::internal)?;
        // An empty answer is read as null.
        let text = if read.is_empty() { b"null" } else { &read[..] };
        serde_json::from_slice(text).map_err(Error::internal)
    }

    /// Sends a request, and returns the answer as it is.
    pub async fn call(
        &self,
        method: Method,
        path: &str,
        body: Option<String>,
        headers: HeaderMap,
    ) -> Result<Response, Error> {
        let mut request = Request::builder().method(method).uri(path);
        if body.is_some() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        let body = body.map_or_else(Body::empty, Body::from);
        let mut request = request.body(body).map_err(|_| Error::NoSuchRoute)?;
        request.headers_mut().extend(headers);
        if let Some(Visitor { access_token }) = &self.visitor {
            let bearer = format!("Bearer {}", access_token.expose_secret());
            let mut bearer = HeaderValue::from_str(&bearer).map_err(|_| Error::Unauthorized)?;
            bearer.set_sensitive(true);
            request.headers_mut().insert(AUTHORIZATION, bearer);
        }
        let extensions = request.extensions_mut();
        extensions.insert(self.client.clone());
        extensions.insert(self.request_id.clone());
        extensions.insert(self.gone.clone());
        extensions.insert(FromConsole);
        let answered = self.routes.0.clone().oneshot(request).await;
        let mut response = answered.unwrap_or_else(|never| match never {});
        match response.extensions_mut().remove::<Error>() {
            Some(error) => Err(error),
            None => Ok(response),
        }
    }

    /// Whether the visitor is logged in.
    pub const fn is_logged_in(&self) -> bool {
        self.visitor.is_some()
    }

    /// The request's id.
    pub const fn request_id(&self) -> &RequestId {
        &self.request_id
    }
}

impl FromRequestParts<App> for Api {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Error> {
        let routes = Extension::<Routes>::from_request_parts(parts, app).await;
        let Extension(routes) = routes.map_err(Error::internal)?;
        let extensions = &parts.extensions;
        let request_id = extensions.get().cloned().unwrap_or(RequestId(String::new()));
        let gone = extensions.get().cloned();
        Ok(Self {
            routes,
            visitor: extensions.get().cloned(),
            client: extensions.get().cloned().unwrap_or_default(),
            request_id,
            gone: gone.unwrap_or(ClientGone(tokio_util::sync::CancellationToken::new())),
        })
    }
}
