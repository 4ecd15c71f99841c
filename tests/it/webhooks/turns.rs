//! A node chooses among URLs while there are more than it can serve.

use fencepost_store::sweep::{pushes::pushed_queues, webhooks::served_endpoints};
use serde_json::json;

use super::endpoint;
use crate::harness::{Sink, TestServer, fresh_database, limited};

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
        let chosen = async |conn: &mut sqlx::PgConnection, limit| {
            let found = pushed_queues(conn, limit).await.expect("it runs");
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
        let chosen = async |conn: &mut sqlx::PgConnection, limit| {
            let found = served_endpoints(conn, limit).await.expect("it runs");
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
