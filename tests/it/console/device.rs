//! `fencepost login`: the program shows a code, the console approves it.

use std::process::Stdio;

use fencepost_domain::access::Role;
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStderr, Command},
};

use super::Browser;
use crate::{
    harness::{TestProject, run_alone, scratch},
    people::{PASSWORD, second_factor::age_sessions},
};

const ADA: &str = "ada@example.com";
/// The file of profiles, below the folder of settings.
const PROFILES: &str = "fencepost/profiles.json";

/// The program, with profiles in a folder of its own.
fn program(t: &TestProject, home: &std::path::Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fencepost"));
    command.args(args).env("FENCEPOST_URL", &t.url).env_remove("FENCEPOST_KEY");
    command.env("XDG_CONFIG_HOME", home).env("FENCEPOST_DATA_DIR", home.join("none"));
    command.stdin(Stdio::null()).kill_on_drop(true);
    command
}

/// `fencepost login`, the path of its page, and the code.
struct Login {
    program: Child,
    said: Lines<BufReader<ChildStderr>>,
    page: String,
    code: String,
}

impl Login {
    /// Whether it has succeeded, and its last line.
    async fn ends(mut self) -> (bool, String) {
        let mut last = String::new();
        while let Some(line) = self.said.next_line().await.expect("text") {
            last = line;
        }
        (self.program.wait().await.expect("it ends").success(), last)
    }
}

async fn logging_in(t: &TestProject, home: &std::path::Path) -> Login {
    let mut program = program(t, home, &["login"]);
    let mut program = program.stderr(Stdio::piped()).spawn().expect("it starts");
    let mut said = BufReader::new(program.stderr.take().expect("its words")).lines();
    let line = said.next_line().await.expect("text").expect("a line");
    let page = line.strip_prefix("Open ").expect("a page");
    let page = page[page.find("/console").expect("a path")..].to_owned();
    let code = page.split_once("?code=").expect("a code").1.to_owned();
    Login { program, said, page, code }
}

async fn printed(t: &TestProject, home: &std::path::Path, args: &[&str]) -> String {
    let output = program(t, home, args).output().await.expect("it runs");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {error}");
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn a_terminal_is_logged_in_and_manages_keys() {
    run_alone(async |t| {
        let home = scratch("login");
        let login = logging_in(t, &home).await;
        let (page, code) = (login.page.clone(), login.code.clone());
        let mut browser = Browser::of_member(t, ADA, Role::Admin).await;
        let mut stranger = Browser::new(t, "stranger@example.com");
        let next = page.replace('/', "%2F").replace('?', "%3F").replace('=', "%3D");
        stranger.get(&page).await.goes(&format!("/console/login?next={next}"));
        browser.get("/console/device").await.says(200, "Type it here");
        browser.get("/console/device?code=nonsense").await.says(400, "This code is wrong");
        let asked = browser.get(&page).await;
        asked.says(200, "cli");
        asked.says(200, &format!("<code>{code}</code>"));
        let form = [("code", code.as_str()), ("project", "main"), ("preset", "full")];
        age_sessions(t).await;
        let step_up = browser.post("/console/device", &form).await;
        assert!(
            step_up.headers["location"].to_str().expect("text").starts_with("/console/step-up")
        );
        let proof = [("password", PASSWORD), ("next", page.as_str())];
        let back = format!("{page}&done=auth_step_up");
        browser.post("/console/step-up", &proof).await.goes(&back);
        browser.get(&back).await.says(200, "Approve</button>");
        let done = "/console/device?done=projects_approve_device";
        browser.post("/console/device", &form).await.goes(done);
        browser.get(done).await.says(200, "The terminal logs in within seconds");

        let (is_done, said) = login.ends().await;
        assert!(is_done, "{said}");
        assert!(said.starts_with("The profile default is kept"), "{said}");
        assert!(home.join(PROFILES).exists());
        let listed = printed(t, &home, &["api-keys", "list"]).await;
        assert!(listed.starts_with("KEY ID") && listed.contains("cli"), "{listed}");
        let create = [
            "api-keys", "create", "billing", "--preset", "worker", "--queue", "mail", "-o", "json",
        ];
        let made: Value = serde_json::from_str(&printed(t, &home, &create).await).expect("JSON");
        assert!(made["secret"].as_str().is_some_and(|it| it.starts_with("fp_")));
        assert_eq!(made["key"]["queues"][0], "mail");
        let id = made["key"]["id"].as_str().expect("an id");
        let rotated =
            printed(t, &home, &["api-keys", "rotate", id, "--overlap-seconds", "60"]).await;
        assert!(rotated.contains("billing"), "{rotated}");
        printed(t, &home, &["api-keys", "revoke", id, "--revoke-keys", "true"]).await;
        let key = printed(t, &home, &["api-keys", "get", id]).await;
        assert!(key.contains("revoked"), "{key}");
    });
}

#[test]
fn a_terminal_that_is_refused_or_gets_no_key_says_so() {
    run_alone(async |t| {
        let home = scratch("refused-login");
        let mut browser = Browser::of_member(t, ADA, Role::Admin).await;
        let login = logging_in(t, &home).await;
        let form = [("code", login.code.as_str()), ("refuse", "1")];
        let done = "/console/device?done=auth_refuse_device";
        browser.post("/console/device", &form).await.goes(done);
        browser.get(&login.page).await.says(400, "This code is wrong");
        let (is_done, said) = login.ends().await;
        assert!(!is_done && said.contains("the code was refused"), "{said}");

        t.database.execute("update projects set overrides = '{\"keys\": 1}'").await;
        let login = logging_in(t, &home).await;
        let form = [("code", login.code.as_str()), ("project", "main"), ("preset", "worker")];
        let done = "/console/device?done=projects_approve_device";
        browser.post("/console/device", &form).await.goes(done);
        let (is_done, said) = login.ends().await;
        assert!(!is_done && said.contains("keys"), "{said}");
        assert!(!home.join(PROFILES).exists(), "none is written");
    });
}
