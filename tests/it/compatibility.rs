//! Within `/v1` changes only add: the API's document is compared with the last released one,
//! `openapi/released.json`. What is deprecated says so. Released migrations never change.

use std::collections::BTreeSet;

use chrono::NaiveDate;
use fencepost_http::deprecation::Deprecated;
use reqwest::Method;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::{
    docs::read,
    harness::{Stage, TestServer, eventually, fresh_database, limited},
};

/// What the side that was compiled against the older document would notice.
fn breaks(old: &Value, new: &Value) -> Vec<String> {
    let mut found = Vec::new();
    for (path, methods) in fields(&old["paths"]) {
        for (method, was) in fields(methods) {
            let now = &new["paths"][path][method];
            let place = format!("{} {path}", method.to_uppercase());
            if now["operationId"] != was["operationId"] {
                found.push(format!("{place}: it is gone, or has another name"));
                continue;
            }
            parameters(&place, was, now, &mut found);
            for status in fields(&was["responses"]).filter(|it| it.0.starts_with('2')) {
                if now["responses"][status.0].is_null() {
                    found.push(format!("{place}: it no longer answers {}", status.0));
                }
            }
        }
    }
    let (sent, answered) = (used(old, "requestBody"), used(old, "responses"));
    for (name, was) in fields(&old["components"]["schemas"]) {
        let now = &new["components"]["schemas"][name];
        if now.is_null() {
            found.push(format!("{name}: the type is gone"));
            continue;
        }
        let uses = (sent.contains(name), answered.contains(name));
        schema(name, was, now, uses, &mut found);
    }
    found
}

fn fields(it: &Value) -> impl Iterator<Item = (&String, &Value)> {
    it.as_object().into_iter().flatten()
}

fn texts(it: &Value) -> BTreeSet<&str> {
    it.as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

fn parameters(place: &str, was: &Value, now: &Value, found: &mut Vec<String>) {
    let all = |it: &Value| it["parameters"].as_array().cloned().unwrap_or_default();
    let (was, now) = (all(was), all(now));
    let same =
        |one: &Value, other: &Value| one["name"] == other["name"] && one["in"] == other["in"];
    for it in &was {
        match now.iter().find(|other| same(it, other)) {
            None => found.push(format!("{place}: the parameter {} is gone", it["name"])),
            Some(other) if kind(&it["schema"]) != kind(&other["schema"]) => {
                found.push(format!("{place}: the parameter {} has another type", it["name"]));
            }
            Some(_) => (),
        }
    }
    for it in now.iter().filter(|it| it["required"] == true) {
        if !was.iter().any(|other| same(it, other) && other["required"] == true) {
            found.push(format!("{place}: the parameter {} is required now", it["name"]));
        }
    }
}

/// The type of a schema, without its bounds and descriptions.
fn kind(it: &Value) -> Value {
    json!([
        it["type"],
        it["$ref"],
        it["format"],
        it["items"]["$ref"],
        it["oneOf"].as_array().map(|all| { all.iter().map(kind).collect::<Vec<_>>() })
    ])
}

fn schema(
    name: &str,
    was: &Value,
    now: &Value,
    (is_sent, is_answered): (bool, bool),
    found: &mut Vec<String>,
) {
    if was["properties"].is_null() && kind(was) != kind(now) {
        found.push(format!("{name}: it has another type"));
    }
    for (field, was) in fields(&was["properties"]) {
        let now = &now["properties"][field];
        if now.is_null() {
            found.push(format!("{name}.{field}: it is gone"));
        } else if kind(was) != kind(now) {
            found.push(format!("{name}.{field}: it has another type"));
        }
    }
    let (must_have, must) = (texts(&was["required"]), texts(&now["required"]));
    for field in must.difference(&must_have).filter(|_| is_sent) {
        found.push(format!("{name}.{field}: requests must send it now"));
    }
    for field in must_have.difference(&must).filter(|_| is_answered) {
        found.push(format!("{name}.{field}: answers may lack it now"));
    }
    for value in texts(&was["enum"]).difference(&texts(&now["enum"])).filter(|_| is_sent) {
        found.push(format!("{name}: requests cannot send {value} any more"));
    }
}

/// The types that are reachable from this part of an operation.
fn used(document: &Value, part: &str) -> BTreeSet<String> {
    let mut reached = BTreeSet::new();
    let methods = fields(&document["paths"]).flat_map(|it| fields(it.1));
    let mut left: Vec<&Value> = methods.map(|it| &it.1[part]).collect();
    while let Some(it) = left.pop() {
        match it {
            Value::Array(all) => left.extend(all),
            Value::Object(all) => {
                left.extend(all.values());
                let place = it["$ref"].as_str().and_then(|it| it.strip_prefix('#'));
                let name = place.and_then(|it| it.strip_prefix("/components/schemas/"));
                let is_new = name.is_none_or(|it| reached.insert(it.to_owned()));
                left.extend(place.filter(|_| is_new).and_then(|it| document.pointer(it)));
            }
            _ => (),
        }
    }
    reached
}

#[test]
fn nothing_of_the_released_api_is_gone_or_means_something_else() {
    let parse = |file: &str| serde_json::from_str(&read(file)).expect("JSON");
    let found = breaks(&parse("openapi/released.json"), &parse("openapi/openapi.json"));
    assert!(found.is_empty(), "clients of the last release would notice: {found:#?}");
}

#[test]
fn each_kind_of_a_breaking_change_is_found() {
    let old: Value = serde_json::from_str(&read("openapi/released.json")).expect("JSON");
    let check = |reported: &str, change: &dyn Fn(&mut Value)| {
        let mut new = old.clone();
        change(&mut new);
        let found = breaks(&old, &new);
        assert!(found.len() == 1 && found[0].contains(reported), "{reported}: {found:?}");
    };
    fn at<'a>(document: &'a mut Value, place: &str) -> &'a mut Value {
        document.pointer_mut(place).unwrap_or_else(|| panic!("no {place}"))
    }
    fn remove(document: &mut Value, place: &str, field: &str) {
        at(document, place).as_object_mut().expect("an object").remove(field).expect("a field");
    }
    const SCHEMAS: &str = "/components/schemas";
    check("GET /v1/queues: it is gone", &|it| remove(it, "/paths/~1v1~1queues", "get"));
    check("has another name", &|document| {
        *at(document, "/paths/~1v1~1queues/get/operationId") = json!("queues_all");
    });
    check("the parameter \"limit\" is gone", &|document| {
        let all =
            at(document, "/paths/~1v1~1queues/get/parameters").as_array_mut().expect("a list");
        all.retain(|it| it["name"] != "limit");
    });
    check("is required now", &|document| {
        let all =
            at(document, "/paths/~1v1~1queues/get/parameters").as_array_mut().expect("a list");
        all.push(json!({"name": "of", "in": "query", "required": true, "schema": {}}));
    });
    check("JobPage.jobs: it is gone", &|document| {
        remove(document, &format!("{SCHEMAS}/JobPage/properties"), "jobs");
        let required = at(document, &format!("{SCHEMAS}/JobPage/required"));
        assert!(texts(required).contains("jobs"));
    });
    check("Job.attempt: it has another type", &|document| {
        *at(document, &format!("{SCHEMAS}/Job/properties/attempt/type")) = json!("string");
    });
    check("EnqueueRequest.queue: requests must send it", &|document| {
        at(document, &format!("{SCHEMAS}/EnqueueRequest/required"))
            .as_array_mut()
            .expect("a list")
            .push(json!("queue"));
    });
    check("Job.state: answers may lack it", &|document| {
        let required = at(document, &format!("{SCHEMAS}/Job/required"));
        required.as_array_mut().expect("a list").retain(|it| it != "state");
    });
    check("requests cannot send replace any more", &|document| {
        let values = at(document, &format!("{SCHEMAS}/OnConflict/enum"));
        values.as_array_mut().expect("a list").retain(|it| it != "replace");
    });
}

