//! The same document as a Postman collection: <https://schema.postman.com/collection/json/v2.1.0/draft-07/docs/index.html>.

use serde_json::{Map, Value, json};

/// A folder for each tag, a request for each operation, with an example body. `base_url` and
/// `api_key` are variables of the collection.
#[must_use]
pub fn of(document: &Value) -> Value {
    let tags = document["tags"].as_array().into_iter().flatten();
    let folders: Vec<Value> = tags
        .map(|tag| {
            let requests: Vec<Value> = operations(document)
                .filter(|it| it.2["tags"][0] == tag["name"])
                .map(|(path, method, operation)| request(document, path, method, operation))
                .collect();
            json!({"name": tag["name"], "description": tag["description"], "item": requests})
        })
        .collect();
    json!({
        "info": {
            "name": document["info"]["title"],
            "description": document["info"]["description"],
            "version": document["info"]["version"],
            "schema": "https://schema.getpostman.com/json/collection/v2.1.0/collection.json",
        },
        "auth": {
            "type": "bearer",
            "bearer": [{"key": "token", "value": "{{api_key}}", "type": "string"}],
        },
        "variable": [
            {"key": "base_url", "value": "http://127.0.0.1:7070"},
            {"key": "api_key", "value": ""},
        ],
        "item": folders,
    })
}

fn operations(document: &Value) -> impl Iterator<Item = (&str, &str, &Value)> {
    let paths = document["paths"].as_object().into_iter().flatten();
    paths.flat_map(|(path, methods)| {
        let methods = methods.as_object().into_iter().flatten();
        methods.map(move |(method, operation)| (path.as_str(), method.as_str(), operation))
    })
}

fn request(document: &Value, path: &str, method: &str, operation: &Value) -> Value {
    let parameters: Vec<&Value> =
        operation["parameters"].as_array().into_iter().flatten().collect();
    let of = |place: &str, is_optional: bool| -> Vec<Value> {
        let those = parameters.iter().filter(|it| it["in"] == place);
        those.map(|it| parameter(it, is_optional)).collect()
    };
    // Postman writes `:job_id` for what a document calls `{job_id}`.
    let path: Vec<String> = path
        .trim_start_matches('/')
        .split('/')
        .map(|it| match it.strip_prefix('{').and_then(|it| it.strip_suffix('}')) {
            Some(name) => format!(":{name}"),
            None => it.to_owned(),
        })
        .collect();
    let mut request = Map::new();
    request.insert("method".to_owned(), json!(method.to_uppercase()));
    request.insert("description".to_owned(), operation["description"].clone());
    request.insert("header".to_owned(), json!(of("header", true)));
    request.insert(
        "url".to_owned(),
        json!({
            "raw": format!("{{{{base_url}}}}/{}", path.join("/")),
            "host": ["{{base_url}}"],
            "path": path,
            "query": of("query", true),
            "variable": of("path", false),
        }),
    );
    if let Some(body) = body(document, operation) {
        let options = json!({"raw": {"language": "json"}});
        let raw = format!("{body:#}");
        request.insert("body".to_owned(), json!({"mode": "raw", "raw": raw, "options": options}));
    }
    json!({"name": operation["summary"], "request": request})
}

/// Optional parameters are disabled.
fn parameter(parameter: &Value, is_optional: bool) -> Value {
    let example = parameter["example"].as_str().unwrap_or_default();
    let mut made = json!({
        "key": parameter["name"], "value": example, "description": parameter["description"],
    });
    if is_optional {
        made["disabled"] = json!(parameter["required"] != true);
    }
    made
}

/// The example of a request body.
fn body(document: &Value, operation: &Value) -> Option<Value> {
    let schema = operation.pointer("/requestBody/content/application~1json/schema")?;
    let named = schema["$ref"].as_str()?.trim_start_matches('#');
    document.pointer(named)?.get("example").cloned()
}
