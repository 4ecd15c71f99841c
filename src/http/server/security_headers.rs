//! Headers by which browsers restrict what an answer may do.

use axum::http::{
    HeaderMap, HeaderName, HeaderValue,
    header::{
        CACHE_CONTROL, CONTENT_SECURITY_POLICY, REFERRER_POLICY, STRICT_TRANSPORT_SECURITY,
        X_CONTENT_TYPE_OPTIONS,
    },
};

const OPENER_POLICY: HeaderName = HeaderName::from_static("cross-origin-opener-policy");
const RESOURCE_POLICY: HeaderName = HeaderName::from_static("cross-origin-resource-policy");
const PERMISSIONS_POLICY: HeaderName = HeaderName::from_static("permissions-policy");
/// Prefix of the reference and the documentation.
const DOCS: [&str; 3] = ["/docs", "/examples", "/clients"];
/// Prefix of the console's pages.
const CONSOLE: &str = "/console";
/// Headers that every answer gets, and a few of its own.
const MAX_OWN_HEADERS: usize = 12;

/// Content security policy of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// Nothing is allowed: it is no page.
    Nothing,
    /// The API reference's own scripts and styles; some of the styles are inline.
    Docs,
    /// The console's own files, nothing inline.
    Console,
}

impl Policy {
    /// That of a path.
    pub fn of(path: &str) -> Self {
        let is_below = |base: &str| {
            path.strip_prefix(base).is_some_and(|it| it.is_empty() || it.starts_with('/'))
        };
        match path {
            _ if DOCS.into_iter().any(is_below) => Self::Docs,
            _ if is_below(CONSOLE) => Self::Console,
            _ => Self::Nothing,
        }
    }

    /// With `no-referrer`, a browser hides the origin of a form even from the page's own server,
    /// which must check it.
    const fn referrer(self) -> &'static str {
        match self {
            Self::Nothing | Self::Docs => "no-referrer",
            Self::Console => "same-origin",
        }
    }

    const fn text(self) -> &'static str {
        match self {
            Self::Nothing => "default-src 'none'; frame-ancestors 'none'",
            Self::Docs => {
                "default-src 'self'; script-src 'self'; style-src 'self' 'unsafe-inline'; \
                 img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
            }
            Self::Console => {
                "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                 form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
            }
        }
    }
}

/// Security headers of every answer: the API is no page, is not cached, and is never framed.
pub fn secure(headers: &mut HeaderMap, policy: Policy) {
    // All of them, together with the following ones.
    headers.reserve(MAX_OWN_HEADERS);
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(policy.text()));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static(policy.referrer()));
    headers.insert(STRICT_TRANSPORT_SECURITY, HeaderValue::from_static("max-age=31536000"));
    let same_origin = HeaderValue::from_static("same-origin");
    headers.insert(OPENER_POLICY, same_origin.clone());
    if policy != Policy::Nothing {
        headers.insert(RESOURCE_POLICY, same_origin);
        let none = HeaderValue::from_static("camera=(), geolocation=(), microphone=(), payment=()");
        headers.insert(PERMISSIONS_POLICY, none);
    }
    if policy != Policy::Docs {
        headers.entry(CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    }
}