const DEPRECATED: &[Deprecated] = &[Deprecated {
    method: "GET",
    path: "/queues",
    since: NaiveDate::from_ymd_opt(2026, 12, 1).expect("a day"),
    sunset: NaiveDate::from_ymd_opt(2027, 12, 1).expect("a day"),
    instead: "GET /v1/lines",
}];

#[test]
fn answers_say_that_an_operation_will_end_and_keys_count_its_calls() {
    limited(async {
        let stage = Stage { deprecated: DEPRECATED, ..Stage::default() };
        let server = TestServer::start_as(fresh_database().await, stage).await;
        let t = server.project("main").await;
        let other = server.project("other").await;
        for path in ["/v1/queues", "/v1/projects/main/queues"] {
            let answer = t.request(Method::GET, path).send().await.expect("an answer");
            let reported = |name: &str| answer.headers().get(name).and_then(|it| it.to_str().ok());
            assert_eq!(reported("deprecation"), Some("@1796083200"), "{path}");
            assert_eq!(reported("sunset"), Some("Wed, 01 Dec 2027 00:00:00 GMT"), "{path}");
            assert!(reported("link").is_some_and(|it| it.contains("/docs/versions>")), "{path}");
        }
        for path in ["/v1/queues/default", "/v1/keys"] {
            let answer = t.request(Method::GET, path).send().await.expect("an answer");
            assert!(answer.headers().get("deprecation").is_none(), "{path}");
        }
        let key = eventually("two deprecated calls to be counted", async || {
            let key = t.get("/v1/keys").await.is(200)["keys"][0].clone();
            (key["deprecated_calls"] == 2).then_some(key)
        })
        .await;
        assert!(key["deprecated_call_at"].is_string(), "{key}");
        let unused = other.get("/v1/keys").await.is(200)["keys"][0].clone();
        assert_eq!(unused["deprecated_calls"], 0);
        assert_eq!(unused["deprecated_call_at"], Value::Null);
        server.stop().await;
    });
}

#[test]
fn released_migrations_are_not_changed() {
    let released = read("migrations/released");
    let lines: Vec<_> = released.lines().filter_map(|it| it.split_once("  ")).collect();
    assert!(lines.len() >= 13, "{released}");
    for (sum, file) in lines {
        let now = Sha256::digest(read(&format!("migrations/{file}")));
        let now: String = now.iter().map(|it| format!("{it:02x}")).collect();
        assert_eq!(now, sum, "{file} was released: add another file");
    }
}
