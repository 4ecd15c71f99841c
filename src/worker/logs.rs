//! Sends a job's standard error to the job's logs.
//!
//! Reading never waits for the server: a command with a full pipe would block.

use std::{
    collections::VecDeque,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use fencepost_domain::text::cut;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncRead, AsyncReadExt},
    sync::mpsc,
    time::{Instant, sleep, timeout_at},
};

use crate::client::Client;

/// Lines are sent together, at the latest after this time.
const FLUSH_PERIOD: Duration = Duration::from_secs(1);
const MAX_CALL_LINES: usize = 200;
/// Maximum bytes of one call, as JSON: half of what a body may have.
const MAX_CALL_BYTES: usize = 512 * 1024;
/// Maximum bytes of one chunk; a longer line is split.
const CHUNK_BYTES: usize = 8 * 1024;
/// Lines that wait for a server that does not answer; newer ones are dropped, which shows as a gap.
const MAX_WAITING_LINES: usize = 1_000;
/// The pause after a call that failed.
const FAILURE_PAUSE: Duration = Duration::from_millis(500);
/// Lines whose tail is part of a failure's message, and their bytes.
const MAX_MESSAGE_LINES: usize = 20;
const MAX_MESSAGE_LINE_BYTES: usize = 400;

/// Whose logs they are.
#[derive(Debug, Clone)]
pub struct Owner {
    pub client: Client,
    pub worker_id: String,
    pub job_id: String,
    pub attempt: i64,
}

/// Reads to the end and sends on the way; ends when all is sent. Returns the last lines.
pub async fn ship(owner: Owner, stderr: impl AsyncRead + Unpin + Send + 'static) -> String {
    let (lines, waiting) = mpsc::channel(MAX_WAITING_LINES);
    let reading = tokio::spawn(read(stderr, lines));
    send_all(owner, waiting).await;
    reading.await.unwrap_or_default()
}

/// One line, with its sequence and time.
struct Line {
    sequence: u64,
    data: String,
    timestamp_ms: u64,
}

async fn read(mut stderr: impl AsyncRead + Unpin, lines: mpsc::Sender<Line>) -> String {
    let (mut sequence, mut rest) = (0, Vec::new());
    let mut last: VecDeque<String> = VecDeque::new();
    let mut take = |bytes: &[u8]| {
        let data = String::from_utf8_lossy(bytes).into_owned();
        last.push_back(cut(&data, MAX_MESSAGE_LINE_BYTES).trim_end().to_owned());
        if last.len() > MAX_MESSAGE_LINES {
            last.pop_front();
        }
        // The buffer is full: drop it.
        let _ = lines.try_send(Line { sequence, data, timestamp_ms: now_ms() });
        sequence += 1;
    };
    let mut buffer = vec![0; CHUNK_BYTES];
    while let Ok(read @ 1..) = stderr.read(&mut buffer).await {
        rest.extend_from_slice(&buffer[..read]);
        while let Some(length) = next_chunk(&rest) {
            take(&rest[..length]);
            rest.drain(..length);
        }
    }
    if !rest.is_empty() {
        take(&rest);
    }
    last.into_iter().collect::<Vec<_>>().join("\n")
}

/// The length of the next line, with its line break; or of a chunk of a long line, which ends
/// between two characters. None: more input is needed.
fn next_chunk(bytes: &[u8]) -> Option<usize> {
    if let Some(at) = bytes.iter().take(CHUNK_BYTES).position(|it| *it == b'\n') {
        return Some(at + 1);
    }
    if bytes.len() < CHUNK_BYTES {
        return None;
    }
    let chunk = &bytes[..CHUNK_BYTES];
    Some(match std::str::from_utf8(chunk) {
        Err(error) if error.error_len().is_none() && error.valid_up_to() > 0 => error.valid_up_to(),
        _ => CHUNK_BYTES,
    })
}

/// Sends until the last line, or until the server refuses: then the attempt belongs to another
/// worker.
async fn send_all(owner: Owner, mut waiting: mpsc::Receiver<Line>) {
    let mut left_over = None;
    while let Some(first) = match left_over.take() {
        Some(line) => Some(line),
        None => waiting.recv().await,
    } {
        let mut bytes = 0;
        let mut chunks: Vec<Value> = Vec::new();
        let mut add = |line: &Line, chunks: &mut Vec<Value>| {
            let chunk = json!({
                "job_id": owner.job_id, "attempt": owner.attempt, "stream": "stderr",
                "sequence": line.sequence, "data": line.data, "timestamp_ms": line.timestamp_ms,
            });
            bytes += chunk.to_string().len();
            let fits = bytes <= MAX_CALL_BYTES || chunks.is_empty();
            if fits {
                chunks.push(chunk);
            }
            fits
        };
        add(&first, &mut chunks);
        let deadline = Instant::now() + FLUSH_PERIOD;
        while chunks.len() < MAX_CALL_LINES {
            let Ok(Some(line)) = timeout_at(deadline, waiting.recv()).await else { break };
            if !add(&line, &mut chunks) {
                left_over = Some(line);
                break;
            }
        }
        let body = json!({"worker_id": owner.worker_id, "chunks": chunks});
        while let Err(failure) = owner.client.post("/v1/workers/logs", &body).await {
            if !failure.is_transient() {
                return;
            }
            sleep(FAILURE_PAUSE).await;
        }
    }
}

/// The worker's own clock is right for its lines.
#[allow(clippy::disallowed_methods)]
fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_cut_into_lines_and_long_lines_between_characters() {
        assert_eq!(next_chunk(b"one\ntwo"), Some(4));
        assert_eq!(next_chunk(b"two"), None);
        let long = "x".repeat(CHUNK_BYTES - 1) + "ä";
        assert_eq!(next_chunk(long.as_bytes()), Some(CHUNK_BYTES - 1));
        assert_eq!(
            next_chunk(&[0xff; CHUNK_BYTES]),
            Some(CHUNK_BYTES),
            "what is no text is cut too"
        );
    }
}
