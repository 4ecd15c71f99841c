//! `fencepost worker --exec`, `enqueue` and `jobs`, as they are typed.

use std::process::Stdio;

use crate::harness::{TestProject, eventually, run, run_alone, until};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStderr, Command},
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_fencepost");

/// A running worker, killed with its test.
struct Worker {
    child: Child,
    said: Lines<BufReader<ChildStderr>>,
}

fn command(t: &TestProject, command: &str) -> Command {
    let mut program = Command::new(PROGRAM);
    program.arg(command).env("FENCEPOST_URL", &t.url).env("FENCEPOST_KEY", &t.api_key);
    program.kill_on_drop(true);
    program
}

impl Worker {
    async fn start(t: &TestProject, exec: &str, more: &[&str]) -> Self {
        let mut command = command(t, "worker");
        command.args(["--queue", "default", "--worker-id", "w", "--exec", exec]).args(more);
        let mut child = command.stderr(Stdio::piped()).spawn().expect("it starts");
        let stderr = child.stderr.take().expect("its standard error");
        let mut this = Self { child, said: BufReader::new(stderr).lines() };
        this.says("takes jobs from default").await;
        this
    }

    /// Waits until it says this.
    async fn says(&mut self, what: &str) {
        while let Some(line) = self.said.next_line().await.expect("a line") {
            if line.contains(what) {
                return;
            }
        }
        panic!("it never said: {what}");
    }

    fn signal(&self, signal: &str) {
        let pid = self.child.id().expect("it runs").to_string();
        let mut kill = std::process::Command::new("sh");
        kill.args(["-c", "kill \"$0\" \"$1\"", signal, &pid]);
        assert!(kill.status().expect("sh runs").success());
    }

    async fn ends_well(mut self) {
        assert!(self.child.wait().await.expect("it ends").success());
    }
}

async fn output(command: &mut Command) -> (Option<i32>, String) {
    let output = command.output().await.expect("it runs");
    let text = String::from_utf8(output.stdout).expect("text");
    let text = if text.is_empty() { String::from_utf8(output.stderr).expect("text") } else { text };
    (output.status.code(), text.trim_end().to_owned())
}

