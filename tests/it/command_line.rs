//! The commands for people on call, as they are typed.

use std::{
    fs::Permissions,
    os::unix::fs::PermissionsExt,
    process::{Output, Stdio},
};

use crate::harness::{TestProject, run, run_alone};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt},
    process::Command,
};

fn command(t: &TestProject, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fencepost"));
    command
        .args(args)
        .env("FENCEPOST_URL", &t.url)
        .env("FENCEPOST_KEY", &t.api_key)
        .kill_on_drop(true);
    command
}

async fn typed(t: &TestProject, args: &[&str]) -> Output {
    command(t, args).output().await.expect("it runs")
}

/// What a command prints that succeeds.
async fn printed(t: &TestProject, args: &[&str]) -> String {
    let output = typed(t, args).await;
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {error}");
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn a_group_is_listed_paused_and_resumed() {
    run_alone(async |t| {
        t.enqueue(json!({"queue": "mail", "group": "a/b", "job_type": "welcome"})).await;
        printed(t, &["groups", "pause", "mail", "a/b"]).await;
        let groups = printed(t, &["groups", "list", "mail", "--state", "paused"]).await;
        assert!(groups.contains("a/b") && groups.contains("paused"), "{groups}");
        printed(t, &["groups", "resume", "mail", "a/b"]).await;
        let group = printed(t, &["groups", "show", "mail", "a/b"]).await;
        assert!(group.contains("waiting"), "{group}");
        let unblock = ["groups", "unblock", "mail", "a/b", "--head", "skip"];
        let refused = typed(t, &unblock).await;
        assert!(!refused.status.success(), "nothing blocks it");
    });
}

#[test]
fn a_queue_is_seen_paused_and_explained() {
    run_alone(async |t| {
        let job = t.enqueue(json!({"queue": "mail", "job_type": "welcome"})).await;
        let table = printed(t, &["queues", "list"]).await;
        let lines: Vec<_> = table.lines().collect();
        assert!(lines[0].starts_with("QUEUE  READY  RUNNING"), "{table}");
        assert!(lines[1].starts_with("mail   1      0"), "{table}");
        printed(t, &["queues", "pause", "mail"]).await;
        let why = printed(t, &["explain", &job]).await;
        assert!(why.starts_with("pending: ") && why.contains("  waits  queue"), "{why}");
        printed(t, &["queues", "resume", "mail"]).await;
        let queue: Value =
            serde_json::from_str(&printed(t, &["queues", "get", "mail", "-o", "json"]).await)
                .expect("JSON");
        assert_eq!((&queue["queue"], &queue["paused_at"]), (&json!("mail"), &Value::Null));
        let missing = typed(t, &["explain", "job_01m7w3ha3aextt8pkwwdmxsmqw"]).await;
        assert_eq!(missing.status.code(), Some(3), "not found");
    });
}

#[test]
fn dead_letters_are_grouped_counted_and_retried() {
    run_alone(async |t| {
        for _ in 0..2 {
            t.enqueue(json!({"job_type": "welcome", "max_attempts": 1})).await;
            let job = t.wait_and_lease("w").await;
            let error = json!({"error": {"type": "Smtp", "message": "no answer"}});
            t.ack_with(&job, "w", "failed", error).await.is(200);
        }
        let groups = printed(t, &["dead-letters", "groups"]).await;
        assert!(
            groups.lines().nth(1).is_some_and(|it| it.starts_with("2      welcome")),
            "{groups}"
        );
        let list = printed(t, &["dead-letters", "list", "--job-type", "welcome"]).await;
        assert_eq!(list.lines().count(), 3, "{list}");
        let job =
            list.lines().nth(1).and_then(|it| it.split(' ').next()).expect("a job").to_owned();
        let counted = printed(t, &["dead-letters", "retry", "--all", "--dry-run"]).await;
        assert!(counted.lines().any(|it| it.ends_with(" 2")), "{counted}");
        printed(t, &["dead-letters", "retry", &job]).await;
        assert_eq!(t.job(&job).await["state"], "pending");
        for wrong in [&[&*job, "--queue", "q"][..], &[&job, "--dry-run"], &["--dry-run"], &[]] {
            let refused = typed(t, &[&["dead-letters", "retry"], wrong].concat()).await;
            assert_eq!(refused.status.code(), Some(2), "one, or those that match: {wrong:?}");
        }
    });
}

#[test]
fn logs_are_followed_until_the_job_has_ended() {
    run_alone(async |t| {
        t.enqueue(json!({"job_type": "long"})).await;
        let job = t.wait_and_lease("w").await;
        let id = job["id"].as_str().expect("an id");
        let write = async |sequence: u32, data: &str| {
            let chunk = json!({"job_id": id, "attempt": 1, "sequence": sequence, "data": data,
                               "timestamp_ms": 1});
            t.post("/v1/workers/logs", json!({"worker_id": "w", "chunks": [chunk]})).await.is(200);
        };
        write(0, "one\n").await;
        let mut child =
            command(t, &["logs", "-f", id]).stdout(Stdio::piped()).spawn().expect("it starts");
        let mut lines = tokio::io::BufReader::new(child.stdout.take().expect("its output")).lines();
        assert_eq!(lines.next_line().await.expect("a line").as_deref(), Some("one"));
        write(1, "two\n").await;
        assert_eq!(lines.next_line().await.expect("a line").as_deref(), Some("two"));
        t.ack(&job, "w", "succeeded").await.is(200);
        assert_eq!(lines.next_line().await.expect("the end"), None);
        assert!(child.wait().await.expect("it ends").success());
        assert_eq!(printed(t, &["logs", id]).await, "one\ntwo\n");
    });
}

#[test]
fn jobs_are_found_shown_and_cancelled_by_a_search() {
    run_alone(async |t| {
        let first = printed(
            t,
            &[
                "enqueue",
                "--job-type",
                "welcome",
                "--queue",
                "mail",
                "--payload",
                r#"{"n": 12345678901234567890.10}"#,
                "--unique-key",
                "u",
                "--on-conflict",
                "return_existing",
                "--run-at",
                "2030-01-31T12:00:00Z",
                "--expires-at",
                "2030-02-01T00:00:00Z",
                "--concurrency-key",
                "k",
                "--concurrency-limit",
                "2",
                "--retry",
                r#"{"strategy": "constant", "initial_seconds": 5}"#,
                "--on-failure",
                r#"{"job_type": "alarm"}"#,
                "--tag",
                "customer=3",
            ],
        )
        .await;
        let first = first.trim();
        let second = printed(t, &["enqueue", "--job-type", "x", "--depends-on", first]).await;
        let job = t.job(first).await;
        assert_eq!(
            (&job["unique_key"], &job["concurrency_limit"], &job["callbacks"][0]["job_type"]),
            (&json!("u"), &json!(2), &json!("alarm"))
        );
        assert_eq!(t.job(second.trim()).await["parents"], json!([first]));
        let list = printed(t, &["jobs", "list", "queue:mail", "tag:customer=3"]).await;
        assert!(list.lines().count() == 2 && list.contains(first), "{list}");
        let shown = printed(t, &["jobs", "get", first]).await;
        assert!(shown.contains("payload:\n{\"n\": 12345678901234567890.10}"), "{shown}");
        assert!(shown.contains("customer=3") && shown.contains("unique key       u"), "{shown}");
        let counted = printed(t, &["jobs", "cancel", "--search", "queue:mail", "--dry-run"]).await;
        assert_eq!(counted, "1 jobs match\n");
        let done = printed(t, &["jobs", "cancel", "--search", "queue:mail"]).await;
        assert!(done.contains("succeeded"), "{done}");
        t.job_becomes(first, "cancelled").await;
        t.job_becomes(second.trim(), "cancelled").await;
        let refused = typed(t, &["jobs", "list", "colour:red"]).await;
        let error = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(error.contains("`colour:` is not a condition"), "{error}");
        for wrong in
            [&["cancel"][..], &["cancel", first, "--dry-run"], &["retry", first, "--max", "1"]]
        {
            let refused = typed(t, &[&["jobs"], wrong].concat()).await;
            assert_eq!(refused.status.code(), Some(2), "{wrong:?}");
        }
        assert!(!typed(t, &["jobs", "cancel", "--search", " "]).await.status.success());
        let page = typed(t, &["jobs", "list", "state:cancelled", "--limit", "1"]).await;
        let hint = String::from_utf8_lossy(&page.stderr).into_owned();
        let cursor = hint.split("--cursor ").nth(1).expect("a cursor").trim();
        let args = ["jobs", "list", "state:cancelled", "--limit", "1", "--cursor", cursor];
        let next = printed(t, &args).await;
        assert!(next.contains(first) && next.lines().count() == 2, "{next}");
    });
}

#[test]
fn a_login_is_kept_for_its_owner_and_its_server_only() {
    run(async |t| {
        let home = crate::harness::scratch("profiles");
        let bare = |args: &[&str]| {
            let mut command = command(t, args);
            command.env_remove("FENCEPOST_URL").env_remove("FENCEPOST_KEY");
            command.env("XDG_CONFIG_HOME", &home).env("FENCEPOST_DATA_DIR", home.join("none"));
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
            command
        };
        let ran = async |args: &[&str], input: &str| {
            let mut child = bare(args).spawn().expect("it starts");
            let mut stdin = child.stdin.take().expect("its input");
            // It may end without reading.
            let _ = stdin.write_all(input.as_bytes()).await;
            drop(stdin);
            let output = child.wait_with_output().await.expect("it runs");
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            (output.status.code(), said + &String::from_utf8_lossy(&output.stdout))
        };
        let (code, said) = ran(&["queues", "list"], "").await;
        assert!(code == Some(1) && said.contains("`fencepost login`"), "{said}");
        let (code, said) = ran(&["login", "--with-key", "--url", &t.url], "fp_live_wrong\n").await;
        assert!(code == Some(1) && !said.contains("fp_live_wrong"), "{said}");
        let (code, said) =
            ran(&["login", "--with-key", "--url", &t.url], &format!("{}\n", t.api_key)).await;
        assert!(code == Some(0) && !said.contains(&t.api_key), "{said}");
        let file = home.join("fencepost/profiles.json");
        let mode = || std::fs::metadata(&file).expect("a file").permissions();
        assert_eq!(mode().mode() & 0o777, 0o600);
        let (code, said) = ran(&["queues", "list"], "").await;
        assert!(code == Some(0) && said.starts_with("QUEUE"), "{said}");
        // The key of one server is not for another.
        let (code, said) = ran(&["queues", "list", "--url", "http://127.0.0.1:1"], "").await;
        assert!(code == Some(1) && said.contains("there is no key"), "{said}");
        let (code, said) = ran(&["queues", "list", "--profile", "other"], "").await;
        assert!(code == Some(1) && said.contains("there is no profile other"), "{said}");
        std::fs::set_permissions(&file, Permissions::from_mode(0o644)).expect("they are set");
        let (code, said) = ran(&["queues", "list"], "").await;
        assert!(code == Some(1) && said.contains("chmod 600"), "{said}");
        std::fs::set_permissions(&file, Permissions::from_mode(0o600)).expect("they are set");
        assert_eq!(ran(&["logout"], "").await.0, Some(0));
        assert_eq!(ran(&["queues", "list"], "").await.0, Some(1));
    });
}

#[test]
fn any_request_is_sent_and_its_answer_printed() {
    run_alone(async |t| {
        let job = printed(t, &["api", "POST", "/v1/jobs", r#"{"job_type": "t"}"#]).await;
        let job: Value = serde_json::from_str(&job).expect("JSON");
        let id = job["id"].as_str().expect("an id");
        let found = printed(t, &["api", "GET", &format!("/v1/jobs/{id}")]).await;
        assert!(found.contains(id));
        let missing = typed(t, &["api", "GET", "/v1/jobs/job_01m7w3ha3aextt8pkwwdmxsmqw"]).await;
        assert_eq!(missing.status.code(), Some(3));
        for wrong in [["api", "GET", "v1/jobs"], ["api", "FETCH", "/v1/jobs"]] {
            assert!(!typed(t, &wrong).await.status.success(), "{wrong:?}");
        }
    });
}

#[test]
fn workers_schedules_and_workflows_are_listed_and_controlled() {
    run_alone(async |t| {
        let worker = json!({"worker_id": "w", "queues": ["q"], "job_types": []});
        t.post("/v1/workers/register", worker).await.is(200);
        printed(t, &["workers", "quiet", "w"]).await;
        let workers = printed(t, &["workers", "list"]).await;
        assert!(workers.contains("quiet"), "{workers}");
        let schedule = json!({"job_type": "report", "cron_expression": "0 7 * * *"});
        t.put("/v1/recurring/daily", schedule).await.is(200);
        printed(t, &["schedules", "pause", "daily"]).await;
        printed(t, &["schedules", "run", "daily"]).await;
        let schedules = printed(t, &["schedules", "list"]).await;
        assert!(schedules.contains("daily") && schedules.contains("false"), "{schedules}");
        let graph = json!({"name": "g", "jobs": [{"key": "a", "job_type": "a"}]});
        let workflow = t.post("/v1/workflows", graph).await.is(201)["id"].clone();
        let workflow = workflow.as_str().expect("an id");
        printed(t, &["workflows", "cancel", workflow]).await;
        let workflows = printed(t, &["workflows", "list"]).await;
        assert!(workflows.contains(workflow) && workflows.contains("cancelled"), "{workflows}");
    });
}

#[test]
fn shells_complete_and_every_command_has_a_manual_page() {
    run_alone(async |t| {
        for (shell, begin) in
            [("bash", "_fencepost()"), ("zsh", "#compdef fencepost"), ("fish", "")]
        {
            let text = printed(t, &["completions", shell]).await;
            assert!(text.starts_with(begin) && text.contains("dead-letters"), "{shell}");
        }
        let dir = crate::harness::scratch("manual");
        printed(t, &["man", dir.to_str().expect("a path")]).await;
        let page = std::fs::read_to_string(dir.join("fencepost-dead-letters-retry.1"));
        assert!(page.expect("a page").contains("Only count them"));
    });
}
