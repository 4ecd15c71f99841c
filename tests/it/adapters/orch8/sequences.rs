//! Sequences: blocks that handle failures, and stored ones.

use crate::harness::{
    TestProject, TestServer, eventually, fresh_database, limited, run, run_alone,
};
use serde_json::{Value, json};

use super::{poll, say, step};

const SEQUENCES: &str = "/orch8/sequences";
const INSTANCES: &str = "/orch8/instances";

async fn start(t: &TestProject, blocks: Value) -> String {
    let made = t.post(INSTANCES, json!({"sequence": {"blocks": blocks}})).await.is(201);
    made["id"].as_str().expect("an id").to_owned()
}

/// Works the next task, which must be of this handler: it succeeds with its name, or fails.
async fn work(t: &TestProject, handler: &str, succeeds: bool) -> Value {
    let task = poll(t, json!({})).await;
    assert_eq!(task["handler_name"], handler);
    let (what, said) = match succeeds {
        true => ("complete", json!({"output": {"by": handler}})),
        false => ("fail", json!({"error": format!("{handler} broke")})),
    };
    say(t, &task, what, said).await.is(200);
    task
}

/// Works tasks of these handlers, in this order.
async fn work_all(t: &TestProject, handlers: impl IntoIterator<Item = (&str, bool)>) {
    for (handler, succeeds) in handlers {
        work(t, handler, succeeds).await;
    }
}

async fn ends(t: &TestProject, id: &str) -> Value {
    eventually("the instance to end", async || {
        let seen = t.get(&format!("{INSTANCES}/{id}")).await.is(200);
        (seen["state"] != "running").then_some(seen)
    })
    .await
}

fn states(instance: &Value) -> Vec<(&str, &str)> {
    let steps = instance["steps"].as_array().expect("steps");
    steps
        .iter()
        .map(|it| (it["id"].as_str().expect("an id"), it["state"].as_str().expect("a state")))
        .collect()
}

fn with_fallback(id: &str) -> Value {
    let mut with = step(id, json!({}));
    with["fallback_handler"] = json!(format!("save_{id}"));
    with
}

#[test]
fn a_fallback_takes_the_place_of_its_step() {
    run(async |t| {
        let last = || step("b", json!({"by": "{{steps.a.output.by}}"}));
        let id = start(t, json!([with_fallback("a"), last()])).await;
        work(t, "run_a", false).await;
        work(t, "save_a", true).await;
        let task = work(t, "run_b", true).await;
        assert_eq!(task["params"], json!({"by": "save_a"}));
        assert_eq!(task["context"]["steps"]["a"]["output"], json!({"by": "save_a"}));
        let ended = ends(t, &id).await;
        assert_eq!(ended["state"], "completed");
        assert_eq!(
            states(&ended),
            [("a", "failed"), ("a.fallback", "completed"), ("b", "completed")]
        );

        let id = start(t, json!([with_fallback("a"), last()])).await;
        work(t, "run_a", true).await;
        assert_eq!(work(t, "run_b", true).await["params"], json!({"by": "run_a"}));
        assert_eq!(ends(t, &id).await["state"], "completed");

        let id = start(t, json!([with_fallback("a"), last()])).await;
        work(t, "run_a", false).await;
        work(t, "save_a", false).await;
        let ended = ends(t, &id).await;
        assert_eq!(ended["state"], "failed");
        assert_eq!(states(&ended)[2], ("b", "cancelled"));
    });
}

fn try_catch() -> Value {
    json!({
        "type": "try_catch", "id": "pay",
        "try_block": [step("check", json!({})), step("charge", json!({}))],
        "catch_block": [step("refund", json!({})), step("notify", json!({}))],
        "finally_block": [step("record", json!({}))],
    })
}

#[test]
fn a_failure_that_is_caught_does_not_end_the_sequence() {
    run(async |t| {
        let id = start(t, json!([try_catch(), step("ship", json!({}))])).await;
        work(t, "run_check", false).await;
        let task = work(t, "run_refund", true).await;
        assert_eq!(task["context"]["steps"]["check"]["error"], "run_check broke");
        for handler in ["run_notify", "run_record", "run_ship"] {
            work(t, handler, true).await;
        }
        let ended = ends(t, &id).await;
        assert_eq!(ended["state"], "completed");
        assert_eq!(states(&ended)[1], ("charge", "cancelled"));
    });
}

