//! What others make of a signed request: the packages of Standard Webhooks, and our libraries.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt, process::Command};

use super::{endpoint, path};
use crate::harness::{Sink, TestServer, fresh_database, run_for, scratch};

const READ_IN_PYTHON: &str = "
import json, sys
sent = json.load(sys.stdin)
";
const OURS_IN_PYTHON: &str = "
from fencepost import InvalidWebhook, verify_webhook
try:
    event = verify_webhook(sent['secret'], sent['headers'], sent['body'])
except InvalidWebhook:
    sys.exit(3)
assert event['type'] == 'endpoint.test', event
";
const THEIRS_IN_PYTHON: &str = "
from standardwebhooks.webhooks import Webhook, WebhookVerificationError
try:
    event = Webhook(sent['secret']).verify(sent['body'], sent['headers'])
except WebhookVerificationError:
    sys.exit(3)
assert event['type'] == 'endpoint.test', event
";
const READ_IN_NODE: &str = "
import { readFileSync } from 'node:fs';
const sent = JSON.parse(readFileSync(0, 'utf8'));
";
const OURS_IN_NODE: &str = "
const { InvalidWebhook, verifyWebhook } = await import(process.env.LIBRARY);
try {
  const body = new TextEncoder().encode(sent.body);
  const event = verifyWebhook(sent.secret, sent.headers, body);
  if (event.type !== 'endpoint.test') throw new Error(event.type);
} catch (error) {
  process.exit(error instanceof InvalidWebhook ? 3 : 1);
}
";
const THEIRS_IN_NODE: &str = "
const { Webhook, WebhookVerificationError } = await import('standardwebhooks');
try {
  const event = new Webhook(sent.secret).verify(sent.body, sent.headers);
  if (event.type !== 'endpoint.test') throw new Error(event.type);
} catch (error) {
  process.exit(error instanceof WebhookVerificationError ? 3 : 1);
}
";
/// What the programs above end with when they refuse a request.
const REFUSED: i32 = 3;

fn clients() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("clients")
}

/// Runs a program, and answers with how it ended.
async fn ends_with(command: &mut Command, input: &Value) -> Option<i32> {
    let mut child = command.stdin(Stdio::piped()).spawn().expect("it runs");
    let mut to = child.stdin.take().expect("an input");
    to.write_all(input.to_string().as_bytes()).await.expect("it is read");
    drop(to);
    child.wait().await.expect("it ends").code()
}

async fn runs(dir: &Path, program: &str, args: &[&str]) {
    let done = Command::new(program).args(args).current_dir(dir).output().await.expect("it runs");
    let said = String::from_utf8_lossy(&done.stdout) + String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{program} {args:?}: {said}");
}

/// The four programs: their name, and how they are run.
async fn programs() -> Vec<(&'static str, Command)> {
    let dir = scratch("webhook-verifiers");
    runs(&dir, "python3", &["-m", "venv", "python"]).await;
    let package = ["install", "--quiet", "standardwebhooks==1.1.0"];
    runs(&dir, "python/bin/pip", &package).await;
    let package = ["install", "--no-audit", "--no-fund", "standardwebhooks@1.1.1"];
    runs(&dir, "npm", &package).await;
    let python = |text: &str| {
        let mut command = Command::new(dir.join("python/bin/python"));
        command.args(["-c", &format!("{READ_IN_PYTHON}{text}")]);
        command.env("PYTHONPATH", clients().join("python"));
        command
    };
    let node = |text: &str| {
        let mut command = Command::new("node");
        command.args(["--input-type=module", "-e", &format!("{READ_IN_NODE}{text}")]);
        command.env("LIBRARY", clients().join("typescript/index.js")).current_dir(&dir);
        command
    };
    vec![
        ("our library in Python", python(OURS_IN_PYTHON)),
        ("theirs in Python", python(THEIRS_IN_PYTHON)),
        ("our library in TypeScript", node(OURS_IN_NODE)),
        ("theirs in TypeScript", node(THEIRS_IN_NODE)),
    ]
}

#[test]
fn a_signed_request_is_accepted_by_all_and_a_changed_one_by_none() {
    run_for(Duration::from_secs(180), async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project("main").await;
        let sink = Sink::start().await;
        let made = endpoint(&t, &sink, json!({})).await;
        let mut programs = programs().await;
        t.act(&path(&made, "/test")).await.is(202);
        let reported = sink.next().await;
        let names = ["webhook-id", "webhook-timestamp", "webhook-signature"];
        let headers: serde_json::Map<_, _> =
            names.iter().map(|it| ((*it).to_owned(), json!(reported.header(it)))).collect();
        let sent = json!({"secret": made["secret"], "headers": headers, "body": reported.text});
        let with = |pointer: &str, value: Value| {
            let mut changed = sent.clone();
            *changed.pointer_mut(pointer).expect("it is there") = value;
            changed
        };
        let changed = [
            with("/body", json!(format!("{} ", reported.text))),
            with("/secret", json!("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")),
            with("/headers/webhook-id", json!("evt_other")),
            with("/headers/webhook-timestamp", json!("1614265330")),
        ];
        for (name, program) in &mut programs {
            assert_eq!(ends_with(program, &sent).await, Some(0), "{name}");
            for changed in &changed {
                assert_eq!(ends_with(program, changed).await, Some(REFUSED), "{name}: {changed}");
            }
        }
        server.stop().await;
    });
}

#[test]
fn the_library_in_go_accepts_what_is_signed_alone() {
    run_for(Duration::from_secs(120), async {
        runs(&clients().join("go"), "go", &["test", "./..."]).await;
    });
}
