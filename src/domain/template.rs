//! Templates: payloads of a workflow's jobs with places that the workflow's input or the results of
//! parents fill. No loops and no code: a place is a path.
//!
//! `{{input.a.0}}` or `{{context.data.a.0}}` names a value in the input, `{{steps.KEY.output.b}}`
//! one in the result of the parent with that key. A string that is one place becomes the value
//! itself; in a longer string the value is written as text. What is filled in is not read again.

use std::borrow::Cow;

use serde::Deserialize;
use utoipa::ToSchema;

use super::{
    limits::{MAX_FILLED_BYTES, MAX_PLACES},
    raw_json::RawNode,
};

/// The JSON of a place without a value.
pub const NULL: &str = "null";

/// Something is wrong with a template.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// `{{` without `}}`.
    #[error("has `{{{{` without `}}}}`")]
    Open,
    /// Neither an input nor a step's output.
    #[error("`{0}` is neither input.… nor steps.KEY.output…")]
    Unknown(String),
    /// The step is no parent of the job.
    #[error("`{0}` names a step that is not in depends_on")]
    NoParent(String),
    /// The input has no such value.
    #[error("the input has no `{0}`")]
    Missing(String),
    /// More than [`MAX_PLACES`].
    #[error("has more than {MAX_PLACES} places to fill")]
    TooMany,
}

/// Policy for a place of a template that names nothing in the workflow's `input`. One that names
/// nothing in a parent's result becomes null.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum TemplateMode {
    /// It becomes null.
    Lenient,
    /// 400, nothing is stored.
    Strict,
}

/// The value that a place stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place<'a> {
    /// A path in the workflow's input.
    Input(&'a str),
    /// A path in the result of a parent.
    Step {
        /// The parent's key.
        key: &'a str,
        /// The path in its result.
        path: &'a str,
    },
}

impl<'a> Place<'a> {
    /// Reads what stands between the braces.
    ///
    /// # Errors
    /// [`TemplateError::Unknown`].
    pub fn read(text: &'a str) -> Result<Self, TemplateError> {
        let text = text.trim();
        let unknown = || TemplateError::Unknown(text.to_owned());
        // An empty name is a slip: without it, another value would be meant.
        let is_path = |it: &str| it.is_empty() || it.split('.').all(|name| !name.is_empty());
        if text.ends_with('.') {
            return Err(unknown());
        }
        let (root, rest) = text.split_once('.').unwrap_or((text, ""));
        match root {
            "input" if is_path(rest) => Ok(Self::Input(rest)),
            // As the Orch8 document writes it.
            "context" => match rest.strip_prefix("data") {
                Some("") => Ok(Self::Input("")),
                Some(path) => {
                    let path = path.strip_prefix('.').filter(|it| is_path(it));
                    path.map(Self::Input).ok_or_else(unknown)
                }
                None => Err(unknown()),
            },
            "steps" => {
                // A key may have dots: it ends before the first segment `output`.
                let ends = rest.match_indices(".output");
                let mut parts = ends.map(|(end, it)| (&rest[..end], &rest[end + it.len()..]));
                let (key, path) = parts
                    .find(|(_, path)| path.is_empty() || path.starts_with('.'))
                    .ok_or_else(unknown)?;
                let path = path.strip_prefix('.').unwrap_or_default();
                if is_path(path) { Ok(Self::Step { key, path }) } else { Err(unknown()) }
            }
            _ => Err(unknown()),
        }
    }
}

/// The text of the value at a path: names of fields and indexes of arrays, separated by dots. An
/// empty path is the whole.
#[must_use]
pub fn at<'a>(value: &RawNode<'a>, path: &str) -> Option<&'a str> {
    value.at(path.split('.').filter(|it| !it.is_empty())).map(|it| it.text)
}

/// A payload whose places are filled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filled {
    /// The payload. Apart from strings with places, its bytes are those that were sent.
    pub payload: String,
    /// Bytes of the values that fill it.
    pub bytes: usize,
}

