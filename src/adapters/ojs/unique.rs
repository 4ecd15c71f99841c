//! The unique policy of a job, and the key that is made from it.

use fencepost_domain::{limits, raw_json::RawNode};
use fencepost_engine::enqueue::dependencies::OnConflict;
use fencepost_web::wire::validate::Check;
use serde_json::{Value, value::RawValue};
use sha2::{Digest, Sha256};

use super::fields::{Fields, duration};

/// Longer numbers may be rounded when they are read: they count as they were sent.
const MAX_EXACT_DIGITS: usize = 15;
/// Integers below this are exact as floating-point numbers.
const MAX_EXACT_INTEGER: f64 = 1e15;
/// Names in each list of a policy.
const MAX_NAMES: usize = 32;
/// Parts of a job that a key can be made from.
const DIMENSIONS: [&str; 4] = ["type", "queue", "args", "meta"];

/// The unique key of a job.
pub struct Unique {
    pub key: String,
    pub on_conflict: OnConflict,
    /// Milliseconds after which another job may take the key.
    pub period_ms: Option<i64>,
}

/// The unique key of a job: a hash of the fields that its policy names.
pub fn accept_unique(
    options: &mut Fields,
    (job_type, queue, sent): (&str, &str, &Fields),
    check: &mut Check,
) -> Option<Unique> {
    let mut policy: Fields = options.take("unique", check)?;
    let mut inner = Check::below(format!("{}unique.", check.path()));
    let named = accept_named(&mut policy, sent, &mut inner);
    let on_conflict = accept_on_conflict(&mut policy, &mut inner);
    let (field, period_ms) = match policy.take::<String>("period", &mut inner) {
        Some(text) => ("period", duration("period", &text, &mut inner)),
        None => ("period_ms", policy.take("period_ms", &mut inner)),
    };
    let period_ms = period_ms.filter(|it| *it != 0);
    if let Some(ms) = period_ms {
        inner.range(field, ms, 0, i64::MAX);
    }
    // Only live jobs hold a key, whatever states the policy names.
    names(&mut policy, "states", &mut inner);
    for unknown in policy.0.keys() {
        inner.refuse(unknown, "is not a field of a unique policy");
    }
    check.absorb(inner);
    Some(Unique { key: named.key(job_type, queue, sent), on_conflict, period_ms })
}

/// A list of names, bounded: each is looked for in the job.
fn names(policy: &mut Fields, field: &str, check: &mut Check) -> Option<Vec<String>> {
    let names: Vec<String> = policy.take(field, check)?;
    let count = names.len();
    check.names(field, &names, MAX_NAMES, limits::MAX_NAME_CHARS);
    Some(if count > MAX_NAMES { Vec::new() } else { names })
}

fn accept_on_conflict(policy: &mut Fields, check: &mut Check) -> OnConflict {
    match policy.take::<String>("on_conflict", check).as_deref() {
        None | Some("reject") => OnConflict::Reject,
        Some("ignore") => OnConflict::ReturnExisting,
        Some("replace" | "replace_except_schedule") => OnConflict::Replace,
        Some(_) => {
            let message = "must be reject, replace, replace_except_schedule or ignore";
            check.refuse("on_conflict", message);
            OnConflict::Reject
        }
    }
}

/// The parts of a job that a policy names.
#[derive(Default)]
struct Named {
    dimensions: Vec<String>,
    /// Names of the fields of arguments that count. None: all of them.
    args_keys: Option<Vec<String>>,
    /// Names of the fields of `meta` that count. None: all of them.
    meta_keys: Option<Vec<String>>,
}

