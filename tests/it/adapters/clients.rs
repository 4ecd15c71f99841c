//! Programs that were written for other systems, each as it is but for base URL and key.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
};

use crate::{
    docs::read,
    harness::{TestProject, run},
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::Command,
    sync::OnceCell,
};

fn program(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/adapters").join(name)
}

/// The base URL of an adapter with the key in it, for clients that cannot set a header.
fn with_key(t: &TestProject, adapter: &str) -> String {
    let address = t.url.strip_prefix("http://").expect("an http URL");
    format!("http://:{}@{address}/{adapter}", t.api_key)
}

/// What a program prints, if it ends well.
async fn output(command: &mut Command) -> String {
    let output = command.kill_on_drop(true).output().await.expect("it runs");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {said}{error}");
    said
}

/// Installs Python packages, as pip's arguments name them, into a folder of their own.
async fn install(target: &Path, wanted: &[&str]) {
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]);
    pip.arg("--target").arg(target).args(wanted);
    output(&mut pip).await;
}

/// The Python packages, installed once beside the build.
async fn packages() -> &'static Path {
    static INSTALLED: OnceCell<PathBuf> = OnceCell::const_new();
    let installed = INSTALLED.get_or_init(async || {
        let list = program("requirements.txt");
        let wanted = std::fs::read(&list).expect("a text");
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("adapters-python");
        let kept = target.join("requirements.txt");
        if std::fs::read(&kept).ok() != Some(wanted.clone()) {
            let _ = std::fs::remove_dir_all(&target);
            install(&target, &["-r", list.to_str().expect("a text")]).await;
            std::fs::write(kept, wanted).expect("it is written");
        }
        target
    });
    installed.await
}

async fn python(name: &str) -> Command {
    let mut command = Command::new("python3");
    command.arg(program(name)).env("PYTHONPATH", packages().await);
    command
}

#[test]
fn mobius_calls_in_curl() {
    run(async |t| {
        let id = t.enqueue(json!({"job_type": "summarize", "payload": {"page": 1}})).await;
        let mut script = Command::new("sh");
        script.arg(program("mobius.sh")).env("API_BASE", format!("{}/mobius", t.url));
        script.env("PROJECT", &t.slug).env("MOBIUS_API_KEY", &t.api_key);
        let said = output(&mut script).await;
        assert!(
            said.contains(&format!("claimed {id}-1: summarize summarize, heartbeat every 30 s"))
        );
        assert!(said.ends_with("completed\n"), "{said}");
        assert_eq!(t.job(&id).await["result"], json!({"summary": "done"}));
    });
}

#[test]
fn a_mobius_worker_with_the_published_client() {
    run(async |t| {
        let summary = json!({"job_type": "summarize", "payload": {"page": 7}});
        let done = t.enqueue(summary).await;
        let failing = json!({"job_type": "fail", "payload": {"why": "oops"}, "max_attempts": 1});
        let failed = t.enqueue(failing).await;
        let mut program = python("mobius.py").await;
        program.env("MOBIUS_URL", format!("{}/mobius", t.url)).env("JOBS", "2");
        program.env("PROJECT", &t.slug).env("MOBIUS_API_KEY", &t.api_key);
        let said = output(&mut program).await;
        assert!(said.contains("summarized 7 1\n") && said.ends_with("stopped\n"), "{said}");
        assert_eq!(t.job(&done).await["result"], json!({"summary": "page 7"}));
        let failed = t.job(&failed).await;
        assert_eq!(failed["state"], "dead_letter");
        assert_eq!(failed["last_error"]["message"], "oops");
        let events = t.get(&format!("/v1/jobs/{done}/events")).await.is(200);
        let events = events["events"].as_array().expect("events");
        assert!(events.iter().any(|it| it["type"] == "summary.begun"), "{events:?}");
        let worker = t.get("/v1/workers").await.is(200)["workers"][0].clone();
        assert_eq!(
            (&worker["worker_id"], &worker["concurrency"]),
            (&json!("summaries"), &json!(2))
        );
    });
}

/// Other versions of the client that claim jobs.
const MOBIUS_VERSIONS: [&str; 5] = ["0.0.5", "0.0.8", "0.0.16", "0.0.19", "0.0.20"];

