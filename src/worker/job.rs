//! One job: the command's process, from its start to the ack.

use std::{process::ExitStatus, process::Stdio, time::Duration};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use serde_json::{Value, json, value::RawValue};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt},
    process::{Child, Command},
    sync::watch,
    time::{Instant, sleep, sleep_until},
};

use super::{WorkerArgs, logs};
use crate::{
    client::{Client, Failure},
    domain::limits::MAX_RESULT_BYTES,
};

/// The conventional exit code for a failure that may pass (`EX_TEMPFAIL` of sysexits.h).
#[cfg(test)]
const TEMPORARY_FAILURE: i32 = 75;
/// Time between SIGTERM and SIGKILL.
const KILL_AFTER: Duration = Duration::from_secs(10);
/// Pauses between tries to send an ack; they double up to the last.
const ACK_PAUSES_MS: [u64; 6] = [200, 500, 1_000, 2_000, 5_000, 10_000];
/// How often an ack is tried: longer than any lease is worth.
const MAX_ACK_TRIES: usize = 60;

/// What the worker wants of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// Go on.
    Run,
    /// It was called off: stop, and say so.
    Cancel,
    /// The lease is lost: stop, and say nothing.
    Abandon,
    /// The grace is over: stop, and hand it back.
    Release,
    /// The grace is over: stop; it has failed.
    Fail,
}

/// A leased job, as the poll answered it.
#[derive(Debug, Clone)]
pub struct Leased {
    pub id: String,
    pub attempt: i64,
    pub lease_id: String,
    pub heartbeat_interval_seconds: u64,
    /// The bytes that were sent.
    payload: String,
    raw: Value,
}

impl Leased {
    /// None when the answer is not what it should be.
    pub fn of(text: &str) -> Option<Self> {
        #[derive(serde::Deserialize)]
        struct Payload<'a> {
            #[serde(borrow)]
            payload: &'a RawValue,
        }
        let Payload { payload } = serde_json::from_str(text).ok()?;
        let raw: Value = serde_json::from_str(text).ok()?;
        Some(Self {
            payload: payload.get().to_owned(),
            id: raw["id"].as_str()?.to_owned(),
            attempt: raw["attempt"].as_i64()?,
            lease_id: raw["lease_id"].as_str()?.to_owned(),
            heartbeat_interval_seconds: raw["heartbeat_interval_seconds"].as_u64()?,
            raw,
        })
    }

    /// The facts that the command gets as variables.
    fn variables(&self, worker_id: &str) -> Vec<(&'static str, String)> {
        let text = |field: &str| match &self.raw[field] {
            Value::String(text) => text.clone(),
            Value::Null => String::new(),
            other => other.to_string(),
        };
        vec![
            ("FENCEPOST_JOB_ID", self.id.clone()),
            ("FENCEPOST_JOB_TYPE", text("job_type")),
            ("FENCEPOST_QUEUE", text("queue")),
            ("FENCEPOST_ATTEMPT", self.attempt.to_string()),
            ("FENCEPOST_MAX_ATTEMPTS", text("max_attempts")),
            ("FENCEPOST_FAILURES", text("failures")),
            ("FENCEPOST_PRIORITY", text("priority")),
            ("FENCEPOST_TIMEOUT_SECONDS", text("timeout_seconds")),
            ("FENCEPOST_ENQUEUED_AT", text("enqueued_at")),
            ("FENCEPOST_TAGS", text("tags")),
            ("FENCEPOST_TRACEPARENT", text("traceparent")),
            ("FENCEPOST_LEASE_ID", self.lease_id.clone()),
            ("FENCEPOST_WORKER_ID", worker_id.to_owned()),
        ]
    }
}

/// How the command ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    Succeeded(Option<String>),
    Failed {
        kind: String,
        message: String,
        retryable: bool,
    },
    Released,
    /// Nothing is to be said.
    Abandoned,
}

