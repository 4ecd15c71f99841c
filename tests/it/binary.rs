//! The program as it is typed: `dev` starts, is found, stops, and recovers.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use crate::harness::{fresh_database, limited, until};
use serde_json::{Value, json};

const PROGRAM: &str = env!("CARGO_BIN_EXE_fencepost");
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// A data folder of one test, that goes with it.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let dir = PathBuf::from(format!("/var/tmp/fencepost-binary-{}-{name}", std::process::id()));
        fs::create_dir_all(&dir).expect("a folder");
        Self(dir)
    }

    fn ready_file(&self) -> PathBuf {
        self.0.join("ready.json")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A running `fencepost dev`, killed with its test.
struct Dev {
    child: Child,
    ready: Value,
}

impl Dev {
    fn command(folder: &Folder) -> Command {
        let mut command = Command::new(PROGRAM);
        command
            .args([
                "dev",
                "--listen",
                "127.0.0.1:0",
                "--metrics-listen",
                "127.0.0.1:0",
                "--data-dir",
            ])
            .arg(&folder.0)
            .arg("--ready-file")
            .arg(folder.ready_file());
        command
    }

    fn start(folder: &Folder, more: &[&str]) -> Self {
        let _ = fs::remove_file(folder.ready_file());
        let output = fs::File::create(folder.0.join("output")).expect("a file");
        let mut child = Self::command(folder).args(more).stdout(output).spawn().expect("it starts");
        let deadline = Instant::now() + START_TIMEOUT;
        while !folder.ready_file().exists() {
            assert!(child.try_wait().expect("a state").is_none(), "it ended");
            assert!(Instant::now() < deadline, "it was not ready in time");
            std::thread::sleep(Duration::from_millis(10));
        }
        let ready = fs::read_to_string(folder.ready_file()).expect("it is ready");
        Self { child, ready: serde_json::from_str(&ready).expect("JSON") }
    }

    fn text(&self, field: &str) -> &str {
        self.ready[field].as_str().expect("a text")
    }

    fn signal(&self, signal: &str) {
        let pid = self.child.id().to_string();
        assert!(kill(signal, &pid));
    }

    fn stop(mut self) {
        self.signal("-TERM");
        assert!(self.child.wait().expect("it ends").success());
    }
}

impl Drop for Dev {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Through the shell, whose `kill` is always there.
fn kill(signal: &str, pid: &str) -> bool {
    let mut shell = Command::new("sh");
    shell.args(["-c", "kill \"$0\" \"$1\" 2>/dev/null", signal, pid]);
    shell.status().expect("sh runs").success()
}

fn curl(dev: &Dev, path: &str, body: Option<Value>) -> Value {
    let mut command = Command::new("curl");
    command
        .args(["-sS", &format!("{}/v1{path}", dev.text("url"))])
        .args(["-H", &format!("Authorization: Bearer {}", dev.text("api_key"))]);
    if let Some(body) = body {
        command.args(["-H", "Content-Type: application/json", "-d", &body.to_string()]);
    }
    let output = command.output().expect("curl runs");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn fencepost(args: &[&str], folder: &Path) -> Output {
    Command::new(PROGRAM).args(args).arg("--data-dir").arg(folder).output().expect("it runs")
}

fn text(output: &[u8]) -> String {
    String::from_utf8(output.to_vec()).expect("text")
}

#[test]
fn dev_keeps_its_data_and_its_key_and_leaves_nothing_running() {
    limited(async {
        let folder = Folder::new("keeps");
        let dev = Dev::start(&folder, &[]);
        let (key, project) = (dev.text("api_key").to_owned(), dev.text("project_id").to_owned());
        assert_eq!(dev.ready["pid"], dev.child.id());
        let job = curl(&dev, "/jobs", Some(json!({"job_type": "t"})));
        let metrics = Command::new("curl").args(["-sS", dev.text("metrics_url")]).output();
        let metrics = text(&metrics.expect("curl runs").stdout);
        assert!(metrics.contains("fencepost_jobs_enqueued_total 1"), "{metrics}");
        assert!(metrics.contains("# HELP fencepost_jobs_enqueued_total Jobs stored."));
        let postmaster = postmaster(&folder);
        dev.stop();
        assert!(!is_alive(&postmaster));

        let dev = Dev::start(&folder, &[]);
        assert_eq!((dev.text("api_key"), dev.text("project_id")), (key.as_str(), project.as_str()));
        let id = job["id"].as_str().expect("an id");
        assert_eq!(curl(&dev, &format!("/jobs/{id}"), None)["state"], "pending");
        dev.stop();

        let dev = Dev::start(&folder, &["--reset"]);
        assert_ne!(dev.text("api_key"), key);
        assert_eq!(curl(&dev, "/jobs", None)["jobs"], json!([]));
        dev.stop();
    });
}

fn postmaster(folder: &Folder) -> String {
    let pid = fs::read_to_string(folder.0.join("postgres/postmaster.pid")).expect("it runs");
    pid.lines().next().expect("a line").trim().to_owned()
}

fn is_alive(pid: &str) -> bool {
    kill("-0", pid)
}

#[test]
fn dev_that_was_killed_leaves_nothing_running_and_starts_again() {
    limited(async {
        let folder = Folder::new("killed");
        let mut dev = Dev::start(&folder, &[]);
        let job = curl(&dev, "/jobs", Some(json!({"job_type": "t"})));
        let postmaster = postmaster(&folder);
        dev.signal("-KILL");
        dev.child.wait().expect("it ends");
        until("PostgreSQL to end", async || !is_alive(&postmaster)).await;
        let dev = Dev::start(&folder, &[]);
        let id = job["id"].as_str().expect("an id");
        assert_eq!(curl(&dev, &format!("/jobs/{id}"), None)["state"], "pending");
        dev.stop();
    });
}

#[test]
fn a_second_dev_on_the_same_folder_says_who_has_it() {
    limited(async {
        let folder = Folder::new("second");
        let dev = Dev::start(&folder, &[]);
        let second = Dev::command(&folder).output().expect("it runs");
        assert!(!second.status.success());
        let reported = text(&second.stderr);
        assert!(reported.contains("another `fencepost dev` runs in"), "{reported}");
        assert!(reported.contains(dev.text("url")), "{reported}");
        assert!(reported.contains(&dev.child.id().to_string()), "{reported}");
        dev.stop();
    });
}

#[test]
fn a_taken_address_is_reported_with_the_flag_that_changes_it() {
    let folder = Folder::new("taken");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    let reported = Command::new(PROGRAM)
        .args(["dev", "--listen", &address, "--data-dir"])
        .arg(&folder.0)
        .output()
        .expect("it runs");
    let reported = text(&reported.stderr);
    assert!(reported.contains(&address) && reported.contains("--listen"), "{reported}");
}

#[test]
fn the_printed_lines_work_when_they_are_pasted() {
    limited(async {
        let folder = Folder::new("pasted");
        let dev = Dev::start(&folder, &[]);
        let output = fs::read_to_string(folder.0.join("output")).expect("it printed");
        let lines = output.lines().filter_map(|it| it.strip_prefix("  "));
        let starts = ["curl ", "export ", "fp", "work"];
        let pasted: Vec<_> =
            lines.filter(|it| starts.iter().any(|start| it.starts_with(start))).collect();
        assert_eq!(pasted.len(), 9, "{output}");
        let shell = Command::new("bash")
            .args(["-euc", &pasted.join("\n")])
            .stdin(Stdio::null())
            .output()
            .expect("bash runs");
        let reported = text(&shell.stdout);
        let answers = serde_json::Deserializer::from_str(&reported).into_iter::<Value>();
        let answers: Vec<Value> = answers.map(|it| it.expect("JSON")).collect();
        assert_eq!(answers.iter().filter(|it| it["action"] == "done").count(), 2, "{reported}");
        assert_eq!(answers.iter().filter(|it| it["action"] == "retry").count(), 1, "{reported}");
        let last = answers.last().expect("an answer");
        assert_eq!((&last["state"], &last["failures"]), (&json!("dead_letter"), &json!(2)));
        dev.stop();
    });
}

#[test]
fn keys_are_made_listed_and_revoked_from_the_terminal() {
    limited(async {
        let folder = Folder::new("keys");
        let without = fencepost(&["keys", "list", "--project", "demo"], &folder.0);
        assert!(
            text(&without.stderr).contains("no `fencepost dev` is running in"),
            "{}",
            text(&without.stderr)
        );
        let dev = Dev::start(&folder, &[]);
        let made = fencepost(&["keys", "create", "--new-project", "My Shop", "--quiet"], &folder.0);
        let key = text(&made.stdout).trim().to_owned();
        assert!(key.starts_with("fp_live_") && !key.contains(char::is_whitespace), "{key}");
        let with_key = |key: &str| {
            let output = Command::new("curl")
                .args([
                    "-sS",
                    "-H",
                    &format!("X-Api-Key: {key}"),
                    &format!("{}/v1/projects/my-shop/jobs", dev.text("url")),
                ])
                .output();
            serde_json::from_slice::<Value>(&output.expect("curl runs").stdout).expect("JSON")
        };
        assert_eq!(with_key(&key)["jobs"], json!([]));
        let shop = ["keys", "create", "--project", "my-shop", "--quiet"];
        let create = |more: &[&str]| fencepost(&[&shop[..], more].concat(), &folder.0);
        let bound = ["--expires-in-days", "30", "--allowed-ip", "192.0.2.0/24"];
        let bound = text(&create(&bound).stdout).trim().to_owned();
        assert_eq!(with_key(&bound)["error"]["code"], "forbidden", "from another network");
        for (flag, value) in [("--expires-in-days", "3661"), ("--allowed-ip", "192.0.2.7/x")] {
            let refused = text(&create(&[flag, value]).stderr).clone();
            assert!(refused.contains(flag), "{refused}");
        }
        let listed = text(&fencepost(&["keys", "list", "--project", "my-shop"], &folder.0).stdout);
        assert_eq!(listed.lines().count(), 3, "{listed}");
        let id = listed.lines().nth(1).and_then(|it| it.split_whitespace().next()).expect("an id");
        let revoked = fencepost(&["keys", "revoke", id, "--project", "my-shop"], &folder.0);
        assert!(revoked.status.success());
        let again = fencepost(&["keys", "create", "--new-project", "my shop"], &folder.0);
        assert!(text(&again.stderr).contains("the project `my-shop` exists already"));
        let listed = text(&fencepost(&["keys", "list", "--project", "my-shop"], &folder.0).stdout);
        assert!(listed.contains("live") && !listed.contains(&key), "{listed}");
        let row = listed.lines().last().expect("a key");
        let id = row.split_whitespace().next().expect("an id").to_owned();
        let foreign = fencepost(&["keys", "revoke", &id, "--project", "demo"], &folder.0);
        assert!(!foreign.status.success());
        assert!(
            fencepost(&["keys", "revoke", &id, "--project", "my-shop"], &folder.0).status.success()
        );
        until("the key to be refused", async || with_key(&key)["error"]["code"] == "unauthorized")
            .await;
        dev.stop();
    });
}

#[test]
fn counts_that_are_wrong_are_corrected() {
    limited(async {
        let database = fresh_database().await;
        database
            .execute(
                "insert into jobs (project_id, id, queue, job_type, state, rank, run_at, max_attempts,
                                   timeout_seconds, completed_at)
                 select 1, gen_random_uuid(), 'q', 't', state, 0, now(), 3, 60,
                        case state when 'dead_letter' then now() end
                 from unnest(array['pending', 'backoff', 'scheduled', 'dead_letter']) state;
                 insert into queue_counts (project_id, queue, active, succeeded) values (1, 'q', 7, 5);
                 insert into dead_letters (project_id, job_id, fingerprint, queue, job_type)
                 values (1, gen_random_uuid(), gen_random_uuid(), 'q', 't');
                 insert into dead_letter_groups (project_id, fingerprint, job_type, sample_job_id, jobs)
                 select 1, fingerprint, 't', job_id, 1 from dead_letters",
            )
            .await;
        let recount = || {
            let mut command = Command::new(PROGRAM);
            command.arg("recount").env("FENCEPOST_DATABASE_URL", &database.url);
            text(&command.output().expect("it runs").stdout)
        };
        assert_eq!(recount(), "corrected: 1 queues, 2 dead letters\n");
        assert_eq!(recount(), "corrected: 0 queues, 0 dead letters\n");
        let counted =
            "select (sum(active) * 100 + sum(scheduled) * 10 + sum(dead_letter))::bigint from (
            select active, scheduled, dead_letter from queue_counts
            union all
            select active, scheduled, dead_letter from queue_deltas
        ) counts";
        assert_eq!(database.number(counted).await, 211);
        assert_eq!(database.number("select sum(jobs)::bigint from dead_letter_groups").await, 1);
    });
}

#[test]
fn a_database_of_an_unreleased_version_is_not_migrated() {
    limited(async {
        let database = fresh_database().await;
        database.execute("update _sqlx_migrations set checksum = '\\x00' where version = 1").await;
        let mut migrate = Command::new(PROGRAM);
        migrate.args(["migrate", "--database-url", &database.url]);
        let refused = migrate.output().expect("it runs");
        assert_eq!(refused.status.code(), Some(1));
        let said = text(&refused.stderr);
        assert!(said.contains("before the first release"), "{said}");
        assert!(said.contains("create an empty database"), "{said}");
    });
}

#[test]
fn serve_and_migrate_take_a_database_from_their_environment() {
    limited(async {
        let database = fresh_database().await;
        let run = |args: &[&str], variable: &str, url: &str| {
            let mut command = Command::new(PROGRAM);
            command.args(args).env_remove("DATABASE_URL").env(variable, url);
            command
        };
        let migrated = run(&["migrate"], "DATABASE_URL", &database.url).output().expect("it runs");
        assert!(migrated.status.success(), "{}", text(&migrated.stderr));
        let nowhere = run(&["migrate"], "UNRELATED", "").output().expect("it runs");
        assert!(text(&nowhere.stderr).contains("--database-url"));
        let args = ["serve", "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"];
        let mut serving = run(&args, "FENCEPOST_DATABASE_URL", &database.url)
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        let mut log = std::io::BufReader::new(serving.stderr.take().expect("a log"));
        let mut line = String::new();
        std::io::BufRead::read_line(&mut log, &mut line).expect("a line");
        let line: Value = serde_json::from_str(&line).expect("logs are JSON");
        let url = format!("http://{}/readyz", line["api.address"].as_str().expect("an address"));
        let ready = crate::harness::client().get(url).send().await.expect("an answer");
        assert_eq!(ready.text().await.expect("a body"), "ok\n");
        assert!(kill("-TERM", &serving.id().to_string()));
        assert!(serving.wait().expect("it ends").success());
    });
}

#[test]
fn openapi_prints_the_committed_file() {
    let printed = Command::new(PROGRAM).arg("openapi").output().expect("it runs");
    assert_eq!(text(&printed.stdout), include_str!("../../openapi/openapi.json"));
}
