//! Every operation of every adapter's document: no call passes without a key, with too few rights,
//! or with another project's.

use fencepost_adapters as adapters;
use fencepost_domain::ids::JobId;

use crate::harness::{Reply, TestProject, TestServer, fresh_database, limited, run};
use reqwest::Method;
use serde_json::{Value, json};

/// An operation with its parameters filled in.
#[derive(Clone)]
struct Operation {
    adapter: &'static str,
    id: String,
    method: Method,
    path: String,
    /// The path with the names of its parameters.
    template: String,
    is_public: bool,
}

impl Operation {
    /// The same with this id for each parameter but the project.
    fn with(&self, project: &str, id: &str) -> Self {
        let template = self.template.replace("{project}", project);
        let segments =
            template.split('/').map(|segment| if segment.starts_with('{') { id } else { segment });
        Self { path: segments.collect::<Vec<_>>().join("/"), ..self.clone() }
    }
}

/// The ids of a job at the adapters, and of its project.
struct Named {
    project: String,
    job_id: String,
    lease_id: String,
}

fn operations(named: &Named) -> Vec<Operation> {
    let id: JobId = named.job_id.parse().expect("an id");
    let task = named.job_id.replace("job_", "task_");
    let lease = format!("{}.1.{}", named.job_id, named.lease_id);
    let mut found = Vec::new();
    for (adapter, document) in adapters::documents() {
        let document: Value = serde_json::from_str(&document).expect("JSON");
        for (path, methods) in document["paths"].as_object().expect("paths") {
            for (method, operation) in methods.as_object().expect("methods") {
                let job = match adapter {
                    "mobius" => format!("{}-1", named.job_id),
                    "orch8" => format!("{task}-1"),
                    "ojs" => id.0.to_string(),
                    _ => named.job_id.clone(),
                };
                let template = format!("/{adapter}{path}");
                let path = path
                    .replace("{project}", &named.project)
                    .replace("{lease_id}", &lease)
                    .replace("{workflow_id}/{job_id}", &format!("{job}/{job}"))
                    .replace("{workflow_id}/jobs/{job_id}", &format!("{job}/jobs/{job}"))
                    .replace("/runs/{id}", &format!("/runs/{}", named.job_id))
                    .replace("{id}", &job)
                    .replace("{worker_id}", "w")
                    .replace("{name}", "x");
                assert!(!path.contains('{'), "{adapter}: {path}");
                found.push(Operation {
                    adapter,
                    id: operation["operationId"].as_str().expect("an id").to_owned(),
                    method: method.to_uppercase().parse().expect("a method"),
                    path: format!("/{adapter}{path}"),
                    template,
                    is_public: operation["security"] == json!([{}]),
                });
            }
        }
    }
    assert!(found.len() > 50, "{}", found.len());
    found
}

/// A body that passes the checks of whatever looks at a job.
fn body(operation: &Operation) -> Value {
    json!({
        "worker_id": "w", "attempt": 1, "status": "completed", "events": [{"type": "a"}], "output": {},
        "error": if operation.adapter == "ojs" { json!({"message": "x"}) } else { json!("x") },
        "progress": 0.5,
        "chunks": [{"sequence": 0, "data": "x", "timestamp_ms": 0, "stream": "stdout"}],
    })
}

async fn call(t: &TestProject, operation: &Operation, key: Option<&str>) -> Reply {
    let url = format!("{}{}", t.url, operation.path);
    let mut request = t.client.request(operation.method.clone(), url);
    if let Some(key) = key {
        request = request.bearer_auth(key);
    }
    if operation.method != Method::GET {
        request = request.json(&body(operation));
    }
    Reply::of(request.send().await.expect("an answer")).await
}

/// A job under a lease of this project.
async fn held(t: &TestProject, project: &str) -> Named {
    let job_id = t.enqueue(json!({"payload": {"command": "x"}})).await;
    let lease = t.lease("w").await;
    let lease_id = lease["lease_id"].as_str().expect("an id").to_owned();
    Named { project: project.to_owned(), job_id, lease_id }
}

