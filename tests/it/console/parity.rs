//! The console's buttons are compared with the OpenAPI document.

use std::collections::BTreeSet;

use fencepost_console::{
    self as console,
    action_table::{ACTIONS, OTHERS, Plane},
};
use fencepost_domain::limits;
use fencepost_http::openapi;

use serde_json::Value;

/// The path and the method of an operation.
fn find(document: &Value, id: &str) -> Option<(String, String, Value)> {
    let paths = document["paths"].as_object().expect("paths");
    paths.iter().find_map(|(path, methods)| {
        let methods = methods.as_object().expect("methods");
        let found = methods.iter().find(|(_, it)| it["operationId"] == id)?;
        Some((path.clone(), found.0.to_uppercase(), found.1.clone()))
    })
}

fn schema<'a>(document: &'a Value, at: &'a Value) -> &'a Value {
    match at["$ref"].as_str() {
        Some(place) => document.pointer(&place[1..]).expect("a schema"),
        None => {
            match at["oneOf"].as_array().and_then(|it| it.iter().find(|it| it["$ref"].is_string()))
            {
                Some(one) => schema(document, one),
                None => at,
            }
        }
    }
}

#[test]
fn every_button_is_an_operation_of_the_api_and_sends_what_it_takes() {
    let document = serde_json::to_value(openapi::document()).expect("a document");
    for action in ACTIONS {
        let (path, method, operation) = find(&document, action.operation)
            .unwrap_or_else(|| panic!("{}: the API has no such operation", action.operation));
        assert_eq!(method, action.method, "{}", action.operation);
        let below = match action.plane {
            Plane::Project => ["/v1/projects/{project}", "/v1"].as_slice(),
            Plane::People => ["/v1"].as_slice(),
        };
        let own = action.path.split('?').next().expect("a path");
        let is_there = below.iter().any(|it| path == format!("{it}{own}"));
        assert!(is_there, "{}: {path} is not {own}", action.operation);
        let body = &operation["requestBody"]["content"]["application/json"]["schema"];
        for field in action.fields {
            let mut at = schema(&document, body);
            for part in field.name().split('.') {
                at = schema(&document, &at["properties"][part]);
                assert!(!at.is_null(), "{}: no field {}", action.operation, field.name());
            }
        }
    }
    for (operation, ..) in OTHERS {
        assert!(find(&document, operation).is_some(), "{operation}: the API has no such operation");
    }
}

#[test]
fn nothing_else_in_the_console_changes_anything() {
    let source = include_str!("../../../src/console/lib.rs");
    let route = |call: &str| {
        let path = call.split('"').nth(1)?;
        call.contains("post(").then(|| path.to_owned())
    };
    for other in ["put(", "patch(", "delete(", "any(", " on(", "MethodFilter"] {
        assert!(!source.contains(other), "{other}: a page changes something with POST alone");
    }
    let (of_project, of_people) = source.split_once("fn of_people").expect("two tables");
    let mut found = BTreeSet::new();
    for (base, table) in [("/console/p/{project}", of_project), ("/console", of_people)] {
        found.extend(table.split(".route(").filter_map(route).map(|it| format!("{base}{it}")));
    }
    // Buttons, a link to a login provider, which needs a browser, and mailed links, which are kept.
    for path in [
        "/console/p/{project}/do/{operation}",
        "/console/do/{operation}",
        "/console/account/link/{provider}",
        "/console/links/{link}",
    ] {
        assert!(found.remove(path), "{path}");
    }
    found.remove("/console/console/{*anything}");
    let reported: BTreeSet<_> = OTHERS.iter().map(|it| it.1.to_owned()).collect();
    assert_eq!(found, reported);
}

#[test]
fn every_button_of_every_page_is_in_the_table() {
    let known: BTreeSet<_> = ACTIONS.iter().map(|it| it.operation).collect();
    let mut used = BTreeSet::new();
    let templates = concat!(env!("CARGO_MANIFEST_DIR"), "/src/console/templates");
    for file in std::fs::read_dir(templates).expect("templates") {
        let path = file.expect("a file").path();
        let text = std::fs::read_to_string(path).expect("a template");
        let begins = [
            "frame.form(\"",
            "frame.form_to(\"",
            "frame.form_back(\"",
            "ui::action(frame, \"",
            "/do/",
        ];
        for begin in begins {
            for after in text.split(begin).skip(1) {
                let name: String =
                    after.chars().take_while(|it| it.is_ascii_lowercase() || *it == '_').collect();
                used.insert(name);
            }
        }
    }
    for operation in [
        "jobs_bulk_cancel",
        "jobs_bulk_pause",
        "jobs_bulk_resume",
        "jobs_bulk_replay",
        "jobs_bulk_retry",
        "dead_letters_purge",
        "dead_letters_bulk_retry",
    ] {
        used.insert(operation.to_owned()); // Named by the handler that counts first.
    }
    let unknown: Vec<_> = used.iter().filter(|it| !known.contains(it.as_str())).collect();
    let unused: Vec<_> = known.iter().filter(|it| !used.contains(**it)).collect();
    assert!(unknown.is_empty() && unused.is_empty(), "unknown {unknown:?}, unused {unused:?}");
}

#[test]
fn the_page_about_the_console_has_the_numbers_of_the_code() {
    let page = include_str!("../../../docs/console.md").replace('\n', " ");
    let script = include_str!("../../../assets/console.js");
    let queues = console::MAX_QUEUE_PAGES * limits::MAX_PAGE_QUEUES as usize;
    assert_eq!((queues, console::NEW_KEY_SHOWN_SECONDS), (1_000, 120));
    for reported in [
        format!("the newest {} attempts", console::MAX_SHOWN_ATTEMPTS),
        format!("attempts and {} events", console::SHOWN_EVENTS),
        format!("{} KiB of its JSON", console::MAX_SHOWN_BYTES / 1024),
        "a thousand queues".to_owned(),
        "for two minutes at the most".to_owned(),
        "at most every two seconds, and every five seconds anyway".to_owned(),
    ] {
        assert!(page.contains(&reported), "{reported}");
    }
    for reported in ["REFRESH_PAUSE_MS = 2000;", "REFRESH_ANYWAY_MS = 5000;"] {
        assert!(script.contains(reported), "{reported}");
    }
}