#[test]
#[ignore = "takes long: `make nightly` runs it"]
fn other_versions_of_the_mobius_client_work_jobs() {
    run(async |t| {
        for version in MOBIUS_VERSIONS {
            let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("mobius-{version}"));
            let _ = std::fs::remove_dir_all(&target);
            install(&target, &[&format!("deepnoodle-mobius=={version}")]).await;
            let id = t.enqueue(json!({"job_type": "summarize", "payload": {"page": 7}})).await;
            let mut program = python("mobius.py").await;
            let paths = std::env::join_paths([&*target, packages().await]).expect("paths");
            program.env("PYTHONPATH", paths).env("JOBS", "1").env("PROJECT", &t.slug);
            program
                .env("MOBIUS_URL", format!("{}/mobius", t.url))
                .env("MOBIUS_API_KEY", &t.api_key);
            let said = output(&mut program).await;
            assert!(said.contains("summarized 7 1\n"), "{version}: {said}");
            assert_eq!(t.job(&id).await["state"], "succeeded", "{version}");
        }
    });
}

#[test]
fn the_page_names_the_versions_of_clients_that_are_run() {
    let page = read("docs/protocols.md");
    let table = page.split("\n## ").find(|it| it.starts_with("Clients that were run"));
    let table = table.expect("the chapter");
    let listed = read("examples/adapters/requirements.txt");
    let version = |package: &str| {
        let line = listed.lines().find_map(|it| it.strip_prefix(&format!("{package}==")));
        line.expect("a version").to_owned()
    };
    for package in ["deepnoodle-mobius", "orch8-io-sdk", "zeridion-flare"] {
        let version = version(package);
        let row = table.lines().find(|it| it.contains(&format!("`{package}`"))).expect("a row");
        assert!(row.contains(&version), "{row}");
    }
    for version in MOBIUS_VERSIONS {
        assert!(table.contains(version), "{version}");
    }
}

#[test]
fn orch8_calls_in_curl_with_the_key_in_the_url() {
    run(async |t| {
        let payload = json!({"image_url": "https://cdn/x.png", "width": 800});
        let id = t.enqueue(json!({"job_type": "process_image", "payload": payload})).await;
        let mut script = Command::new("sh");
        script.arg(program("orch8.sh")).env("ORCH8_URL", with_key(t, "orch8"));
        let said = output(&mut script).await;
        assert!(said.contains("attempt 1") && said.ends_with("completed\n"), "{said}");
        assert_eq!(t.job(&id).await["result"]["url"], "https://cdn/x.png?w=800");
    });
}

#[test]
fn a_sequence_with_the_published_client_of_orch8() {
    run(async |t| {
        let mut program = python("orch8_sequence.py").await;
        program.env("ORCH8_URL", format!("{}/orch8", t.url)).env("ORCH8_KEY", &t.api_key);
        let said = output(&mut program).await;
        assert_eq!(said, "charge 7\nrefund\nship Ada\ncompleted True\n");
    });
}

#[test]
fn an_orch8_worker_in_javascript() {
    run(async |t| {
        let enqueue = async |payload: Value| {
            let retry = json!({"initial_seconds": 0, "jitter_seconds": 0});
            let job = json!({"job_type": "process_image", "payload": payload, "retry": retry, "max_attempts": 2});
            t.enqueue(job).await
        };
        let good = enqueue(json!({"image_url": "u", "width": 8})).await;
        let bad = enqueue(json!({})).await;
        let large = enqueue(json!({"image_url": "u", "width": 20_000})).await;
        let mut worker = Command::new("node");
        worker.arg(program("orch8.mjs")).env("ORCH8_URL", format!("{}/orch8", t.url));
        // The large one is tried twice.
        worker.env("ORCH8_KEY", &t.api_key).env("ORCH8_TASKS", "4");
        let said = output(&mut worker).await;
        assert_eq!(said, "completed 1\nfailed 1\nfailed 1\nfailed 2\n");
        assert_eq!(t.job(&good).await["result"]["resized_url"], "u?w=8");
        let over = async |id: &str| {
            (t.job(id).await["state"].clone(), t.job(id).await["failures"].clone())
        };
        assert_eq!(over(&bad).await, (json!("dead_letter"), json!(1)));
        assert_eq!(over(&large).await, (json!("dead_letter"), json!(2)));
    });
}

#[test]
fn workflow_graph_calls_in_curl() {
    run(async |t| {
        let job = json!({"payload": {"command": "echo hello"}, "labels": ["docker"]});
        let id = t.enqueue(job).await;
        let mut script = Command::new("sh");
        script.arg(program("workflow_graph.sh")).env("WG_SERVER", with_key(t, "workflow-graph"));
        assert_eq!(output(&mut script).await, "completed\n");
        assert_eq!(t.job(&id).await["result"], json!({"stdout": "hello"}));
    });
}

