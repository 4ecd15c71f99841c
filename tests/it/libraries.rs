//! The client libraries of `clients/`: each as a user would run it, against a real server, over a
//! network that loses answers, and with a worker that is killed.

mod lists;
mod refusals;

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use crate::{
    examples::{does_its_duties, greet, must, scratch, start},
    harness::{Process, TestProject, TestServer, fresh_database, limited, run, run_for, until},
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
    process::Command,
    sync::oneshot,
};

const JOBS: usize = 1_000;
/// One of this many pieces of answers is lost with its connection.
const LOST_OF: usize = 40;
/// What comes instead of half of them.
const GATEWAY_ANSWER: &[u8] =
    b"HTTP/1.1 502 Bad Gateway\r\ncontent-type: text/html\r\ncontent-length: 22\r\n\
      connection: close\r\n\r\n<html>try again</html>";

fn clients() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("clients")
}

/// A way to the server that loses answers, or gives those of a gateway instead. Returns its URL.
async fn lossy(url: &str) -> String {
    let server = url.trim_start_matches("http://").to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        static ANSWERS: AtomicUsize = AtomicUsize::new(0);
        while let Ok((mut client, _)) = listener.accept().await {
            let server = server.clone();
            tokio::spawn(async move {
                let Ok(mut upstream) = TcpStream::connect(server).await else { return };
                let (mut sent, mut answered) = (vec![0; 65_536], vec![0; 65_536]);
                loop {
                    tokio::select! {
                        read = client.read(&mut sent) => match read {
                            Ok(1..) => {
                                let read = read.unwrap_or_default();
                                if upstream.write_all(&sent[..read]).await.is_err() {
                                    return;
                                }
                            }
                            _ => return,
                        },
                        read = upstream.read(&mut answered) => match read {
                            Ok(1..) => {
                                let number = ANSWERS.fetch_add(1, Ordering::Relaxed);
                                let read = read.unwrap_or_default();
                                if number % LOST_OF == LOST_OF - 1 {
                                    if number / LOST_OF % 2 == 1 {
                                        let _ = client.write_all(GATEWAY_ANSWER).await;
                                        let _ = client.shutdown().await;
                                    }
                                    return;
                                }
                                if client.write_all(&answered[..read]).await.is_err() {
                                    return;
                                }
                            }
                            _ => return,
                        },
                    }
                }
            });
        }
    });
    format!("http://{address}")
}

/// What version 0.2.0 answers to a worker that registers `beat_seconds`.
const BEATS_REFUSED: &str = r#"{"error": {"code": "invalid_request", "message": "unknown field",
    "details": [{"field": "beat_seconds", "message": "unknown field"}]}}"#;

/// A way to the server that refuses `beat_seconds`. Returns its URL, and how many requests have
/// named their project.
async fn without_beats(url: &str) -> (String, Arc<AtomicUsize>) {
    let server = url.trim_start_matches("http://").to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let named = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&named);
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let counted = Arc::clone(&counted);
            let upstream = TcpStream::connect(&server).await.expect("the server");
            let (mut client, mut to_client) = client.into_split();
            let (mut answers, mut upstream) = upstream.into_split();
            let (refuse, refused) = oneshot::channel();
            tokio::spawn(async move {
                let mut sent = vec![0; 65_536];
                while let Ok(read @ 1..) = client.read(&mut sent).await {
                    let text = String::from_utf8_lossy(&sent[..read]).to_lowercase();
                    if text.contains("fencepost-project: proj_") {
                        counted.fetch_add(1, Ordering::Relaxed);
                    }
                    if text.contains("beat_seconds") {
                        let _ = refuse.send(());
                        return;
                    }
                    if upstream.write_all(&sent[..read]).await.is_err() {
                        return;
                    }
                }
            });
            tokio::spawn(async move {
                tokio::select! {
                    _ = tokio::io::copy(&mut answers, &mut to_client) => {}
                    Ok(()) = refused => {
                        let length = BEATS_REFUSED.len();
                        let head = format!("HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\
                            content-type: application/json\r\ncontent-length: {length}\r\n\r\n");
                        let answer = head + BEATS_REFUSED;
                        to_client.write_all(answer.as_bytes()).await.expect("the answer is read");
                    }
                }
            });
        }
    });
    (format!("http://{address}"), named)
}

async fn counts(t: &TestProject) -> Value {
    t.get("/v1/queues/default").await.is(200)["counts"].clone()
}

