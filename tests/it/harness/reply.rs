//! An answer, and what a test expects of it.

use reqwest::{StatusCode, header::HeaderMap};
use serde_json::Value;

use super::documented;

/// What the server answered.
#[derive(Debug)]
pub struct Reply {
    /// The status.
    pub status: StatusCode,
    /// The headers.
    pub headers: HeaderMap,
    /// The body as it came.
    pub text: String,
}

impl Reply {
    /// Reads the whole answer; of a stream, the head.
    pub async fn of(response: reqwest::Response) -> Self {
        let (status, headers) = (response.status(), response.headers().clone());
        let is_endless = headers.get("content-type").is_some_and(|it| it == "text/event-stream");
        if is_endless {
            return Self { status, headers, text: String::new() };
        }
        let url = response.url().clone();
        let text = response.text().await.expect("a body");
        documented::check(&url, status, &text);
        Self { status, headers, text }
    }

    /// The body as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|_| panic!("no JSON: {self:?}"))
    }

    /// Expects a status, and answers with the body.
    #[track_caller]
    pub fn is(&self, status: u16) -> Value {
        assert_eq!(self.status.as_u16(), status, "{}", self.text);
        self.json()
    }

    /// Expects a 201 whose body a test cannot or need not read.
    #[track_caller]
    pub fn is_created(&self) {
        assert_eq!(self.status.as_u16(), 201, "{}", self.text);
    }

    /// Expects a status, and nothing to read.
    #[track_caller]
    pub fn is_empty(&self, status: u16) {
        assert_eq!((self.status.as_u16(), self.text.as_str()), (status, ""));
    }

    /// Expects an error in the one shape that all errors have.
    #[track_caller]
    pub fn is_error(&self, status: u16, code: &str) -> Value {
        let body = self.is(status);
        let error = &body["error"];
        assert_eq!(error["code"], code, "{}", self.text);
        let docs_url = error["docs_url"].as_str().expect("a URL");
        assert!(docs_url.starts_with("http"), "{docs_url}");
        assert!(docs_url.ends_with(&format!("/docs/errors#{code}")), "{docs_url}");
        let request_id = self.headers.get("x-request-id").expect("an id");
        assert_eq!(error["request_id"], request_id.to_str().expect("text"));
        assert!(error["message"].as_str().is_some_and(|it| !it.is_empty()));
        error.clone()
    }

    /// Expects a 400 that names this field.
    #[track_caller]
    pub fn refuses(&self, field: &str) -> String {
        let error = self.is_error(400, "invalid_request");
        let details = error["details"].as_array().cloned().unwrap_or_default();
        let named = details.iter().find(|it| it["field"] == field);
        let named = named.unwrap_or_else(|| panic!("{field} is not named: {}", self.text));
        named["message"].as_str().expect("a message").to_owned()
    }
}
