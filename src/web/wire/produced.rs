//! Text that programs produce, such as messages of errors and lines of output. It is read whatever
//! its characters are: a report must not be refused for them.

use std::{collections::BTreeSet, fmt, ops::RangeInclusive};

use axum::body::Bytes;
use fencepost_domain::text::ErrorReport;
use serde::{
    Deserialize, Deserializer,
    de::{Error, Visitor},
};

/// A string in which U+FFFD stands for what is no text: halves of surrogate pairs, which
/// `JSON.stringify` makes of a cut emoji and Python of file names, and bytes that are no UTF-8.
///
/// ```
/// # use fencepost_web::wire::produced::ProducedText;
/// let read = |json: &str| serde_json::from_str::<ProducedText>(json).unwrap().into_string();
/// assert_eq!(read(r#""cut \ud83d""#), "cut \u{FFFD}");
/// assert_eq!(read(r#""\udc00\ud83d\ude00\ud800 é""#), "\u{FFFD}😀\u{FFFD} é");
/// assert!(serde_json::from_str::<ProducedText>("[1]").is_err());
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProducedText(String);

impl ProducedText {
    /// The text.
    #[must_use]
    pub fn into_string(self) -> String {
        self.0
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Reads bytes in which each half of a surrogate pair has the three bytes that UTF-8 would give
    /// it: so `serde_json` passes them on.
    fn of(bytes: Vec<u8>) -> Self {
        const SURROGATE: u8 = 0xED;
        const REPLACEMENT: &[u8] = "\u{FFFD}".as_bytes();
        let text = String::from_utf8(bytes).unwrap_or_else(|error| {
            let mut bytes = error.into_bytes();
            for at in 0..bytes.len().saturating_sub(2) {
                if bytes[at] == SURROGATE
                    && (0xA0..=0xBF).contains(&bytes[at + 1])
                    && (0x80..=0xBF).contains(&bytes[at + 2])
                {
                    bytes[at..at + REPLACEMENT.len()].copy_from_slice(REPLACEMENT);
                }
            }
            String::from_utf8_lossy(&bytes).into_owned()
        });
        Self(text)
    }
}

/// Bytes of a list that may be no UTF-8; with more, it is no list of texts.
const MAX_BROKEN_BYTES: usize = 64 * 1024;
/// Characters that mean nothing, one of which stands for each byte that is no UTF-8.
const MARKS: RangeInclusive<char> = '\u{FDD0}'..='\u{FDEF}';
/// A byte that is no UTF-8, wherever it stands.
const BROKEN_BYTE: u8 = 0xFF;

/// Writes a mark for each byte that is no UTF-8, so that a list can be read whose entries fail
/// alone, and returns it. None: all is text, or there is no list to be read.
#[must_use]
pub fn mark_broken(body: Bytes) -> (Bytes, Option<char>) {
    if std::str::from_utf8(&body).is_ok() {
        return (body, None);
    }
    let (mut broken, mut used) = (0, BTreeSet::new());
    for chunk in body.utf8_chunks() {
        broken += chunk.invalid().len();
        used.extend(chunk.valid().chars().filter(|it| MARKS.contains(it)));
    }
    let unused = MARKS.into_iter().find(|it| !used.contains(it));
    let Some(mark) = unused.filter(|_| broken <= MAX_BROKEN_BYTES) else { return (body, None) };
    let mut text = String::with_capacity(body.len() + broken * mark.len_utf8());
    for chunk in body.utf8_chunks() {
        text.push_str(chunk.valid());
        text.extend(chunk.invalid().iter().map(|_| mark));
    }
    (text.into(), Some(mark))
}

/// Writes a byte that is no UTF-8 for each mark: a text that a program produced has U+FFFD there,
/// and other values are refused.
#[must_use]
pub fn unmark(text: &str, mark: char) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    for (number, part) in text.split(mark).enumerate() {
        bytes.extend((number > 0).then_some(BROKEN_BYTE));
        bytes.extend(part.bytes());
    }
    bytes
}

/// The report of an error, cut as [`ErrorReport::bounded`] cuts it.
#[must_use]
pub fn error_report(
    kind: Option<&ProducedText>,
    message: Option<&ProducedText>,
    stack_trace: Option<&ProducedText>,
) -> ErrorReport {
    let [kind, message, stack_trace] =
        [kind, message, stack_trace].map(|it| it.map(ProducedText::as_str));
    ErrorReport::bounded(kind, message, stack_trace)
}

impl<'de> Deserialize<'de> for ProducedText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_byte_buf(TextVisitor)
    }
}

struct TextVisitor;

impl Visitor<'_> for TextVisitor {
    type Value = ProducedText;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<ProducedText, E> {
        Ok(ProducedText::of(bytes.to_vec()))
    }

    fn visit_byte_buf<E: Error>(self, bytes: Vec<u8>) -> Result<ProducedText, E> {
        Ok(ProducedText::of(bytes))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<ProducedText, E> {
        Ok(ProducedText(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::unknown_fields::{KnownFields, Skipped};

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Report {
        message: Option<ProducedText>,
    }

    #[test]
    fn text_is_read_where_unknown_fields_are_ignored_too() {
        let read = |json: &str| {
            let json = &mut serde_json::Deserializer::from_str(json);
            Report::deserialize(KnownFields(json, Skipped::All)).expect("it is read").message
        };
        let message = read(r#"{"message": "a\udfff", "more": 1}"#);
        assert_eq!(message.expect("sent").as_str(), "a\u{FFFD}");
        assert_eq!(read(r#"{"message": null}"#), None);
    }

    #[test]
    fn bytes_that_are_no_text_are_replaced_and_text_stays() {
        let read = |bytes: &[u8]| ProducedText::of(bytes.to_vec()).into_string();
        assert_eq!(read(b"caf\xE9"), "caf\u{FFFD}");
        assert_eq!(read(b"\xED\xA0\xBDx"), "\u{FFFD}x");
        assert_eq!(read(b"\xED\xA0"), "\u{FFFD}\u{FFFD}");
        assert_eq!(read("\u{D7FF} é 😀".as_bytes()), "\u{D7FF} é 😀");
    }

    #[test]
    fn bytes_that_are_no_text_are_found_again() {
        let (text, mark) = mark_broken(Bytes::from_static(b"caf\xE9 \xEF\xB7\x90 \xFF"));
        let mark = mark.expect("it is broken");
        assert_ne!(mark, '\u{FDD0}', "it has that one");
        let text = std::str::from_utf8(&text).expect("it is text now");
        assert_eq!(unmark(text, mark), b"caf\xFF \xEF\xB7\x90 \xFF");
        assert_eq!(mark_broken(Bytes::from_static(b"caf")).1, None);
    }

    #[test]
    fn other_values_are_refused() {
        for json in ["1", "true", "{}", "[104]"] {
            assert!(serde_json::from_str::<ProducedText>(json).is_err(), "{json}");
        }
    }
}
