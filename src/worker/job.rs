//! One job: the command's process, from its start to the ack.

use std::{
    collections::BTreeMap,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use nix::{
    errno::Errno,
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use serde_json::{Value, json, value::RawValue};
use tokio::{
    io::AsyncWriteExt,
    process::{Child, Command},
    sync::watch,
    task::JoinHandle,
    time::{Instant, sleep, sleep_until, timeout},
};

use super::{
    WorkerArgs, logs,
    outcome::{CommandEnd, Output, Stopped, Wanted, judge, read_result},
};
use crate::client::{Client, Failure};

/// How often the exit of a stopped command and its children is checked.
const GROUP_LOOK_PERIOD: Duration = Duration::from_millis(50);
/// Time for remaining children to close their pipes.
const PIPES_TIMEOUT: Duration = Duration::from_secs(2);
/// Time to send the last lines.
const LAST_LINES_TIMEOUT: Duration = Duration::from_secs(10);
/// The error's type when the server refused the command's output.
const ACK_REFUSED: &str = "ack.refused";
/// Time between SIGTERM and SIGKILL.
const KILL_AFTER: Duration = Duration::from_secs(10);
/// Pauses between tries to send an ack; they double up to the last.
const ACK_PAUSES_MS: [u64; 6] = [200, 500, 1_000, 2_000, 5_000, 10_000];
/// Maximum number of tries: longer than any lease lasts.
const MAX_ACK_TRIES: usize = 60;

/// A leased job, as the poll answered it.
#[derive(Debug, Clone)]
pub struct Leased {
    pub id: String,
    pub attempt: i64,
    pub lease_id: String,
    pub heartbeat_interval_seconds: u64,
    /// The payload, byte for byte.
    payload: String,
    /// The parents' results, byte for byte; none without parents.
    parent_results: Option<String>,
    raw: Value,
}

impl Leased {
    /// None if the answer is malformed.
    pub fn of(text: &str) -> Option<Self> {
        // Only fields of known shape are parsed: payloads may be JSON that only their program can
        // read.
        let parts: BTreeMap<String, &RawValue> = serde_json::from_str(text).ok()?;
        let part = |name: &str| parts.get(name).map(|it| it.get().to_owned());
        let opaque = ["payload", "parent_results"];
        let raw = parts.iter().filter(|(name, _)| !opaque.contains(&name.as_str()));
        let raw: Value = raw
            .map(|(name, it)| Some((name.clone(), serde_json::from_str(it.get()).ok()?)))
            .collect::<Option<serde_json::Map<_, _>>>()?
            .into();
        Some(Self {
            payload: part("payload")?,
            parent_results: part("parent_results").filter(|it| it != "[]"),
            id: raw["id"].as_str()?.to_owned(),
            attempt: raw["attempt"].as_i64()?,
            lease_id: raw["lease_id"].as_str()?.to_owned(),
            heartbeat_interval_seconds: raw["heartbeat_interval_seconds"].as_u64()?,
            raw,
        })
    }

    /// Facts for the command, as environment variables.
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

/// Runs the command for a job and acknowledges it.
pub async fn run(
    client: Client,
    args: WorkerArgs,
    worker_id: String,
    job: Leased,
    mut wanted: watch::Receiver<Wanted>,
) -> CommandEnd {
    let started = Instant::now();
    let end = match run_command(&client, &args, &worker_id, &job, &mut wanted).await {
        Ok(end) => end,
        Err(error) => CommandEnd::Failed {
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
) -> std::io::Result<CommandEnd> {
    let parents = ParentResults::write(job).await?;
    let mut command = Command::new("sh");
    command.arg("-c").arg(&args.exec).envs(job.variables(worker_id));
    if let Some(parents) = &parents {
        command.env("FENCEPOST_PARENT_RESULTS_FILE", &parents.0);
    }
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // A process group of its own, so that its children end with it, and Ctrl-C does not reach it.
    command.process_group(0).kill_on_drop(true);
    let mut child = command.spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        let payload = job.payload.clone();
        // A command that does not read its payload closes the pipe.
        tokio::spawn(async move { stdin.write_all(payload.as_bytes()).await });
    }
    // Whatever happens to this task, the command and its children end with it.
    let group = Group::of(&child);
    let output = Output::default();
    let stdout = child.stdout.take().map(|it| tokio::spawn(read_result(it, output.clone())));
    let owner = logs::Owner {
        client: client.clone(),
        worker_id: worker_id.to_owned(),
        job_id: job.id.clone(),
        attempt: job.attempt,
    };
    let stderr = child.stderr.take().map(|it| tokio::spawn(logs::ship(owner, it)));
    let timeout_seconds = job.raw["timeout_seconds"].as_u64().unwrap_or(u64::from(u32::MAX));
    let (status, stopped_for) = wait(&mut child, &group, timeout_seconds, wanted).await?;
    let last_lines = drain(&group, stdout, stderr).await;
    Ok(judge(status, stopped_for, &output.so_far(), &last_lines, &args.permanent_exit_codes))
}

/// Reads the rest of the output, and sends it before the ack: later it would be refused. Children
/// that hold the pipes open get a moment, and are then killed.
async fn drain(
    group: &Group,
    stdout: Option<JoinHandle<()>>,
    stderr: Option<JoinHandle<String>>,
) -> String {
    let rest = async {
        if let Some(reading) = stdout {
            let _ = reading.await;
        }
        match stderr {
            Some(shipping) => shipping.await.unwrap_or_default(),
            None => String::new(),
        }
    };
    tokio::pin!(rest);
    match timeout(PIPES_TIMEOUT, &mut rest).await {
        Ok(last_lines) => last_lines,
        Err(_) => {
            group.signal(Signal::SIGKILL);
            timeout(LAST_LINES_TIMEOUT, rest).await.unwrap_or_default()
        }
    }
}

/// The process group of a command: the rest of it is killed when this is dropped.
struct Group(Option<Pid>);

impl Group {
    fn of(child: &Child) -> Self {
        Self(child.id().and_then(|it| i32::try_from(it).ok()).map(Pid::from_raw))
    }

    fn is_gone(&self) -> bool {
        self.0.is_none_or(|it| killpg(it, None) == Err(Errno::ESRCH))
    }

    fn signal(&self, signal: Signal) {
        if let Some(group) = self.0 {
            // It may have ended by itself.
            let _ = killpg(group, signal);
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.signal(Signal::SIGKILL);
    }
}

/// Waits for the command's end; stops it on request, or at its timeout.
async fn wait(
    child: &mut Child,
    group: &Group,
    timeout_seconds: u64,
    wanted: &mut watch::Receiver<Wanted>,
) -> std::io::Result<(ExitStatus, Option<Stopped>)> {
    let deadline = Instant::now() + Duration::from_secs(timeout_seconds);
    let stopped = tokio::select! {
        status = child.wait() => return Ok((status?, None)),
        changed = wanted.wait_for(|it| *it != Wanted::Run) => {
            Stopped::For(changed.map_or(Wanted::Release, |it| *it))
        }
        () = sleep_until(deadline) => Stopped::AtTimeout(timeout_seconds),
    };
    group.signal(Signal::SIGTERM);
    // The shell may exit before its children.
    let ended = async {
        let status = child.wait().await;
        while !group.is_gone() {
            sleep(GROUP_LOOK_PERIOD).await;
        }
        status
    };
    if let Ok(status) = timeout(KILL_AFTER, ended).await {
        return Ok((status?, Some(stopped)));
    }
    group.signal(Signal::SIGKILL);
    Ok((child.wait().await?, Some(stopped)))
}

/// The parents' results, in a file for the command; removed when dropped.
struct ParentResults(std::path::PathBuf);

impl ParentResults {
    async fn write(job: &Leased) -> std::io::Result<Option<Self>> {
        let Some(results) = &job.parent_results else { return Ok(None) };
        let name = format!("fencepost-{}-{}.json", job.id, job.lease_id);
        let file = Self(std::env::temp_dir().join(name));
        // Readable by this user only.
        let mut options = tokio::fs::OpenOptions::new();
        let mut written = options.write(true).create_new(true).mode(0o600).open(&file.0).await?;
        written.write_all(results.as_bytes()).await?;
        written.flush().await?;
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

/// Sends the ack, repeatedly while the server does not answer: an ack with its attempt is safe to
/// repeat. Stops when the lease is lost.
async fn acknowledge(
    client: &Client,
    worker_id: &str,
    job: &Leased,
    end: &CommandEnd,
    duration_ms: u64,
    wanted: &mut watch::Receiver<Wanted>,
) -> CommandEnd {
    let (mut result, mut error, mut retryable) = (None, None, None);
    let status = match end {
        CommandEnd::Succeeded(made) => {
            result = made.as_ref().and_then(|it| RawValue::from_string(it.clone()).ok());
            "succeeded"
        }
        CommandEnd::Failed { kind, message, retryable: may_retry } => {
            retryable = Some(*may_retry);
            error = Some(json!({"type": kind, "message": message}));
            "failed"
        }
        CommandEnd::Released => "released",
        CommandEnd::Abandoned => return CommandEnd::Abandoned,
    };
    let mut ack = Ack {
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
            Err(failure) if failure.is_transient() => {
                let pause = ACK_PAUSES_MS.get(attempt).or(ACK_PAUSES_MS.last()).copied();
                let pause = Duration::from_millis(pause.unwrap_or_default());
                let lost = wanted.wait_for(|it| *it == Wanted::Abandon);
                if let Ok(Ok(_)) = tokio::time::timeout(pause, lost).await {
                    return CommandEnd::Abandoned;
                }
            }
            // The output cannot be stored or is too large: ack without it.
            Err(Failure::Refused { status, code, message })
                if [400, 413].contains(&status.as_u16()) && ack.status != "released" =>
            {
                ack.status = "failed";
                ack.result = None;
                ack.retryable = ack.retryable.or(Some(true));
                let is_first = ack.error.as_ref().is_none_or(|it| it["type"] != ACK_REFUSED);
                if !is_first {
                    return CommandEnd::Abandoned;
                }
                let message = format!("the ack was refused: {message} ({code})");
                ack.error = Some(json!({"type": ACK_REFUSED, "message": message}));
            }
            Err(Failure::Refused { code, message, .. }) => {
                tracing::warn!(job.id, code, message, "the ack was refused");
                return CommandEnd::Abandoned;
            }
            Err(Failure::Unreachable(_)) => return CommandEnd::Abandoned,
        }
    }
    CommandEnd::Abandoned
}
