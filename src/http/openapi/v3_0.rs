//! The same document for generators that read OpenAPI 3.0 only.

use serde_json::{Map, Value, json};

/// Translates OpenAPI 3.1 to 3.0.3: a value that may be null is `nullable`, a reference with a
/// description is an `allOf` of one, a licence has no identifier, keys have no scopes, and there
/// are no webhooks.
#[must_use]
pub fn of(document: &Value) -> Value {
    let mut older = document.clone();
    older["openapi"] = json!("3.0.3");
    if let Some(document) = older.as_object_mut() {
        document.remove("webhooks");
    }
    if let Some(license) = older.pointer_mut("/info/license").and_then(Value::as_object_mut) {
        license.remove("identifier");
    }
    without_scopes(&mut older);
    without_nulls_in_examples(&mut older);
    rewrite(&mut older);
    name_types(&mut older, document);
    older
}

/// In 3.0 only OAuth has scopes: alternatives that differ by them alone are one.
fn without_scopes(document: &mut Value) {
    for operation in super::shared::operations(document) {
        let security = operation.get_mut("security").and_then(Value::as_array_mut);
        let Some(security) = security else { continue };
        for scopes in security.iter_mut().filter_map(Value::as_object_mut).flat_map(Map::values_mut)
        {
            *scopes = json!([]);
        }
        security.dedup();
    }
}

/// Validators of 3.0 accept no null where a field refers to a schema: such examples are left out.
fn without_nulls_in_examples(document: &mut Value) {
    let schemas = document.pointer_mut("/components/schemas").and_then(Value::as_object_mut);
    for schema in schemas.into_iter().flat_map(Map::values_mut).filter_map(Value::as_object_mut) {
        if schema.get("example").is_some_and(has_null) {
            schema.remove("example");
        }
    }
}

fn has_null(value: &Value) -> bool {
    match value {
        Value::Array(list) => list.iter().any(has_null),
        Value::Object(object) => object.values().any(has_null),
        other => other.is_null(),
    }
}

/// A nullable schema must have a type: in 3.0 `nullable` means nothing without.
fn name_types(value: &mut Value, document: &Value) {
    match value {
        Value::Array(list) => list.iter_mut().for_each(|it| name_types(it, document)),
        Value::Object(object) => {
            object
                .iter_mut()
                .filter(|it| it.0 != "example")
                .for_each(|(_, it)| name_types(it, document));
            let is_untyped = object.contains_key("nullable") && !object.contains_key("type");
            let reference = object.get("allOf").and_then(|it| it[0]["$ref"].as_str());
            let named = reference.and_then(|it| document.pointer(it.trim_start_matches('#')));
            if let Some(kind) = named.and_then(|it| it.get("type")).filter(|_| is_untyped).cloned()
            {
                object.insert("type".to_owned(), kind);
            }
        }
        _ => (),
    }
}

fn rewrite(value: &mut Value) {
    match value {
        Value::Array(list) => list.iter_mut().for_each(rewrite),
        Value::Object(object) => {
            // Examples are not schemas, whatever their fields are called.
            object.iter_mut().filter(|it| it.0 != "example").for_each(|(_, it)| rewrite(it));
            without_null(object);
            apart_from_words(object);
        }
        _ => (),
    }
}

fn without_null(schema: &mut Map<String, Value>) {
    if super::only_type(schema) {
        schema.insert("nullable".to_owned(), json!(true));
    }
    let Some(Value::Array(alternatives)) = schema.get_mut("oneOf") else { return };
    let before = alternatives.len();
    alternatives.retain(|it| it.get("type").is_none_or(|it| it != "null"));
    if alternatives.len() == before {
        return;
    }
    if let [only] = alternatives.as_slice()
        && let Some(only) = only.as_object().cloned()
    {
        schema.remove("oneOf");
        schema.extend(only);
    }
    schema.insert("nullable".to_owned(), json!(true));
}

fn apart_from_words(schema: &mut Map<String, Value>) {
    if schema.len() > 1
        && let Some(reference) = schema.remove("$ref")
    {
        schema.insert("allOf".to_owned(), json!([{ "$ref": reference }]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_is_a_word_of_its_own_in_3_0() {
        let older = of(&json!({
            "openapi": "3.1.0", "info": {"license": {"name": "MIT", "identifier": "MIT"}},
            "a": {"type": ["string", "null"], "example": {"$ref": "no schema", "type": ["x", "null"]}},
            "b": {"oneOf": [{"$ref": "#/x", "description": "words"}, {"type": "null"}]},
            "c": {"$ref": "#/x"}, "x": {"type": "object"},
        }));
        let expected = json!({
            "openapi": "3.0.3", "info": {"license": {"name": "MIT"}},
            "a": {"type": "string", "nullable": true,
                  "example": {"$ref": "no schema", "type": ["x", "null"]}},
            "b": {"allOf": [{"$ref": "#/x"}], "description": "words", "nullable": true, "type": "object"},
            "c": {"$ref": "#/x"}, "x": {"type": "object"},
        });
        assert_eq!(older, expected);
    }
}