/// Works on a thousand jobs that its own producer enqueues, while answers are lost and one of two
/// workers is killed.
fn loses_nothing(command: impl Fn() -> std::process::Command) {
    run_for(Duration::from_secs(180), async {
        let server = TestServer::start(fresh_database().await).await;
        let t = &server.project("main").await;
        let url = lossy(&t.url).await;
        let program = || {
            let mut command = command();
            command.env("FENCEPOST_URL", &url).env("FENCEPOST_KEY", &t.api_key);
            command.env("FENCEPOST_LEASE_SECONDS", "3").env("CONCURRENCY", "8");
            command
        };
        let mut produce = Command::from(program());
        must(produce.args(["enqueue", &JOBS.to_string()])).await;
        assert_eq!(counts(t).await["pending"], json!(JOBS), "each job is stored once");

        let (mut killed, mut spared) =
            (Process::start(&mut program()), Process::start(&mut program()));
        let succeeded = async |jobs: usize| {
            until(format!("{jobs} succeeded jobs"), async || {
                counts(t).await["succeeded"].as_u64() >= Some(jobs as u64)
            })
            .await;
        };
        succeeded(JOBS / 5).await;
        killed.kill();
        for jobs in [JOBS / 2, JOBS * 3 / 4, JOBS] {
            succeeded(jobs).await;
        }
        assert_eq!(counts(t).await["dead_letter"], json!(0));
        assert!(spared.terminate().await, "it drains");
        server.stop().await;
    });
}

/// Rests between SIGTSTP and SIGCONT, and stays alive.
async fn rests(t: &TestProject, command: &mut Command) {
    let mut child = start(t, command).await;
    let pid = child.id().expect("it runs").to_string();
    let signal = async |name: &str| {
        must(Command::new("sh").args(["-c", "kill -$1 \"$0\"", &pid, name])).await;
    };
    let seen = async || {
        let workers = t.get("/v1/workers").await.is(200)["workers"].clone();
        let mut workers = workers.as_array().expect("workers").clone();
        workers.retain(|it| it["pid"] == child.id().expect("it runs"));
        (workers[0]["state"].clone(), workers[0]["last_seen_at"].clone())
    };
    signal("TSTP").await;
    until("the worker to be quiet", async || seen().await.0 == "quiet").await;
    let job = greet(t, json!({"name": "Ada"})).await;
    for _ in 0..3 {
        let before = seen().await.1;
        until("a sign of life", async || seen().await.1 != before).await;
    }
    assert_eq!(t.job(&job).await["attempt"], 0, "it takes no job");
    signal("CONT").await;
    t.job_becomes(&job, "succeeded").await;
    let later = greet(t, json!({"later": 1})).await;
    let job = t.job_becomes(&later, "succeeded").await;
    assert_eq!(["attempt", "snoozes", "failures"].map(|it| job[it].clone()), [2, 1, 0]);
    signal("TERM").await;
    assert!(child.wait().await.expect("it ends").success(), "it drains");
}

/// Killed in step 7 of 10, it continues there.
async fn resumes(t: &TestProject, command: impl Fn() -> std::process::Command) {
    let program = || {
        let mut command = Command::from(command());
        command.env("FENCEPOST_LEASE_SECONDS", "2");
        command
    };
    let mut killed = start(t, &mut program()).await;
    let job = greet(t, json!({"steps": 10, "hangs_at": 7})).await;
    until("six steps to be stored", async || t.job(&job).await["checkpoint_sequence"] == 6).await;
    killed.kill().await.expect("it is killed");
    let mut spared = start(t, &mut program()).await;
    let done = t.job_becomes(&job, "succeeded").await;
    assert_eq!(done["result"], json!({"ran": [7, 8, 9, 10], "sum": 385}));
    assert_eq!(["failures", "losses"].map(|it| done[it].clone()), [0, 1]);
    spared.kill().await.expect("it is killed");
}

#[test]
fn a_job_in_steps_continues_in_each_language_where_its_worker_was_killed() {
    run(async |t| {
        resumes(t, python).await;
        resumes(t, typescript).await;
        resumes(t, go).await;
        resumes(t, rust).await;
    });
}

