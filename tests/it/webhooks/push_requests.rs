//! Requests of pushed queues that end in another way than with an answer, and nodes that share the
//! work.

use std::collections::BTreeSet;

use axum::http::{StatusCode, header};
use serde_json::{Value, json};

use super::push::{PUSH, enqueue};
use crate::harness::{Sink, TestServer, fresh_database, limited, run};

#[test]
fn two_nodes_push_each_job_once_and_both_take_part() {
    limited(async {
        let database = fresh_database().await;
        let (one, two) =
            (TestServer::start(database.clone()).await, TestServer::start(database).await);
        let t = one.project("main").await;
        let sink = Sink::start().await;
        t.put(PUSH, json!({"url": sink.url, "max_in_flight": 2})).await.is(201);
        sink.hold(true);
        let mut jobs = BTreeSet::new();
        for _ in 0..20 {
            jobs.insert(enqueue(&t, json!({})).await);
        }
        // More are under way than one node may send.
        let (mut sent, mut nodes) = (BTreeSet::new(), BTreeSet::new());
        for number in 0..20 {
            if number == 4 {
                assert_eq!(nodes.len(), 2, "two of each");
                sink.hold(false);
            }
            let request = sink.next().await;
            assert_eq!(request.header("fencepost-attempt"), "1");
            sent.insert(request.header("fencepost-job-id").to_owned());
            nodes.insert(request.header("fencepost-worker-id").to_owned());
        }
        assert_eq!(sent, jobs);
        for id in jobs {
            t.job_becomes(&id, "succeeded").await;
        }
        assert!(!sink.has_more().await);
        one.stop().await;
        two.stop().await;
    });
}

#[test]
fn a_node_that_stops_during_a_request_gives_the_job_to_another() {
    limited(async {
        let database = fresh_database().await;
        let one = TestServer::start(database.clone()).await;
        let t = one.project("main").await;
        let sink = Sink::start().await;
        t.put(PUSH, json!({"url": sink.url})).await.is(201);
        sink.hold(true);
        let id = enqueue(&t, json!({"max_attempts": 1})).await;
        assert_eq!(sink.next().await.header("fencepost-attempt"), "1");
        let two = TestServer::start(database).await;
        one.stop().await;
        sink.hold(false);
        assert_eq!(sink.next().await.header("fencepost-attempt"), "2");
        let t = t.through(&two.url);
        assert_eq!(t.job_becomes(&id, "succeeded").await["failures"], 0);
        two.stop().await;
    });
}

#[test]
fn the_timeout_of_a_job_ends_a_request_that_may_take_longer() {
    run(async |t| {
        let sink = Sink::start().await;
        t.put(PUSH, json!({"url": sink.url, "timeout_seconds": 60})).await.is(201);
        sink.hold(true);
        let id = enqueue(t, json!({"max_attempts": 1, "timeout_seconds": 1})).await;
        let ended = t.job_becomes(&id, "dead_letter").await;
        assert_eq!(ended["attempts"][0]["error"]["type"], "timeout");
        let push = t.get(PUSH).await.is(200);
        assert_eq!(push["timeout_seconds"], 60);
    });
}

#[test]
fn an_answer_to_a_push_that_is_no_text_ends_the_attempt() {
    run(async |t| {
        let sink = Sink::start().await;
        t.put(PUSH, json!({"url": sink.url})).await.is(201);
        let bytes = b"\x00\xff not text".to_vec();
        let json = [(header::CONTENT_TYPE, "application/json")];
        for bytes in [bytes.clone(), b"{\"a\":\"\xff\"}".to_vec()] {
            sink.answer_with((json.clone(), bytes));
            let done = enqueue(t, json!({})).await;
            assert_eq!(t.job_becomes(&done, "succeeded").await["result"], Value::Null);
        }
        sink.answer_with((StatusCode::BAD_REQUEST, json, bytes));
        let failed = enqueue(t, json!({})).await;
        let failed = t.job_becomes(&failed, "dead_letter").await;
        let error = &failed["attempts"][0]["error"];
        assert_eq!(error["type"], "http_400");
        let message = error["message"].as_str().expect("a message");
        assert!(message.ends_with(" not text"), "{message}");
    });
}
