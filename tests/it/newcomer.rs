//! A newcomer's way, as the start page shows it: sign up at a server with the plan `free`, write a
//! worker in an empty folder, and see its first job done.

use std::{path::PathBuf, process::Stdio, time::Duration};

use crate::{
    docs::read,
    guides::blocks,
    harness::{NodeProcess, eventually, free_port, fresh_database, run_for},
};
use serde_json::{Value, json};
use tokio::process::{Child, Command};

/// One of them compiles the library for Rust and all that it needs.
const TIME_LIMIT: Duration = Duration::from_secs(400);

/// A rate that is used up in a moment, on any machine.
const JOBS_PER_MINUTE: u32 = 6;

/// A program and all that it has started.
struct Working(Child);

impl Working {
    fn start(mut command: Command) -> Self {
        let command = command.process_group(0).stdout(Stdio::null()).stderr(Stdio::null());
        Self(command.spawn().expect("bash runs"))
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        let group = format!("-{}", self.0.id().expect("it runs"));
        let _ = std::process::Command::new("kill").args(["-KILL", "--", &group]).status();
    }
}

/// Instructions of one tab of the page.
struct Tab {
    /// To run first.
    setup: Option<String>,
    /// A file and its text.
    program: Option<(String, String)>,
    /// To run then.
    then: String,
}

/// The tab of a language in each of the page's groups: the worker, and the producer.
fn tabs(language: &str) -> [Tab; 2] {
    let page = read("docs/index.md");
    let mut groups = page.split("<!-- tabs -->\n").skip(1).map(|group| {
        let (tabs, _) = group.split_once("<!-- end -->").expect("its end");
        let (_, tab) = tabs.split_once(&format!("**{language}**\n")).expect("its tab");
        let tab = tab.split("\n**").next().unwrap_or(tab);
        let mut found = Tab { setup: None, program: None, then: String::new() };
        for (language, text) in blocks(tab) {
            if language == "sh" {
                let earlier = std::mem::replace(&mut found.then, text);
                found.setup = Some(earlier).filter(|it| !it.is_empty()).or(found.setup.take());
                continue;
            }
            let (name, _) = text.split_once('\n').expect("its first line");
            let name = name.trim_start_matches(['#', '/', ' ']).to_owned();
            found.program = Some((name, text));
        }
        found
    });
    [(); 2].map(|()| groups.next().expect("a group of tabs"))
}

/// A folder outside of this workspace, where Cargo would add to it.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let name = format!("fencepost-newcomer-{}-{name}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).expect("a folder");
        Self(folder)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A folder and a server.
struct Place {
    folder: Scratch,
    url: String,
    database_url: String,
    key: String,
    project: String,
}

impl Place {
    fn shell(&self, text: &str) -> Command {
        let mut command = Command::new("bash");
        command
            .args(["-eu", "-o", "pipefail", "-c", text])
            .current_dir(&self.folder.0)
            .env("FENCEPOST_URL", &self.url)
            .env("FENCEPOST_KEY", &self.key)
            // Another server may have handed out the same version.
            .env("GOMODCACHE", self.folder.0.join("go"))
            .env("GOFLAGS", "-modcacherw")
            // Each run would compile the same crates again.
            .env("CARGO_TARGET_DIR", PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("newcomer"))
            .stdin(Stdio::null())
            .kill_on_drop(true);
        command
    }

    async fn runs(&self, text: &str) -> String {
        let output = self.shell(text).output().await.expect("bash runs");
        let said =
            String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{text}\n{said}");
        said.into_owned()
    }

    fn write(&self, tab: &Tab) {
        let Some((name, text)) = &tab.program else { return };
        let file = self.folder.0.join(name);
        std::fs::create_dir_all(file.parent().expect("a folder")).expect("a folder");
        std::fs::write(file, text).expect("a file");
    }

    /// Generates a client with a generator that `scripts/clients.sh` names so, and works with it.
    async fn generates(&self, client: &str) -> String {
        let root = env!("CARGO_MANIFEST_DIR");
        self.runs(&format!("cd '{root}' && bash scripts/clients.sh {client}")).await
    }

    /// Signs up, as the page's first block says.
    async fn sign_up(&mut self) {
        let page = blocks(&read("docs/index.md"));
        let [first, sign_up, key] = &page[..3] else { panic!("three blocks") };
        assert!(first.1.contains("FENCEPOST_URL="));
        assert!(key.1.contains("FENCEPOST_KEY="));
        let said = self.runs(&sign_up.1).await;
        let answer: Value = said.lines().find_map(|it| serde_json::from_str(it).ok()).expect(&said);
        self.key = answer["api_key"]["secret"].as_str().expect("a key").to_owned();
        assert_eq!(answer["project"]["plan"], "free", "{said}");
        self.project = answer["project"]["slug"].as_str().expect("a slug").to_owned();
    }

    /// Sets a limit of the project, as the operator does.
    fn set_limit(&self, limit: &str) {
        let set = std::process::Command::new(env!("CARGO_BIN_EXE_fencepost"))
            .args(["projects", "set", &self.project, "--limit", limit])
            .env("FENCEPOST_DATABASE_URL", &self.database_url)
            .output()
            .expect("it runs");
        assert!(set.status.success(), "{}", String::from_utf8_lossy(&set.stderr));
    }
}