#[test]
fn a_failure_that_a_fallback_did_not_mend_is_caught() {
    run(async |t| {
        let block = json!({
            "type": "try_catch", "id": "pay", "try_block": [with_fallback("charge")],
            "catch_block": [step("refund", json!({}))],
        });
        let id = start(t, json!([block, step("ship", json!({}))])).await;
        let handlers = [("run_charge", false), ("save_charge", false), ("run_refund", true)];
        work_all(t, handlers).await;
        work(t, "run_ship", true).await;
        assert_eq!(ends(t, &id).await["state"], "completed");
    });
}

#[test]
fn a_failure_within_a_catch_block_is_caught_outside() {
    run(async |t| {
        let inner = json!({
            "type": "try_catch", "id": "inner", "try_block": [step("a", json!({}))],
            "catch_block": [step("b", json!({}))],
        });
        let outer = json!({
            "type": "try_catch", "id": "outer", "try_block": [inner],
            "catch_block": [step("c", json!({}))],
        });
        let id = start(t, json!([outer, step("d", json!({}))])).await;
        work_all(t, [("run_a", false), ("run_b", false), ("run_c", true), ("run_d", true)]).await;
        assert_eq!(ends(t, &id).await["state"], "completed");
    });
}

#[test]
fn a_failure_is_not_handled_by_what_catches_another() {
    run(async |t| {
        let last = json!({
            "type": "try_catch", "id": "t2", "try_block": [step("c", json!({})), step("d", json!({}))],
            "catch_block": [step("e", json!({}))],
        });
        let block = json!({
            "type": "try_catch", "id": "t1", "try_block": [step("a", json!({}))],
            "catch_block": [step("b", json!({}))], "finally_block": [last],
        });
        let id = start(t, json!([block])).await;
        work_all(t, [("run_a", false), ("run_b", false), ("run_c", false), ("run_e", true)]).await;
        assert_eq!(ends(t, &id).await["state"], "failed");
    });
}

#[test]
fn without_a_failure_nothing_is_caught() {
    run(async |t| {
        let id = start(t, json!([step("pick", json!({})), try_catch(), step("ship", json!({}))]));
        let id = id.await;
        for handler in ["run_pick", "run_check", "run_charge", "run_record", "run_ship"] {
            work(t, handler, true).await;
        }
        let ended = ends(t, &id).await;
        assert_eq!(ended["state"], "completed");
        assert_eq!(states(&ended)[3..5], [("refund", "cancelled"), ("notify", "cancelled")]);
    });
}

#[test]
fn a_failure_that_is_not_caught_ends_the_sequence_after_its_last_block() {
    run(async |t| {
        let id = start(t, json!([try_catch(), step("ship", json!({}))])).await;
        work(t, "run_check", true).await;
        work(t, "run_charge", false).await;
        work(t, "run_refund", false).await;
        work(t, "run_record", true).await;
        let ended = ends(t, &id).await;
        assert_eq!(ended["state"], "failed");
        assert_eq!(states(&ended).last(), Some(&("ship", "cancelled")));
    });
}

#[test]
fn blocks_of_blocks_name_what_is_wrong_with_them() {
    run(async |t| {
        let refused = async |block: Value, field: &str| {
            let wanted = json!({"sequence": {"blocks": [block]}});
            let reported = t.post(INSTANCES, wanted).await.is(400);
            let reported = reported["error"].as_str().expect("a message");
            assert!(reported.contains(&format!("sequence.blocks[0].{field}")), "{reported}");
        };
        let with = |field: &str, value: Value| {
            let mut block = try_catch();
            block[field] = value;
            block
        };
        refused(with("catch_block", json!([])), "catch_block").await;
        refused(with("try_block", json!([try_catch()])), "try_block").await;
        let nested = json!({
            "type": "try_catch", "id": "outer", "try_block": [step("t", json!({}))],
            "catch_block": [step("c", json!({})), try_catch()],
        });
        refused(with("try_block", json!([nested])), "try_block").await;
        refused(with("handler", json!("a")), "handler").await;
        refused(json!({"type": "step", "id": "a"}), "handler").await;
        let named = json!([step("c", json!({})), {"type": "step", "id": "d", "handler": ""}]);
        refused(with("finally_block", named), "finally_block[1].handler").await;
        let twice = json!([step("check", json!({}))]);
        refused(with("catch_block", twice), "catch_block[0].id").await;
        let mut many: Vec<_> = (0..60).map(|it| with_fallback(&format!("s{it}"))).collect();
        many.insert(0, step("first", json!({})));
        let many = json!({"sequence": {"blocks": many}});
        let reported = t.post(INSTANCES, many).await.is(400)["error"].to_string();
        assert!(reported.contains("at most 101 steps and fallbacks"), "{reported}");
    });
}

