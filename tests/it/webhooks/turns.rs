//! A node chooses among URLs while there are more than it can serve.

use std::collections::BTreeSet;

use fencepost_domain::ids::NodeId;
use fencepost_store::sweep::{pushes::pushed_queues, webhooks::served_endpoints};
use serde_json::json;

use super::{endpoint, path};
use crate::harness::{Sink, TestServer, fresh_database, limited, until};

/// The only node that runs.
async fn only_node(conn: &mut sqlx::PgConnection) -> NodeId {
    NodeId(sqlx::query_scalar("select id from nodes").fetch_one(conn).await.expect("one node"))
}

#[test]
fn each_node_serves_a_part_of_its_own() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project("main").await;
        let sink = Sink::start().await;
        for number in 0..40 {
            let path = format!("/v1/queues/q{number}/push");
            t.put(&path, json!({"url": sink.url})).await.is(201);
            endpoint(&t, &sink, json!({})).await;
        }
        let mut conn = t.database.connect().await;
        let first = only_node(&mut conn).await;
        let second = NodeId::generate();
        let joins = sqlx::query("insert into nodes (id, seen_at) values ($1, now() + '1 day')");
        joins.bind(second.0).execute(&mut conn).await.expect("it runs");
        let (mut queues, mut endpoints) = (BTreeSet::new(), BTreeSet::new());
        for node in [first, second] {
            let found = pushed_queues(&mut conn, node, 3).await.expect("it runs");
            queues.extend(found.into_iter().map(|it| it.queue));
            let found = served_endpoints(&mut conn, node, 3).await.expect("it runs");
            endpoints.extend(found.into_iter().map(|it| it.id.to_string()));
        }
        assert_eq!((queues.len(), endpoints.len()), (6, 6), "no two serve the same one");
        let all = pushed_queues(&mut conn, second, 100).await.expect("it runs");
        assert_eq!(all.len(), 40, "and each serves all while there is room");
        server.stop().await;
    });
}

#[test]
fn a_push_that_no_node_serves_is_named() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project("main").await;
        let sink = Sink::start().await;
        for queue in ["one", "two"] {
            let path = format!("/v1/queues/{queue}/push");
            t.put(&path, json!({"url": sink.url})).await.is(201);
        }
        let known = |queues: &str| {
            format!(
                "select count(*) from workers
                 where worker_id like 'fencepost-push-%' and queues = '{{{queues}}}'"
            )
        };
        t.database.until(&known("one,two"), 1).await;
        let unusable = "update queue_pushes
                        set updated_at = now() - interval '1 hour',
                            url = case queue when 'one' then url else 'http://10.0.0.1/' end";
        t.database.execute(unusable).await;
        t.database.until(&known("one"), 1).await;
        for (queue, is_served) in [("one", true), ("two", false)] {
            let push = t.get(&format!("/v1/queues/{queue}/push")).await.is(200);
            assert_eq!(push["not_served"], !is_served, "{queue}");
            let id = t.enqueue(json!({"queue": queue, "labels": ["gpu"]})).await;
            let explained = t.get(&format!("/v1/jobs/{id}/explain")).await.is(200);
            let reason = if is_served { "labels" } else { "push_not_served" };
            assert_eq!(explained["reason"], reason, "{explained}");
        }
        server.stop().await;
    });
}

#[test]
fn projects_take_turns_for_pushed_queues_and_those_with_jobs_go_first() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let (greedy, other) = (server.project("greedy").await, server.project("other").await);
        let sink = Sink::start().await;
        let push = json!({"url": sink.url});
        for queue in ["a", "b", "c", "d"] {
            greedy.put(&format!("/v1/queues/{queue}/push"), push.clone()).await.is(201);
        }
        other.put("/v1/queues/only/push", push).await.is(201);
        let mut conn = other.database.connect().await;
        let node = only_node(&mut conn).await;
        let chosen = async |conn: &mut sqlx::PgConnection, limit| {
            let found = pushed_queues(conn, node, limit).await.expect("it runs");
            let mut found: Vec<_> = found.into_iter().map(|it| it.queue).collect();
            found.sort();
            found
        };
        assert_eq!(chosen(&mut conn, 10).await, ["a", "b", "c", "d", "only"]);
        assert_eq!(chosen(&mut conn, 2).await, ["a", "only"]);
        let held = "insert into queue_counts (project_id, queue, active)
                    select id, queue, 1 from projects, unnest(array['c', 'd']) as queue
                    where slug = 'greedy'
                    on conflict (project_id, queue) do update set active = 1";
        greedy.database.execute(held).await;
        assert_eq!(chosen(&mut conn, 2).await, ["c", "d"]);
        assert_eq!(chosen(&mut conn, 4).await, ["a", "c", "d", "only"]);
        server.stop().await;
    });
}

