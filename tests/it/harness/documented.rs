//! Every error that any test sees must be one that the document lists for an operation of its path.

use fencepost_http::openapi;

use reqwest::{StatusCode, Url};
use serde_json::{Map, Value};

/// What any request may be answered with, whatever its operation.
const ANYWHERE: [&str; 4] = ["internal", "method_not_allowed", "not_found", "request_timeout"];

/// Expects the code of an error among those of the operations of its path.
#[track_caller]
pub fn check(url: &Url, status: StatusCode, text: &str) {
    if status.as_u16() < 400 || !url.path().starts_with("/v1/") {
        return;
    }
    let body: Value = serde_json::from_str(text).unwrap_or_default();
    let Some(code) = body["error"]["code"].as_str().filter(|it| !ANYWHERE.contains(it)) else {
        return;
    };
    let documents = [openapi::document(), openapi::project_document()];
    let mut paths: Vec<_> = documents
        .iter()
        .flat_map(|it| it["paths"].as_object().expect("paths"))
        .filter(|it| is_at(it.0, url.path()))
        .collect();
    // The path with the fewest parameters is the one that was meant.
    paths.sort_by_key(|it| it.0.matches('{').count());
    let Some((path, methods)) = paths.first() else { return };
    let methods: &Map<_, _> = methods.as_object().expect("methods");
    let is_listed = methods.values().any(|method| {
        let codes = method["x-error-codes"][status.as_str()].as_array();
        codes.is_some_and(|it| it.iter().any(|it| it == code))
    });
    assert!(is_listed, "{path} does not list {status} {code}");
}

fn is_at(template: &str, path: &str) -> bool {
    let (mut names, mut parts) = (template.split('/'), path.split('/'));
    loop {
        match (names.next(), parts.next()) {
            (None, None) => return true,
            (Some(name), Some(part)) if name == part || name.starts_with('{') => (),
            _ => return false,
        }
    }
}

#[test]
#[should_panic(expected = "does not list 409 Conflict stale_lease")]
fn a_code_that_the_document_does_not_list_fails_the_test_that_sees_it() {
    let url = "http://127.0.0.1/v1/jobs".parse().expect("a URL");
    check(&url, StatusCode::CONFLICT, r#"{"error": {"code": "stale_lease"}}"#);
}