/// Fills the places of a payload. `fill` gives the JSON of a place's value, which is written as it
/// is; none leaves the place.
///
/// # Errors
/// The first that `fill` returns. [`TemplateError::Open`], [`TemplateError::Unknown`], and
/// [`TemplateError::TooMany`].
pub fn fill<'v>(
    payload: &str,
    fill: &mut impl FnMut(Place<'_>) -> Result<Option<&'v str>, TemplateError>,
) -> Result<Filled, TemplateError> {
    let mut filling = Filling { fill, places: 0, bytes: 0 };
    let (mut filled, mut written) = (String::with_capacity(payload.len()), 0);
    for (begins, text) in RawNode::read(payload).strings() {
        if let Some(value) = filling.text(text)? {
            filled.push_str(&payload[written..begins]);
            filled.push_str(&value);
            written = begins + text.len();
        }
    }
    filled.push_str(&payload[written..]);
    Ok(Filled { payload: filled, bytes: filling.bytes })
}

struct Filling<'a, F> {
    fill: &'a mut F,
    places: usize,
    bytes: usize,
}

impl<'v, F: FnMut(Place<'_>) -> Result<Option<&'v str>, TemplateError>> Filling<'_, F> {
    /// The JSON in place of a string; none: it has no places.
    fn text(&mut self, quoted: &str) -> Result<Option<String>, TemplateError> {
        let content = with_plain_braces(content_of(quoted).unwrap_or_default());
        let (mut written, mut rest, mut is_any) = (String::new(), &*content, false);
        while let Some((before, after)) = rest.split_once("{{") {
            let (inside, after) = after.split_once("}}").ok_or(TemplateError::Open)?;
            self.places += 1;
            if self.places > MAX_PLACES {
                return Err(TemplateError::TooMany);
            }
            written.push_str(before);
            let name = serde_json::from_str::<String>(&format!("\"{inside}\""));
            let name = name.map_err(|_| TemplateError::Unknown(inside.to_owned()))?;
            match (self.fill)(Place::read(&name)?)?.map(|it| self.bounded(it)) {
                Some(value) if after.is_empty() && written.is_empty() => {
                    return Ok(Some(value.to_owned()));
                }
                Some(value) => match content_of(value) {
                    Some(content) => written.push_str(content),
                    None => written.push_str(content_of(&quoted_text(value)).unwrap_or_default()),
                },
                None => written.extend(["{{", inside, "}}"]),
            }
            is_any = true;
            rest = after;
        }
        written.push_str(rest);
        Ok(is_any.then(|| format!("\"{written}\"")))
    }

    /// Null instead of what exceeds [`MAX_FILLED_BYTES`]. From then on nothing is measured.
    fn bounded(&mut self, value: &'v str) -> &'v str {
        if self.bytes <= MAX_FILLED_BYTES {
            self.bytes += value.len();
        }
        if self.bytes > MAX_FILLED_BYTES { NULL } else { value }
    }
}

/// The text between the quotes of a JSON string, escapes included; none: it is no string.
fn content_of(json: &str) -> Option<&str> {
    json.strip_prefix('"')?.strip_suffix('"')
}

fn quoted_text(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Braces may be sent as escapes.
fn with_plain_braces(content: &str) -> Cow<'_, str> {
    if !content.contains("\\u007") {
        return content.into();
    }
    let (mut plain, mut rest) = (String::with_capacity(content.len()), content);
    while let Some(at) = rest.find('\\') {
        let (before, escape) = rest.split_at(at);
        plain.push_str(before);
        let (brace, bytes) = match escape.get(..6) {
            Some("\\u007b" | "\\u007B") => ("{", 6),
            Some("\\u007d" | "\\u007D") => ("}", 6),
            // The backslash, and what it escapes.
            _ => (escape.get(..2).unwrap_or_default(), 2),
        };
        plain.push_str(brace);
        rest = escape.get(bytes..).unwrap_or_default();
    }
    plain.push_str(rest);
    plain.into()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const INPUT: &str = r#"{"a": {"b": [1, "x{{input.a}}"]}, "n": null, "big": 18446744073709551616,
        "cut": "a\ud83d\"b", "long": 0.1234567890123456789, "out": [1e999,  2.50]}"#;

