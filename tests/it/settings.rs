//! Settings that two may change: their tags, and writes under a condition.

use reqwest::Method;
use serde_json::{Value, json};

use crate::harness::{LoneProject, Reply, TestProject, TestServer, fresh_database, limited, run};

/// A write with a condition, such as `if-match`.
async fn send(
    t: &TestProject,
    (method, path): (Method, &str),
    (name, value): (&str, &str),
    body: &Value,
) -> Reply {
    let request = t.request(method, path).header(name, value);
    Reply::of(request.json(body).send().await.expect("an answer")).await
}

fn etag(of: &Value) -> String {
    of["etag"].as_str().expect("a tag").to_owned()
}

/// Paths of settings, each with two values to write.
async fn resources(t: &TestProject) -> Vec<(Method, String, [Value; 2])> {
    let endpoint = json!({"url": "https://example.com/hook", "events": ["job.*"]});
    let endpoint = t.post("/v1/webhooks", endpoint).await.is(201);
    let id = endpoint["endpoint"]["id"].as_str().expect("an id");
    let schedule = |cron: &str| json!({"job_type": "a", "cron_expression": cron});
    vec![
        (
            Method::PATCH,
            "/v1/queues/mail".into(),
            [json!({"max_concurrency": 3}), json!({"max_concurrency": 4})],
        ),
        (
            Method::PUT,
            "/v1/recurring/nightly".into(),
            [schedule("0 3 * * *"), schedule("0 4 * * *")],
        ),
        (
            Method::PUT,
            "/v1/alarms/dead_letters".into(),
            [json!({"threshold": 20}), json!({"threshold": 30})],
        ),
        (
            Method::PUT,
            "/v1/job-types/a".into(),
            [json!({"schema": {"type": "object"}}), json!({"schema": {"type": "array"}})],
        ),
        (
            Method::PATCH,
            format!("/v1/webhooks/{id}"),
            [json!({"description": "x"}), json!({"description": "y"})],
        ),
    ]
}

#[test]
fn a_write_under_a_condition_changes_only_the_settings_that_it_names() {
    run(async |t| {
        for (method, path, [one, other]) in resources(t).await {
            let to = || (method.clone(), path.as_str());
            let first = send(t, to(), ("x-none", "1"), &one).await.is(200);
            let read = t.get(&path).await.is(200);
            assert_eq!(etag(&first), etag(&read), "{path}");
            let second = send(t, to(), ("if-match", &etag(&first)), &other).await.is(200);
            assert_ne!(etag(&first), etag(&second), "{path}");
            // Another has changed them since.
            let late = send(t, to(), ("if-match", &etag(&first)), &one).await;
            late.is_error(412, "precondition_failed");
            assert_eq!(etag(&t.get(&path).await.is(200)), etag(&second), "{path}");
            let creates = send(t, to(), ("if-none-match", "*"), &one).await;
            creates.is_error(412, "precondition_failed");
            let any = send(t, to(), ("if-match", "*"), &one).await.is(200);
            assert_eq!(etag(&any), etag(&first), "{path}: the same settings");
            let unreadable = send(t, to(), ("if-match", "no-quotes"), &one).await;
            unreadable.refuses("if-match");
        }
    });
}

#[test]
fn the_header_has_the_tag_that_the_answer_has() {
    run(async |t| {
        t.put("/v1/recurring/x", json!({"job_type": "a", "cron_expression": "0 3 * * *"}))
            .await
            .is(200);
        let answer = t.request(Method::GET, "/v1/recurring/x").send().await.expect("an answer");
        let header = answer.headers()["etag"].to_str().expect("a text").to_owned();
        let body: Value = answer.json().await.expect("JSON");
        assert_eq!(header, etag(&body));
        // It does not change with what the server does.
        let before = etag(&body);
        t.post("/v1/recurring/x/run", json!({})).await;
        assert_eq!(etag(&t.get("/v1/recurring/x").await.is(200)), before);
        t.act("/v1/recurring/x/pause").await.is(200);
        assert_ne!(etag(&t.get("/v1/recurring/x").await.is(200)), before);
    });
}

#[test]
fn a_job_type_without_a_schema_has_no_settings_yet() {
    run(async |t| {
        let to = || (Method::PUT, "/v1/job-types/new");
        let schema = json!({"schema": {"type": "object"}});
        send(t, to(), ("if-match", "*"), &schema).await.is_error(412, "precondition_failed");
        let none = t.get("/v1/job-types/new").await.is(200);
        let other = ("if-none-match", &*etag(&none));
        send(t, to(), other, &schema).await.is_error(412, "precondition_failed");
        let made = send(t, to(), ("if-none-match", "*"), &schema).await.is(200);
        send(t, to(), ("if-match", &etag(&none)), &schema)
            .await
            .is_error(412, "precondition_failed");
        let list = format!(",\"a,b\", {},", etag(&made));
        send(t, to(), ("if-match", &list), &schema).await.is(200);
        send(t, to(), ("if-match", "*, \"a\""), &schema).await.refuses("if-match");
    });
}

#[test]
fn a_write_may_only_create_and_a_deletion_may_have_a_condition() {
    run(async |t| {
        let schedule = json!({"job_type": "a", "cron_expression": "0 3 * * *"});
        let to = || (Method::PUT, "/v1/recurring/x");
        let missing = send(t, to(), ("if-match", "*"), &schedule).await;
        missing.is_error(412, "precondition_failed");
        let made = send(t, to(), ("if-none-match", "*"), &schedule).await.is(200);
        send(t, to(), ("if-none-match", "*"), &schedule).await.is_error(412, "precondition_failed");
        let schema = json!({"schema": {"type": "object"}});
        let to = || (Method::PUT, "/v1/job-types/new");
        send(t, to(), ("if-none-match", "*"), &schema).await.is(200);
        send(t, to(), ("if-none-match", "*"), &schema).await.is_error(412, "precondition_failed");
        let gone = || (Method::DELETE, "/v1/recurring/x");
        let late = send(t, gone(), ("if-match", "\"other\""), &json!({})).await;
        late.is_error(412, "precondition_failed");
        send(t, gone(), ("if-match", &etag(&made)), &json!({})).await.is_empty(204);
        t.get("/v1/recurring/x").await.is_error(404, "recurring_job_not_found");
    });
}

#[test]
fn of_many_writes_with_one_if_match_one_succeeds_on_any_number_of_nodes() {
    limited(async {
        let database = fresh_database().await;
        let one = TestServer::start(database.clone()).await;
        let other = TestServer::start(database).await;
        let here: LoneProject = one.project("main").await;
        let there = here.through(&other.url);
        for round in 1..=5 {
            let path = "/v1/queues/mail";
            let before = here.patch(path, json!({"max_concurrency": 1_000})).await.is(200);
            let tag = etag(&before);
            let tag = ("if-match", &*tag);
            let bodies = [1, 2, 3, 4].map(|it| json!({"max_concurrency": round * 10 + it}));
            let to = || (Method::PATCH, path);
            let (a, b, c, d) = tokio::join!(
                send(&here, to(), tag, &bodies[0]),
                send(&there, to(), tag, &bodies[1]),
                send(&here, to(), tag, &bodies[2]),
                send(&there, to(), tag, &bodies[3]),
            );
            let done = [&a, &b, &c, &d].iter().filter(|it| it.status == 200).count();
            let refused = [&a, &b, &c, &d].iter().filter(|it| it.status == 412).count();
            assert_eq!((done, refused), (1, 3), "{round}");
        }
        one.stop().await;
        other.stop().await;
    });
}
