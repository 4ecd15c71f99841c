//! Parts of a request that would otherwise be ignored without a word: parameters and conditions
//! that an operation does not have, and what HTTP forbids.

use axum::{
    extract::Request,
    http::{
        HeaderMap, Version,
        header::{HOST, IF_MATCH, IF_NONE_MATCH, TRANSFER_ENCODING},
    },
};
use fencepost_domain::error::{Error, KEY_PREFIX};
use percent_encoding::percent_decode_str;
use serde_json::Value;

use crate::openapi;

/// Bytes of a parameter's name that an error repeats.
const MAX_NAME_BYTES: usize = 100;
/// Characters of a parameter's value that an error repeats.
const MAX_SHOWN_CHARS: usize = 60;

/// Refuses a request to this route if a part of it would be ignored. `?dry_run=true` at an
/// operation without parameters would really run it.
pub fn check(request: &Request, route: Option<&str>) -> Result<(), Error> {
    check_message(request.version(), request.headers())?;
    let query = request.uri().query().unwrap_or_default();
    let is_write = !request.method().is_safe();
    let conditions = [IF_MATCH, IF_NONE_MATCH];
    let condition = conditions.iter().find(|it| is_write && request.headers().contains_key(*it));
    // Most requests have neither.
    if query.is_empty() && condition.is_none() {
        return Ok(());
    }
    let method = if request.method() == "HEAD" { "GET" } else { request.method().as_str() };
    let operations = route.and_then(openapi::operations);
    let Some(operation) = operations.and_then(|it| it.get(&method.to_ascii_lowercase())) else {
        return Ok(());
    };
    if percent_decode_str(query).decode_utf8().is_err() {
        return Err(Error::invalid("query", "is not valid UTF-8"));
    }
    let parameters = || operation["parameters"].as_array().into_iter().flatten();
    if !parameters().any(|it| it["in"] == "query")
        && let Some((name, _)) = form_urlencoded::parse(query.as_bytes()).next()
    {
        // Errors are logged: what may be a key is not repeated.
        let is_name = name.len() <= MAX_NAME_BYTES && !name.contains(KEY_PREFIX);
        let name = if is_name { &name } else { "query" };
        return Err(Error::invalid(name, "is no parameter: this operation has none in its query"));
    }
    check_values(query, parameters)?;
    if let Some(name) = condition
        && !parameters().any(|it| it["name"] == "If-Match")
    {
        let message = "is no condition of this operation: send it with a `PUT`, `PATCH` or \
            `DELETE` of settings that have an `etag`";
        return Err(Error::invalid(name.as_str(), message));
    }
    Ok(())
}

/// Checks the numbers, and what is true or false, against their schemas: the parser of a query
/// knows no bounds but those of the types in the server.
fn check_values<'a, P: Iterator<Item = &'a Value>>(
    query: &str,
    parameters: impl Fn() -> P,
) -> Result<(), Error> {
    for (name, value) in form_urlencoded::parse(query.as_bytes()) {
        let schema = parameters().find(|it| it["in"] == "query" && it["name"] == *name);
        let Some(schema) = schema.map(|it| &it["schema"]) else { continue };
        let is = |kind: &str| {
            let named = &schema["type"];
            named == kind || named.as_array().is_some_and(|it| it.iter().any(|it| it == kind))
        };
        let shown: String = value.chars().take(MAX_SHOWN_CHARS).collect();
        let shown = if shown.is_empty() { "empty".to_owned() } else { format!("`{shown}`") };
        if is("boolean") && !matches!(&*value, "true" | "false") {
            return Err(Error::invalid(name, format!("must be `true` or `false`, is {shown}")));
        }
        if is("integer") {
            let min = schema["minimum"].as_i64().unwrap_or(i32::MIN.into());
            let max = schema["maximum"].as_i64().unwrap_or(i32::MAX.into());
            if !value.parse::<i64>().is_ok_and(|it| (min..=max).contains(&it)) {
                let message = format!("must be an integer between {min} and {max}, is {shown}");
                return Err(Error::invalid(name, message));
            }
        }
    }
    Ok(())
}

/// RFC 9112: a request names its host once (section 3.2), and its body has no coding but chunks,
/// which the server decodes (section 6.1).
fn check_message(version: Version, headers: &HeaderMap) -> Result<(), Error> {
    let mut hosts = headers.get_all(HOST).iter();
    let is_named = match (hosts.next(), hosts.next()) {
        (Some(host), None) => host.as_bytes().iter().all(|it| is_host_byte(*it)),
        (None, _) => version != Version::HTTP_11,
        (Some(_), Some(_)) => false,
    };
    if !is_named {
        return Err(Error::invalid("Host", "must be sent once, as a name or address"));
    }
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    let is_plain = match (codings.next(), codings.next()) {
        (None, _) => true,
        (Some(only), None) => only.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked"),
        (Some(_), Some(_)) => false,
    };
    match is_plain {
        true => Ok(()),
        false => Err(Error::invalid("Transfer-Encoding", "must be chunked")),
    }
}