impl End {
    /// For people.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Succeeded(_) => "succeeded",
            Self::Failed { .. } => "failed",
            Self::Released => "released",
            Self::Abandoned => "abandoned",
        }
    }
}

/// Runs the command for a job and acknowledges it.
pub async fn run(
    client: Client,
    args: WorkerArgs,
    worker_id: String,
    job: Leased,
    mut wanted: watch::Receiver<Wanted>,
) -> End {
    let started = Instant::now();
    let end = match run_command(&client, &args, &worker_id, &job, &mut wanted).await {
        Ok(end) => end,
        Err(error) => End::Failed {
            kind: "exec".to_owned(),
            message: format!("the command could not be run: {error}"),
            retryable: true,
        },
    };
    let duration_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
    acknowledge(&client, &worker_id, &job, &end, duration_ms, &mut wanted).await
}

async fn run_command(
    client: &Client,
    args: &WorkerArgs,
    worker_id: &str,
    job: &Leased,
    wanted: &mut watch::Receiver<Wanted>,
) -> std::io::Result<End> {
    let parents = ParentResults::write(job).await?;
    let mut command = Command::new("sh");
    command.arg("-c").arg(&args.exec).envs(job.variables(worker_id));
    if let Some(parents) = &parents {
        command.env("FENCEPOST_PARENT_RESULTS_FILE", &parents.0);
    }
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // A group of its own, so that its children end with it, and Ctrl-C does not reach it.
    command.process_group(0).kill_on_drop(true);
    let mut child = command.spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        let payload = job.payload.clone();
        // A command that does not read its payload closes the pipe.
        tokio::spawn(async move { stdin.write_all(payload.as_bytes()).await });
    }
    let stdout = child.stdout.take().map(|it| tokio::spawn(read_result(it)));
    let owner = logs::Owner {
        client: client.clone(),
        worker_id: worker_id.to_owned(),
        job_id: job.id.clone(),
        attempt: job.attempt,
    };
    let stderr = child.stderr.take().map(|it| tokio::spawn(logs::ship(owner, it)));
    let timeout_seconds = job.raw["timeout_seconds"].as_u64().unwrap_or(u64::from(u32::MAX));
    let (status, stopped_for) = wait(&mut child, timeout_seconds, wanted).await?;
    let output = match stdout {
        Some(reading) => reading.await.unwrap_or_default(),
        None => Vec::new(),
    };
    let last_lines = match stderr {
        Some(shipping) => shipping.await.unwrap_or_default(),
        None => String::new(),
    };
    Ok(judge(status, stopped_for, &output, &last_lines, &args.permanent_exit_codes))
}

/// Why a command was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stopped {
    For(Wanted),
    AtTimeout(u64),
}

/// Waits for the command's end; stops it when that is wanted, or when its time is over.
async fn wait(
    child: &mut Child,
    timeout_seconds: u64,
    wanted: &mut watch::Receiver<Wanted>,
) -> std::io::Result<(ExitStatus, Option<Stopped>)> {
    let deadline = Instant::now() + Duration::from_secs(timeout_seconds);
    let group = child.id().and_then(|it| i32::try_from(it).ok()).map(Pid::from_raw);
    let stopped = tokio::select! {
        status = child.wait() => return Ok((status?, None)),
        changed = wanted.wait_for(|it| *it != Wanted::Run) => {
            Stopped::For(changed.map_or(Wanted::Release, |it| *it))
        }
        () = sleep_until(deadline) => Stopped::AtTimeout(timeout_seconds),
    };
    let signal = |signal| {
        if let Some(group) = group {
            // It may have ended by itself.
            let _ = killpg(group, signal);
        }
    };
    signal(Signal::SIGTERM);
    let status = tokio::select! {
        status = child.wait() => status,
        () = sleep(KILL_AFTER) => {
            signal(Signal::SIGKILL);
            child.wait().await
        }
    };
    // Its children that are still there hold its pipes open.
    signal(Signal::SIGKILL);
    Ok((status?, Some(stopped)))
}