#[test]
fn a_workflow_graph_worker_in_python_runs_a_workflow_and_retries_its_failure() {
    run(async |t| {
        let mut worker = python("workflow_graph.py").await;
        worker.env("WG_SERVER", with_key(t, "workflow-graph")).env("WG_LABELS", "python");
        worker.env("WG_HEARTBEAT_SECONDS", "0.1").env("WG_JOBS", "4").kill_on_drop(true);
        let mut child = worker.stdout(Stdio::piped()).spawn().expect("it starts");
        let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        let mut next = async || lines.next_line().await.expect("a line").unwrap_or_default();
        assert_eq!(next().await, "ready");
        let jobs = json!([
            {"id": "build", "command": "echo built"},
            {"id": "test", "command": "echo oops >&2; exit 3", "depends_on": ["build"], "max_retries": 1},
        ]);
        let path = "/workflow-graph/api/workflows";
        let workflow = t.post(path, json!({"name": "ci", "jobs": jobs})).await.is(201);
        let id = workflow["id"].as_str().expect("an id");
        t.act(&format!("{path}/{id}/run")).await.is_empty(202);
        assert_eq!(next().await, "build 200");
        assert_eq!((next().await, next().await), ("test 200".to_owned(), "test 200".to_owned()));
        let over = t.get(&format!("{path}/{id}/status")).await.is(200)["jobs"].clone();
        assert_eq!(
            (&over[0]["status"], &over[1]["status"]),
            (&json!("success"), &json!("failure"))
        );
        assert_eq!(over[1]["attempt"], 1);
        let logs = t.get(&format!("{path}/{id}/jobs/test/logs")).await.is(200);
        assert_eq!((&logs[0]["data"], &logs[0]["stream"]), (&json!("oops\n"), &json!("stderr")));
        // A long job keeps its lease; a cancelled one is killed.
        let endless = t.enqueue(json!({"payload": "exec sleep 600"})).await;
        t.job_becomes(&endless, "processing").await;
        t.act(&format!("/v1/jobs/{endless}/cancel")).await.is(200);
        t.job_becomes(&endless, "cancelled").await;
        assert!(child.wait().await.expect("it ends").success());
    });
}

#[test]
fn open_job_spec_calls_in_curl() {
    run(async |t| {
        let jobs = [t.enqueue(json!({"queue": "critical"})).await, t.enqueue(json!({})).await];
        let mut script = Command::new("sh");
        script.arg(program("open_job_spec.sh")).env("OJS_URL", format!("{}/ojs/v1", t.url));
        script.env("OJS_KEY", &t.api_key);
        assert_eq!(output(&mut script).await, "running: 2 jobs\ngone\n");
        for id in jobs {
            let job = t.job(&id).await;
            assert_eq!(
                (&job["state"], &job["result"]),
                (&json!("succeeded"), &json!({"done": true}))
            );
            assert_eq!(job["worker_id"], "worker-abc-123", "its heartbeat has adopted the lease");
        }
    });
}

#[test]
fn the_published_client_of_the_native_wires_ancestor() {
    run(async |t| {
        let mut program = python("flare.py").await;
        program.env("FLARE_URL", format!("{}/v1", t.url)).env("FLARE_API_KEY", &t.api_key);
        let said = output(&mut program).await;
        for line in [
            "scheduled scheduled cancelled",
            "once True",
            "sent ada 1",
            "succeeded 1",
            "dead 2 ValueError attempt 2",
            "again True",
            "kept None",
            "stopped cancelled",
            "ticked",
            "listed 1 True True",
            "missing None",
            "ConflictError invalid_state True",
            "NotFoundError job_not_found True",
            "AuthError unauthorized True",
            "FlareError invalid_request True",
        ] {
            assert!(said.lines().any(|it| it == line), "{line}\n---\n{said}");
        }
        let schedule = t.get("/v1/recurring/rjob_Tick").await.is(200);
        assert_eq!(
            (&schedule["job_type"], &schedule["queue"]),
            (&json!("Demo.Jobs.Tick"), &json!("mail"))
        );
        let workers = t.get("/v1/workers").await.is(200)["workers"].clone();
        assert!(
            workers[0]["worker_id"].as_str().is_some_and(|it| it.starts_with("wrk_")),
            "{workers}"
        );
    });
}