#[test]
fn no_call_passes_without_a_key_or_with_too_few_rights() {
    run(async |t| {
        let named = held(t, &t.slug).await;
        let reader = json!({"name": "reader", "scopes": ["read"]});
        let reader = t.post("/v1/keys", reader).await.is(201);
        let reader = reader["secret"].as_str().expect("a key");
        for operation in operations(&named) {
            let reported = format!("{} {}", operation.adapter, operation.id);
            let keyless = call(t, &operation, None).await.status.as_u16();
            assert_eq!(keyless, if operation.is_public { 200 } else { 401 }, "{reported}");
            let forged = call(t, &operation, Some("fp_live_nonsense")).await.status.as_u16();
            assert!(operation.is_public || forged == 401, "{reported}");
            if operation.method != Method::GET {
                let read_only = call(t, &operation, Some(reader)).await;
                assert_eq!(read_only.status.as_u16(), 403, "{reported}: {read_only:?}");
            }
        }
        assert_eq!(t.job(&named.job_id).await["state"], "processing");
    });
}

#[test]
fn a_control_character_in_a_path_is_refused_in_one_way() {
    run(async |t| {
        let named = held(t, &t.slug).await;
        let mut tried = 0;
        for operation in operations(&named) {
            let operation = operation.with(&t.slug, "%01");
            if operation.path.contains("%01") {
                let reply = call(t, &operation, Some(&t.api_key)).await;
                let reported = format!("{} {}: {reply:?}", operation.adapter, operation.id);
                assert_eq!(reply.status.as_u16(), 400, "{reported}");
                assert!(reply.text.contains("U+0001"), "{reported}");
                tried += 1;
            }
        }
        assert!(tried > 20, "{tried}");
    });
}

#[test]
fn an_id_that_names_nothing_is_not_found_however_odd_it_is() {
    run(async |t| {
        let named = held(t, &t.slug).await;
        let long = "x".repeat(300);
        let odd = ["x", "-", "0", "%20", "%C3%A9", "..%2Fx", "%25", "job_", &long];
        for operation in operations(&named) {
            // Only an id names what is there; a queue or a worker may have any name.
            let Some(start) = operation.template.find("id}") else { continue };
            if operation.template[..start].ends_with("{worker_") {
                continue;
            }
            for id in odd {
                let operation = operation.with(&t.slug, id);
                let reply = call(t, &operation, Some(&t.api_key)).await;
                let expected = if operation.template.contains("{lease_id}") { 409 } else { 404 };
                let reported = format!("{} {} {id}: {reply:?}", operation.adapter, operation.id);
                assert_eq!(reply.status.as_u16(), expected, "{reported}");
            }
        }
    });
}

#[test]
fn another_projects_jobs_look_like_jobs_that_are_not_there() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let (mine, other) = (server.project("main").await, server.project("other").await);
        let named = held(&mine, "other").await;
        let missing = Named {
            job_id: JobId::generate().to_string(),
            project: named.project.clone(),
            lease_id: named.lease_id.clone(),
        };
        let pairs = operations(&named).into_iter().zip(operations(&missing));
        for (theirs, missing) in pairs.filter(|it| it.0.path != it.1.path) {
            let (seen, unseen) = (
                call(&other, &theirs, Some(&other.api_key)).await,
                call(&other, &missing, Some(&other.api_key)).await,
            );
            let reported = format!("{} {}: {seen:?}", theirs.adapter, theirs.id);
            assert_eq!(seen.status, unseen.status, "{reported}");
            assert!([404, 409].contains(&seen.status.as_u16()), "{reported}");
            assert!(
                !seen.text.contains("processing") && !seen.text.contains("active"),
                "{reported}"
            );
        }
        let mut foreign = named;
        foreign.project = "main".to_owned();
        let of_project = |it: &Operation| it.adapter == "mobius" && it.path.contains("/projects/");
        for operation in operations(&foreign).into_iter().filter(of_project) {
            let reply = call(&other, &operation, Some(&other.api_key)).await;
            assert_eq!(reply.status.as_u16(), 404, "{}", operation.id);
        }
        let job = mine.job(&foreign.job_id).await;
        assert_eq!((&job["state"], &job["attempt"]), (&json!("processing"), &json!(1)));
        server.stop().await;
    });
}