/// What the end of a command means.
fn judge(
    status: ExitStatus,
    stopped: Option<Stopped>,
    output: &[u8],
    last_lines: &str,
    permanent_exit_codes: &[i32],
) -> End {
    use std::os::unix::process::ExitStatusExt;
    match stopped {
        Some(Stopped::For(Wanted::Abandon)) => return End::Abandoned,
        // What is done is done, whoever wanted it to stop.
        _ if status.success() => return End::Succeeded(result(output)),
        Some(Stopped::For(Wanted::Release)) => return End::Released,
        Some(Stopped::AtTimeout(seconds)) => {
            let message = format!("stopped after {seconds} s, its timeout");
            return End::Failed { kind: "timeout".to_owned(), message, retryable: true };
        }
        _ => (),
    }
    let (kind, what, retryable) = match (status.code(), status.signal()) {
        (Some(code), _) => {
            let retryable = !permanent_exit_codes.contains(&code);
            (format!("exit.{code}"), format!("exit code {code}"), retryable)
        }
        (None, signal) => {
            let signal = signal.unwrap_or_default();
            (format!("signal.{signal}"), format!("ended by signal {signal}"), true)
        }
    };
    let last_lines = last_lines.trim_end();
    let message = if last_lines.is_empty() { what } else { format!("{what}\n{last_lines}") };
    End::Failed { kind, message, retryable }
}

/// Standard output as a result: JSON as it is, or else text. None when there is none.
fn result(output: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(output);
    let trimmed = text.trim();
    if trimmed.is_empty() {
        return None;
    }
    let is_json = serde_json::from_str::<&RawValue>(trimmed).is_ok();
    if is_json && trimmed.len() <= MAX_RESULT_BYTES {
        return Some(trimmed.to_owned());
    }
    // Quotes and escapes make it longer.
    let mut cut = trimmed.len().min(MAX_RESULT_BYTES);
    loop {
        let shown = &trimmed[..trimmed.floor_char_boundary(cut)];
        let encoded = Value::String(shown.to_owned()).to_string();
        if encoded.len() <= MAX_RESULT_BYTES {
            return Some(encoded);
        }
        cut = cut * 3 / 4;
    }
}

/// Reads all, and keeps what a result may be.
async fn read_result(mut stdout: impl AsyncRead + Unpin) -> Vec<u8> {
    let (mut kept, mut buffer) = (Vec::new(), vec![0; 16 * 1024]);
    while let Ok(read @ 1..) = stdout.read(&mut buffer).await {
        // One byte more tells that it is too long.
        let room = (MAX_RESULT_BYTES + 1).saturating_sub(kept.len());
        kept.extend_from_slice(&buffer[..read.min(room)]);
    }
    kept
}

/// What the parents have made, in a file for the command; removed when dropped.
struct ParentResults(std::path::PathBuf);

impl ParentResults {
    async fn write(job: &Leased) -> std::io::Result<Option<Self>> {
        let results = &job.raw["parent_results"];
        if results.as_array().is_none_or(Vec::is_empty) {
            return Ok(None);
        }
        let name = format!("fencepost-{}-{}.json", job.id, job.lease_id);
        let file = Self(std::env::temp_dir().join(name));
        tokio::fs::write(&file.0, results.to_string()).await?;
        Ok(Some(file))
    }
}

impl Drop for ParentResults {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[derive(serde::Serialize)]
struct Ack<'a> {
    job_id: &'a str,
    worker_id: &'a str,
    attempt: i64,
    lease_id: &'a str,
    duration_ms: u64,
    status: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<Box<RawValue>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    retryable: Option<bool>,
}