/// Goes the way of the page in a language.
fn goes_the_way(language: &str) {
    run_for(TIME_LIMIT, async {
        let (_node, place) = arrive(language).await;
        let [worker, producer] = tabs(language);
        if let Some(setup) = &worker.setup {
            place.runs(setup).await;
        }
        place.write(&worker);
        place.write(&producer);
        if worker.program.is_none() {
            place.runs(&worker.then).await;
            let said = place.runs(&producer.then).await;
            assert!(said.contains("Hello, Ada!") && said.contains("\"attempt\":1"), "{said}");
            return refused_and_patient(&place, &worker.then).await;
        }
        let working = Working::start(place.shell(&worker.then));
        let said = place.runs(&producer.then).await;
        assert!(said.contains("attempt 1: ") && said.contains("Hello, Ada!"), "{said}");
        drop(working);
    });
}

/// Starts a server that people can sign up at, and signs up.
async fn arrive(name: &str) -> (NodeProcess, Place) {
    let database = fresh_database().await;
    let port = free_port();
    let public_url = format!("http://127.0.0.1:{port}");
    let args = ["--signup", "open", "--default-plan", "free", "--public-url", &public_url];
    let mut node = NodeProcess::start_at(&database, port, &args);
    node.until_ready().await;
    let mut place = Place {
        folder: Scratch::new(name),
        url: node.url(),
        database_url: database.url.clone(),
        key: String::new(),
        project: String::new(),
    };
    place.sign_up().await;
    (node, place)
}

/// Uses up a small rate, and goes the same way again: curl waits as the answer says.
///
/// The plan's own rate comes back faster than curl starts.
async fn refused_and_patient(place: &Place, text: &str) {
    place.set_limit(&format!("produce_per_minute={JOBS_PER_MINUTE}"));
    let client = crate::harness::client();
    let refused = eventually("the rate to be used up", async || {
        let request = client.post(format!("{}/v1/jobs", place.url)).bearer_auth(&place.key);
        let reply = request.json(&json!({"job_type": "other", "queue": "other"})).send().await;
        let reply = reply.expect("an answer");
        // Nodes learn of the limit within seconds.
        (reply.status() != 201 && header(&reply, "x-ratelimit-limit") == Some(JOBS_PER_MINUTE))
            .then_some(reply)
    })
    .await;
    assert_eq!(refused.status(), 429);
    let after = header(&refused, "retry-after");
    assert!(after.is_some_and(|it| (1..=60 / JOBS_PER_MINUTE).contains(&it)), "{refused:?}");
    let body: Value = refused.json().await.expect("a body");
    assert_eq!(body["error"]["code"], "rate_limit_exceeded");
    place.runs(text).await;
}

fn header(reply: &reqwest::Response, name: &str) -> Option<u32> {
    reply.headers().get(name)?.to_str().ok()?.parse().ok()
}

#[test]
fn a_newcomer_with_curl_completes_a_job_and_waits_when_rate_limited() {
    goes_the_way("curl");
}

/// Installs the library as the page says, in an empty folder.
fn installs(language: &str, then: &str) {
    run_for(TIME_LIMIT, async {
        let (_node, place) = arrive(&format!("install-{language}")).await;
        let [worker, _] = tabs(language);
        place.runs(&worker.setup.expect("instructions")).await;
        place.runs(then).await;
    });
}

#[test]
fn the_wheel_of_the_server_is_installed_without_a_clone() {
    installs("Python", ".venv/bin/python -c 'import fencepost; fencepost.Worker.job'");
}

#[test]
fn the_npm_package_of_the_server_is_installed_without_a_clone() {
    let then = "node --input-type=module -e 'import { Worker } from \"fencepost\"; Worker.name'";
    installs("TypeScript", then);
}

#[test]
fn the_go_module_of_the_server_is_installed_without_a_clone() {
    installs(
        "Go",
        "go list -m fencepost.example/fencepost && go build fencepost.example/fencepost",
    );
}

#[test]
fn the_crate_of_the_server_is_installed_without_a_clone() {
    installs("Rust", "cargo fetch --quiet && grep -A 3 fencepost-client Cargo.lock");
}

#[test]
#[ignore = "takes long: `make nightly` runs it"]
fn a_newcomer_with_python_sees_a_job_done() {
    goes_the_way("Python");
}

#[test]
#[ignore = "takes long: `make nightly` runs it"]
fn a_newcomer_with_typescript_sees_a_job_done() {
    goes_the_way("TypeScript");
}

#[test]
#[ignore = "takes long: `make nightly` runs it"]
fn a_newcomer_with_go_sees_a_job_done() {
    goes_the_way("Go");
}

#[test]
#[ignore = "takes long: `make nightly` runs it"]
fn a_newcomer_with_rust_sees_a_job_done() {
    goes_the_way("Rust");
}

#[test]
#[ignore = "takes long: `make nightly` runs it"]
fn a_newcomer_with_generated_clients_sees_jobs_done_and_obeys_refusals() {
    run_for(TIME_LIMIT, async {
        for client in ["python", "fetch", "hey"] {
            let (_node, place) = arrive(client).await;
            let said = place.generates(client).await;
            assert!(said.contains("made, compiled, worked a job"), "{said}");
        }
    });
}
