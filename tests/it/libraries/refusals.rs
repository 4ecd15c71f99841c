//! What the libraries do when the server refuses a request.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::process::Command;

use super::{clients, go, python, rust, typescript};
use crate::harness::{TestServer, fresh_database, limited, repeatedly, run};

#[test]
fn each_library_waits_as_a_rate_limit_says() {
    // More than come free while a program starts.
    const JOBS: u32 = 20;
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project_with("main", "free", json!({"produce_per_minute": 600})).await;
        for mut command in [python(), typescript(), go(), rust()].map(Command::from) {
            repeatedly("the rate to be used up", async || {
                let reply = t.post("/v1/jobs", json!({"job_type": "other"})).await;
                (reply.status == 429).then_some(())
            })
            .await;
            command.args(["enqueue", &JOBS.to_string()]).kill_on_drop(true);
            command.env("FENCEPOST_URL", &t.url).env("FENCEPOST_KEY", &t.api_key);
            let output = command.output().await.expect("it runs");
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{command:?}: {said}");
        }
        let stored = "select count(*) from jobs where job_type = 'greet'";
        assert_eq!(t.database.number(stored).await, i64::from(JOBS) * 4);
        server.stop().await;
    });
}

#[test]
fn each_library_says_at_once_that_a_queue_is_full_and_waits_for_room_if_asked() {
    // Far below the minute for which they retry what may pass.
    const AT_ONCE: Duration = Duration::from_secs(20);
    run(async |t| {
        t.patch("/v1/queues/default", json!({"max_waiting": 1})).await.is(200);
        for program in [python, typescript, go, rust] {
            let enqueue = |retry_seconds: Option<&str>| {
                let mut command = Command::from(program());
                command.args(["enqueue", "1"]).kill_on_drop(true);
                command.env("FENCEPOST_URL", &t.url).env("FENCEPOST_KEY", &t.api_key);
                command.envs(retry_seconds.map(|it| ("RETRY_SECONDS", it)));
                command
            };
            // What is counted of the last round comes a little later.
            let full = repeatedly("room in the queue", async || {
                let reply = t.post("/v1/jobs", json!({"job_type": "other"})).await;
                (reply.status == 201).then(|| reply.json()["id"].as_str().map(str::to_owned))?
            })
            .await;
            let output = tokio::time::timeout(AT_ONCE, enqueue(None).output()).await;
            let output = output.expect("it ends at once").expect("it runs");
            let said = String::from_utf8_lossy(&output.stderr).to_lowercase();
            let names_it = ["queue_full", "queuefull"].iter().any(|it| said.contains(it));
            assert!(!output.status.success() && names_it, "{said}");
            let mut patient = enqueue(Some("60"));
            let (output, ()) = tokio::join!(patient.output(), async {
                t.act(&format!("/v1/jobs/{full}/cancel")).await.is(200);
            });
            assert!(output.expect("it runs").status.success(), "{patient:?}");
            let stored = t.wait_and_lease("w").await;
            t.ack(&stored, "w", "succeeded").await.is(200);
        }
    });
}

#[test]
fn each_library_has_all_codes_of_errors() {
    let document = fencepost_http::openapi::document();
    let document = serde_json::to_value(document).expect("JSON");
    let codes = document["components"]["schemas"]["ErrorCode"]["enum"].as_array().expect("codes");
    let codes: Vec<_> = codes.iter().filter_map(Value::as_str).collect();
    let read = |file: &str| std::fs::read_to_string(clients().join(file)).expect("a file");
    for file in ["python/fencepost/codes.py", "typescript/index.d.ts", "go/codes.go"] {
        let text = read(file);
        let missing: Vec<_> =
            codes.iter().filter(|it| !text.contains(&format!("\"{it}\""))).collect();
        assert!(missing.is_empty(), "{file}: {missing:?}");
    }
    let text = read("rust/src/codes.rs");
    for code in codes {
        let name: String =
            code.split('_').map(|word| word[..1].to_uppercase() + &word[1..]).collect();
        assert!(text.contains(&format!("    {name},")), "{name}");
    }
}

#[test]
fn typed_libraries_have_all_fields_of_an_enqueue() {
    // Headers, arguments of their own, and what only a workflow has.
    const OTHERS: [&str; 5] = ["idempotency_key", "job_type", "key", "payload", "template"];
    let document = fencepost_http::openapi::document();
    let document = serde_json::to_value(document).expect("JSON");
    let fields = &document["components"]["schemas"]["EnqueueRequest"]["properties"];
    let names = fields.as_object().expect("fields").keys().map(String::as_str);
    let names: Vec<_> = names.filter(|it| !OTHERS.contains(it)).collect();
    assert!(names.len() > 20, "{names:?}");
    for (file, mark) in [("python/fencepost/fields.py", ": "), ("typescript/index.d.ts", "?: ")] {
        let text = std::fs::read_to_string(clients().join(file)).expect("a file");
        let missing: Vec<_> =
            names.iter().filter(|it| !text.contains(&format!(" {it}{mark}"))).collect();
        assert!(missing.is_empty(), "{file}: {missing:?}");
    }
}