#[test]
fn another_attempt_of_a_fan_out_makes_no_second_child() {
    run(async |t| {
        for (number, program) in [python, typescript, go, rust].into_iter().enumerate() {
            let parent = json!({
                "job_type": "greet", "payload": {"children": 2, "fails_first": true},
                "retry": {"initial_seconds": 0, "jitter_seconds": 0},
            });
            let parent = t.enqueue(parent).await;
            let mut worker = start(t, &mut Command::from(program())).await;
            let done = t.job_becomes(&parent, "succeeded").await;
            assert_eq!(done["attempt"], 2);
            let children = t.get("/v1/jobs?q=type:child").await.is(200);
            let children = children["jobs"].as_array().map(Vec::len);
            assert_eq!(children, Some(2 * (number + 1)), "two of each parent");
            worker.kill().await.expect("it is killed");
        }
    });
}

#[test]
fn idle_slots_of_a_worker_share_one_poll() {
    const SLOTS: u32 = 5;
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        // A poll of each slot would be refused.
        let t = server.project_with("main", "free", json!({"parked_polls": 1})).await;
        for program in [python, typescript, go, rust] {
            let mut command = Command::from(program());
            let mut worker = start(&t, command.env("CONCURRENCY", SLOTS.to_string())).await;
            let waits = json!({"job_type": "greet", "payload": {"sleep_seconds": 600}});
            let jobs = (0..SLOTS).map(|_| waits.clone()).collect::<Vec<_>>();
            t.post("/v1/jobs/batch", json!({ "jobs": jobs })).await.is(201);
            let running = "select count(*) from jobs where state = 'processing'";
            t.database.until(running, SLOTS.into()).await;
            worker.kill().await.expect("it is killed");
            let all = json!({"filter": {"state": "processing"}});
            t.post("/v1/jobs/cancel", all).await.is(202);
            t.expire_leases().await;
            t.database.until(running, 0).await;
        }
        server.stop().await;
    });
}

#[test]
fn a_handler_that_outlives_its_timeout_is_warned_of() {
    run(async |t| {
        // What the library for Rust logs is for the program's own subscriber.
        for program in [python, typescript, go] {
            let endless = json!({
                "job_type": "greet", "payload": {"sleep_seconds": 600}, "timeout_seconds": 1,
                "max_attempts": 1,
            });
            let job = t.enqueue(endless).await;
            let mut command = Command::from(program());
            let mut worker = start(t, command.stderr(Stdio::piped())).await;
            let mut said = BufReader::new(worker.stderr.take().expect("its errors")).lines();
            loop {
                let line = said.next_line().await.expect("a line").expect("a warning");
                if line.contains(&job) && line.contains("has outlived its timeout of 1") {
                    break;
                }
            }
            worker.kill().await.expect("it is killed");
        }
    });
}

/// Runs a command of a build.
pub fn build(dir: &Path, program: &str, args: &[&str]) {
    let output = std::process::Command::new(program).args(args).current_dir(dir).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {args:?}: {said}");
}

fn python() -> std::process::Command {
    let mut command = std::process::Command::new("python3");
    command.env("PYTHONPATH", clients().join("python"));
    command.arg(clients().join("python/examples/greet.py"));
    command
}

#[test]
fn a_worker_with_the_python_library_does_its_duties() {
    run(async |t| {
        does_its_duties(t, &mut Command::from(python())).await;
        rests(t, &mut Command::from(python())).await;
    });
}

#[test]
#[ignore = "takes long: `make nightly` runs it"]
fn the_python_library_loses_nothing() {
    loses_nothing(python);
}

/// The example, compiled against the library that npm installed from its folder.
pub fn typescript_folder() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let dir = scratch("typescript-library");
        let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/typescript");
        for from in [example.join("package.json"), example.join("package-lock.json")] {
            std::fs::copy(&from, dir.join(from.file_name().expect("a name"))).expect("a copy");
        }
        for file in ["greet.ts", "tsconfig.json"] {
            let from = clients().join("typescript/examples").join(file);
            std::fs::copy(from, dir.join(file)).expect("a copy");
        }
        let library = clients().join("typescript").display().to_string();
        build(&dir, "npm", &["ci", "--no-audit", "--no-fund"]);
        build(&dir, "npm", &["install", "--no-save", "--no-audit", "--no-fund", &library]);
        build(&dir, "npx", &["tsc", "-p", "."]);
        dir
    })
}

fn typescript() -> std::process::Command {
    let mut command = std::process::Command::new("node");
    command.arg(typescript_folder().join("greet.js"));
    command
}

#[test]
fn a_worker_with_the_typescript_library_does_its_duties() {
    run(async |t| {
        does_its_duties(t, &mut Command::from(typescript())).await;
        rests(t, &mut Command::from(typescript())).await;
    });
}

