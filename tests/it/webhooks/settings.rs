//! Changes of endpoints, their secrets, and what is shown of deliveries.

use std::sync::Arc;

use fencepost_engine::webhooks;
use fencepost_net::seal::{MasterKeys, new_master_key};
use fencepost_store::connection::migrate;
use serde_json::{Value, json};
use sqlx::Connection;

use super::{delivery_becomes, endpoint, path};
use crate::harness::{Sink, Stage, TestServer, fresh_database, limited, run, run_alone, until};

#[test]
fn secrets_are_stored_encrypted_and_the_master_key_can_be_replaced() {
    limited(async {
        let (old, new) = (new_master_key(), new_master_key());
        let parse = |text: String| MasterKeys::parse(&text.into()).expect("master keys");
        let sink = Sink::start().await;
        let database = fresh_database().await;
        let stage = Stage { master_keys: Arc::new(parse(old.clone())), ..Stage::default() };
        let server = TestServer::start_as(database.clone(), stage).await;
        let t = server.project("main").await;
        let made = endpoint(&t, &sink, json!({})).await;
        t.post(&path(&made, "/secret/rotate"), json!({})).await.is(200);
        let push = json!({"url": sink.url, "headers": {"Authorization": "Bearer hidden"}});
        t.put("/v1/queues/functions/push", push).await.is(201);
        let plain =
            "select (select count(*) from webhook_endpoints where octet_length(secret) = 32)
            + (select count(*) from queue_pushes where position('hidden'::bytea in headers) > 0)";
        assert_eq!(t.database.number(plain).await, 0);
        server.stop().await;
        let mut conn = database.connect().await;
        let both = parse(format!("{new}\n{old}"));
        assert_eq!(webhooks::seal_secrets(&mut conn, &both).await.expect("they are read"), 2);
        assert_eq!(webhooks::seal_secrets(&mut conn, &both).await.expect("they are read"), 0);
        conn.close().await.expect("the connection closes");
        let stage = Stage { master_keys: Arc::new(parse(new)), ..Stage::default() };
        let server = TestServer::start_as(database, stage).await;
        let t = t.through(&server.url);
        t.act(&path(&made, "/test")).await.is(202);
        assert!(sink.next().await.is_signed_with(made["secret"].as_str().expect("one")));
        t.enqueue(json!({"queue": "functions"})).await;
        assert_eq!(sink.next().await.header("authorization"), "Bearer hidden");
        server.stop().await;
    });
}

#[test]
fn what_was_sent_under_other_settings_does_not_disable_an_endpoint() {
    run(async |t| {
        let (sink, other) = (Sink::start().await, Sink::start().await);
        let made = endpoint(t, &sink, json!({})).await;
        sink.hold(true);
        sink.answer([(410, "gone")]);
        t.act(&path(&made, "/test")).await.is(202);
        sink.next().await;
        t.patch(&path(&made, ""), json!({"url": other.url})).await.is(200);
        sink.hold(false);
        delivery_becomes(t, &made, "failed").await;
        // A node learns of the other URL in a moment.
        loop {
            t.act(&path(&made, "/test")).await.is(202);
            tokio::select! {
                _ = other.next() => break,
                _ = sink.next() => (),
            }
        }
        until("the success to be noted", async || {
            !t.get(&path(&made, "")).await.is(200)["last_success_at"].is_null()
        })
        .await;
        assert_eq!(t.get(&path(&made, "")).await.is(200)["state"], "enabled");
    });
}

