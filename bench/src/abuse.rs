//! What a stranger may do with a free account, or with none: over HTTP alone, from one address or
//! from many.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, bail};
use bytes::Bytes;
use hyper::{Method, Request, http::request::Builder};
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinSet,
};

use super::{
    attacks::{Attack, large_batch},
    client::{self, Client, Target},
};

/// Clients that attack at the same time.
const CLIENTS: usize = 32;
/// Addresses of those who attack from many.
const ADDRESSES: usize = 240;
/// Readers that hardly read.
const SLOW_READERS: usize = 500;
/// Streams that one project tries to open.
const STREAMS: usize = 600;
/// Polls that one project tries to park.
const POLLS: usize = 500;
/// Large jobs, for pages and histories.
const LARGE_JOBS: usize = 100;
const LARGE_JOB_BYTES: usize = 60_000;
/// Pause of a client after a refusal.
const PAUSE: Duration = Duration::from_millis(100);
/// Pause of a slow reader between two reads.
const READ_PAUSE: Duration = Duration::from_secs(1);
const PASSWORD: &str = "quiet otters borrow umbrellas";

/// What is sent again and again.
#[derive(Debug, Clone)]
struct Call {
    method: Method,
    path: String,
    body: Arc<str>,
    /// Instead of the project's key.
    credential: Option<String>,
}

impl Call {
    fn get(path: &str) -> Self {
        Self { method: Method::GET, path: path.to_owned(), body: "".into(), credential: None }
    }

    fn post(path: &str, body: String) -> Self {
        Self { method: Method::POST, body: body.into(), ..Self::get(path) }
    }

    fn by(self, credential: String) -> Self {
        Self { credential: Some(credential), ..self }
    }

    async fn send(&self, client: &mut Client, from: &str) -> anyhow::Result<Bytes> {
        let head: Builder = Request::builder()
            .method(self.method.clone())
            .uri(&self.path)
            .header("x-forwarded-for", from);
        client.send_as(head, &self.path, self.body.to_string(), self.credential.as_deref()).await
    }
}

/// Address number `number` of an attack.
fn address(number: usize) -> String {
    let number = number % ADDRESSES;
    format!("198.{}.{number}.7", 18 + number % 2)
}

/// An attack, which lasts until `clients` is dropped.
pub struct Abuse<'a> {
    pub target: &'a Target,
    pub clients: &'a mut JoinSet<()>,
}

