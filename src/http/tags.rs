//! Entity tags, as the headers `If-Match` and `If-None-Match` list them (RFC 9110, section 8.8.3).

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use fencepost_domain::error::Error;

/// The tags of a header with a condition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tags {
    /// `*`: anything that exists.
    Any,
    /// These tags.
    Listed(Vec<Tag>),
}

/// An entity tag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tag {
    is_weak: bool,
    /// The bytes between the quotes.
    opaque: Vec<u8>,
}

impl Tags {
    /// The tags of a header, which may be sent in several lines; none: it was not sent.
    ///
    /// # Errors
    /// [`Error::Invalid`] when it is no list of tags: a caller who forgot the quotes would wonder
    /// why none is equal.
    pub fn read(headers: &HeaderMap, name: &HeaderName) -> Result<Option<Self>, Error> {
        let lines: Vec<_> = headers.get_all(name).iter().map(HeaderValue::as_bytes).collect();
        if lines.is_empty() {
            return Ok(None);
        }
        Self::parse(&lines.join(&b", "[..])).map(Some).ok_or_else(|| {
            let tags = "must be * or tags in double quotes, as an answer's ETag is";
            Error::invalid(name.as_str(), tags)
        })
    }

    fn parse(text: &[u8]) -> Option<Self> {
        if text.trim_ascii() == b"*" {
            return Some(Self::Any);
        }
        let mut tags = Vec::new();
        let mut rest = after_commas(text);
        while !rest.is_empty() {
            let unprefixed = rest.strip_prefix(b"W/");
            let quoted = unprefixed.unwrap_or(rest).strip_prefix(b"\"")?;
            let length = quoted.iter().position(|it| *it == b'"')?;
            let (opaque, quote) = quoted.split_at(length);
            if !opaque.iter().all(|it| is_tag_byte(*it)) {
                return None;
            }
            tags.push(Tag { is_weak: unprefixed.is_some(), opaque: opaque.to_vec() });
            let following = quote[1..].trim_ascii_start();
            if !following.is_empty() && following[0] != b',' {
                return None;
            }
            rest = after_commas(following);
        }
        (!tags.is_empty()).then_some(Self::Listed(tags))
    }

    /// True if an `If-Match` with them holds for the settings with this strong tag.
    #[must_use]
    pub fn match_strongly(&self, current: &str) -> bool {
        self.have(current, |it| !it.is_weak)
    }

    /// True if an `If-None-Match` with them fails for the settings with this strong tag.
    #[must_use]
    pub fn match_weakly(&self, current: &str) -> bool {
        self.have(current, |_| true)
    }

    fn have(&self, current: &str, counts: impl Fn(&Tag) -> bool) -> bool {
        let is_current = |it: &Tag| it.opaque == current.trim_matches('"').as_bytes();
        match self {
            Self::Any => true,
            Self::Listed(tags) => tags.iter().any(|it| counts(it) && is_current(it)),
        }
    }
}

/// The text after commas and spaces: a list may have empty elements.
fn after_commas(text: &[u8]) -> &[u8] {
    let start = text.iter().position(|it| !matches!(it, b',' | b' ' | b'\t'));
    start.map_or(&[], |it| &text[it..])
}

const fn is_tag_byte(byte: u8) -> bool {
    matches!(byte, 0x21 | 0x23..=0x7e | 0x80..=0xff)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(text: &[u8]) -> Option<Vec<(bool, Vec<u8>)>> {
        match Tags::parse(text)? {
            Tags::Any => None,
            Tags::Listed(tags) => {
                Some(tags.into_iter().map(|it| (it.is_weak, it.opaque)).collect())
            }
        }
    }

    #[test]
    fn lists_are_read_as_the_standard_has_them() {
        let strong = |text: &[u8]| (false, text.to_vec());
        assert_eq!(Tags::parse(b" * "), Some(Tags::Any));
        assert_eq!(listed(b"\"a\""), Some(vec![strong(b"a")]));
        assert_eq!(listed(b"\"\""), Some(vec![strong(b"")]));
        assert_eq!(listed(b", \"a\",, W/\"b\" ,"), Some(vec![strong(b"a"), (true, b"b".to_vec())]));
        assert_eq!(listed(b"\"a,b\",\"c\""), Some(vec![strong(b"a,b"), strong(b"c")]));
        assert_eq!(listed(b"\"\xff\""), Some(vec![strong(b"\xff")]));
    }

    #[test]
    fn what_is_no_list_of_tags_is_refused() {
        let all: [&[u8]; 11] = [
            b"",
            b",",
            b"x",
            b"\"x",
            b"x\"",
            b"\"a\" \"b\"",
            b"\"a b\"",
            b"w/\"a\"",
            b"W/",
            b"*, \"a\"",
            b"\"a\"*",
        ];
        for text in all {
            assert_eq!(Tags::parse(text), None, "{}", text.escape_ascii());
        }
    }
}
