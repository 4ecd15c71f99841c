//! The outcome of a command: from its exit code, the reason for stopping it, and its output.

use std::{
    process::ExitStatus,
    sync::{Arc, Mutex, PoisonError},
};

use serde_json::{Value, value::RawValue};
use tokio::io::{AsyncRead, AsyncReadExt};

use fencepost_domain::{
    limits::{MAX_JSON_DEPTH, MAX_RESULT_BYTES},
    text::json_depth,
};

/// The worker's request to a running job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    Run,
    /// It was cancelled: stop, and ack.
    Cancel,
    /// The lease is lost: stop, and do not ack.
    Abandon,
    /// The grace period has ended: stop, and release it.
    Release,
    /// The grace period has ended: stop, and report a failure.
    Fail,
}

/// The outcome of the command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommandEnd {
    Succeeded(Option<String>),
    Failed { kind: String, message: String, retryable: bool },
    Released,
    Abandoned,
}

impl CommandEnd {
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

/// Why a command was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    For(Wanted),
    AtTimeout(u64),
}

/// The outcome of a command.
pub fn judge(
    status: ExitStatus,
    stopped: Option<Stopped>,
    output: &[u8],
    last_lines: &str,
    permanent_exit_codes: &[i32],
) -> CommandEnd {
    use std::os::unix::process::ExitStatusExt;
    match stopped {
        Some(Stopped::For(Wanted::Abandon)) => return CommandEnd::Abandoned,
        // Many programs exit with 0 when they are stopped: that does not mean that the job is done.
        Some(Stopped::For(Wanted::Release)) => return CommandEnd::Released,
        None if status.success() => return CommandEnd::Succeeded(result(output)),
        Some(Stopped::AtTimeout(seconds)) => {
            let message = format!("stopped after {seconds} s, its timeout");
            return CommandEnd::Failed { kind: "timeout".to_owned(), message, retryable: true };
        }
        _ => (),
    }
    let (kind, what, retryable) = match (status.code(), status.signal()) {
        (Some(0), _) => ("stopped".to_owned(), "stopped before it was done".to_owned(), true),
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
    CommandEnd::Failed { kind, message, retryable }
}

/// Standard output as a result: JSON as it is, or else text. None if it is empty.
fn result(output: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(output);
    let trimmed = text.trim();
    if trimmed.is_empty() {
        return None;
    }
    let is_json =
        serde_json::from_str::<&RawValue>(trimmed).is_ok() && json_depth(trimmed) <= MAX_JSON_DEPTH;
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

/// The output so far; it can be read before the pipe is closed.
#[derive(Clone, Default)]
pub struct Output(Arc<Mutex<Vec<u8>>>);

impl Output {
    /// The output so far.
    pub fn so_far(&self) -> Vec<u8> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Reads everything, and keeps the maximum size of a result.
pub async fn read_result(mut stdout: impl AsyncRead + Unpin, output: Output) {
    let mut buffer = vec![0; 16 * 1024];
    while let Ok(read @ 1..) = stdout.read(&mut buffer).await {
        let mut kept = output.0.lock().unwrap_or_else(PoisonError::into_inner);
        // One more byte shows that it is too long.
        let room = (MAX_RESULT_BYTES + 1).saturating_sub(kept.len());
        kept.extend_from_slice(&buffer[..read.min(room)]);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    /// The conventional exit code of a temporary failure (`EX_TEMPFAIL` of sysexits.h).
    const TEMPORARY_FAILURE: i32 = 75;

    fn exit(code: i32) -> ExitStatus {
        ExitStatus::from_raw(code << 8)
    }

    fn failed(status: ExitStatus) -> (String, bool) {
        match judge(status, None, b"", "", &[64, 65]) {
            CommandEnd::Failed { kind, retryable, .. } => (kind, retryable),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn exit_codes_are_outcomes() {
        assert_eq!(judge(exit(0), None, b"", "", &[]), CommandEnd::Succeeded(None));
        assert_eq!(failed(exit(TEMPORARY_FAILURE)), ("exit.75".to_owned(), true));
        assert_eq!(failed(exit(1)), ("exit.1".to_owned(), true));
        assert_eq!(failed(exit(64)), ("exit.64".to_owned(), false));
        assert_eq!(failed(ExitStatus::from_raw(9)), ("signal.9".to_owned(), true));
    }

    #[test]
    fn why_a_command_was_stopped_counts_whatever_its_exit_code() {
        let stopped = |it| judge(ExitStatus::from_raw(15), Some(it), b"", "", &[]);
        assert_eq!(stopped(Stopped::For(Wanted::Release)), CommandEnd::Released);
        assert_eq!(stopped(Stopped::For(Wanted::Abandon)), CommandEnd::Abandoned);
        assert!(matches!(stopped(Stopped::For(Wanted::Cancel)), CommandEnd::Failed { .. }));
        assert!(
            matches!(stopped(Stopped::AtTimeout(9)), CommandEnd::Failed { kind, .. } if kind == "timeout")
        );
        let polite = judge(exit(0), Some(Stopped::For(Wanted::Fail)), b"1", "", &[]);
        assert!(matches!(polite, CommandEnd::Failed { kind, .. } if kind == "stopped"));
        let released = judge(exit(0), Some(Stopped::For(Wanted::Release)), b"1", "", &[]);
        assert_eq!(released, CommandEnd::Released);
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
        let CommandEnd::Failed { message, .. } = end else { panic!("{end:?}") };
        assert_eq!(message, "exit code 3\nline one\nline two");
    }
}