impl Abuse<'_> {
    /// Begins one of the attacks of a free account.
    ///
    /// # Errors
    /// When it cannot begin.
    pub async fn begin(&mut self, attack: Attack) -> anyhow::Result<()> {
        match attack {
            Attack::Expressions => self.expressions(),
            Attack::LargePages => self.large_pages().await?,
            Attack::SlowReaders => self.slow_readers().await?,
            Attack::Bytes => self.bytes(),
            Attack::Streams => self.streams(),
            Attack::Polls => self.polls(),
            Attack::Passwords => self.passwords(),
            Attack::SignUps => self.sign_ups(),
            Attack::UnknownKeys => self.unknown_keys(),
            Attack::Exports => self.exports().await?,
            other => bail!("{other:?} is no attack of a free account"),
        }
        Ok(())
    }

    /// The same call again and again, from this many addresses.
    fn flood(&mut self, addresses: usize, call: &Call) {
        for number in 0..CLIENTS.max(addresses) {
            let (target, call) = (self.target.clone(), call.clone());
            self.clients.spawn(async move {
                let from = address(if addresses == 1 { 0 } else { number });
                loop {
                    let Ok(mut client) = Client::connect(&target).await else { continue };
                    while call.send(&mut client, &from).await.is_ok() {}
                    tokio::time::sleep(PAUSE).await;
                }
            });
        }
    }

    /// Expressions that take long to read, or never fire.
    fn expressions(&mut self) {
        for expression in ["59 59 23 29 2 SUN", "0 0 30 2 *", "*/7 */11 */13 1-31 1-12 *"] {
            let body = format!(r#"{{"cron_expression":"{expression}","count":100}}"#);
            self.flood(1, &Call::post("/v1/recurring/preview", body));
        }
    }

    /// Pages of large jobs.
    async fn large_pages(&mut self) -> anyhow::Result<()> {
        self.store_large_jobs().await?;
        self.flood(1, &Call::get("/v1/jobs?limit=200"));
        Ok(())
    }

    /// The same, by readers that take a byte a second.
    async fn slow_readers(&mut self) -> anyhow::Result<()> {
        self.store_large_jobs().await?;
        for _ in 0..SLOW_READERS {
            self.hold("/v1/jobs?limit=200", true);
        }
        Ok(())
    }

    /// Enqueues of 7.5 MB.
    fn bytes(&mut self) {
        self.flood(1, &Call::post("/v1/jobs/batch", large_batch()));
    }

    /// More event streams than a project may have.
    fn streams(&mut self) {
        for _ in 0..STREAMS {
            self.hold("/v1/events/stream", false);
        }
    }

    /// More parked polls than a project may have.
    fn polls(&mut self) {
        let body = r#"{"worker_id":"w","queues":["none"],"wait_seconds":30}"#.to_owned();
        let call = Call::post("/v1/workers/poll", body);
        for _ in 0..POLLS / CLIENTS {
            self.flood(1, &call);
        }
    }

    /// Logins with a wrong password: each costs a hash.
    fn passwords(&mut self) {
        let body = r#"{"email":"victim@example.com","password":"wrong but long"}"#.to_owned();
        self.flood(ADDRESSES, &Call::post("/v1/auth/login", body));
    }

    /// Sign-ups, each with a hash, a project and a key.
    fn sign_ups(&mut self) {
        let body = format!(r#"{{"email":"victim@example.com","password":"{PASSWORD}"}}"#);
        self.flood(ADDRESSES, &Call::post("/v1/auth/signup", body));
    }

    /// Keys that do not exist.
    fn unknown_keys(&mut self) {
        let key = fencepost_web::auth::key::generate("live");
        self.flood(ADDRESSES, &Call::get("/v1/jobs").by(key));
    }

    /// Exports of one account, and all that it may read of itself.
    async fn exports(&mut self) -> anyhow::Result<()> {
        let body = format!(r#"{{"email":"attacker@example.com","password":"{PASSWORD}"}}"#);
        let mut client = Client::connect(self.target).await?;
        Call::post("/v1/auth/signup", body.clone()).send(&mut client, &address(0)).await?;
        let session = Call::post("/v1/auth/login", body).send(&mut client, &address(0)).await?;
        let session: Value = serde_json::from_slice(&session)?;
        let token = session["access_token"].as_str().context("a token")?.to_owned();
        for path in ["/v1/me/export", "/v1/me/security-log", "/v1/projects"] {
            self.flood(1, &Call::get(path).by(token.clone()));
        }
        Ok(())
    }

    async fn store_large_jobs(&self) -> anyhow::Result<()> {
        let mut client = Client::connect(self.target).await?;
        for _ in 0..LARGE_JOBS {
            client.post("/v1/jobs", client::job("large", LARGE_JOB_BYTES)).await?;
        }
        Ok(())
    }

    /// Opens a connection, asks, and reads little or nothing.
    fn hold(&mut self, path: &'static str, reads: bool) {
        let target = self.target.clone();
        self.clients.spawn(async move {
            let ask = format!(
                "GET {path} HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {}\r\n\r\n",
                target.authority, target.api_key
            );
            loop {
                let Ok(mut stream) = TcpStream::connect(&target.authority).await else { continue };
                let mut byte = [0_u8];
                if stream.write_all(ask.as_bytes()).await.is_ok() {
                    while reads && matches!(stream.read(&mut byte).await, Ok(1)) {
                        tokio::time::sleep(READ_PAUSE).await;
                    }
                    // A stream is read, so that it is not ended for that.
                    let mut rest = [0_u8; 1024];
                    while !reads && matches!(stream.read(&mut rest).await, Ok(1..)) {}
                }
                tokio::time::sleep(PAUSE).await;
            }
        });
    }
}