#[test]
fn an_endpoint_for_all_job_events_gets_types_that_a_later_version_adds() {
    run_alone(async |t| {
        let (group, single) = (Sink::start().await, Sink::start().await);
        endpoint(t, &group, json!({"events": ["job.*", "alarm.triggered"]})).await;
        endpoint(t, &single, json!({"events": ["alarm.triggered"]})).await;
        // As a version stored them that had no such type.
        t.database.execute("update webhook_endpoints set event_types = '{alarm.triggered}'").await;
        t.database.execute("delete from event_subscriptions where type like 'job.%'").await;
        migrate::migrate(&t.database.url).await.expect("the database is migrated");
        let types = "select sum(cardinality(event_types)) from webhook_endpoints";
        assert_eq!(t.database.number(types).await, 6);
        let id = t.enqueue(json!({})).await;
        t.act(&format!("/v1/jobs/{id}/cancel")).await.is(200);
        assert_eq!(group.next().await.body()["type"], "job.cancelled");
    });
}

#[test]
fn an_endpoint_gets_events_from_its_creation_on() {
    run(async |t| {
        let (first, later) = (Sink::start().await, Sink::start().await);
        endpoint(t, &first, json!({"events": ["job.cancelled"]})).await;
        let made = endpoint(t, &later, json!({"events": ["job.dead_lettered"]})).await;
        let id = t.enqueue(json!({})).await;
        t.act(&format!("/v1/jobs/{id}/cancel")).await.is(200);
        first.next().await;
        t.patch(&path(&made, ""), json!({"events": ["job.cancelled"]})).await.is(200);
        let id = t.enqueue(json!({})).await;
        t.act(&format!("/v1/jobs/{id}/cancel")).await.is(200);
        assert_eq!(later.next().await.body()["data"]["job"]["id"], id.as_str());
        // Settings that were not sent stay as they are.
        let now = t.patch(&path(&made, ""), json!({"enabled": false})).await.is(200);
        assert_eq!(
            (&now["state"], &now["events"]),
            (&json!("disabled"), &json!(["job.cancelled"]))
        );
        assert_eq!(now["disabled_reason"], "by_user");
        let now = t.patch(&path(&made, ""), json!({"description": "x"})).await.is(200);
        assert_eq!((&now["state"], &now["description"]), (&json!("disabled"), &json!("x")));
        let now = t.patch(&path(&made, ""), json!({"description": ""})).await.is(200);
        assert_eq!(now["description"], Value::Null);
    });
}

#[test]
fn an_endpoint_with_too_many_waiting_deliveries_gets_no_more_and_holds_up_no_other() {
    run_alone(async |t| {
        let (full, other) = (Sink::start().await, Sink::start().await);
        let made = endpoint(t, &full, json!({"max_in_flight": 1})).await;
        endpoint(t, &other, json!({})).await;
        let queue = made["id"].as_str().expect("an id");
        let fill = format!(
            "insert into queue_counts (project_id, queue, active)
             select outbox_id, '{queue}', 50000 from outboxes"
        );
        t.database.execute(&fill).await;
        let id = t.enqueue(json!({})).await;
        t.act(&format!("/v1/jobs/{id}/cancel")).await.is(200);
        other.next().await;
        assert_eq!(t.get(&path(&made, "")).await.is(200)["dropped_events"], 1);
        assert!(!full.has_more().await);
    });
}

#[test]
fn a_key_that_may_not_read_payloads_sees_no_bodies() {
    run(async |t| {
        let sink = Sink::start().await;
        let made = endpoint(t, &sink, json!({})).await;
        sink.answer([(500, "their secret")]);
        let sent = t.act(&path(&made, "/test")).await.is(202);
        sink.next().await;
        delivery_becomes(t, &made, "waiting").await;
        let key = json!({"name": "k", "scopes": ["webhooks"]});
        let key = t.post("/v1/keys", key).await.is(201)["secret"].as_str().expect("one").to_owned();
        let lesser = t.with_key(key);
        let delivery = path(&made, &format!("/deliveries/{}", sent["id"].as_str().expect("one")));
        let shown = lesser.get(&delivery).await;
        assert!(!shown.text.contains("their secret"), "{}", shown.text);
        let shown = shown.is(200);
        assert_eq!((&shown["redacted"], &shown["body"]), (&json!(true), &Value::Null));
        assert_eq!(shown["failed_tries"][0]["error_type"], "http_500");
    });
}

