//! What a stranger may do with a free account, or with none: over HTTP alone, from one address or
//! from many.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, bail};
use bytes::Bytes;
use hyper::{Method, Request, http::request::Builder};
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
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
/// Clients of calls that cost much each.
const FEW_CLIENTS: usize = 6;
/// Clients of polls of new queues.
const NEW_QUEUES_CLIENTS: usize = 150;
/// Jobs of a batch with callbacks: each counts with its six.
const CALLBACK_JOBS: usize = 100;
/// Jobs of another batch.
const BULK_JOBS: usize = 100;
/// As many as the plan has.
const ENDPOINTS: usize = 3;
const PUSHED_QUEUES: u64 = 10;
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
    /// A header besides.
    header: Option<(&'static str, String)>,
    /// True: the call asks for a refusal, which ends nothing.
    is_refused: bool,
}

impl Call {
    fn get(path: &str) -> Self {
        Self {
            method: Method::GET,
            path: path.to_owned(),
            body: "".into(),
            credential: None,
            header: None,
            is_refused: false,
        }
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
        let head = self.header.iter().fold(head, |head, (name, value)| head.header(*name, value));
        let (body, credential) = (self.body.to_string(), self.credential.as_deref());
        if self.is_refused {
            return Ok(client.answer(head, body, credential).await?.1);
        }
        client.send_as(head, &self.path, body, credential).await
    }
}

/// Address number `number` of an attack.
fn address(number: usize) -> String {
    let number = number % ADDRESSES;
    format!("198.{}.{number}.7", 18 + number % 2)
}