/// As the libraries of Orch8 send it.
fn sequence(name: &str, version: i32) -> Value {
    json!({
        "tenant_id": "acme", "namespace": "billing", "name": name, "version": version,
        "deprecated": false, "status": "production", "created_at": "2026-05-05T12:00:00Z",
        "blocks": [step("greet", json!({"to": "{{context.data.name}}"}))],
    })
}

#[test]
fn an_instance_is_started_from_a_stored_sequence() {
    run(async |t| {
        let mut sent = sequence("hello", 1);
        sent["id"] = json!("018f85d4-9c2b-7f5f-a2a5-f4143fa7d001");
        let stored = t.post(SEQUENCES, sent.clone()).await.is(201);
        assert_eq!((&stored["id"], &stored["blocks"]), (&sent["id"], &sent["blocks"]));
        let wanted = |key: &str| {
            json!({
                "sequence_id": sent["id"], "tenant_id": "acme", "namespace": "billing",
                "context": {"data": {"name": "Ada"}, "config": {}}, "idempotency_key": key,
            })
        };
        let made = t.post(INSTANCES, wanted("k-1")).await.is(201);
        assert_eq!((&made["sequence_id"], &made["state"]), (&sent["id"], &json!("running")));
        assert_eq!((&made["tenant_id"], &made["namespace"]), (&json!("acme"), &json!("billing")));
        assert_eq!(made["context"], json!({"data": {"name": "Ada"}}));
        assert!(made["created_at"].is_string() && made["updated_at"].is_string());
        let again = t.post(INSTANCES, wanted("k-1")).await.is(200);
        assert_eq!((&again["id"], &again["deduplicated"]), (&made["id"], &json!(true)));
        assert_eq!(again["context"], made["context"]);
        let other = t.post(INSTANCES, wanted("k-2")).await.is(201);
        assert_ne!(other["id"], made["id"]);
        let task = work(t, "run_greet", true).await;
        assert_eq!(task["params"], json!({"to": "Ada"}));
        assert_eq!(ends(t, made["id"].as_str().expect("an id")).await["name"], "hello");

        let nameless = json!({"sequence_id": sent["id"], "context": {"data": {}}});
        let refused = t.post(INSTANCES, nameless).await.is(400)["error"].to_string();
        assert!(refused.contains("sequence.blocks[0].params"), "{refused}");
        let unknown = json!({"sequence_id": "018f85d4-9c2b-7f5f-a2a5-f4143fa7d009"});
        t.post(INSTANCES, unknown).await.is(404);
        t.post(INSTANCES, json!({})).await.is(400);
    });
}

#[test]
fn a_key_belongs_to_its_sequence_as_long_as_its_instance_is_there() {
    run_alone(async |t| {
        let of = |name: &str| t.post(SEQUENCES, sequence(name, 1));
        let (one, other) = (of("one").await.is(201), of("other").await.is(201));
        let wanted = |sequence: &Value| {
            json!({
                "sequence_id": sequence["id"], "context": {"data": {"name": "Ada"}},
                "idempotency_key": "k",
            })
        };
        let made = t.post(INSTANCES, wanted(&one)).await.is(201);
        t.post(INSTANCES, wanted(&other)).await.is(409);
        let sent = json!({"sequence": {"blocks": [step("a", json!({}))]}, "idempotency_key": "k"});
        let refused = t.post(INSTANCES, sent).await.is(400)["error"].to_string();
        assert!(refused.contains("idempotency_key"), "{refused}");
        // As nodes of the last release prune: they do not know the table of keys.
        t.database.execute("delete from workflow_jobs").await;
        t.database.execute("delete from workflows").await;
        let again = t.post(INSTANCES, wanted(&other)).await.is(201);
        assert_ne!(again["id"], made["id"]);
        let same = t.post(INSTANCES, wanted(&other)).await.is(200);
        assert_eq!(same["id"], again["id"]);
    });
}

#[test]
fn of_many_who_use_a_key_at_once_one_starts_an_instance() {
    run(async |t| {
        let stored = t.post(SEQUENCES, sequence("hello", 1)).await.is(201);
        let wanted = json!({
            "sequence_id": stored["id"], "context": {"data": {"name": "Ada"}},
            "idempotency_key": "once",
        });
        for key in 0..8 {
            let mut wanted = wanted.clone();
            wanted["idempotency_key"] = json!(format!("once {key}"));
            let all = (0..8).map(|_| t.post(INSTANCES, wanted.clone()));
            let made = futures_util::future::join_all(all).await;
            let ids: std::collections::BTreeSet<_> =
                made.iter().map(|it| it.json()["id"].to_string()).collect();
            assert_eq!(ids.len(), 1, "{made:?}");
            assert_eq!(made.iter().filter(|it| it.status == 201).count(), 1);
        }
    });
}