fn accept_named(policy: &mut Fields, sent: &Fields, check: &mut Check) -> Named {
    let mut named = Named {
        dimensions: names(policy, "keys", check).unwrap_or_default(),
        args_keys: names(policy, "args_keys", check),
        meta_keys: names(policy, "meta_keys", check),
    };
    if let Some(unknown) = named.dimensions.iter().find(|it| !is_dimension(it)) {
        check.refuse("keys", format!("must be of type, queue, args and meta, has {unknown}"));
    }
    // Most libraries send dimensions and names of fields of arguments in this one field.
    let mut field = "args_keys";
    if let Some(key) = names(policy, "key", check) {
        if !named.dimensions.is_empty() {
            check.refuse("key", "is another name of `keys`: send one of them");
        }
        let (dimensions, fields): (Vec<_>, Vec<_>) =
            key.into_iter().partition(|it| is_dimension(it));
        named.dimensions = dimensions;
        if !fields.is_empty() {
            field = "key";
            named.args_keys = Some(fields);
            if !named.dimensions.iter().any(|it| it == "args") {
                named.dimensions.push("args".to_owned());
            }
        }
    }
    let has_meta = named.dimensions.iter().any(|it| it == "meta");
    if has_meta && named.meta_keys.as_ref().is_none_or(Vec::is_empty) {
        // As the specification has it: whole metadata would make nearly every job unique.
        check.refuse("meta_keys", "must name the fields of `meta` that count");
    }
    // A field that no job has would make all jobs of the type the same.
    let args = sent.0.get("args").and_then(|it| serde_json::from_str::<Value>(it.get()).ok());
    let has = |name: &str| {
        let mut args = args.iter().filter_map(Value::as_array).flatten();
        args.any(|it| it.get(name).is_some())
    };
    for name in named.args_keys.iter().flatten().filter(|it| !has(it)) {
        check.refuse(field, format!("{name} is not a field of an object in `args`"));
    }
    named
}

fn is_dimension(name: &str) -> bool {
    DIMENSIONS.contains(&name)
}

impl Named {
    fn key(&self, job_type: &str, queue: &str, sent: &Fields) -> String {
        let mut hash = Sha256::new();
        let mut add = |name: &str, value: &str| {
            for part in [name, value] {
                hash.update((part.len() as u64).to_be_bytes());
                hash.update(part.as_bytes());
            }
        };
        let value = |name: &str| sent.0.get(name).map(|it| &**it);
        add("type", job_type);
        // In one order, however they were named.
        for name in DIMENSIONS.into_iter().filter(|it| self.dimensions.iter().any(|own| own == it))
        {
            match name {
                "queue" => add("queue", queue),
                "args" => add("args", &canonical(value("args"), self.args_keys.as_deref())),
                "meta" => add("meta", &canonical(value("meta"), self.meta_keys.as_deref())),
                _ => (),
            }
        }
        let digest = hash.finalize();
        digest.iter().fold("ojs:".to_owned(), |text, byte| format!("{text}{byte:02x}"))
    }
}

/// A value in canonical form: sorted, without white space; of objects, and of objects in arguments,
/// only the named fields, if any are named.
fn canonical(value: Option<&RawValue>, only: Option<&[String]>) -> String {
    let Some(value) = value else { return String::new() };
    let node = RawNode::read(value.get());
    match node.items() {
        Some(items) => list(items.iter().map(|item| canonical_node(item, only))),
        None => canonical_node(&node, only),
    }
}

fn canonical_node(node: &RawNode<'_>, only: Option<&[String]>) -> String {
    if let Some(items) = node.items() {
        return list(items.iter().map(|item| canonical_node(item, None)));
    }
    let Some(mut fields) = node.fields() else { return canonical_leaf(node.text) };
    fields.retain(|name, _| only.is_none_or(|only| only.iter().any(|named| named == name)));
    let field = |(name, value)| format!("{}:{}", Value::from(name), canonical_node(value, None));
    format!("{{{}}}", fields.into_iter().map(field).collect::<Vec<_>>().join(","))
}

fn list(items: impl Iterator<Item = String>) -> String {
    format!("[{}]", items.collect::<Vec<_>>().join(","))
}

/// A text, a number, a constant, or what is nested too deeply.
fn canonical_leaf(text: &str) -> String {
    let digits = text.chars().filter(char::is_ascii_digit).count();
    let is_number = text.starts_with(|it: char| it == '-' || it.is_ascii_digit());
    if is_number && digits > MAX_EXACT_DIGITS {
        return text.to_owned();
    }
    match serde_json::from_str::<Value>(text) {
        Ok(Value::Number(number)) => match number.as_f64() {
            // As the specification has it, 1.0 is 1.
            Some(whole) if whole.fract() == 0.0 && whole.abs() < MAX_EXACT_INTEGER => {
                format!("{whole:.0}")
            }
            _ => number.to_string(),
        },
        Ok(other) => other.to_string(),
        Err(_) => text.to_owned(),
    }
}
