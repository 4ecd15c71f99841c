//! The example workers do what `docs/worker-guide.md` asks of a worker: each against a real server.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
};

use crate::harness::{TestProject, eventually, run};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
};

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples")
}

/// A scratch folder for what an example has to be compiled into.
pub fn scratch(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&dir).expect("a folder");
    dir
}

pub async fn must(command: &mut Command) {
    let output = command.output().await.expect("it runs");
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {said}");
}

/// Starts a worker and waits until it has registered.
pub async fn start(t: &TestProject, command: &mut Command) -> Child {
    command
        .env("FENCEPOST_URL", &t.url)
        .env("FENCEPOST_KEY", &t.api_key)
        // So that a heartbeat comes every second.
        .env("FENCEPOST_LEASE_SECONDS", "3")
        .stdout(Stdio::piped())
        .kill_on_drop(true);
    let mut child = command.spawn().expect("it starts");
    let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
    let first = lines.next_line().await.expect("a line");
    assert_eq!(first.as_deref(), Some("ready"), "{command:?}");
    child
}

pub async fn greet(t: &TestProject, payload: Value) -> String {
    t.enqueue(json!({"job_type": "greet", "payload": payload, "timeout_seconds": 60})).await
}

/// Succeeds, fails, keeps its lease, obeys a cancel, and drains on SIGTERM.
pub async fn does_its_duties(t: &TestProject, command: &mut Command) {
    let mut child = start(t, command).await;
    let hello = greet(t, json!({"name": "Ada"})).await;
    let job = t.job_becomes(&hello, "succeeded").await;
    assert_eq!(job["result"], json!({"greeting": "Hello, Ada!"}));

    let bad = greet(t, json!({"fail": true})).await;
    let job = eventually("the first failure", async || {
        let job = t.job(&bad).await;
        (job["failures"] == 1).then_some(job)
    })
    .await;
    let message = job["last_error"]["message"].as_str().expect("a message").trim();
    assert_eq!(message, "asked to fail");

    // Longer than its lease.
    let long = greet(t, json!({"sleep_seconds": 4})).await;
    let job = t.job_becomes(&long, "succeeded").await;
    assert_eq!((&job["attempt"], &job["failures"]), (&json!(1), &json!(0)));

    let endless = greet(t, json!({"sleep_seconds": 600})).await;
    t.job_becomes(&endless, "processing").await;
    t.post(&format!("/v1/jobs/{endless}/cancel"), json!({})).await.is(200);
    let job = t.job_becomes(&endless, "cancelled").await;
    assert_eq!(job["attempts"][0]["outcome"], "cancelled");

    let last = greet(t, json!({"sleep_seconds": 1})).await;
    t.job_becomes(&last, "processing").await;
    let pid = child.id().expect("it runs").to_string();
    must(Command::new("sh").args(["-c", "kill -TERM \"$0\"", &pid])).await;
    let later = greet(t, json!({})).await;
    assert!(child.wait().await.expect("it ends").success(), "it drains");
    assert_eq!(t.job(&last).await["state"], "succeeded");
    assert_eq!(t.job(&later).await["attempt"], 0, "it took no more");
    let workers = t.get("/v1/workers").await.is(200);
    assert_eq!(workers["workers"][0]["state"], "terminated", "it deregistered");
}

#[test]
fn the_worker_in_python() {
    run(async |t| {
        does_its_duties(t, Command::new("python3").arg(examples().join("python/worker.py"))).await;
    });
}

#[test]
fn the_worker_in_bash() {
    run(async |t| {
        does_its_duties(t, &mut Command::new(examples().join("bash/worker.sh"))).await;
    });
}

#[test]
fn the_worker_in_rust() {
    run(async |t| {
        // Cargo builds examples beside the tests.
        let target = Path::new(env!("CARGO_BIN_EXE_fencepost")).parent().expect("a folder");
        does_its_duties(t, &mut Command::new(target.join("examples/worker"))).await;
    });
}

#[test]
fn the_worker_in_typescript() {
    run(async |t| {
        let dir = scratch("typescript");
        for file in ["package.json", "package-lock.json", "tsconfig.json", "worker.ts"] {
            std::fs::copy(examples().join("typescript").join(file), dir.join(file))
                .expect("a copy");
        }
        must(Command::new("npm").args(["ci", "--no-audit", "--no-fund"]).current_dir(&dir)).await;
        must(Command::new("npm").args(["run", "build"]).current_dir(&dir)).await;
        does_its_duties(t, Command::new("node").arg(dir.join("worker.js"))).await;
    });
}

#[test]
fn the_worker_in_go() {
    run(async |t| {
        let program = scratch("go").join("worker");
        let mut build = Command::new("go");
        build.args(["build", "-o"]).arg(&program).arg(".");
        must(build.current_dir(examples().join("go"))).await;
        does_its_duties(t, &mut Command::new(&program)).await;
    });
}