#[test]
fn a_script_is_a_worker_payload_in_result_out_lines_to_the_logs() {
    run(async |t| {
        let exec = r#"read payload
            echo "working on $FENCEPOST_JOB_TYPE, attempt $FENCEPOST_ATTEMPT" >&2
            printf '{"got": %s, "tags": %s}' "$payload" "$FENCEPOST_TAGS""#;
        let _worker = Worker::start(t, exec, &[]).await;
        let payload = r#"{"b":1,"a":12345678901234567890123}"#;
        let body = format!(r#"{{"job_type":"greet","tags":{{"k":"v"}},"payload":{payload}}}"#);
        let id = t.post_text("/v1/jobs", body).await.is(201)["id"].as_str().expect("it").to_owned();
        let done = t.get(&format!("/v1/jobs/{id}?wait_seconds=30")).await;
        assert_eq!(done.is(200)["state"], "succeeded");
        let result = format!(r#""result":{{"got": {payload}, "tags": {{"k":"v"}}}}"#);
        assert!(done.text.contains(&result), "byte for byte: {}", done.text);
        let logs = t.get(&format!("/v1/jobs/{id}/logs")).await.is(200);
        assert_eq!(logs["logs"][0]["data"], "working on greet, attempt 1\n");
        assert_eq!(logs["logs"][0]["stream"], "stderr");
    });
}

#[test]
fn exit_codes_and_signals_are_outcomes() {
    run(async |t| {
        let exec = "read code; echo because >&2; [ $code = 9 ] && kill -9 $$; exit $code";
        let _worker = Worker::start(t, exec, &["--permanent-exit-codes", "64,65"]).await;
        for (code, state, kind) in [
            (75, "pending", "exit.75"),
            (1, "pending", "exit.1"),
            (9, "pending", "signal.9"),
            (65, "dead_letter", "exit.65"),
        ] {
            let id = t.enqueue(json!({"payload": code})).await;
            let job = eventually("the first failure", async || {
                let job = t.job(&id).await;
                (job["failures"] == 1).then_some(job)
            })
            .await;
            assert_eq!((&job["state"], &job["last_error"]["type"]), (&json!(state), &json!(kind)));
            let message = job["last_error"]["message"].as_str().expect("text");
            assert!(message.ends_with("because"), "{message}");
        }
    });
}

#[test]
fn a_cancelled_job_is_stopped_and_what_lost_its_lease_says_nothing() {
    run_alone(async |t| {
        let exec = "trap 'exit 3' TERM; while :; do sleep 0.05; done";
        let _worker = Worker::start(t, exec, &["--concurrency", "2"]).await;
        let cancelled = t.enqueue(json!({})).await;
        t.job_becomes(&cancelled, "processing").await;
        t.post(&format!("/v1/jobs/{cancelled}/cancel"), json!({})).await.is(200);
        let job = t.job_becomes(&cancelled, "cancelled").await;
        assert_eq!(job["attempts"][0]["error"]["type"], "exit.3");
        let lost = t.enqueue(json!({"max_attempts": 1})).await;
        t.job_becomes(&lost, "processing").await;
        t.expire_leases().await;
        let job = t.job_becomes(&lost, "dead_letter").await;
        assert_eq!(job["attempts"][0]["outcome"], "lease_expired");
    });
}

/// A file by which a command and its test leave notes for each other; it goes with its test.
struct Marker(std::path::PathBuf);

impl Marker {
    fn new(name: &str) -> Self {
        let name = format!("fencepost-marker-{name}-{}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }

    fn path(&self) -> std::path::Display<'_> {
        self.0.display()
    }

    fn set(&self) {
        std::fs::write(&self.0, "").expect("a file");
    }

    async fn is_set(&self) {
        until("the file", async || self.0.exists()).await;
    }
}

impl Drop for Marker {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn a_worker_asked_to_stop_finishes_what_runs_and_takes_no_more() {
    run(async |t| {
        for signal in ["-TERM", "-INT"] {
            let (started, go) =
                (Marker::new(&format!("on{signal}")), Marker::new(&format!("go{signal}")));
            let (began, may_end) = (started.path(), go.path());
            let exec = format!("touch {began}; while ! [ -e {may_end} ]; do sleep 0.02; done");
            let mut worker = Worker::start(t, &exec, &["--concurrency", "4"]).await;
            let id = t.enqueue(json!({})).await;
            started.is_set().await;
            worker.signal(signal);
            worker.says("draining 1 jobs").await;
            let later = t.enqueue(json!({})).await;
            go.set();
            worker.ends_well().await;
            assert_eq!(t.job(&id).await["state"], "succeeded");
            // The server may have handed it out before it noticed that the poll was gone.
            let job = t.job_becomes(&later, "pending").await;
            assert_eq!(job["failures"], 0);
            t.post(&format!("/v1/jobs/{later}/cancel"), json!({})).await.is(200);
        }
    });
}

#[test]
fn at_the_end_of_the_grace_jobs_are_released_or_failed() {
    run(async |t| {
        for (choice, failures, outcome) in [("release", 0, "released"), ("fail", 1, "failed")] {
            let started = Marker::new(choice);
            // Many programs end with 0 when they are asked to end.
            let exec = format!(
                "trap 'exit 0' TERM; touch {}; while :; do sleep 0.05; done",
                started.path()
            );
            let more = ["--grace-seconds", "0", "--at-grace-end", choice];
            let worker = Worker::start(t, &exec, &more).await;
            let id = t.enqueue(json!({})).await;
            started.is_set().await;
            worker.signal("-TERM");
            worker.ends_well().await;
            let job = t.job(&id).await;
            assert_eq!((&job["state"], &job["failures"]), (&json!("pending"), &json!(failures)));
            assert_eq!(job["attempts"][0]["outcome"], outcome);
            t.post(&format!("/v1/jobs/{id}/cancel"), json!({})).await.is(200);
        }
        let workers = t.get("/v1/workers").await.is(200);
        assert_eq!(workers["workers"][0]["state"], "terminated");
    });
}

#[test]
fn a_payload_that_only_its_owner_can_read_reaches_the_command_and_comes_back() {
    run(async |t| {
        let _worker = Worker::start(t, "cat", &[]).await;
        let deep = "[".repeat(127) + &"]".repeat(127);
        for payload in [r#""\ud800""#, "1e999", &deep, r#"{"a":1,"a":2}"#] {
            let body = format!(r#"{{"job_type":"t","payload":{payload}}}"#);
            let reply = t.post_text("/v1/jobs", body).await;
            assert_eq!(reply.status, 201, "{}", reply.text);
            let path = reply.headers["location"].to_str().expect("text").to_owned();
            let done = t.get(&format!("{path}?wait_seconds=30")).await;
            assert!(done.text.contains(&format!(r#""result":{payload}"#)), "{}", done.text);
        }
    });
}

#[test]
fn a_command_that_leaves_a_child_behind_or_prints_too_much_is_acknowledged_all_the_same() {
    run(async |t| {
        let exec = "read what; case $what in 1) sleep 600 & echo '\"done\"';; \
            *) head -c 3000000 /dev/zero | tr '\\0' '\\1' >&2; exit 64;; esac";
        let _worker = Worker::start(t, exec, &["--permanent-exit-codes", "64"]).await;
        let child = t.enqueue(json!({"payload": 1})).await;
        assert_eq!(t.job_becomes(&child, "succeeded").await["result"], "done");
        let noisy = t.enqueue(json!({"payload": 2})).await;
        let job = t.job_becomes(&noisy, "dead_letter").await;
        assert_eq!(job["last_error"]["type"], "exit.64");
        let logs = t.get(&format!("/v1/jobs/{noisy}/logs?limit=1")).await.is(200);
        assert_eq!(logs["truncated_attempts"], json!([1]));
    });
}

/// Enqueues jobs until one is not claimed any more, and returns it.
async fn left_waiting(t: &TestProject) -> String {
    eventually("a job that stays pending", async || {
        let id = t.enqueue(json!({})).await;
        let job = t.get(&format!("/v1/jobs/{id}?wait_seconds=1")).await.is(200);
        assert_eq!(job["failures"], 0);
        (job["state"] == "pending").then_some(id)
    })
    .await
}

#[test]
fn a_worker_can_be_quieted_and_woken_by_signals_and_by_the_server() {
    run(async |t| {
        let mut worker = Worker::start(t, "true", &[]).await;
        worker.signal("-TSTP");
        worker.says("quiet").await;
        // What the poll was given that it has just ended it still works at.
        let id = left_waiting(t).await;
        worker.signal("-CONT");
        t.job_becomes(&id, "succeeded").await;
        t.post("/v1/workers/w/quiet", json!({})).await.is(200);
        // It hears of it with its next poll or heartbeat; an answer to an earlier one may be on its
        // way.
        let id = left_waiting(t).await;
        t.post("/v1/workers/w/resume", json!({})).await.is(200);
        t.job_becomes(&id, "succeeded").await;
        t.post("/v1/workers/w/terminate", json!({})).await.is(200);
        worker.says("directive: terminate").await;
        worker.ends_well().await;
    });
}

#[test]
fn a_worker_never_takes_more_than_it_has_room_for() {
    run_alone(async |t| {
        let _worker = Worker::start(t, "sleep 60", &["--concurrency", "3"]).await;
        for _ in 0..6 {
            t.enqueue(json!({})).await;
        }
        let running = "select count(*) from jobs where state = 'processing'";
        t.database.until_at_least(running, 3).await;
        let registered = t.get("/v1/workers").await.is(200);
        assert_eq!(registered["workers"][0]["concurrency"], 3);
        assert_eq!(t.database.number(running).await, 3);
    });
}

#[test]
fn a_worker_killed_in_the_middle_of_a_thousand_jobs_loses_none_and_settles_none_twice() {
    run_alone(async |t| {
        let jobs: Vec<_> = (0..500).map(|it| json!({"job_type": "t", "payload": it})).collect();
        for _ in 0..2 {
            t.post("/v1/jobs/batch", json!({"jobs": jobs})).await.is(201);
        }
        let settled = "select count(*) from finished_jobs";
        // Two of the first are under way whenever it is killed.
        let exec = "read n; case $n in 7|8) sleep 600;; *) sleep 0.01;; esac";
        let mut first = Worker::start(t, exec, &["--concurrency", "16"]).await;
        t.database.until_at_least(settled, 300).await;
        first.child.kill().await.expect("it is killed");
        let more = ["--concurrency", "16", "--worker-id", "second"];
        let mut command = command(t, "worker");
        command.args(["--queue", "default", "--exec", "true"]).args(more).stderr(Stdio::null());
        let _second = command.spawn().expect("it starts");
        // As if thirty seconds had passed.
        while t.database.number(settled).await < 1_000 {
            t.database
                .execute(
                    "update workers set last_seen_at = now() - interval '31 s',
                         last_beat_at = now() - interval '31 s'
                     where worker_id = 'w';
                     update jobs set claimed_at = claimed_at - interval '31 s',
                         lease_expires_at = lease_expires_at - interval '31 s'
                     where worker_id = 'w' and claimed_at > now() - interval '31 s'",
                )
                .await;
        }
        assert_eq!(t.database.number("select count(*) from jobs").await, 0);
        let succeeded = "select count(*) from finished_jobs where state = 'succeeded'";
        assert_eq!(t.database.number(succeeded).await, 1_000);
        let lost = "select count(*) from attempts
                    where outcome = 'released' and error_kind = 'worker_gone'";
        let lost = t.database.number(lost).await;
        assert!((2..=16).contains(&lost), "{lost} were lost with their worker");
        let failures = "select sum(failures)::bigint from finished_jobs";
        assert_eq!(t.database.number(failures).await, 0, "the loss of a worker is no failure");
        let unaccounted = "select count(*) from finished_jobs job where attempt <> 1 + (
            select count(*) from attempts
            where attempts.project_id = job.project_id and attempts.job_id = job.id)";
        assert_eq!(t.database.number(unaccounted).await, 0, "each attempt has one end");
    });
}

#[test]
fn jobs_are_stored_listed_shown_cancelled_and_retried_from_the_terminal() {
    run(async |t| {
        let mut enqueue = command(t, "enqueue");
        enqueue.args(["--job-type", "mail", "--payload", r#"{"b":2,"a":1}"#, "--tag", "k=v"]);
        enqueue.args(["--priority", "-3", "--idempotency-key", "once"]);
        let (code, id) = output(&mut enqueue).await;
        assert_eq!(code, Some(0));
        assert_eq!(output(&mut enqueue).await, (Some(0), id.clone()), "it is stored once");
        let job = t.get(&format!("/v1/jobs/{id}")).await;
        assert!(job.text.contains(r#""payload":{"b":2,"a":1}"#), "{}", job.text);
        assert_eq!(
            (&job.json()["priority"], &job.json()["tags"]),
            (&json!(-3), &json!({"k": "v"}))
        );

        let jobs = async |arguments: &[&str]| {
            output(command(t, "jobs").args(arguments).env("NO_COLOR", "1")).await
        };
        let (code, listed) = jobs(&["list", "--state", "pending", "--tag", "k=v"]).await;
        assert_eq!(code, Some(0));
        assert!(listed.lines().nth(1).expect("a job").starts_with(&id), "{listed}");
        let (_, listed) = jobs(&["list", "-o", "json", "--job-type", "no such"]).await;
        assert_eq!(serde_json::from_str::<Value>(&listed).expect("JSON")["jobs"], json!([]));
        let (code, cancelled) = jobs(&["cancel", &id]).await;
        assert_eq!(code, Some(0));
        assert!(cancelled.contains("cancelled"), "{cancelled}");
        let (code, retried) = jobs(&["retry", &id, "-o", "json"]).await;
        assert_eq!((code, retried.contains(r#""state":"pending""#)), (Some(0), true));
        assert_eq!(jobs(&["retry", &id]).await.0, Some(4));
        assert_eq!(jobs(&["get", "job_01m7w3ha3aextt8pkwwdmxsmqw"]).await.0, Some(3));
        assert_eq!(jobs(&["get"]).await.0, Some(2));
        let away = t.through("http://127.0.0.1:1");
        assert_eq!(output(command(&away, "jobs").args(["get", &id])).await.0, Some(5));
        let mut bad = command(t, "enqueue");
        let (code, error) = output(bad.args(["--job-type", "t", "--payload", "{"])).await;
        assert_eq!(code, Some(1));
        assert!(error.contains("--payload: not valid JSON"), "{error}");
    });
}

#[test]
fn batches_are_created_filled_sealed_and_shown_from_the_terminal() {
    run(async |t| {
        let batches = async |arguments: &[&str]| {
            output(command(t, "batches").args(arguments).env("NO_COLOR", "1")).await
        };
        let create = ["create", "--name", "import", "--idempotency-key", "once"];
        let (code, id) = batches(&create).await;
        assert_eq!(code, Some(0));
        assert_eq!(batches(&create).await, (Some(0), id.clone()), "it is created once");
        let mut enqueue = command(t, "enqueue");
        let (code, job) = output(enqueue.args(["--job-type", "t", "--batch-id", &id])).await;
        assert_eq!(code, Some(0));
        let (_, jobs) = output(command(t, "jobs").args(["list", "--batch-id", &id])).await;
        assert!(jobs.contains(&job), "{jobs}");
        let (_, sealed) = batches(&["seal", &id]).await;
        assert!(sealed.contains("sealed_at"), "{sealed}");
        let (_, shown) = batches(&["get", &id, "-o", "json"]).await;
        assert!(shown.contains(r#""open_jobs":1"#), "{shown}");
        let (_, listed) = batches(&["list"]).await;
        assert!(listed.contains(&id) && listed.contains("running"), "{listed}");
        assert_eq!(batches(&["get", "batch_01m7w3ha3aextt8pkwwdmxsmqw"]).await.0, Some(3));
    });
}

#[test]
fn a_job_that_is_waited_for_and_does_not_succeed_is_a_failure_of_the_command() {
    run(async |t| {
        let wait = async |id: &str| {
            let mut get = command(t, "jobs");
            output(get.args(["get", id, "--wait-seconds", "1"])).await.0
        };
        let id = t.enqueue(json!({})).await;
        assert_eq!(wait(&id).await, Some(6), "it waits");
        t.act(&format!("/v1/jobs/{id}/cancel")).await.is(200);
        assert_eq!(wait(&id).await, Some(1), "it is cancelled");
        let id = t.enqueue(json!({})).await;
        let leased = t.polled(json!({"worker_id": "w", "queues": ["default"]})).await.remove(0);
        t.ack(&leased, "w", "succeeded").await.is(200);
        assert_eq!(wait(&id).await, Some(0), "it has succeeded");
    });
}
