//! What the README shows works as shown.

use std::path::PathBuf;

use crate::harness::{TestProject, run, run_alone};
use serde_json::json;
use tokio::process::{Child, Command};

const MAX_WORKER_LINES: usize = 8;
const WORKERS: usize = 4;
const JOBS: usize = 1_000;

fn worker() -> String {
    let readme = include_str!("../../README.md");
    let (_, after) = readme.split_once("```python\n").expect("a worker in Python");
    after.split_once("```").expect("its end").0.to_owned()
}

/// The README's worker, running.
fn start(t: &TestProject, program: &PathBuf) -> Child {
    Command::new("python3")
        .arg(program)
        .env("PYTHONPATH", concat!(env!("CARGO_MANIFEST_DIR"), "/clients/python"))
        .env("FENCEPOST_URL", &t.url)
        .env("FENCEPOST_KEY", &t.api_key)
        .kill_on_drop(true)
        .spawn()
        .expect("python3 runs")
}

#[test]
fn the_script_that_is_a_worker_greets() {
    run(async |t| {
        let readme = include_str!("../../README.md");
        let (_, after) = readme.split_once("<<'END'\n").expect("a script");
        let script = after.split_once("END\n").expect("its end").0;
        let path = std::env::temp_dir().join(format!("fencepost-greet-{}.sh", std::process::id()));
        std::fs::write(&path, script).expect("the script is written");
        let mut worker = Command::new(env!("CARGO_BIN_EXE_fencepost"))
            .args(["worker", "--queue", "default", "--exec"])
            .arg(format!("sh {}", path.display()))
            .env("FENCEPOST_URL", &t.url)
            .env("FENCEPOST_KEY", &t.api_key)
            .kill_on_drop(true)
            .spawn()
            .expect("it starts");
        let id = t.enqueue(json!({"payload": {"name": "Ada"}})).await;
        assert_eq!(t.job_becomes(&id, "succeeded").await["result"], "Hello, Ada!");
        worker.kill().await.expect("it is killed");
        std::fs::remove_file(path).expect("the script goes");
    });
}

#[test]
fn the_worker_in_python_is_short() {
    let lines = worker().lines().count();
    assert!(lines <= MAX_WORKER_LINES, "{lines}");
}

#[test]
fn the_worker_in_python_works_a_thousand_jobs() {
    run_alone(async |t| {
        let program =
            std::env::temp_dir().join(format!("fencepost-worker-{}.py", std::process::id()));
        std::fs::write(&program, worker()).expect("the program is written");
        let workers: Vec<_> = (0..WORKERS).map(|_| start(t, &program)).collect();
        for batch in 0..JOBS / 500 {
            let jobs: Vec<_> = (0..500)
                .map(|it| json!({"job_type": "hello", "payload": batch * 500 + it}))
                .collect();
            t.post("/v1/jobs/batch", json!({"jobs": jobs})).await.is(201);
        }
        let done = "select count(*) from finished_jobs
                    where state = 'succeeded' and attempt = 1 and result like '{\"hello\": %}'";
        t.database.until_at_least(done, JOBS as i64).await;
        assert_eq!(t.database.number("select count(*) from jobs").await, 0);
        assert_eq!(t.database.number("select count(*) from workers").await, WORKERS as i64);
        drop(workers);
        std::fs::remove_file(program).expect("the program goes");
    });
}
