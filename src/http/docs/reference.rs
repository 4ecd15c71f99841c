//! The reference of the API, one page a tag, written from the OpenAPI document.

use serde_json::{Map, Value};

use crate::openapi;

/// Objects in fields of a request are listed down to this depth.
const MAX_DEPTH: usize = 2;

/// Names below `reference/` and Markdown of all pages.
pub fn pages() -> Vec<(String, String)> {
    let document = serde_json::to_value(openapi::document()).unwrap_or_default();
    let document = Document(&document);
    document.list("/tags").map(|tag| document.page(tag)).collect()
}

/// The whole document, to look up references in.
#[derive(Clone, Copy)]
struct Document<'a>(&'a Value);

/// An operation and where it is.
struct Operation<'a> {
    method: &'a str,
    path: &'a str,
    it: &'a Value,
}

impl<'a> Document<'a> {
    fn list(self, pointer: &str) -> impl Iterator<Item = &'a Value> {
        self.0.pointer(pointer).and_then(Value::as_array).into_iter().flatten()
    }

    /// The schema that a reference names; anything else is itself.
    fn resolve<'b>(self, value: &'b Value) -> &'b Value
    where
        'a: 'b,
    {
        let pointer = value["$ref"].as_str().and_then(|it| it.strip_prefix('#'));
        pointer.and_then(|it| self.0.pointer(it)).unwrap_or(value)
    }

    fn page(self, tag: &Value) -> (String, String) {
        let name = text(&tag["name"]);
        let mut page = format!("# API: {name}\n\n{}\n", text(&tag["description"]));
        let paths = self.0["paths"].as_object().into_iter().flatten();
        let operations = paths.flat_map(|(path, methods)| {
            let methods = methods.as_object().into_iter().flatten();
            methods.map(move |(method, it)| Operation { method, path, it })
        });
        for operation in operations.filter(|it| it.it["tags"][0] == name) {
            self.operation(&operation, &mut page);
        }
        (format!("reference/{name}"), page)
    }

    fn operation(self, operation: &Operation<'_>, page: &mut String) {
        let Operation { method, path, it } = operation;
        let title = text(&it["summary"]).trim_end_matches('.');
        let (method, rights) = (method.to_uppercase(), rights(&it["security"]));
        *page += &format!("\n## {title}\n\n`{method} {path}` · {rights}\n");
        if let Some(description) = it["description"].as_str() {
            *page += &format!("\n{description}\n");
        }
        let mut rows = String::new();
        for parameter in it["parameters"].as_array().into_iter().flatten() {
            let parameter = self.resolve(parameter);
            let (name, place) = (text(&parameter["name"]), text(&parameter["in"]));
            let kind = self.kind(&parameter["schema"]);
            let needed = if parameter["required"] == true { ", required" } else { "" };
            let about = cell(text(&parameter["description"]));
            rows += &format!("| `{name}` | {place}{needed} | {kind} | {about} |\n");
        }
        if !rows.is_empty() {
            *page += &format!("\n| parameter | in | type | |\n|---|---|---|---|\n{rows}");
        }
        let media = &it["requestBody"]["content"]["application/json"];
        let mut rows = String::new();
        self.fields(&media["schema"], "", 0, &mut rows);
        if !rows.is_empty() {
            *page += &format!("\n| field | type | |\n|---|---|---|\n{rows}");
        }
        let body = self.example(media);
        *page += &curl(operation, body.as_ref());
        for (status, answer) in it["responses"].as_object().into_iter().flatten() {
            let answer = self.resolve(answer);
            if status.starts_with('2') {
                *page += &format!("\n**{status}** {}\n", text(&answer["description"]));
                let example = self.example(&answer["content"]["application/json"]);
                if let Some(example) = example {
                    let example = serde_json::to_string_pretty(&example).unwrap_or_default();
                    *page += &format!("\n```json\n{example}\n```\n");
                }
            }
        }
        *page += &self.errors(it);
    }

    /// Each status with its codes.
    fn errors(self, it: &Value) -> String {
        let mut rows = String::new();
        for (status, codes) in it["x-error-codes"].as_object().into_iter().flatten() {
            let codes = codes.as_array().into_iter().flatten().map(text);
            let codes: Vec<_> = codes.map(|it| format!("[`{it}`](/docs/errors#{it})")).collect();
            let why = cell(text(&self.resolve(&it["responses"][status])["description"]));
            rows += &format!("| {status} | {} | {why} |\n", codes.join(", "));
        }
        if rows.is_empty() {
            return rows;
        }
        format!("\n| error | codes | |\n|---|---|---|\n{rows}")
    }

    /// The rows of an object's fields, and of the objects in it.
    fn fields(self, schema: &Value, prefix: &str, depth: usize, rows: &mut String) {
        let schema = self.resolve(schema);
        let required = schema["required"].as_array();
        for (name, field) in schema["properties"].as_object().into_iter().flatten() {
            let needed = required.is_some_and(|it| it.iter().any(|it| it == name));
            let needed = if needed && depth == 0 { ", required" } else { "" };
            let (kind, about) = (self.kind(field), cell(text(&field["description"])));
            *rows += &format!("| `{prefix}{name}` | {kind}{needed} | {about} |\n");
            // Callbacks have callbacks.
            if depth + 1 < MAX_DEPTH && !name.starts_with("on_") {
                self.fields(field, &format!("{prefix}{name}."), depth + 1, rows);
            }
        }
        for alternative in schema["oneOf"].as_array().into_iter().flatten() {
            self.fields(alternative, prefix, depth, rows);
        }
    }

    /// The type of a field, with its bounds.
    fn kind(self, schema: &Value) -> String {
        if let Some(values) = self.resolve(schema)["enum"].as_array() {
            let values: Vec<_> = values.iter().map(|it| format!("`{}`", text(it))).collect();
            return values.join(", ");
        }
        if let Some(name) = schema["$ref"].as_str().and_then(|it| it.rsplit('/').next()) {
            return format!("object ({name})");
        }
        if let Some(alternatives) = schema["oneOf"].as_array() {
            let kinds: Vec<_> = alternatives.iter().map(|it| self.kind(it)).collect();
            return kinds.join(" or ");
        }
        let kind = match &schema["type"] {
            Value::String(kind) => kind.clone(),
            Value::Array(kinds) => kinds.iter().map(text).collect::<Vec<_>>().join(" or "),
            _ => "any JSON".to_owned(),
        };
        let kind = match schema.get("items") {
            Some(items) => format!("{kind} of {}", self.kind(items)),
            None => kind,
        };
        kind + &bounds(schema)
    }

    /// The example of a body: its own, or that of its schema.
    fn example(self, media: &Value) -> Option<Value> {
        let own = media.get("example").or_else(|| {
            media["examples"].as_object().and_then(|it| it.values().next()?.get("value"))
        });
        own.or_else(|| self.resolve(&media["schema"]).get("example")).cloned()
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Text in a cell of a table.
fn cell(text: &str) -> String {
    text.replace('\n', " ").replace('|', "\\|")
}

fn bounds(schema: &Value) -> String {
    let number = |name: &str| schema.get(name).filter(|it| it.is_number()).map(Value::to_string);
    let size = |least: Option<String>, most: Option<String>, unit: &str| match (least, most) {
        (Some(least), Some(most)) => format!(", {least} to {most}{unit}"),
        (None, Some(most)) => format!(", at most {most}{unit}"),
        (Some(least), None) => format!(", at least {least}{unit}"),
        (None, None) => String::new(),
    };
    size(number("minimum"), number("maximum"), "")
        + &size(number("minLength"), number("maxLength"), " characters")
        + &size(number("minItems"), number("maxItems"), " items")
}

/// The credentials that may call it.
fn rights(security: &Value) -> String {
    let schemes = security.as_array().into_iter().flatten().filter_map(Value::as_object);
    let rights = schemes.flat_map(Map::iter).map(|(scheme, scopes)| {
        let scopes = scopes.as_array().into_iter().flatten();
        let scopes: Vec<_> = scopes.map(|it| format!("`{}`", text(it))).collect();
        match (&**scheme, scopes.is_empty()) {
            ("api_key", true) => "any key".to_owned(),
            ("api_key", false) => format!("a key with {}", scopes.join(" and ")),
            _ => "a session".to_owned(),
        }
    });
    let rights: Vec<_> = rights.collect();
    if rights.is_empty() { "needs no key".to_owned() } else { rights.join(", or ") }
}

fn curl(operation: &Operation<'_>, body: Option<&Value>) -> String {
    let Operation { method, path, it } = operation;
    let mut path = (*path).to_owned();
    for parameter in it["parameters"].as_array().into_iter().flatten() {
        if let (Some(name), Some(example)) =
            (parameter["name"].as_str(), parameter["example"].as_str())
        {
            path = path.replace(&format!("{{{name}}}"), example);
        }
    }
    let mut command = match &**method {
        "get" => format!("curl \"$FENCEPOST_URL{path}\""),
        method => format!("curl -X {} \"$FENCEPOST_URL{path}\"", method.to_uppercase()),
    };
    if it["security"].as_array().is_some_and(|it| !it.is_empty()) {
        command += " \\\n  -H \"Authorization: Bearer $FENCEPOST_KEY\"";
    }
    if let Some(body) = body {
        let body = body.to_string().replace('\'', "'\\''");
        command += &format!(" \\\n  -H 'Content-Type: application/json' \\\n  -d '{body}'");
    }
    format!("\n```sh\n{command}\n```\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_operation_has_its_rights_its_fields_and_its_errors() {
        let pages = pages();
        let workers = &pages.iter().find(|it| it.0 == "reference/workers").expect("a page").1;
        for wanted in [
            "## Send a heartbeat\n\n`POST /v1/workers/heartbeat` · a key with `work`\n",
            "| `capacity` | integer, 1 to 50 | Maximum number of jobs to return. Default: 1. |",
            "| `status` | `succeeded`, `failed`, `released`, `rate_limited`, required |",
            "[`stale_lease`](/docs/errors#stale_lease)",
            "curl -X POST \"$FENCEPOST_URL/v1/workers/poll\"",
            "\"lease_id\": ",
        ] {
            assert!(workers.contains(wanted), "{wanted}: {workers}");
        }
        let operations: usize = pages.iter().map(|it| it.1.matches("\n## ").count()).sum();
        let document = serde_json::to_value(openapi::document()).expect("JSON");
        let paths = document["paths"].as_object().expect("paths").values();
        let all: usize = paths.filter_map(Value::as_object).map(Map::len).sum();
        assert_eq!(operations, all);
    }
}
