//! Paths of the console: where a visitor is, and where a form may lead back to.

use axum::http::{HeaderName, Uri};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

/// The page with the login form.
pub const LOGIN: &str = "/console/login";

/// In the query of a page: why a login with a provider was refused.
pub const REFUSED: &str = "refused";

/// Set on requests by htmx.
pub const HX_REQUEST: HeaderName = HeaderName::from_static("hx-request");

/// Characters that a path segment keeps.
const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// A name as one segment of a path.
pub fn segment(name: &str) -> String {
    utf8_percent_encode(name, SEGMENT).to_string()
}

/// The path and query of a request, as a link has them.
pub fn path_and_query(uri: &Uri) -> String {
    uri.path_and_query().map_or_else(|| uri.path().to_owned(), ToString::to_string)
}

/// Whether a path belongs to the console, so that no redirect leads to another site.
pub fn is_own_page(place: &str) -> bool {
    let is_below = place == "/console"
        || place.strip_prefix("/console").is_some_and(|it| it.starts_with(['/', '?']));
    is_below && place.bytes().all(|it| it.is_ascii_graphic() && it != b'\\')
}

/// Where a form leads next: to this page, if it is of the console.
pub fn own_page(next: Option<&str>) -> String {
    next.filter(|it| is_own_page(it)).unwrap_or("/console").to_owned()
}

/// The purpose of a mailed link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Link {
    Reset,
    Verify,
    Email,
    Invitation,
}

impl Link {
    pub const ALL: [Self; 4] = [Self::Reset, Self::Verify, Self::Email, Self::Invitation];

    /// Its name in the cookie and in the path that reads it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Reset => "reset",
            Self::Verify => "verify",
            Self::Email => "email",
            Self::Invitation => "invitation",
        }
    }

    /// The page that it leads to.
    pub const fn page(self) -> &'static str {
        match self {
            Self::Reset => "/console/reset/confirm",
            Self::Verify => "/console/verify",
            Self::Email => "/console/email",
            Self::Invitation => "/console/invitation",
        }
    }

    /// Whether this is the path of such a page.
    pub fn is_page(path: &str) -> bool {
        Self::ALL.into_iter().any(|it| it.page() == path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_form_leads_back_to_a_page_of_the_console_only() {
        let check =
            |place: &str, expected: bool| assert_eq!(is_own_page(place), expected, "{place}");
        check("/console", true);
        check("/console?from=login", true);
        check("/console/p/acme/jobs?queue=a%20b", true);
        check("/consolex", false);
        check("//evil.example/console/", false);
        check("https://evil.example/console/", false);
        check("/console/\\evil", false);
        check("/console/\r\nset-cookie: a=b", false);
        check("", false);
    }

    #[test]
    fn a_name_stays_one_segment() {
        assert_eq!(segment("a/b c"), "a%2Fb%20c");
        assert_eq!(segment("../x?y#z"), "..%2Fx%3Fy%23z");
        assert_eq!(segment("plain-Name_1.2~"), "plain-Name_1.2~");
    }
}