#[test]
fn a_computation_that_blocks_the_event_loop_keeps_its_lease() {
    run(async |t| {
        let mut worker = start(t, &mut Command::from(typescript())).await;
        // It computes for longer than its lease.
        let job = greet(t, json!({"name": "Ada", "spin_seconds": 5})).await;
        let done = t.job_becomes(&job, "succeeded").await;
        assert_eq!(["attempt", "losses", "failures"].map(|it| done[it].clone()), [1, 0, 0]);
        worker.kill().await.expect("it is killed");
    });
}

#[test]
#[ignore = "takes long: `make nightly` runs it"]
fn the_typescript_library_loses_nothing() {
    loses_nothing(typescript);
}

fn go() -> std::process::Command {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let program = BUILT.get_or_init(|| {
        let program = scratch("go-library").join("greet");
        let to = program.display().to_string();
        build(&clients().join("go"), "go", &["build", "-o", &to, "./examples/greet"]);
        program
    });
    std::process::Command::new(program)
}

#[test]
fn a_worker_with_the_go_library_does_its_duties() {
    run(async |t| {
        does_its_duties(t, &mut Command::from(go())).await;
        rests(t, &mut Command::from(go())).await;
    });
}

#[test]
#[ignore = "takes long: `make nightly` runs it"]
fn the_go_library_loses_nothing() {
    loses_nothing(go);
}

/// Cargo builds examples beside the tests.
fn rust() -> std::process::Command {
    let target = Path::new(env!("CARGO_BIN_EXE_fencepost")).parent().expect("a folder");
    std::process::Command::new(target.join("examples/greet"))
}

#[test]
fn a_worker_with_the_rust_library_does_its_duties() {
    run(async |t| {
        does_its_duties(t, &mut Command::from(rust())).await;
        rests(t, &mut Command::from(rust())).await;
    });
}

#[test]
#[ignore = "takes long: `make nightly` runs it"]
fn the_rust_library_loses_nothing() {
    loses_nothing(rust);
}

/// The first two programs of a page: a worker and a producer that prints its job's result.
fn shown(page: &str, fence: &str) -> [String; 2] {
    let page = std::fs::read_to_string(clients().join(page)).expect("a page");
    let begin = format!("```{fence}\n");
    let mut programs = page.split(&begin).skip(1);
    [(); 2].map(|()| {
        let program = programs.next().expect("a program");
        program.split_once("```").expect("its end").0.to_owned()
    })
}

/// Runs both programs as the page says.
async fn greets(t: &TestProject, [worker, producer]: [&mut Command; 2]) {
    for command in [&mut *worker, &mut *producer] {
        command.env("FENCEPOST_URL", &t.url).env("FENCEPOST_KEY", &t.api_key).kill_on_drop(true);
    }
    let working = worker.spawn().expect("it starts");
    let output = producer.output().await.expect("it runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("Hello, Ada!"), "{said}{}", String::from_utf8_lossy(&output.stderr));
    drop(working);
}

#[test]
fn what_the_page_of_the_python_library_shows_runs() {
    run(async |t| {
        let programs = shown("python/README.md", "python");
        let [mut worker, mut producer] = programs.map(|program| {
            let mut command = Command::new("python3");
            command.env("PYTHONPATH", clients().join("python")).args(["-c", &program]);
            command
        });
        greets(t, [&mut worker, &mut producer]).await;
    });
}

#[test]
fn what_the_page_of_the_typescript_library_shows_runs() {
    run(async |t| {
        let dir = typescript_folder();
        let [mut worker, mut producer] = shown("typescript/README.md", "ts").map(|program| {
            let mut command = Command::new("node");
            command.current_dir(dir).args(["--input-type=module", "--eval", &program]);
            command
        });
        greets(t, [&mut worker, &mut producer]).await;
    });
}

#[test]
fn each_library_works_at_a_server_that_refuses_beats_and_names_its_project() {
    run(async |t| {
        let (url, named) = without_beats(&t.url).await;
        for mut command in [python(), typescript(), go(), rust()].map(Command::from) {
            let job = greet(t, json!({"name": "Ada"})).await;
            command.env("FENCEPOST_URL", &url).env("FENCEPOST_KEY", &t.api_key);
            let mut worker = command.kill_on_drop(true).spawn().expect("it starts");
            t.job_becomes(&job, "succeeded").await;
            worker.kill().await.expect("it is killed");
            let named = named.swap(0, Ordering::Relaxed);
            assert!(named > 0, "{command:?} sends the header that it was sent");
        }
    });
}