/// Tells the server, again and again while it does not answer: an ack that shows its attempt is safe to
/// repeat. Gives up when the lease is lost.
async fn acknowledge(
    client: &Client,
    worker_id: &str,
    job: &Leased,
    end: &End,
    duration_ms: u64,
    wanted: &mut watch::Receiver<Wanted>,
) -> End {
    let (mut result, mut error, mut retryable) = (None, None, None);
    let status = match end {
        End::Succeeded(made) => {
            result = made.as_ref().and_then(|it| RawValue::from_string(it.clone()).ok());
            "succeeded"
        }
        End::Failed { kind, message, retryable: may_retry } => {
            retryable = Some(*may_retry);
            error = Some(json!({"type": kind, "message": message}));
            "failed"
        }
        End::Released => "released",
        End::Abandoned => return End::Abandoned,
    };
    let ack = Ack {
        job_id: &job.id,
        worker_id,
        attempt: job.attempt,
        lease_id: &job.lease_id,
        duration_ms,
        status,
        result,
        error,
        retryable,
    };
    for attempt in 0..MAX_ACK_TRIES {
        match client.post("/v1/workers/ack", &ack).await {
            Ok(_) => return end.clone(),
            Err(failure) if failure.is_passing() => {
                let pause = ACK_PAUSES_MS.get(attempt).or(ACK_PAUSES_MS.last()).copied();
                let pause = Duration::from_millis(pause.unwrap_or_default());
                let lost = wanted.wait_for(|it| *it == Wanted::Abandon);
                if let Ok(Ok(_)) = tokio::time::timeout(pause, lost).await {
                    return End::Abandoned;
                }
            }
            Err(Failure::Refused { code, message, .. }) => {
                tracing::warn!(job.id, code, message, "the ack was refused");
                return End::Abandoned;
            }
            Err(Failure::Unreachable(_)) => return End::Abandoned,
        }
    }
    End::Abandoned
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    fn exit(code: i32) -> ExitStatus {
        ExitStatus::from_raw(code << 8)
    }

    fn failed(status: ExitStatus) -> (String, bool) {
        match judge(status, None, b"", "", &[64, 65]) {
            End::Failed { kind, retryable, .. } => (kind, retryable),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn exit_codes_are_outcomes() {
        assert_eq!(judge(exit(0), None, b"", "", &[]), End::Succeeded(None));
        assert_eq!(failed(exit(TEMPORARY_FAILURE)), ("exit.75".to_owned(), true));
        assert_eq!(failed(exit(1)), ("exit.1".to_owned(), true));
        assert_eq!(failed(exit(64)), ("exit.64".to_owned(), false));
        assert_eq!(failed(ExitStatus::from_raw(9)), ("signal.9".to_owned(), true));
    }

    #[test]
    fn why_a_command_was_stopped_counts_unless_it_was_done() {
        let stopped = |it| judge(ExitStatus::from_raw(15), Some(it), b"", "", &[]);
        assert_eq!(stopped(Stopped::For(Wanted::Release)), End::Released);
        assert_eq!(stopped(Stopped::For(Wanted::Abandon)), End::Abandoned);
        assert!(matches!(stopped(Stopped::For(Wanted::Cancel)), End::Failed { .. }));
        assert!(
            matches!(stopped(Stopped::AtTimeout(9)), End::Failed { kind, .. } if kind == "timeout")
        );
        let done = judge(exit(0), Some(Stopped::For(Wanted::Release)), b"1", "", &[]);
        assert_eq!(done, End::Succeeded(Some("1".to_owned())));
    }

    #[test]
    fn output_is_json_or_text_within_its_bound() {
        assert_eq!(result(b" {\"a\": 1}\n").as_deref(), Some("{\"a\": 1}"));
        assert_eq!(result(b"done\n").as_deref(), Some("\"done\""));
        assert_eq!(result(b"\n"), None);
        let long = result("\"".repeat(MAX_RESULT_BYTES + 1).as_bytes()).expect("a result");
        assert!(long.len() <= MAX_RESULT_BYTES && long.len() > MAX_RESULT_BYTES / 2);
    }

    #[test]
    fn a_failure_says_what_was_printed_last() {
        let end = judge(exit(3), None, b"", "line one\nline two\n", &[]);
        let End::Failed { message, .. } = end else { panic!("{end:?}") };
        assert_eq!(message, "exit code 3\nline one\nline two");
    }
}
