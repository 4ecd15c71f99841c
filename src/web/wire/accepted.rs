//! Headers by which a client says what it accepts, such as `Accept: text/html, */*;q=0.5`.

use axum::http::{HeaderMap, HeaderName};

/// The weight of a name in such a header, from 0 to 1 (RFC 9110, section 12.4.2); none: the header
/// does not have the name.
#[must_use]
pub fn weight(headers: &HeaderMap, header: &HeaderName, name: &str) -> Option<f32> {
    let lists = headers.get_all(header).iter().filter_map(|it| it.to_str().ok());
    lists.flat_map(|it| it.split(',')).find_map(|accepted| {
        let mut parts = accepted.split(';').map(str::trim);
        parts.next().filter(|it| it.eq_ignore_ascii_case(name))?;
        let mut values = parts.filter_map(|it| it.split_once('='));
        let value = values.find(|it| it.0.trim().eq_ignore_ascii_case("q"));
        Some(value.and_then(|it| it.1.trim().parse().ok()).unwrap_or(1.0))
    })
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderValue, header::ACCEPT};

    use super::*;

    #[test]
    fn a_name_has_the_weight_that_is_sent_or_one() {
        let sent = ["text/html;level=1;q=0.7, Text/Plain ; Q = 0", "application/json, a/b;q=x"];
        let headers = sent.map(|it| (ACCEPT, HeaderValue::from_static(it)));
        let mut both = HeaderMap::new();
        for (name, value) in headers {
            both.append(name, value);
        }
        for (name, expected) in [
            ("text/html", Some(0.7)),
            ("text/plain", Some(0.0)),
            ("APPLICATION/JSON", Some(1.0)),
            ("a/b", Some(1.0)),
            ("text", None),
            ("", None),
        ] {
            assert_eq!(weight(&both, &ACCEPT, name), expected, "{name}");
        }
    }
}