#[test]
fn projects_take_turns_for_endpoints_and_those_with_deliveries_go_first() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let (greedy, other) = (server.project("greedy").await, server.project("other").await);
        let sink = Sink::start().await;
        let mut made = Vec::new();
        for t in [&greedy, &greedy, &greedy, &other] {
            made.push(endpoint(t, &sink, json!({})).await["id"].clone());
        }
        let mut conn = other.database.connect().await;
        let node = only_node(&mut conn).await;
        let chosen = async |conn: &mut sqlx::PgConnection, limit| {
            let found = served_endpoints(conn, node, limit).await.expect("it runs");
            let mut found: Vec<_> = found.into_iter().map(|it| json!(it.id.to_string())).collect();
            found.sort_by_key(ToString::to_string);
            found
        };
        assert_eq!(chosen(&mut conn, 10).await, made);
        let one_of_each = [made[0].clone(), made[3].clone()];
        assert_eq!(chosen(&mut conn, 2).await, one_of_each);
        let held = "insert into queue_counts (project_id, queue, active)
                    select outbox_id, 'ep', 1 from outboxes join projects on id = project_id
                    where slug = 'greedy'";
        greedy.database.execute(held).await;
        assert_eq!(chosen(&mut conn, 3).await, made[..3]);
        server.stop().await;
    });
}

#[test]
fn an_endpoint_that_does_not_answer_is_sent_one_at_a_time() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project("main").await;
        let sink = Sink::start().await;
        sink.hold(true);
        let at_once = 15;
        let hangs = json!({"max_in_flight": at_once, "timeout_seconds": 1});
        endpoint(&t, &sink, hangs).await;
        let jobs = vec![json!({"job_type": "t"}); 2 * at_once];
        t.post("/v1/jobs/batch", json!({"jobs": jobs})).await.is(201);
        t.post("/v1/jobs/cancel", json!({"filter": {"job_type": "t"}})).await;
        let mut most = 0;
        for _ in 0..at_once {
            most = most.max(sink.next().await.at_once);
        }
        assert!(most > 1, "as many as it may be sent at first");
        for _ in 0..5 {
            let at_once = sink.next().await.at_once;
            // The end of the one before it may be noticed a little later.
            assert!(at_once <= 3, "{at_once} at once");
        }
        server.stop().await;
    });
}

#[test]
fn a_plan_has_a_number_of_pushed_queues() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project_with("main", "free", json!({"pushed_queues": 1})).await;
        let sink = Sink::start().await;
        let push = json!({"url": sink.url});
        t.put("/v1/queues/one/push", push.clone()).await.is(201);
        t.put("/v1/queues/two/push", push.clone()).await.is_error(429, "quota_exceeded");
        t.put("/v1/queues/one/push", push).await.is(200);
        let limits = t.get("/v1/limits").await.is(200);
        let limits = limits["limits"].as_array().expect("limits");
        let pushed = limits.iter().find(|it| it["name"] == "pushed_queues").expect("it is listed");
        assert_eq!((&pushed["used"], &pushed["limit"]), (&json!(1), &json!(1)));
        server.stop().await;
    });
}

#[test]
fn a_plan_has_a_number_of_deliveries_per_minute_and_drops_what_exceeds_it() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let limits = json!({"deliveries_per_minute": 5});
        let t = server.project_with("main", "free", limits).await;
        let sink = Sink::start().await;
        let made = endpoint(&t, &sink, json!({})).await;
        let second = endpoint(&t, &sink, json!({})).await;
        let jobs = vec![json!({"job_type": "t"}); 6];
        t.post("/v1/jobs/batch", json!({"jobs": jobs})).await.is(201);
        // One statement makes six events, which one pass takes: it is charged all of them.
        t.post("/v1/jobs/cancel", json!({"filter": {"job_type": "t"}})).await;
        for _ in 0..12 {
            sink.next().await;
        }
        let id = t.enqueue(json!({})).await;
        t.post(&format!("/v1/jobs/{id}/cancel"), json!({})).await.is(200);
        for endpoint in [&made, &second] {
            until("the event to be dropped", async || {
                t.get(&path(endpoint, "")).await.is(200)["dropped_events"] == 1
            })
            .await;
        }
        assert!(!sink.has_more().await);
        server.stop().await;
    });
}

#[test]
fn a_plan_has_a_number_of_pushes_under_way_for_all_queues_together() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project_with("main", "free", json!({"push_in_flight": 2})).await;
        let sink = Sink::start().await;
        sink.hold(true);
        let queues = ["one", "two"];
        for queue in queues {
            let push = json!({"url": sink.url, "max_in_flight": 5});
            t.put(&format!("/v1/queues/{queue}/push"), push).await.is(201);
        }
        let jobs: Vec<_> =
            (0..10).map(|it| json!({"job_type": "t", "queue": queues[it % 2]})).collect();
        t.post("/v1/jobs/batch", json!({"jobs": jobs})).await.is(201);
        let mut at_once = vec![sink.next().await.at_once, sink.next().await.at_once];
        sink.hold(false);
        for _ in 0..8 {
            at_once.push(sink.next().await.at_once);
        }
        assert!(at_once.iter().all(|it| *it <= 2), "{at_once:?}");
        server.stop().await;
    });
}
