//! A small HTTP client like a worker's: one keep-alive connection, one request at a time.

use anyhow::ensure;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{
    Request, StatusCode,
    client::conn::http1::{self, SendRequest},
    header::{AUTHORIZATION, CONTENT_TYPE, HOST},
    http::request::Builder,
};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::net::TcpStream;

/// The measured server.
#[derive(Debug, Clone)]
pub struct Target {
    /// `host:port`.
    pub authority: String,
    /// A key of the project to use.
    pub api_key: String,
    /// Approximate payload bytes of each job.
    pub payload_bytes: usize,
}

/// One connection.
pub struct Client {
    sender: SendRequest<Full<Bytes>>,
    target: Target,
}

impl Client {
    /// # Errors
    /// When the server does not answer.
    pub async fn connect(target: &Target) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(&target.authority).await?;
        stream.set_nodelay(true)?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        Ok(Self { sender, target: target.clone() })
    }

    pub async fn get(&mut self, path: &str) -> anyhow::Result<Bytes> {
        self.send(Request::get(path), path, String::new()).await
    }

    pub async fn post(&mut self, path: &str, body: String) -> anyhow::Result<Bytes> {
        self.send(Request::post(path), path, body).await
    }

    pub async fn patch(&mut self, path: &str, body: String) -> anyhow::Result<Bytes> {
        self.send(Request::patch(path), path, body).await
    }

    /// Enqueues a job with this concurrency key.
    pub async fn post_limited_job(&mut self, queue: &str, key: usize) -> anyhow::Result<Bytes> {
        let job = job(queue, self.target.payload_bytes);
        let job = job.strip_suffix('}').unwrap_or_default();
        let limited = format!(r#"{job},"concurrency_key":"bench-{key}","concurrency_limit":100}}"#);
        self.post("/v1/jobs", limited).await
    }

    /// Enqueues a job of a group.
    pub async fn post_job_of_group(&mut self, queue: &str, group: usize) -> anyhow::Result<Bytes> {
        let job = job(queue, self.target.payload_bytes);
        let job = job.strip_suffix('}').unwrap_or_default();
        self.post("/v1/jobs", format!(r#"{job},"group":"bench-{group}"}}"#)).await
    }

    /// Enqueues a job.
    pub async fn post_job(&mut self, queue: &str) -> anyhow::Result<Bytes> {
        let body = job(queue, self.target.payload_bytes);
        self.post("/v1/jobs", body).await
    }

    async fn send(&mut self, head: Builder, path: &str, body: String) -> anyhow::Result<Bytes> {
        self.send_as(head, path, body, None).await
    }

    /// Sends a request with another credential than the target's key.
    pub async fn send_as(
        &mut self,
        head: Builder,
        path: &str,
        body: String,
        credential: Option<&str>,
    ) -> anyhow::Result<Bytes> {
        let (status, body) = self.answer(head, body, credential).await?;
        ensure!(status.is_success(), "{path}: {status}: {}", String::from_utf8_lossy(&body));
        Ok(body)
    }

    /// Sends a request, and returns the answer, whatever it is.
    pub async fn answer(
        &mut self,
        head: Builder,
        body: String,
        credential: Option<&str>,
    ) -> anyhow::Result<(StatusCode, Bytes)> {
        let credential = credential.unwrap_or(&self.target.api_key);
        let request = head
            .header(HOST, &self.target.authority)
            .header(AUTHORIZATION, format!("Bearer {credential}"))
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body)))?;
        self.sender.ready().await?;
        let response = self.sender.send_request(request).await?;
        let status = response.status();
        Ok((status, response.into_body().collect().await?.to_bytes()))
    }

    /// Polls and returns the jobs.
    pub async fn poll(
        &mut self,
        queue: &str,
        worker: usize,
        capacity: usize,
        wait_seconds: u64,
    ) -> anyhow::Result<Vec<Job>> {
        let body = format!(
            r#"{{"worker_id":"bench-{worker}","queues":["{queue}"],"capacity":{capacity},"wait_seconds":{wait_seconds}}}"#
        );
        let Polled { jobs } = serde_json::from_slice(&self.post("/v1/workers/poll", body).await?)?;
        Ok(jobs)
    }
}

/// The answer to a poll.
#[derive(Debug, Deserialize)]
pub struct Polled {
    pub jobs: Vec<Job>,
}

/// A leased job: what a worker needs of it.
#[derive(Debug, Clone, Deserialize)]
pub struct Job {
    pub id: String,
    #[serde(default)]
    pub job_type: String,
    pub attempt: i64,
    pub lease_id: String,
    pub payload: Box<RawValue>,
}

/// The body of a successful ack, as our examples send it.
#[must_use]
pub fn ack(job: &Job, worker: usize) -> String {
    let Job { id, lease_id, attempt, .. } = job;
    format!(
        r#"{{"job_id":"{id}","worker_id":"bench-{worker}","attempt":{attempt},"lease_id":"{lease_id}","status":"succeeded"}}"#
    )
}

/// The body of an ack that polls for the next job.
#[must_use]
pub fn ack_then_poll(job: &Job, worker: usize, queue: &str, wait_seconds: u64) -> String {
    let (ack, poll_id) = (ack(job, worker), uuid::Uuid::now_v7());
    let ack = ack.strip_suffix('}').unwrap_or_default();
    format!(
        r#"{ack},"then_poll":{{"poll_id":"{poll_id}","queues":["{queue}"],"wait_seconds":{wait_seconds}}}}}"#
    )
}

/// The body of an enqueue with about this many payload bytes; at least [`SMALL_PAYLOAD_BYTES`].
#[must_use]
pub fn job(queue: &str, payload_bytes: usize) -> String {
    const FILLER: &str = "a payload of about two hundred bytes is what most jobs carry: a few ids, a \
        template's name and some parameters, but hardly ever a whole document; so this is one of them";
    let more = ".".repeat(payload_bytes.saturating_sub(SMALL_PAYLOAD_BYTES));
    format!(
        r#"{{"job_type":"bench.noop","queue":"{queue}","payload":{{"to":"ada@example.com","text":"{FILLER}{more}"}}}}"#
    )
}

/// The approximate payload of most jobs, in bytes.
pub const SMALL_PAYLOAD_BYTES: usize = 200;
