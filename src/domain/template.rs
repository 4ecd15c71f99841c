//! Templates: payloads of a workflow's jobs with places that the workflow's input or the results of
//! parents fill. No loops and no code: a place is a path.
//!
//! `{{input.a.0}}` or `{{context.data.a.0}}` names a value in the input, `{{steps.KEY.output.b}}`
//! one in the result of the parent with that key. A string that is one place becomes the value
//! itself; in a longer string the value is written as text. What is filled in is not read again.

use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::limits::{MAX_FILLED_BYTES, MAX_PLACES};

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
        let (root, rest) = text.split_once('.').unwrap_or((text, ""));
        match root {
            "input" => Ok(Self::Input(rest)),
            // As the Orch8 document writes it.
            "context" => match rest.strip_prefix("data") {
                Some("") => Ok(Self::Input("")),
                Some(path) => path.strip_prefix('.').map(Self::Input).ok_or_else(unknown),
                None => Err(unknown()),
            },
            "steps" => {
                // A key may have dots: it ends before the first segment `output`.
                let ends = rest.match_indices(".output");
                let mut parts = ends.map(|(end, it)| (&rest[..end], &rest[end + it.len()..]));
                let (key, path) = parts
                    .find(|(_, path)| path.is_empty() || path.starts_with('.'))
                    .ok_or_else(unknown)?;
                Ok(Self::Step { key, path: path.strip_prefix('.').unwrap_or_default() })
            }
            _ => Err(unknown()),
        }
    }
}

/// The value at a path: names of fields and indexes of arrays, separated by dots. An empty path is
/// the whole.
#[must_use]
pub fn at<'a>(value: &'a Value, path: &str) -> Option<&'a Value> {
    path.split('.').filter(|it| !it.is_empty()).try_fold(value, |value, name| match value {
        Value::Array(items) => items.get(name.parse::<usize>().ok()?),
        other => other.get(name),
    })
}

/// Fills the places of a payload, and returns with how many bytes. `fill` gives the value of a
/// place; none leaves it as it is.
///
/// # Errors
/// The first that `fill` returns. [`TemplateError::Open`], [`TemplateError::Unknown`], and
/// [`TemplateError::TooMany`].
pub fn fill<'v>(
    payload: &mut Value,
    fill: &mut impl FnMut(Place<'_>) -> Result<Option<&'v Value>, TemplateError>,
) -> Result<usize, TemplateError> {
    let mut filling = Filling { fill, places: 0, bytes: 0 };
    filling.value(payload)?;
    Ok(filling.bytes)
}

struct Filling<'a, F> {
    fill: &'a mut F,
    places: usize,
    bytes: usize,
}

impl<'v, F: FnMut(Place<'_>) -> Result<Option<&'v Value>, TemplateError>> Filling<'_, F> {
    fn value(&mut self, value: &mut Value) -> Result<(), TemplateError> {
        match value {
            Value::String(text) => {
                if let Some(filled) = self.text(text)? {
                    *value = filled;
                }
            }
            Value::Array(items) => items.iter_mut().try_for_each(|it| self.value(it))?,
            Value::Object(fields) => fields.values_mut().try_for_each(|it| self.value(it))?,
            Value::Null | Value::Bool(_) | Value::Number(_) => (),
        }
        Ok(())
    }

    fn text(&mut self, text: &str) -> Result<Option<Value>, TemplateError> {
        let (mut written, mut rest, mut is_any) = (String::new(), text, false);
        while let Some((before, after)) = rest.split_once("{{") {
            let (inside, after) = after.split_once("}}").ok_or(TemplateError::Open)?;
            self.places += 1;
            if self.places > MAX_PLACES {
                return Err(TemplateError::TooMany);
            }
            written.push_str(before);
            match (self.fill)(Place::read(inside)?)?.map(|it| self.bounded(it)) {
                Some(value) if before.is_empty() && after.is_empty() && written.is_empty() => {
                    return Ok(Some(value));
                }
                Some(Value::String(filled)) => written.push_str(&filled),
                Some(value) => written.push_str(&value.to_string()),
                None => written.extend(["{{", inside, "}}"]),
            }
            is_any = true;
            rest = after;
        }
        written.push_str(rest);
        Ok(is_any.then_some(Value::String(written)))
    }

    /// Null instead of what exceeds [`MAX_FILLED_BYTES`]. From then on nothing is measured.
    fn bounded(&mut self, value: &Value) -> Value {
        if self.bytes <= MAX_FILLED_BYTES {
            self.bytes += value.to_string().len();
        }
        if self.bytes > MAX_FILLED_BYTES { Value::Null } else { value.clone() }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn filled(mut payload: Value) -> Result<Value, TemplateError> {
        let input = json!({"a": {"b": [1, "x{{input.a}}"]}, "n": null});
        let output = json!({"url": "u"});
        fill(&mut payload, &mut |place| match place {
            Place::Input(path) => {
                let missing = || TemplateError::Missing(path.to_owned());
                at(&input, path).map(Some).ok_or_else(missing)
            }
            Place::Step { key: "fetch.all", path } => Ok(at(&output, path)),
            Place::Step { .. } => Ok(None),
        })?;
        Ok(payload)
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
        assert_eq!(filled(payload), Ok(expected));
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
        let error = |text: &str| filled(json!([text])).expect_err("an error");
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
        let mut payload = json!(["{{input}}", "{{input}}"]);
        let long = json!("x".repeat(MAX_FILLED_BYTES - 10));
        fill(&mut payload, &mut |_| Ok(Some(&long))).expect("filled");
        assert_eq!(payload, json!([long, null]));
    }
}
