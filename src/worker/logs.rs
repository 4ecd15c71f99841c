//! A job's standard error on its way to the job's logs.

use std::{
    collections::VecDeque,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, BufReader},
    time::{Instant, timeout, timeout_at},
};

use crate::client::Client;

/// Lines are sent together when so much time has passed since the first of them.
const FLUSH_PERIOD: Duration = Duration::from_secs(1);
/// Or when there are so many.
const FLUSH_LINES: usize = 200;
/// Bytes of one chunk; a longer line becomes several.
const CHUNK_BYTES: usize = 8 * 1024;
/// Lines that wait for a server that does not answer; older ones are dropped.
const MAX_WAITING_LINES: usize = 5_000;
/// Time for the last lines to arrive, once the command has ended.
const LAST_FLUSH_TIMEOUT: Duration = Duration::from_secs(10);
/// Lines of which the last ones are part of a failure's message.
const MAX_MESSAGE_LINES: usize = 20;

/// Whose logs they are.
#[derive(Debug, Clone)]
pub struct Owner {
    pub client: Client,
    pub worker_id: String,
    pub job_id: String,
    pub attempt: i64,
}

/// Reads to the end, sending on the way. Answers with the last lines.
pub async fn ship(owner: Owner, stderr: impl AsyncRead + Unpin) -> String {
    let mut shipping = Shipping { owner, sequence: 0, waiting: VecDeque::new() };
    let mut reader = BufReader::new(stderr);
    let mut last: VecDeque<String> = VecDeque::new();
    let mut flush_at = None;
    loop {
        let mut line = Vec::new();
        let read = reader.read_until(b'\n', &mut line);
        let deadline = flush_at.unwrap_or_else(|| Instant::now() + FLUSH_PERIOD);
        match timeout_at(deadline, read).await {
            Ok(Ok(1..)) => {
                let text = String::from_utf8_lossy(&line).into_owned();
                shipping.add(&text);
                last.push_back(text);
                if last.len() > MAX_MESSAGE_LINES {
                    last.pop_front();
                }
                flush_at.get_or_insert_with(|| Instant::now() + FLUSH_PERIOD);
            }
            Ok(_) => break,
            // What was read of an unfinished line.
            Err(_) if !line.is_empty() => shipping.add(&String::from_utf8_lossy(&line)),
            Err(_) => (),
        }
        let is_due = flush_at.is_some_and(|it| it <= Instant::now());
        if is_due || shipping.waiting.len() >= FLUSH_LINES {
            shipping.flush().await;
            flush_at = None;
        }
    }
    // Before the ack, or they would come too late.
    let _ = timeout(LAST_FLUSH_TIMEOUT, shipping.flush_all()).await;
    last.into_iter().collect()
}

struct Shipping {
    owner: Owner,
    sequence: u64,
    waiting: VecDeque<Value>,
}

impl Shipping {
    fn add(&mut self, text: &str) {
        let mut rest = text;
        while !rest.is_empty() {
            let (data, more) = rest.split_at(rest.floor_char_boundary(CHUNK_BYTES));
            self.waiting.push_back(json!({
                "job_id": self.owner.job_id, "attempt": self.owner.attempt, "stream": "stderr",
                "sequence": self.sequence, "data": data, "timestamp_ms": now_ms(),
            }));
            self.sequence += 1;
            rest = more;
        }
        while self.waiting.len() > MAX_WAITING_LINES {
            self.waiting.pop_front();
        }
    }

    /// Sends what waits, as much as fits in one call. Lines that the server refuses for good are dropped;
    /// those that it could not take stay, and may be sent twice, which is harmless.
    async fn flush(&mut self) -> bool {
        let chunks: Vec<_> = self.waiting.iter().take(FLUSH_LINES / 2).cloned().collect();
        let count = chunks.len();
        if count == 0 {
            return true;
        }
        let body = json!({"worker_id": self.owner.worker_id, "chunks": chunks});
        match self.owner.client.post("/v1/workers/logs", &body).await {
            Err(failure) if failure.is_passing() => false,
            _ => {
                self.waiting.drain(..count);
                true
            }
        }
    }

    async fn flush_all(&mut self) {
        const PAUSE: Duration = Duration::from_millis(500);
        while !self.waiting.is_empty() {
            if !self.flush().await {
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// A worker's own clock is right for a worker's own lines.
#[allow(clippy::disallowed_methods)]
fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or_default()
}
