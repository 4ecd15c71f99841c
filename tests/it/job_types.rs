//! Schemas of job types: stored, compared with payloads, and kept apart by project.

use crate::harness::{Reply, TestProject, TestServer, fresh_database, limited, run, run_alone};
use fencepost_domain::limits;
use serde_json::{Value, json};

fn schema() -> Value {
    json!({
        "type": "object",
        "required": ["to"],
        "properties": {"to": {"type": "string", "pattern": "@"}, "copies": {"minimum": 1}},
    })
}

async fn describe(t: &TestProject, job_type: &str, schema: Value) -> Value {
    t.put(&format!("/v1/job-types/{job_type}"), json!({"schema": schema})).await.is(200)
}

#[test]
fn a_schema_is_stored_shown_and_removed() {
    run(async |t| {
        let none = t.get("/v1/job-types/mail").await.is(200);
        assert_eq!(
            none,
            json!({"job_type": "mail", "schema": null, "updated_at": null, "etag": none["etag"]})
        );
        assert_eq!(describe(t, "mail", schema()).await["schema"], schema());
        assert_eq!(t.get("/v1/job-types/mail").await.is(200)["schema"], schema());
        let listed = t.get("/v1/job-types").await.is(200);
        assert_eq!(listed["job_types"][0]["job_type"], "mail");
        assert_eq!(listed["job_types"][0]["has_schema"], true);
        assert_eq!(describe(t, "mail", Value::Null).await["schema"], Value::Null);
        assert_eq!(t.get("/v1/job-types").await.is(200)["job_types"], json!([]));
        let audit = t.get("/v1/audit-log").await.is(200);
        assert_eq!(audit["entries"][0]["action"], "job_type.changed");
        assert_eq!(audit["entries"][0]["before"]["schema"], schema());
    });
}

#[test]
fn payloads_are_compared_with_the_schema_where_it_is_asked() {
    run_alone(async |t| {
        describe(t, "mail", schema()).await;
        let job = |payload: Value| json!({"job_type": "mail", "payload": payload});
        let checked = |payload| {
            let mut job = job(payload);
            job["check_payload"] = json!(true);
            job
        };
        t.post("/v1/jobs", checked(json!({"to": "a@b"}))).await.is(201);
        t.post("/v1/jobs", job(json!({"to": "nowhere"}))).await.is(201);
        let reply = t.post("/v1/jobs", checked(json!({"to": "secret", "copies": 0}))).await;
        assert!(!reply.refuses("payload.to").contains("secret"));
        reply.refuses("payload.copies");
        let reply = t.post("/v1/jobs", checked(Value::Null)).await;
        assert!(reply.refuses("payload").contains("object"));
        let unreadable = r#"{"job_type": "mail", "payload": [1e999], "check_payload": true}"#;
        t.post_text("/v1/jobs", unreadable).await.refuses("payload");
        let mut unknown = checked(json!({}));
        unknown["job_type"] = json!("other");
        assert!(t.post("/v1/jobs", unknown).await.refuses("check_payload").contains("no schema"));
        let batch = json!({"jobs": [job(json!(1)), checked(json!({"to": 5}))]});
        t.post("/v1/jobs/batch", batch).await.refuses("jobs[1].payload.to");
        let stored = t.database.number("select count(*) from jobs").await;
        assert_eq!(stored, 2, "a batch is stored whole or not at all");
        let graph = json!({"jobs": [{"key": "a", "job_type": "mail", "check_payload": true}]});
        t.post("/v1/workflows", graph).await.refuses("jobs[0].check_payload");
    });
}

#[test]
fn a_schema_that_could_take_long_or_is_none_is_refused_by_its_place() {
    run(async |t| {
        let put = async |body: Value| t.put("/v1/job-types/mail", body).await;
        let refused = put(json!({"schema": {"properties": {"a": {"$ref": "#"}}}})).await;
        assert!(refused.refuses("schema").contains("schema.properties.a.$ref"));
        put(json!({"schema": "text"})).await.refuses("schema");
        put(json!({"schema": {"type": 5}})).await.refuses("schema");
        let unreadable = r#"{"schema": {"const": 1e999}}"#;
        let request = t.request(reqwest::Method::PUT, "/v1/job-types/mail");
        let request = request.header("content-type", "application/json").body(unreadable);
        Reply::of(request.send().await.expect("an answer")).await.refuses("schema");
        put(json!({})).await.is_error(400, "invalid_request");
        let large = json!({"schema": {"description": "x".repeat(17_000)}});
        put(large).await.is_error(413, "payload_too_large");
        let long = "x".repeat(limits::MAX_JOB_TYPE_CHARS + 1);
        t.put(&format!("/v1/job-types/{long}"), json!({"schema": {}})).await.refuses("job_type");
    });
}

#[test]
fn a_key_that_is_bound_to_other_types_learns_nothing_of_a_schema() {
    run(async |t| {
        describe(t, "mail", schema()).await;
        let key = json!({"name": "bound", "scopes": ["produce"], "job_types": ["other"]});
        let key =
            t.post("/v1/keys", key).await.is(201)["secret"].as_str().expect("a key").to_owned();
        let bound = t.with_key(key);
        let job = json!({"job_type": "mail", "payload": {}, "check_payload": true});
        let reply = bound.post("/v1/jobs", job).await;
        assert!(!reply.text.contains("payload"), "{}", reply.text);
        assert_eq!(reply.status, 403);
    });
}

#[test]
fn a_bulk_enqueue_checks_payloads_of_a_bounded_number_of_types() {
    run(async |t| {
        let job =
            |at: usize| json!({"job_type": format!("n{at}"), "payload": {}, "check_payload": true});
        let jobs: Vec<_> = (0..=limits::MAX_CHECKED_TYPES).map(job).collect();
        let reported = t.post("/v1/jobs/batch", json!({"jobs": jobs})).await.refuses("jobs");
        assert!(reported.contains("more than 20 job types"), "{reported}");
    });
}

#[test]
fn schemas_are_bounded_and_belong_to_their_project() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let (t, other) = (server.project("main").await, server.project("other").await);
        describe(&t, "mail", schema()).await;
        assert_eq!(other.get("/v1/job-types/mail").await.is(200)["schema"], Value::Null);
        let job = json!({"job_type": "mail", "payload": 1, "check_payload": true});
        other.post("/v1/jobs", job).await.refuses("check_payload");
        let fill = "insert into job_types (project_id, job_type, schema)
                    select project_id, 'n' || n, '{}' from job_types, generate_series(2, 200) n";
        t.database.execute(fill).await;
        describe(&t, "mail", json!({})).await;
        let more = t.put("/v1/job-types/more", json!({"schema": {}})).await;
        more.is_error(429, "quota_exceeded");
        describe(&other, "more", json!({})).await;
        server.stop().await;
    });
}