#[test]
fn a_key_that_may_not_read_payloads_cannot_choose_where_events_go() {
    run(async |t| {
        let sink = Sink::start().await;
        let made = endpoint(t, &sink, json!({})).await;
        let key = async |scopes: Value| {
            let key = t.post("/v1/keys", json!({"name": "k", "scopes": scopes})).await.is(201);
            t.with_key(key["secret"].as_str().expect("one").to_owned())
        };
        let lesser = key(json!(["webhooks"])).await;
        let url = made["url"].clone();
        for change in [
            json!({"url": url}),
            json!({"events": ["*"]}),
            json!({"queues": []}),
            json!({"job_types": []}),
            json!({"callbacks": true}),
            json!({"enabled": true}),
        ] {
            let error = lesser.patch(&path(&made, ""), change).await.is_error(403, "forbidden");
            assert!(error["message"].to_string().contains("payload:read"), "{error}");
        }
        for field in ["queues", "job_types"] {
            for never in ["mail*", "*.send"] {
                let mut change = json!({});
                change[field] = json!(["mail.*", never]);
                t.patch(&path(&made, ""), change).await.refuses(field);
            }
        }
        let harmless = json!({"description": "ours", "callbacks": false, "max_in_flight": 1});
        lesser.patch(&path(&made, ""), harmless).await.is(200);
        let new = json!({"url": url, "events": ["*"]});
        lesser.post("/v1/webhooks", new.clone()).await.is_error(403, "forbidden");
        let able = key(json!(["webhooks", "payload:read"])).await;
        able.post("/v1/webhooks", new).await.is(201);
        able.patch(&path(&made, ""), json!({"events": ["*"]})).await.is(200);
    });
}

#[test]
fn deliveries_of_a_time_are_sent_again_with_the_same_event_ids() {
    run(async |t| {
        let sink = Sink::start().await;
        let made = endpoint(t, &sink, json!({})).await;
        t.act(&path(&made, "/test")).await.is(202);
        let first = sink.next().await;
        delivery_becomes(t, &made, "delivered").await;
        let replay = async |more: Value| {
            let mut body = json!({"since": "2020-01-01T00:00:00Z"});
            body.as_object_mut().expect("an object").extend(more.as_object().expect("one").clone());
            t.post(&path(&made, "/replay"), body).await
        };
        let counted = replay(json!({"dry_run": true})).await.is(200);
        assert_eq!(counted, json!({"matching": 0, "started": false}));
        let counted = replay(json!({"dry_run": true, "which": "all"})).await.is(200);
        assert_eq!(counted["matching"], 1);
        let early = json!({"dry_run": true, "which": "all", "until": "2020-01-02T00:00:00Z"});
        assert_eq!(replay(early).await.is(200)["matching"], 0);
        let started = replay(json!({"which": "all"})).await.is(202);
        assert_eq!(started, json!({"matching": 1, "started": true}));
        let again = sink.next().await;
        assert_eq!(again.header("webhook-id"), first.header("webhook-id"));
        assert_ne!(again.header("fencepost-delivery"), first.header("fencepost-delivery"));
        // It has its answer: the next one is for another request.
        delivery_becomes(t, &made, "delivered").await;
        sink.answer([(410, "")]);
        t.act(&path(&made, "/test")).await.is(202);
        sink.next().await;
        let failed = delivery_becomes(t, &made, "failed").await;
        t.patch(&path(&made, ""), json!({"enabled": true})).await.is(200);
        assert_eq!(replay(json!({})).await.is(202)["matching"], 1);
        assert_eq!(sink.next().await.header("fencepost-delivery"), failed["id"]);
        t.post(&path(&made, "/replay"), json!({})).await.refuses("since");
        replay(json!({"rate_per_second": 0})).await.refuses("rate_per_second");
        replay(json!({"which": "some"})).await.refuses("which");
    });
}