/// RFC 3986, sections 3.2.2 and 3.2.3: names, addresses and ports. Not parsed, since nothing else
/// of the server reads it, and each request has one.
const fn is_host_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric()
        || matches!(byte, b'!' | b'$' | b'%' | b'&'..=b'.' | b':'..=b';')
        || matches!(byte, b'=' | b'[' | b']' | b'_' | b'~')
}

#[cfg(test)]
mod tests {
    use axum::{body::Body, http::Request as Sent};

    use super::*;

    fn checked(method: &str, uri: &str, route: &str, headers: &[(&str, &str)]) -> Option<String> {
        let mut request = Sent::builder().method(method).uri(uri);
        for (name, value) in [("host", "localhost:80")].iter().chain(headers) {
            request = request.header(*name, *value);
        }
        let request = request.body(Body::empty()).expect("a request");
        match check(&request, Some(route)).err()? {
            Error::Invalid(broken) => {
                Some(broken.iter().map(|it| format!("{}: {}", it.field, it.message)).collect())
            }
            other => Some(other.to_string()),
        }
    }

    #[test]
    fn a_part_that_would_be_ignored_is_refused() {
        for (method, uri, route) in [
            ("POST", "/v1/jobs/cancel?dry_run=true", "/v1/jobs/cancel"),
            ("POST", "/v1/projects/p/jobs/cancel?a", "/v1/projects/{project}/jobs/cancel"),
            ("HEAD", "/v1/limits?x=1", "/v1/limits"),
            ("GET", "/v1/jobs?queue=%ff", "/v1/jobs"),
        ] {
            assert!(checked(method, uri, route, &[]).is_some(), "{uri}");
        }
        for (method, uri, route) in [
            ("POST", "/v1/jobs/cancel?", "/v1/jobs/cancel"),
            ("GET", "/v1/jobs?queue=a", "/v1/jobs"),
            ("GET", "/console?x=1", "/console"),
        ] {
            assert_eq!(checked(method, uri, route, &[]), None, "{uri}");
        }
        let condition = [("if-match", "\"x\"")];
        let push = "/v1/queues/{queue}/push";
        assert!(checked("DELETE", "/v1/queues/q/push", push, &condition).is_some());
        assert_eq!(checked("GET", "/v1/queues/q/push", push, &condition), None);
        assert_eq!(checked("DELETE", "/v1/queues/q", "/v1/queues/{queue}", &condition), None);
    }

    #[test]
    fn a_value_that_its_schema_does_not_have_is_refused_with_the_bound() {
        let message = |query: &str| checked("GET", &format!("/v1/jobs?{query}"), "/v1/jobs", &[]);
        for (query, part) in [
            ("limit=-1", "limit: must be an integer between 1 and 200, is `-1`"),
            ("limit=99999999999999999999", "between 1 and 200"),
            ("limit=ten", "is `ten`"),
            ("limit=", "is empty"),
            ("payloads=0", "payloads: must be `true` or `false`, is `0`"),
        ] {
            let message = message(query).expect("a refusal");
            assert!(message.contains(part), "{query}: {message}");
        }
        assert_eq!(message("limit=200&payloads=true&tag=limit%3D-1"), None);
    }

    #[test]
    fn what_http_forbids_is_refused() {
        let with = |headers: &[_]| checked("GET", "/v1/limits", "/v1/limits", headers);
        assert_eq!(with(&[]), None);
        assert!(with(&[("host", "other")]).is_some());
        for host in ["a b", "a/b", "a@b", "a?b", "a#b", "a\\b"] {
            let named = [(HOST, host.parse().expect("a value"))].into_iter().collect();
            assert!(check_message(Version::HTTP_11, &named).is_err(), "{host}");
        }
        for host in ["", "localhost:80", "[::1]:80", "a-b.example.com", "127.0.0.1", "%41_~"] {
            let named = [(HOST, host.parse().expect("a value"))].into_iter().collect();
            assert!(check_message(Version::HTTP_11, &named).is_ok(), "{host}");
        }
        assert_eq!(with(&[("transfer-encoding", "Chunked")]), None);
        for coding in ["gzip, chunked", "chunked, chunked", "gzip"] {
            assert!(with(&[("transfer-encoding", coding)]).is_some(), "{coding}");
        }
        let none = HeaderMap::new();
        assert!(check_message(Version::HTTP_11, &none).is_err());
        assert!(check_message(Version::HTTP_10, &none).is_ok());
        assert!(check_message(Version::HTTP_2, &none).is_ok());
    }
}
