//! The HTTP client of our own commands.

pub mod profile;

use std::{
    path::PathBuf,
    sync::{Arc, OnceLock},
    time::Duration,
};

use anyhow::Context;
use reqwest::{Method, StatusCode, header::HeaderValue};
use serde::Serialize;
use serde_json::Value;

use self::profile::{Profile, Profiles};
use crate::dev::Ready;

/// Longer than any poll waits.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(45);
/// A stream is followed for this long.
const STREAM_TIMEOUT: Duration = Duration::from_secs(24 * 3_600);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const PROJECT: &str = "fencepost-project";
const DEFAULT_URL: &str = "http://127.0.0.1:7070";

/// The server and the credentials to use.
#[derive(Debug, Clone, clap::Args)]
pub struct ClientArgs {
    /// The server [default: that of the profile, of a running `fencepost dev`, or
    /// http://127.0.0.1:7070]
    #[arg(long, env = "FENCEPOST_URL", value_name = "URL", global = true)]
    pub url: Option<String>,

    /// The project's API key [default: that of the profile, or of a running `fencepost dev`]
    #[arg(long, env = "FENCEPOST_KEY", hide_env_values = true, value_name = "KEY", global = true)]
    pub api_key: Option<String>,

    /// Server and key that `fencepost login` has kept under this name
    #[arg(long, env = "FENCEPOST_PROFILE", value_name = "NAME", global = true)]
    pub profile: Option<String>,

    /// Folder of the `fencepost dev` that runs here
    #[arg(long, env = "FENCEPOST_DATA_DIR", value_name = "DIR", global = true)]
    pub data_dir: Option<PathBuf>,
}

const NO_KEY: &str = "there is no key: `fencepost login`, or give --api-key or FENCEPOST_KEY";

/// The server and the key of the profile that is named, of a running `dev`, or of the default
/// profile. The key of one server is never sent to another.
fn found(args: &ClientArgs) -> anyhow::Result<(String, Option<String>)> {
    let is_meant = |url: &str| {
        args.url.as_ref().is_none_or(|it| it.trim_end_matches('/') == url.trim_end_matches('/'))
    };
    let of = |it: Profile| (is_meant(&it.url).then_some(it.api_key), it.url);
    if let Some(name) = &args.profile {
        let profiles = Profiles::read()?;
        let profile = profiles.get(name).cloned();
        let profile = profile.with_context(|| {
            format!("there is no profile {name}: `fencepost login --profile {name}`")
        })?;
        let (key, url) = of(profile);
        return Ok((url, key));
    }
    if let Ok(ready) = Ready::of_running(args.data_dir.clone())
        && is_meant(&ready.url)
    {
        return Ok((ready.url, Some(ready.api_key)));
    }
    match Profiles::read()?.get(profile::DEFAULT).cloned() {
        Some(profile) => {
            let (key, url) = of(profile);
            Ok((url, key))
        }
        None => Ok((DEFAULT_URL.to_owned(), None)),
    }
}

/// A failed call.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The server answered with an error.
    #[error("{message} ({code})")]
    Refused {
        /// Its status.
        status: StatusCode,
        /// Its code, for programs.
        code: String,
        /// In words.
        message: String,
    },
    /// The server did not answer.
    #[error("the server does not answer")]
    Unreachable(#[source] reqwest::Error),
}

impl Failure {
    /// An answer that is an error.
    pub(crate) fn of(status: StatusCode, text: String) -> Self {
        let error = Reply { text }.json()["error"].clone();
        let text = |field: &str| error[field].as_str().map(str::to_owned);
        Self::Refused {
            status,
            code: text("code").unwrap_or_else(|| status.to_string()),
            message: text("message")
                .unwrap_or_else(|| "the answer is not from a Fencepost server".to_owned()),
        }
    }

    /// Whether this failed call may succeed after a pause.
    #[must_use]
    pub fn is_passing(error: &anyhow::Error) -> bool {
        error.downcast_ref().is_some_and(Self::is_transient)
    }

    /// Whether the same request may succeed after a pause.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable(_) => true,
            Self::Refused { status, .. } => {
                status.is_server_error()
                    || *status == StatusCode::TOO_MANY_REQUESTS
                    || *status == StatusCode::REQUEST_TIMEOUT
            }
        }
    }
}

/// The answer as it came: payloads and results are in it byte for byte, possibly readable only by
/// their program.
#[derive(Debug, Clone)]
pub struct Reply {
    /// JSON.
    pub text: String,
}

impl Reply {
    /// The parsed answer; null if it cannot be parsed as a whole.
    #[must_use]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_default()
    }
}

/// Calls one server with one key. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Client {
    http: reqwest::Client,
    url: String,
    /// None: for calls that need none.
    api_key: Option<String>,
    /// As the server named it: a proxy can keep the requests of a project on one node.
    project: Arc<OnceLock<HeaderValue>>,
}