#[test]
fn sequences_are_kept_by_name_and_version() {
    run(async |t| {
        let first = t.post(SEQUENCES, sequence("hello", 1)).await.is(201);
        let second = t.post(SEQUENCES, sequence("hello", 2)).await.is(201);
        t.post(SEQUENCES, sequence("bye", 1)).await.is(201);
        let twice = t.post(SEQUENCES, sequence("hello", 2)).await.is(400)["error"].to_string();
        assert!(twice.contains("version"), "{twice}");
        let mut same = sequence("hello", 1);
        same["id"] = first["id"].clone();
        t.post(SEQUENCES, same.clone()).await.is(201);
        same["blocks"] = json!([step("other", json!({}))]);
        let other = t.post(SEQUENCES, same).await.is(400)["error"].to_string();
        assert!(other.contains("id"), "{other}");
        let name = "tenant_id=acme&namespace=billing&name=hello";
        let newest = t.get(&format!("{SEQUENCES}/by-name?{name}")).await.is(200);
        assert_eq!(newest["id"], second["id"]);
        let asked = t.get(&format!("{SEQUENCES}/by-name?{name}&version=1")).await.is(200);
        assert_eq!(asked, first);
        let listed = t.get(&format!("{SEQUENCES}?{name}")).await.is(200);
        assert_eq!(listed, json!([second, first]));
        assert_eq!(t.get(&format!("{SEQUENCES}/versions?{name}")).await.is(200), listed);
        let nameless = t.get(&format!("{SEQUENCES}/versions")).await.is(400)["error"].to_string();
        assert!(nameless.contains("name"), "{nameless}");
        let count = async |query: &str| {
            let listed = t.get(&format!("{SEQUENCES}{query}")).await.is(200);
            listed.as_array().map(Vec::len)
        };
        assert_eq!((count("").await, count("?namespace=x").await), (Some(3), Some(0)));
        assert_eq!(count("?namespace=billing").await, Some(3));
        assert_eq!((count("?limit=2").await, count("?limit=2&offset=2").await), (Some(2), Some(1)));
        for (query, field) in [("limit=51", "limit"), ("offset=501", "offset")] {
            let refused = t.get(&format!("{SEQUENCES}?{query}")).await.is(400)["error"].to_string();
            assert!(refused.contains(field), "{refused}");
        }
        for path in ["by-name?name=%00", "versions?name=a&namespace=%00"] {
            let refused = t.get(&format!("{SEQUENCES}/{path}")).await.is(400)["error"].to_string();
            assert!(refused.contains("control characters"), "{refused}");
        }
        let at = format!("{SEQUENCES}/{}", first["id"].as_str().expect("an id"));
        assert_eq!(t.get(&at).await.is(200), first);
        t.delete(&at).await.is_empty(204);
        t.get(&at).await.is(404);
        for (odd, field) in [
            (json!({"blocks": []}), "name"),
            (json!({"name": "a", "blocks": []}), "blocks"),
            (json!({"name": "a", "blocks": [step("a", json!({}))], "id": "x"}), "id"),
            (json!({"name": "a", "blocks": [step("a", json!({}))], "version": 0}), "version"),
            (json!({"name": "a", "blocks": [step("a", json!({}))], "sla": {}}), "sla"),
        ] {
            let refused = t.post(SEQUENCES, odd).await.is(400)["error"].to_string();
            assert!(refused.contains(field), "{field}: {refused}");
        }
    });
}

#[test]
fn another_project_sees_no_sequence() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let (ours, theirs) = (server.project("ours").await, server.project("theirs").await);
        let stored = ours.post(SEQUENCES, sequence("hello", 1)).await.is(201);
        let at = format!("{SEQUENCES}/{}", stored["id"].as_str().expect("an id"));
        let wanted = json!({"sequence_id": stored["id"], "context": {"data": {"name": "x"}}});
        theirs.get(&at).await.is(404);
        theirs.delete(&at).await.is(404);
        theirs.post(INSTANCES, wanted).await.is(404);
        assert_eq!(theirs.get(SEQUENCES).await.is(200), json!([]));
        ours.get(&at).await.is(200);
        server.stop().await;
    });
}