    fn filled_text(payload: &str) -> Result<String, TemplateError> {
        let (input, output) = (RawNode::read(INPUT), RawNode::read(r#"{"url":"u"}"#));
        let filled = fill(payload, &mut |place| match place {
            Place::Input(path) => {
                let missing = || TemplateError::Missing(path.to_owned());
                at(&input, path).map(Some).ok_or_else(missing)
            }
            Place::Step { key: "fetch.all", path } => Ok(at(&output, path)),
            Place::Step { .. } => Ok(None),
        });
        filled.map(|it| it.payload)
    }

    fn filled(payload: &Value) -> Result<Value, TemplateError> {
        let text = filled_text(&payload.to_string())?;
        Ok(serde_json::from_str(&text).expect("JSON"))
    }

    #[test]
    fn values_are_the_bytes_that_were_stored() {
        let check = |payload: &str, expected: &str| {
            assert_eq!(filled_text(payload).as_deref(), Ok(expected));
        };
        check(
            r#"{ "b" : "{{input.big}}", "a":1E5,"a": "{{input.long}}" }"#,
            r#"{ "b" : 18446744073709551616, "a":1E5,"a": 0.1234567890123456789 }"#,
        );
        check(r#"["\ud83d", "{{input.cut}}"]"#, r#"["\ud83d", "a\ud83d\"b"]"#);
        check(r#""\ud83d {{input.cut}}é\u00e9""#, r#""\ud83d a\ud83d\"bé\u00e9""#);
        check(r#""{{input.out}}""#, "[1e999,  2.50]");
        check(r#""= {{input.out}}""#, r#""= [1e999,  2.50]""#);
        check(r#""{{input.a}}!""#, r#""{\"b\": [1, \"x{{input.a}}\"]}!""#);
        check(r#""\u007b\u007Binput.n\u007d}""#, "null");
        check(r#""\\\\u007b{{input.n}}""#, r#""\\\\u007bnull""#);
        check(r#"{"{{input.a}}": 1.50}"#, r#"{"{{input.a}}": 1.50}"#);
    }

    #[test]
    fn places_are_filled_with_values_or_text() {
        let payload = json!({
            "whole": "{{ context.data.a.b }}", "text": "a {{input.a.b.0}} b {{input.a.b.1}}{{input.n}}",
            "step": ["{{steps.fetch.all.output.url}}", "{{steps.fetch.all.output}}"],
            "later": "see {{steps.other.output}}", "{{input.a}}": 1.5,
        });
        let expected = json!({
            "whole": [1, "x{{input.a}}"], "text": "a 1 b x{{input.a}}null",
            "step": ["u", {"url": "u"}],
            "later": "see {{steps.other.output}}", "{{input.a}}": 1.5,
        });
        assert_eq!(filled(&payload), Ok(expected));
    }

    #[test]
    fn the_key_of_a_step_ends_before_the_first_output() {
        let read = |text| Place::read(text).expect("a place");
        let step = |key, path| Place::Step { key, path };
        assert_eq!(read("steps.a.b.output"), step("a.b", ""));
        assert_eq!(read("steps.a.output.output_url"), step("a", "output_url"));
        assert_eq!(read("steps.a.output.x.output"), step("a", "x.output"));
        assert_eq!(read("steps.a.outputs.output.0"), step("a.outputs", "0"));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let error = |text: &str| filled(&json!([text])).expect_err("an error");
        assert_eq!(error("a {{input.a"), TemplateError::Open);
        let wrong = "context.database".to_owned();
        assert_eq!(error("{{context.database}}"), TemplateError::Unknown(wrong));
        assert_eq!(error("{{env.HOME}}"), TemplateError::Unknown("env.HOME".to_owned()));
        assert_eq!(
            error("{{steps.a.result}}"),
            TemplateError::Unknown("steps.a.result".to_owned())
        );
        assert_eq!(error("{{input.a.c}}"), TemplateError::Missing("a.c".to_owned()));
        assert_eq!(error(&"{{input.n}}".repeat(MAX_PLACES + 1)), TemplateError::TooMany);
    }

    #[test]
    fn what_is_filled_in_has_a_bound() {
        let long = quoted_text(&"x".repeat(MAX_FILLED_BYTES - 10));
        let filled = fill(r#"["{{input}}","{{input}}"]"#, &mut |_| Ok(Some(&long)));
        assert_eq!(filled.expect("filled").payload, format!("[{long},null]"));
    }
}