impl Client {
    /// # Errors
    /// When there is no key, neither given nor of a profile or a running `dev`.
    pub fn new(args: &ClientArgs) -> anyhow::Result<Self> {
        let (url, api_key) = match (&args.url, &args.api_key) {
            (Some(url), Some(key)) => (url.clone(), key.clone()),
            (url, key) => {
                let (found_url, found_key) = found(args)?;
                (url.clone().unwrap_or(found_url), key.clone().or(found_key).context(NO_KEY)?)
            }
        };
        anyhow::ensure!(!api_key.is_empty(), NO_KEY);
        Self::of(&url, Some(api_key))
    }

    /// For calls that need no key.
    ///
    /// # Errors
    /// When the URL is none.
    pub fn without_key(url: &str) -> anyhow::Result<Self> {
        Self::of(url, None)
    }

    fn of(url: &str, api_key: Option<String>) -> anyhow::Result<Self> {
        let is_web = url.starts_with("http://") || url.starts_with("https://");
        anyhow::ensure!(is_web, "the URL of the server must begin with http:// or https://: {url}");
        let http = reqwest::Client::builder()
            .timeout(REQUEST_TIMEOUT)
            .connect_timeout(CONNECT_TIMEOUT)
            .build()?;
        let url = url.trim_end_matches('/').to_owned();
        Ok(Self { http, url, api_key, project: Arc::default() })
    }

    pub async fn get(&self, path: &str) -> Result<Reply, Failure> {
        self.send(self.http.request(Method::GET, format!("{}{path}", self.url))).await
    }

    pub async fn post(&self, path: &str, body: &impl Serialize) -> Result<Reply, Failure> {
        self.send(self.http.request(Method::POST, format!("{}{path}", self.url)).json(body)).await
    }

    /// A request with an idempotency key, and a body as it is.
    pub async fn post_once(
        &self,
        path: &str,
        key: Option<&str>,
        body: String,
    ) -> Result<Reply, Failure> {
        self.call(Method::POST, path, key, Some(body)).await
    }

    /// Any request, with a body as it is.
    pub async fn call(
        &self,
        method: Method,
        path: &str,
        key: Option<&str>,
        body: Option<String>,
    ) -> Result<Reply, Failure> {
        let mut request = self.http.request(method, format!("{}{path}", self.url));
        if let Some(body) = body {
            request = request.header("content-type", "application/json").body(body);
        }
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        self.send(request).await
    }

    /// Reads server-sent events until the server ends the stream, and gives the data of each.
    /// Begins after the `last` event, and keeps its id there.
    pub async fn events(
        &self,
        path: &str,
        last: &mut Option<String>,
        mut each: impl FnMut(&Value) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let request = self.http.request(Method::GET, format!("{}{path}", self.url));
        let request = self.authorized(request.timeout(STREAM_TIMEOUT));
        let request = match last {
            Some(id) => request.header("last-event-id", id.as_str()),
            None => request,
        };
        let mut answer = request.send().await.map_err(Failure::Unreachable)?;
        let status = answer.status();
        if !status.is_success() {
            let text = answer.text().await.map_err(Failure::Unreachable)?;
            return Err(Failure::of(status, text).into());
        }
        let mut rest = Vec::new();
        while let Some(bytes) = answer.chunk().await.map_err(Failure::Unreachable)? {
            rest.extend_from_slice(&bytes);
            while let Some(end) = rest.iter().position(|it| *it == b'\n') {
                let line: Vec<u8> = rest.drain(..=end).collect();
                if let Some(id) = line.strip_prefix(b"id:") {
                    *last = Some(String::from_utf8_lossy(id).trim().to_owned());
                }
                if let Some(data) = line.strip_prefix(b"data:") {
                    each(&serde_json::from_slice(data).unwrap_or_default())?;
                }
            }
        }
        Ok(())
    }

    fn authorized(&self, request: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
        let request = match self.project.get() {
            Some(project) => request.header(PROJECT, project),
            None => request,
        };
        match &self.api_key {
            Some(api_key) => request.bearer_auth(api_key),
            None => request,
        }
    }

    async fn send(&self, request: reqwest::RequestBuilder) -> Result<Reply, Failure> {
        let sent = self.authorized(request).send().await;
        let response = sent.map_err(Failure::Unreachable)?;
        let status = response.status();
        if let Some(project) = response.headers().get(PROJECT) {
            self.project.get_or_init(|| project.clone());
        }
        let text = response.text().await.map_err(Failure::Unreachable)?;
        if status.is_success() {
            return Ok(Reply { text });
        }
        Err(Failure::of(status, text))
    }
}
