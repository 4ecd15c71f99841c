//! Forms, and how they become the API's JSON.

use std::collections::BTreeMap;

use axum::{
    extract::{FromRequest, FromRequestParts, Request},
    http::request::Parts,
};
use fencepost_domain::error::Error;
use serde::Serialize;
use serde_json::value::RawValue;

use fencepost_web::wire::body;

/// Maximum bytes of a form: the largest payload, with every byte escaped, and some overhead.
const MAX_FORM_BYTES: usize = 1024 * 1024;

/// Prefix of a field with the value that another field had when the form was made.
const WAS: &str = "was.";

/// The fields of a form or query, in order.
#[derive(Debug, Clone, Default)]
pub struct Fields(pub Vec<(String, String)>);

impl Fields {
    /// The first field with this name, exactly as it was sent: a password or name may begin with a
    /// space. None: it is missing or empty.
    pub fn get(&self, name: &str) -> Option<&str> {
        Some(self.text(name)).filter(|it| !it.is_empty())
    }

    /// The same without surrounding spaces, for values other than texts.
    fn trimmed(&self, name: &str) -> Option<&str> {
        Some(self.text(name).trim()).filter(|it| !it.is_empty())
    }

    /// The first field with this name, or an empty text.
    pub fn text(&self, name: &str) -> &str {
        self.0.iter().find(|it| it.0 == name).map_or("", |it| &it.1)
    }

    /// The value that a field had when the form was made, if the form has it.
    fn was(&self, name: &str) -> Option<&str> {
        let was = self.0.iter().find(|it| it.0.strip_prefix(WAS) == Some(name));
        was.map(|it| it.1.as_str())
    }

    /// Whether a field still has the value from when the form was made.
    fn is_as_it_was(&self, field: Field) -> bool {
        self.was(field.name()).is_some_and(|was| match field {
            Field::Choices(name) => self.all(name).eq(was.split_whitespace()),
            Field::List(name) => lines(self.text(name)).eq(lines(was)),
            field => was == self.text(field.name()),
        })
    }

    /// Whether a form contains the original values of its fields.
    pub fn says_what_was(&self) -> bool {
        self.0.iter().any(|it| it.0.starts_with(WAS))
    }

    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |it| it.0 == name).map(|it| it.1.as_str())
    }

    /// The fields among these that are not empty, as a query.
    pub fn query(&self, names: &[&str]) -> String {
        let kept = names.iter().filter_map(|name| Some((*name, self.get(name)?)));
        encode(&kept.collect::<Vec<_>>())
    }
}

/// A query.
pub fn encode(pairs: &[(&str, &str)]) -> String {
    form_urlencoded::Serializer::new(String::new()).extend_pairs(pairs).finish()
}

fn parse(text: &[u8]) -> Fields {
    let pairs = form_urlencoded::parse(text);
    Fields(pairs.map(|(name, value)| (name.into_owned(), value.into_owned())).collect())
}

impl<S: Send + Sync> FromRequest<S> for Fields {
    type Rejection = Error;

    async fn from_request(request: Request, _: &S) -> Result<Self, Error> {
        Ok(parse(&body::read(request, MAX_FORM_BYTES, None).await?))
    }
}

/// The fields of the query.
#[derive(Debug, Clone, Default)]
pub struct AskedFields(pub Fields);

impl<S: Send + Sync> FromRequestParts<S> for AskedFields {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Error> {
        Ok(Self(parse(parts.uri.query().unwrap_or_default().as_bytes())))
    }
}