/// A batch of jobs in a queue, each with more fields.
fn batch(queue: &str, jobs: usize, more: &str) -> Call {
    let job = format!(r#"{{"job_type":"a","queue":"{queue}"{more}}}"#);
    Call::post("/v1/jobs/batch", format!(r#"{{"jobs":[{}]}}"#, vec![job; jobs].join(",")))
}

fn cancel(queue: &str) -> Call {
    Call::post("/v1/jobs/cancel", format!(r#"{{"filter":{{"queue":"{queue}"}}}}"#))
}

/// Each job has a callback that has one, four deep, and another for its failure.
fn callbacks(number: u64) -> Vec<Call> {
    let job = |inner: &str| format!(r#"{{"job_type":"cb","queue":"cb"{inner}}}"#);
    let nested = (0..4).fold(job(""), |it, _| job(&format!(r#","on_complete":{it}"#)));
    let more = format!(r#","on_complete":{nested},"on_failure":{}"#, job(""));
    let queue = format!("src-{}", number % 10);
    vec![batch(&queue, CALLBACK_JOBS, &more), cancel(&queue)]
}

fn new_queues(number: u64) -> Vec<Call> {
    let queues: Vec<_> = (0..20).map(|it| format!(r#""new-{number}-{it}""#)).collect();
    let body = format!(
        r#"{{"worker_id":"new-{number}","queues":[{}],"wait_seconds":1}}"#,
        queues.join(",")
    );
    vec![Call::post("/v1/workers/poll", body)]
}

fn once(number: u64) -> Vec<Call> {
    let call = Call::post("/v1/jobs", client::job("once", 200));
    vec![Call { header: Some(("idempotency-key", format!("key-{number}"))), ..call }]
}

fn bulk(number: u64) -> Vec<Call> {
    let queue = format!("bulk-{}", number % 50);
    vec![batch(&queue, BULK_JOBS, ""), cancel(&queue)]
}

fn pushed(number: u64) -> Vec<Call> {
    vec![batch(&format!("pushed-{}", number % PUSHED_QUEUES), BULK_JOBS, "")]
}

/// An attack, which lasts until `clients` is dropped.
pub struct Abuse<'a> {
    target: &'a Target,
    clients: &'a mut JoinSet<()>,
    /// Numbers for names that are new each time.
    numbers: Arc<AtomicU64>,
}

impl<'a> Abuse<'a> {
    /// None has begun yet.
    pub fn new(target: &'a Target, clients: &'a mut JoinSet<()>) -> Self {
        Self { target, clients, numbers: Arc::default() }
    }

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
            Attack::Control => {
                self.flood(1, &Call { is_refused: true, ..Call::get("/v1/no-such-path") });
            }
            Attack::Callbacks => self.repeat(FEW_CLIENTS, callbacks),
            Attack::NewQueues => self.repeat(NEW_QUEUES_CLIENTS, new_queues),
            Attack::Lists => self.lists(),
            Attack::Pages => self.pages().await?,
            Attack::HangingEndpoints => self.hanging_endpoints().await?,
            Attack::HangingPushes => self.hanging_pushes().await?,
            Attack::PasskeyOptions => {
                let options = Call::post("/v1/auth/passkeys/options", "{}".to_owned());
                // A server that is called by an address has no passkeys, and says so.
                self.flood(ADDRESSES, &Call { is_refused: true, ..options });
            }
            Attack::IdempotencyKeys => self.repeat(CLIENTS, once),
            Attack::BulkOperations => self.repeat(FEW_CLIENTS, bulk),
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

    /// The calls of a script again and again, each time with another number.
    fn repeat(&mut self, clients: usize, script: fn(u64) -> Vec<Call>) {
        for _ in 0..clients {
            let (target, numbers) = (self.target.clone(), Arc::clone(&self.numbers));
            self.clients.spawn(async move {
                loop {
                    let Ok(mut client) = Client::connect(&target).await else { continue };
                    let mut is_served = true;
                    while is_served {
                        for call in script(numbers.fetch_add(1, Ordering::Relaxed)) {
                            is_served &= call.send(&mut client, &address(0)).await.is_ok();
                        }
                    }
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

    /// A session of an account of its own.
    async fn session(&self) -> anyhow::Result<String> {
        let body = format!(r#"{{"email":"attacker@example.com","password":"{PASSWORD}"}}"#);
        let mut client = Client::connect(self.target).await?;
        Call::post("/v1/auth/signup", body.clone()).send(&mut client, &address(0)).await?;
        let session = Call::post("/v1/auth/login", body).send(&mut client, &address(0)).await?;
        let session: Value = serde_json::from_slice(&session)?;
        Ok(session["access_token"].as_str().context("a token")?.to_owned())
    }

    /// Exports of one account, and all that it may read of itself.
    async fn exports(&mut self) -> anyhow::Result<()> {
        let token = self.session().await?;
        for path in ["/v1/me/export", "/v1/me/security-log", "/v1/projects"] {
            self.flood(1, &Call::get(path).by(token.clone()));
        }
        self.flood(1, &Call::get("/v1/audit-log/export"));
        Ok(())
    }

    fn lists(&mut self) {
        for path in [
            "/v1/jobs?limit=200&q=error:zzz",
            "/v1/jobs?limit=200&q=tag:a%3Db",
            "/v1/dead-letters/groups?limit=200",
            "/v1/metrics/prometheus",
            "/v1/queues?limit=100",
            "/v1/job-types",
            "/v1/metrics/throughput",
        ] {
            self.flood(1, &Call::get(path));
        }
    }

    /// Pages of the console, by a visitor with a session and a project.
    async fn pages(&mut self) -> anyhow::Result<()> {
        let token = self.session().await?;
        let mut client = Client::connect(self.target).await?;
        let projects = Call::get("/v1/projects").by(token.clone());
        let projects: Value =
            serde_json::from_slice(&projects.send(&mut client, &address(0)).await?)?;
        let slug = projects["projects"][0]["slug"].as_str().context("a project")?.to_owned();
        for page in ["", "/jobs", "/queues", "/dead-letters", "/workers", "/recurring", "/audit"] {
            let cookie = format!("__Host-fencepost-access={token}");
            let page = Call::get(&format!("/console/p/{slug}{page}"));
            self.flood(1, &Call { header: Some(("cookie", cookie)), ..page });
        }
        Ok(())
    }

    /// A URL that takes connections, and never answers.
    async fn silent_url(&mut self) -> anyhow::Result<String> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}/", listener.local_addr()?);
        self.clients.spawn(async move {
            let mut held = Vec::new();
            while let Ok((stream, _)) = listener.accept().await {
                held.push(stream);
            }
        });
        Ok(url)
    }

    async fn hanging_endpoints(&mut self) -> anyhow::Result<()> {
        let url = self.silent_url().await?;
        let mut client = Client::connect(self.target).await?;
        for _ in 0..ENDPOINTS {
            let endpoint = format!(
                r#"{{"url":"{url}","events":["*"],"max_in_flight":50,"timeout_seconds":30}}"#
            );
            client.post("/v1/webhooks", endpoint).await?;
        }
        self.repeat(FEW_CLIENTS, bulk);
        Ok(())
    }

    async fn hanging_pushes(&mut self) -> anyhow::Result<()> {
        let url = self.silent_url().await?;
        let mut client = Client::connect(self.target).await?;
        for number in 0..PUSHED_QUEUES {
            let path = format!("/v1/queues/pushed-{number}/push");
            let body = format!(r#"{{"url":"{url}","max_in_flight":200,"timeout_seconds":600}}"#);
            let put = Call { method: Method::PUT, ..Call::post(&path, body) };
            put.send(&mut client, &address(0)).await?;
        }
        self.repeat(FEW_CLIENTS, pushed);
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
