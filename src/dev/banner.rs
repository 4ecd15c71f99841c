//! The output of `dev` when it is ready: its address, and commands to paste.

use secrecy::{ExposeSecret, SecretString};

use super::{Folder, Ready};

/// Prints it to standard output.
#[allow(clippy::print_stdout, reason = "output of the command")]
pub fn print(ready: &Ready, folder: &Folder, invitation: Option<&SecretString>) {
    println!("{}", text(ready, &folder.path().display().to_string(), &console(ready, invitation)));
}

/// The console; with an invitation, which makes the first visitor the demo project's owner.
fn console(ready: &Ready, invitation: Option<&SecretString>) -> String {
    let url = &ready.url;
    match invitation {
        None => format!("{url}/console"),
        Some(it) => format!("{url}/console/invitation#token={}", it.expose_secret()),
    }
}

fn text(ready: &Ready, folder: &str, console: &str) -> String {
    let Ready { url, metrics_url, api_key, project_id, .. } = ready;
    format!(
        r#"
Fencepost is ready.

  API       {url}
  Console   {console}
  Docs      {url}/docs/
  Metrics   {metrics_url}
  Project   demo ({project_id})
  Key       {api_key}
  Data      {folder}

Enqueue a job:

  curl -sS {url}/v1/jobs -H 'Authorization: Bearer {api_key}' -H 'Content-Type: application/json' -d '{{"job_type": "hello", "payload": {{"name": "Ada"}}}}' -w '\n'

Act as a worker: lease it, and report that it is done.

  export FENCEPOST_URL={url} FENCEPOST_KEY={api_key}
  fp() {{ curl -sS "$FENCEPOST_URL/v1$1" -H "Authorization: Bearer $FENCEPOST_KEY" -H 'Content-Type: application/json' ${{2:+-d "$2"}}; echo; }}
  work() {{ POLLED=$(fp /workers/poll '{{"worker_id": "me", "queues": ["'$1'"]}}'); echo "$POLLED"; JOB=$(echo "$POLLED" | grep -o 'job_[0-9a-z]*' | head -n 1); }}
  work default; fp /workers/ack '{{"job_id": "'$JOB'", "worker_id": "me", "attempt": 1, "status": "succeeded"}}'

A job that fails, is retried after a second, fails again, and is dead-lettered:

  fp /jobs '{{"job_type": "hello", "queue": "luck", "max_attempts": 2, "retry": {{"strategy": "constant", "initial_seconds": 1, "jitter_seconds": 0}}}}'
  work luck; fp /workers/ack '{{"job_id": "'$JOB'", "worker_id": "me", "attempt": 1, "status": "failed", "error": {{"message": "out of luck"}}}}'
  work luck; fp /workers/ack '{{"job_id": "'$JOB'", "worker_id": "me", "attempt": 2, "status": "failed", "error": {{"message": "again"}}}}'
  fp /jobs/$JOB

Ctrl-C stops it; the data stay."#
    )
}
