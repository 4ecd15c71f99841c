//! Operations that have a better successor, and will end: their answers and the documents say so,
//! and keys count their calls.

use axum::http::{
    HeaderMap, HeaderName, HeaderValue,
    header::{InvalidHeaderValue, LINK},
};
use chrono::{DateTime, NaiveDate, NaiveTime, Utc};
use serde_json::{Value, json};

/// RFC 9745.
const DEPRECATION: HeaderName = HeaderName::from_static("deprecation");
/// RFC 8594.
const SUNSET: HeaderName = HeaderName::from_static("sunset");
/// The page that lists them.
const PAGE: &str = "/docs/versions";

/// All of them. A release that deprecates one adds it here and to `docs/versions.md`.
pub const DEPRECATED: &[Deprecated] = &[];

/// An operation that will end.
#[derive(Debug)]
pub struct Deprecated {
    /// As HTTP has it.
    pub method: &'static str,
    /// Its path below `/v1`; without `/projects/{project}` if it exists in both forms.
    pub path: &'static str,
    /// From this day on.
    pub since: NaiveDate,
    /// It may be gone from this day on.
    pub sunset: NaiveDate,
    /// The operation to call in its place.
    pub instead: &'static str,
}

impl Deprecated {
    fn matches(&self, method: &str, route: &str) -> bool {
        let Some(path) = route.strip_prefix("/v1") else { return false };
        let of_project = path.strip_prefix("/projects/{project}");
        // A route that answers GET answers HEAD.
        let method = if method.eq_ignore_ascii_case("HEAD") { "GET" } else { method };
        self.method.eq_ignore_ascii_case(method)
            && (path == self.path || of_project == Some(self.path))
    }

    /// Sets the headers that warn the caller.
    pub fn write_headers(
        &self,
        headers: &mut HeaderMap,
        public_url: &str,
    ) -> Result<(), InvalidHeaderValue> {
        let since = format!("@{}", midnight(self.since).timestamp());
        let sunset = midnight(self.sunset).format("%a, %d %b %Y %H:%M:%S GMT").to_string();
        let link = format!("<{public_url}{PAGE}>; rel=\"deprecation\"; type=\"text/html\"");
        headers.insert(DEPRECATION, HeaderValue::try_from(since)?);
        headers.insert(SUNSET, HeaderValue::try_from(sunset)?);
        headers.append(LINK, HeaderValue::try_from(link)?);
        Ok(())
    }
}

fn midnight(day: NaiveDate) -> DateTime<Utc> {
    day.and_time(NaiveTime::MIN).and_utc()
}

/// The deprecated operation that has this route, as the router names it.
#[must_use]
pub fn find(all: &'static [Deprecated], method: &str, route: &str) -> Option<&'static Deprecated> {
    all.iter().find(|it| it.matches(method, route))
}

/// Marks them in a document.
pub fn mark(document: &mut Value, all: &'static [Deprecated]) {
    let paths = document.get_mut("paths").and_then(Value::as_object_mut);
    for (path, methods) in paths.into_iter().flatten() {
        for (method, operation) in methods.as_object_mut().into_iter().flatten() {
            let Some(it) = find(all, method, path) else { continue };
            let description = operation["description"].as_str().unwrap_or_default();
            let (instead, sunset) = (it.instead, it.sunset);
            let description = format!(
                "Deprecated: use {instead}. It may be gone from {sunset} on.\n\n{description}"
            );
            operation["description"] = json!(description.trim_end());
            operation["deprecated"] = json!(true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn day(year: i32, month: u32, day: u32) -> NaiveDate {
        NaiveDate::from_ymd_opt(year, month, day).expect("a day")
    }

    const ALL: &[Deprecated] = &[Deprecated {
        method: "GET",
        path: "/jobs/{job_id}",
        since: day(2026, 12, 1),
        sunset: day(2027, 12, 1),
        instead: "GET /v1/tasks/{id}",
    }];

    #[test]
    fn an_operation_is_found_in_both_forms_and_no_other_one() {
        for route in ["/v1/jobs/{job_id}", "/v1/projects/{project}/jobs/{job_id}"] {
            assert!(find(ALL, "GET", route).is_some(), "{route}");
            assert!(find(ALL, "HEAD", route).is_some(), "{route}");
            assert!(find(ALL, "PATCH", route).is_none(), "{route}");
        }
        for route in ["/v1/jobs", "/jobs/{job_id}", "/v1/jobs/{job_id}/events"] {
            assert!(find(ALL, "GET", route).is_none(), "{route}");
        }
    }

    #[test]
    fn what_is_deprecated_is_an_operation() {
        let paths = crate::openapi::document()["paths"].as_object().expect("paths");
        let is_operation = |it: &Deprecated| {
            paths.iter().any(|(path, methods)| {
                let mut own = methods.as_object().into_iter().flatten();
                own.any(|(method, _)| it.matches(method, path))
            })
        };
        assert!(is_operation(&ALL[0]));
        assert!(!is_operation(&Deprecated { path: "/jobs/{id}", ..ALL[0] }), "misspelt");
        for it in DEPRECATED {
            assert!(is_operation(it), "{} {} is no operation", it.method, it.path);
        }
    }

    #[test]
    fn dates_are_as_the_standards_want_them() {
        let mut headers = HeaderMap::new();
        ALL[0].write_headers(&mut headers, "https://queue.example").expect("headers");
        assert_eq!(headers[DEPRECATION], "@1796083200");
        assert_eq!(headers[SUNSET], "Wed, 01 Dec 2027 00:00:00 GMT");
        let link = "<https://queue.example/docs/versions>; rel=\"deprecation\"; type=\"text/html\"";
        assert_eq!(headers[LINK], link);
    }

    #[test]
    fn documents_mark_it() {
        let of = |text: &str| json!({"description": text});
        let mut document = json!({"paths": {
            "/v1/jobs/{job_id}": {"get": of("Shows a job."), "patch": of("Changes it.")},
        }});
        mark(&mut document, ALL);
        let path = &document["paths"]["/v1/jobs/{job_id}"];
        assert_eq!(path["patch"], of("Changes it."));
        let description = "Deprecated: use GET /v1/tasks/{id}. It may be gone from 2027-12-01 on.\n\nShows a job.";
        assert_eq!(path["get"], json!({"description": description, "deprecated": true}));
    }
}