/// How a field of a form becomes one of the API's. Its name is a path: `filter.queue` is `queue` in
/// `filter`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Field {
    /// A text; omitted when empty.
    Text(&'static str),
    /// A number; omitted when empty.
    Number(&'static str),
    /// A number; null when empty, and then its parent is null, too.
    NumberOrNull(&'static str),
    /// True when the box is ticked.
    Flag(&'static str),
    Choices(&'static str),
    /// Words, as a list; omitted when there is none.
    Words(&'static str),
    /// Lines, as a list, even if there is none.
    List(&'static str),
    /// Words of the form `name=value`, as an object; omitted when there is none.
    Pairs(&'static str),
    /// Words; an empty list when there are none.
    AllWords(&'static str),
    /// JSON; null when it is empty.
    Json(&'static str),
    /// An object that is sent even if it is empty.
    Object(&'static str),
    /// The members of an object: fields named `payload.text.NAME`, `payload.number.NAME` or
    /// `payload.json.NAME`, each omitted when empty. Without any, nothing is sent.
    Members(&'static str),
    /// A local time without a zone, as browsers send it: read as UTC. Omitted when empty.
    Time(&'static str),
}

impl Field {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Text(it)
            | Self::Number(it)
            | Self::NumberOrNull(it)
            | Self::Flag(it)
            | Self::Choices(it)
            | Self::Words(it)
            | Self::List(it)
            | Self::Pairs(it)
            | Self::AllWords(it)
            | Self::Json(it)
            | Self::Object(it)
            | Self::Members(it)
            | Self::Time(it) => it,
        }
    }
}

/// A part of a body: JSON as it was typed, so that no number loses digits, or an object of such
/// parts.
#[derive(Serialize)]
#[serde(untagged)]
enum Part {
    Raw(Box<RawValue>),
    Object(BTreeMap<String, Part>),
}

/// The request body of these fields. Unchanged fields are omitted, so that concurrent edits are not
/// overwritten.
///
/// # Errors
/// [`Error::Invalid`] when a number or JSON cannot be parsed: all other checks are the API's.
pub fn body(fields: &[Field], form: &Fields) -> Result<String, Error> {
    let mut root = BTreeMap::new();
    for field in fields {
        let name = field.name();
        let mut parts = fields.iter().filter(|it| whole(it.name()) == whole(name));
        if parts.all(|it| form.is_as_it_was(*it)) {
            continue;
        }
        let value = match field {
            // One that was there, and is empty now, is removed.
            Field::Text(_) => form.get(name).or(form.was(name).map(|_| "")).map(quoted),
            Field::Number(_) => form.trimmed(name).map(|it| number(name, it)).transpose()?,
            Field::NumberOrNull(_) => match form.trimmed(name) {
                Some(text) => Some(number(name, text)?),
                None => {
                    root.entry(whole(name).to_owned())
                        .or_insert_with(|| Part::Raw(RawValue::NULL.to_owned()));
                    None
                }
            },
            Field::Flag(_) => Some(raw(form.get(name).is_some())),
            Field::Choices(_) => Some(raw(form.all(name).collect::<Vec<_>>())),
            Field::Words(_) => Some(words(form.text(name))).filter(|it| !it.is_empty()).map(raw),
            Field::AllWords(_) => Some(raw(words(form.text(name)))),
            Field::List(_) => Some(raw(lines(form.text(name)).collect::<Vec<_>>())),
            Field::Pairs(_) => {
                let words = form.text(name).split_whitespace();
                let pairs = words.map(|word| {
                    let refused = || Error::invalid(name, format!("write name=value, not {word}"));
                    word.split_once('=').ok_or_else(refused)
                });
                let pairs: BTreeMap<_, _> = pairs.collect::<Result<_, _>>()?;
                (!pairs.is_empty()).then(|| raw(pairs))
            }
            Field::Json(_) => Some(json(name, form.trimmed(name).unwrap_or("null"))?),
            Field::Object(_) => {
                root.entry(name.to_owned()).or_insert_with(|| Part::Object(BTreeMap::new()));
                None
            }
            Field::Members(_) => {
                if let Some(members) = members(name, form)? {
                    root.insert(name.to_owned(), Part::Object(members));
                }
                None
            }
            Field::Time(_) => form.trimmed(name).map(|it| quoted(&utc(it))),
        };
        if let Some(value) = value {
            insert(&mut root, name, value);
        }
    }
    serde_json::to_string(&root).map_err(Error::internal)
}

fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines().map(str::trim).filter(|it| !it.is_empty())
}

fn words(text: &str) -> Vec<&str> {
    let words = text.split(|it: char| it.is_whitespace() || it == ',');
    words.filter(|it| !it.is_empty()).collect()
}

/// The members of an object that a form has fields for.
fn members(object: &str, form: &Fields) -> Result<Option<BTreeMap<String, Part>>, Error> {
    let named = |field: &str| {
        let (kind, name) = field.strip_prefix(object)?.strip_prefix('.')?.split_once('.')?;
        Some((kind.to_owned(), name.to_owned()))
    };
    let (mut members, mut has_any) = (BTreeMap::new(), false);
    for (field, value) in &form.0 {
        let Some((kind, name)) = named(field) else { continue };
        has_any = true;
        let value = match (&*kind, value.trim()) {
            (_, "") => continue,
            ("number", text) => number(&format!("{object}.{name}"), text)?,
            ("json", text) => json(&format!("{object}.{name}"), text)?,
            _ => quoted(value),
        };
        members.insert(name, Part::Raw(value));
    }
    Ok(has_any.then_some(members))
}

/// The parent of a field, or the field.
fn whole(name: &str) -> &str {
    name.split('.').next().unwrap_or(name)
}

fn raw(value: impl Serialize) -> Box<RawValue> {
    serde_json::value::to_raw_value(&value).unwrap_or_else(|_| RawValue::NULL.to_owned())
}

fn quoted(text: &str) -> Box<RawValue> {
    raw(text)
}

/// A browser's time as RFC 3339; anything else is left for the API to refuse.
pub fn utc(text: &str) -> String {
    let is_local = text.len() >= "2026-01-31T12:00".len() && !text.ends_with(['Z', 'z']);
    match text.rsplit_once('T') {
        Some((_, time)) if is_local && !time.contains(['+', '-']) => {
            let seconds = if time.matches(':').count() == 1 { ":00" } else { "" };
            format!("{text}{seconds}Z")
        }
        _ => text.to_owned(),
    }
}

fn number(name: &str, text: &str) -> Result<Box<RawValue>, Error> {
    let is_number = serde_json::from_str::<serde_json::Number>(text).is_ok();
    let raw = is_number.then(|| RawValue::from_string(text.to_owned()).ok()).flatten();
    raw.ok_or_else(|| Error::invalid(name, "must be a number"))
}

fn json(name: &str, text: &str) -> Result<Box<RawValue>, Error> {
    RawValue::from_string(text.to_owned())
        .map_err(|error| Error::invalid(name, format!("must be JSON: {error}")))
}

fn insert(object: &mut BTreeMap<String, Part>, path: &str, value: Box<RawValue>) {
    let Some((first, rest)) = path.split_once('.') else {
        object.insert(path.to_owned(), Part::Raw(value));
        return;
    };
    let inner = object.entry(first.to_owned()).or_insert_with(|| Part::Object(BTreeMap::new()));
    if let Part::Raw(_) = inner {
        *inner = Part::Object(BTreeMap::new());
    }
    if let Part::Object(inner) = inner {
        insert(inner, rest, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(fields: &[Field], form: &str, expected: &str) {
        assert_eq!(body(fields, &parse(form.as_bytes())).expect("a body"), expected, "{form}");
    }

    #[test]
    fn fields_become_json_and_what_is_empty_is_left_out_or_null() {
        let text = [Field::Text("filter.queue"), Field::Text("filter.tag"), Field::Flag("dry_run")];
        check(
            &text,
            "filter.queue=a+b&filter.tag=",
            r#"{"dry_run":false,"filter":{"queue":"a b"}}"#,
        );
        check(&[Field::Number("max")], "max=+5+", r#"{"max":5}"#);
        check(&[Field::Text("password")], "password=+x+", r#"{"password":" x "}"#);
        check(&[Field::Number("max")], "", "{}");
        check(&[Field::Text("filter.tag"), Field::Object("filter")], "", r#"{"filter":{}}"#);
        let limit = [Field::NumberOrNull("rate.count"), Field::NumberOrNull("rate.per")];
        check(&limit, "rate.count=&rate.per=", r#"{"rate":null}"#);
        check(&limit, "rate.count=5&rate.per=60", r#"{"rate":{"count":5,"per":60}}"#);
        check(&limit, "rate.per=60", r#"{"rate":{"per":60}}"#);
        check(
            &[Field::Choices("scopes")],
            "scopes=read&scopes=work",
            r#"{"scopes":["read","work"]}"#,
        );
        let large = r#"{"payload":[12345678901234567890.10]}"#;
        check(&[Field::Json("payload")], "payload=[12345678901234567890.10]", large);
        check(&[Field::Json("payload")], "payload=", r#"{"payload":null}"#);
        let members = [Field::Json("payload"), Field::Members("payload")];
        check(&members, "payload=[1]", r#"{"payload":[1]}"#);
        check(
            &members,
            "payload.text.a.b=x+&payload.number.n=1.0&payload.json.c=[]&payload.number.d=",
            r#"{"payload":{"a.b":"x ","c":[],"n":1.0}}"#,
        );
        check(&members, "payload.text.a=", r#"{"payload":{}}"#);
        check(&[Field::Time("at")], "at=2026-01-31T12:00", r#"{"at":"2026-01-31T12:00:00Z"}"#);
        check(&[Field::Time("at")], "at=2026-01-31T12:00:00Z", r#"{"at":"2026-01-31T12:00:00Z"}"#);
        check(&[Field::Pairs("tags")], "tags=a%3D1+b%3D2", r#"{"tags":{"a":"1","b":"2"}}"#);
        check(&[Field::Words("ips")], "ips=,+", "{}");
        check(&[Field::List("ips")], "ips=", r#"{"ips":[]}"#);
        check(&[Field::List("ips")], "ips=a%0D%0Ab+c%0A", r#"{"ips":["a","b c"]}"#);
        check(&[Field::Pairs("tags")], "tags=", "{}");
        check(&[Field::AllWords("labels")], "labels=", r#"{"labels":[]}"#);
        check(&[Field::AllWords("labels")], "labels=a+b", r#"{"labels":["a","b"]}"#);
        check(&[Field::Time("at")], "at=soon", r#"{"at":"soon"}"#);
    }

    #[test]
    fn what_was_not_changed_is_left_out() {
        let fields = [
            Field::NumberOrNull("max"),
            Field::NumberOrNull("rate.count"),
            Field::NumberOrNull("rate.per"),
        ];
        let was = "was.max=3&was.rate.count=5&was.rate.per=60";
        check(&fields, &format!("{was}&max=3&rate.count=5&rate.per=60"), "{}");
        check(&fields, &format!("{was}&max=&rate.count=5&rate.per=60"), r#"{"max":null}"#);
        let rate = r#"{"rate":{"count":5,"per":1}}"#;
        check(&fields, &format!("{was}&max=3&rate.count=5&rate.per=1"), rate);
        check(&fields[..1], "was.max=&max=", "{}");
        check(&fields[..1], "max=", r#"{"max":null}"#);
    }

    #[test]
    fn what_is_no_number_and_no_json_is_refused_by_name() {
        let refused = |field, form: &str| body(&[field], &parse(form.as_bytes())).is_err();
        assert!(refused(Field::Pairs("tags"), "tags=customer:3"));
        assert!(refused(Field::Number("max"), "max=many"));
        assert!(refused(Field::Json("payload"), "payload={"));
        assert!(!refused(Field::Text("name"), "name={"));
    }
}
