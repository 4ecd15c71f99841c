//! How many batches of a project may be open.

use fencepost_domain::limits;
use reqwest::Method;
use serde_json::json;

use crate::harness::{Reply, TestServer, fresh_database, limited, run_alone};

#[test]
fn a_repeated_create_finds_its_batch_whatever_the_limit_is() {
    run_alone(async |t| {
        let create = async |key: &str| {
            let request = t.request(Method::POST, "/v1/batches").header("Idempotency-Key", key);
            Reply::of(request.json(&json!({})).send().await.expect("an answer")).await
        };
        let first = create("k").await.is(201);
        let max = limits::MAX_OPEN_BATCHES;
        let fill = format!(
            "insert into batches (project_id, id)
             select project_id, gen_random_uuid() from batches, generate_series(1, {max});
             update idempotency_keys set status = null, body = null, locked_at = '-infinity'"
        );
        t.database.execute(&fill).await;
        assert_eq!(create("k").await.is(201)["id"], first["id"]);
        create("other").await.is_error(429, "quota_exceeded");
    });
}

#[test]
fn a_plan_has_a_number_of_open_batches() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project_with("main", "free", json!({"open_batches": 3})).await;
        let create = async |key: &str| {
            let request = t.request(Method::POST, "/v1/batches").header("Idempotency-Key", key);
            Reply::of(request.json(&json!({})).send().await.expect("an answer")).await
        };
        let first = create("k").await.is(201);
        let at_once = (0..6).map(|_| t.post("/v1/batches", json!({})));
        let at_once = futures_util::future::join_all(at_once).await;
        let (created, refused): (Vec<_>, Vec<_>) =
            at_once.iter().partition(|it| it.status.as_u16() == 201);
        assert_eq!(created.len(), 2, "two at once do not pass it together");
        for it in refused {
            let error = it.is_error(429, "quota_exceeded");
            assert_eq!(error["message"], "at most 3 open batches are allowed");
        }
        let callback = json!({"type": "after", "args": []});
        let workflow = json!({
            "type": "batch", "name": "b", "jobs": [{"type": "a", "args": []}],
            "callbacks": {"on_success": callback},
        });
        t.post("/ojs/v1/workflows", workflow.clone()).await.is(429);
        assert_eq!(t.get("/v1/jobs").await.is(200)["jobs"], json!([]), "nothing was stored");
        let limits = t.get("/v1/limits").await.is(200);
        let limits = limits["limits"].as_array().expect("limits");
        let open = limits.iter().find(|it| it["name"] == "open_batches").expect("it is listed");
        assert_eq!((&open["used"], &open["limit"]), (&json!(3), &json!(3)));
        let unknown = "update idempotency_keys set status = null, body = null,
                       locked_at = '-infinity'";
        t.database.execute(unknown).await;
        assert_eq!(create("k").await.is(201)["id"], first["id"], "a repeated request passes");
        let path = format!("/v1/batches/{}/cancel", first["id"].as_str().expect("an id"));
        t.post(&path, json!({})).await.is(200);
        t.post("/ojs/v1/workflows", workflow).await.is(201);
        create("other").await.is_error(429, "quota_exceeded");
        server.stop().await;
    });
}
