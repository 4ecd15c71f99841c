//! A server, and a project on it with a key: what a user has.

use std::{ops::Deref, path::PathBuf, sync::Arc, time::Duration};

use fencepost::{
    dev,
    serve::{self, Node, People},
    zone_files,
};
use fencepost_config::{ConnectionLimits, PoolArgs, RedisPlace, Signup, TrustedProxies};
use fencepost_domain::{ids::JobId, outbound::Allowed, plan::Plans};
use fencepost_engine::schedules::zones::Zones;
use fencepost_http::deprecation::Deprecated;
use fencepost_identity::accounts::{
    oidc::Providers, password::lists::BreachedPasswords, scanners::ScannerKeys,
};
use fencepost_net::{
    mail::{Mail, Mailer},
    outbound::Outbound,
    seal::MasterKeys,
};
use fencepost_store as store;

use super::{Database, Reply, eventually, logins, redis_url};
use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};
use sqlx::Connection;
use tokio::{net::TcpListener, sync::mpsc, task::JoinHandle};
use tokio_util::sync::CancellationToken;

/// How a test's server is set up.
#[derive(Clone)]
pub struct Stage {
    /// Redis; none: without.
    pub redis: Option<RedisPlace>,
    /// What a call to Redis may take.
    pub redis_budget: Duration,
    /// Who may sign up.
    pub signup: Signup,
    /// The plan of new projects.
    pub default_plan: String,
    /// How browsers reach it; none: by its address.
    pub public_url: Option<String>,
    /// The pause between two canaries.
    pub canary: Option<Duration>,
    /// The folder of its host's rules of time zones; none: it knows those that are compiled in.
    pub zone_files: Option<PathBuf>,
    /// How long connections are accepted once it stops.
    pub linger: Duration,
    /// Connections of one address.
    pub connections: u32,
    /// Whether it believes this machine about whom it speaks for.
    pub trusts_proxy: bool,
    /// Whether its pools have the roles of ops/roles.sql.
    pub roles: bool,
    /// What encrypts its secrets.
    pub master_keys: Arc<MasterKeys>,
    pub breached_passwords: Option<Arc<BreachedPasswords>>,
    pub security_contact: Option<String>,
    pub plan_contact: Option<String>,
    pub scanner_keys: Arc<ScannerKeys>,
    pub providers: Arc<Providers>,
    /// Where webhooks may go.
    pub outbound: Outbound,
    /// Its mail server; none: mails are handed to the test.
    pub mailer: Option<Mailer>,
    /// Operations that will end.
    pub deprecated: &'static [Deprecated],
}

/// Webhooks may reach this machine.
pub fn outbound() -> Outbound {
    let here = "127.0.0.1/32".parse().expect("a network");
    Outbound::new(Allowed::from(vec![here]), None).expect("no file")
}

impl Default for Stage {
    /// The tests' Redis, given time: nodes that do without it for a moment count by themselves.
    fn default() -> Self {
        Self {
            redis: Some(redis_url().into()),
            redis_budget: Duration::from_secs(20),
            signup: Signup::Open,
            default_plan: "free".to_owned(),
            public_url: None,
            canary: None,
            zone_files: None,
            linger: Duration::ZERO,
            connections: 20_000,
            trusts_proxy: true,
            roles: true,
            master_keys: Arc::default(),
            breached_passwords: None,
            security_contact: None,
            plan_contact: None,
            scanner_keys: Arc::default(),
            providers: Arc::default(),
            outbound: outbound(),
            mailer: None,
            deprecated: &[],
        }
    }
}

/// A server of one test.
pub struct TestServer {
    /// Its base URL.
    pub url: String,
    /// Its database.
    pub database: Database,
    /// What it has mailed.
    pub mails: tokio::sync::Mutex<mpsc::UnboundedReceiver<Mail>>,
    stopping: CancellationToken,
    running: JoinHandle<anyhow::Result<()>>,
}

impl TestServer {
    /// Starts a server on a free port.
    pub async fn start(database: Database) -> Self {
        Self::start_as(database, Stage::default()).await
    }

    /// Starts a server that still accepts connections for a while when it stops.
    pub async fn start_lingering(database: Database, linger: Duration) -> Self {
        Self::start_as(database, Stage { linger, ..Stage::default() }).await
    }

    /// Starts a server that is set up in another way.
    pub async fn start_as(database: Database, stage: Stage) -> Self {
        let api = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", api.local_addr().expect("an address"));
        let stopping = CancellationToken::new();
        let (mailer, mails) = mpsc::unbounded_channel();
        let node = Node {
            api,
            operator: None,
            database_url: database.url.clone(),
            logins: stage.roles.then(|| logins().clone()),
            pools: PoolArgs::default(),
            redis: stage.redis,
            redis_budget: stage.redis_budget,
            people: People {
                signup: stage.signup,
                plans: Plans::built_in(),
                default_plan: stage.default_plan,
                public_url: stage.public_url.unwrap_or_else(|| url.clone()),
                security_contact: stage.security_contact,
                plan_contact: stage.plan_contact,
                scanner_keys: stage.scanner_keys,
                providers: stage.providers,
                mailer: stage.mailer.unwrap_or(Mailer::Hand(mailer)),
                master_keys: stage.master_keys,
                breached_passwords: stage.breached_passwords,
            },
            connections: ConnectionLimits {
                per_address: stage.connections,
                proxies: TrustedProxies::Networks(
                    stage
                        .trusts_proxy
                        .then(|| "127.0.0.1/32".parse().expect("a network"))
                        .into_iter()
                        .collect(),
                ),
            },
            canary: stage.canary,
            zones: Zones::new(
                stage.zone_files.and_then(|it| zone_files::read(Some(&it)).expect("zones")),
            ),
            outbound: stage.outbound,
            deprecated: stage.deprecated,
            linger: stage.linger,
        };
        let running = tokio::spawn(serve::serve(node, stopping.clone()));
        let mails = tokio::sync::Mutex::new(mails);
        Self { url, database, mails, stopping, running }
    }

    /// Makes a project without limits, with a key that may do everything.
    pub async fn project(&self, slug: &str) -> LoneProject {
        let project = LoneProject::at(&self.url, &self.database, slug).await;
        LoneProject { stopping: self.stopping.clone(), ..project }
    }

    /// Makes a project on a plan, with single limits of its own.
    pub async fn project_with(&self, slug: &str, plan: &str, limits: Value) -> LoneProject {
        let project = self.project(slug).await;
        let mut conn = self.database.connect().await;
        let row = store::people::projects::find(&mut conn, slug, None).await.expect("an answer");
        let id = row.expect("the project").id;
        store::people::projects::set_plan(&mut conn, id, plan, Some(&limits))
            .await
            .expect("a plan");
        conn.close().await.expect("the connection closes");
        project
    }

    /// The next mail.
    pub async fn next_mail(&self) -> Mail {
        self.mails.lock().await.recv().await.expect("a mail")
    }

    /// Stops the server and waits for its end.
    pub async fn stop(self) {
        self.stopping.cancel();
        self.ended().await;
    }

    /// Waits for the server's end.
    pub async fn ended(self) {
        self.running.await.expect("the server does not panic").expect("the server ends well");
    }
}

/// A project, seen with its key, as a tenant sees it.
#[derive(Clone)]
pub struct TestProject {
    /// The server's base URL.
    pub url: String,
    /// The project's public id.
    pub id: String,
    /// The name of the project in paths.
    pub slug: String,
    /// Its key.
    pub api_key: String,
    /// For requests that no verb makes.
    pub client: reqwest::Client,
}

/// A project on a server of its own: the test may also look into the database, and stop the server.
#[derive(Clone)]
pub struct LoneProject {
    pub project: TestProject,
    /// The server's database.
    pub database: Database,
    /// Cancel it to stop the server.
    pub stopping: CancellationToken,
}

impl Deref for LoneProject {
    type Target = TestProject;

    fn deref(&self) -> &TestProject {
        &self.project
    }
}

impl LoneProject {
    /// Makes a project without limits, with a key that may do everything, and sees it through this
    /// server.
    pub async fn at(url: &str, database: &Database, slug: &str) -> Self {
        let project = TestProject::make(url, database, slug, client()).await;
        Self { project, database: database.clone(), stopping: CancellationToken::new() }
    }

    /// The same project, seen through another server.
    pub fn through(&self, url: &str) -> Self {
        Self { project: self.project.through(url), ..self.clone() }
    }

    /// The same project, seen with another key.
    pub fn with_key(&self, api_key: impl Into<String>) -> Self {
        Self { project: self.project.with_key(api_key), ..self.clone() }
    }

    /// Enqueues a job whose `expires_at` has passed.
    pub async fn enqueue_expired(&self, mut job: Value) -> String {
        // Nothing runs it meanwhile.
        job["delay_seconds"] = json!(3_600);
        job["expires_at"] = json!("2999-01-01T00:00:00Z");
        let id = self.enqueue(job).await;
        let JobId(uuid) = id.parse().expect("an id");
        self.database
            .execute(&format!(
                "with passed as (
                     update jobs set expires_at = now() - interval '1 s', run_at = now()
                     where id = '{uuid}'
                 )
                 update job_expiries set expires_at = now() - interval '1 s'
                 where job_id = '{uuid}'"
            ))
            .await;
        id
    }

    /// Makes every running lease a thing of the past.
    pub async fn expire_leases(&self) {
        self.database
            .execute(
                "update jobs set lease_expires_at = now() - interval '1 ms'
                 where state = 'processing'",
            )
            .await;
    }
}

/// A client for servers on this machine. It reads no certificates of the system, which took a
/// twentieth of the CPU time of tests.
pub fn client() -> reqwest::Client {
    client_builder().build().expect("a client")
}

/// A builder of [`client`], for tests that change a setting.
pub fn client_builder() -> reqwest::ClientBuilder {
    reqwest::Client::builder().tls_certs_only([])
}

impl TestProject {
    /// Makes a project without limits, with a key that may do everything, and sees it through this
    /// server.
    pub async fn make(url: &str, database: &Database, slug: &str, client: reqwest::Client) -> Self {
        let mut conn = database.connect().await;
        let (project, api_key) =
            dev::make_project(&mut conn, slug, "test").await.expect("a project");
        conn.close().await.expect("the connection closes");
        Self {
            url: url.to_owned(),
            id: project.public_id.to_string(),
            slug: slug.to_owned(),
            api_key,
            client,
        }
    }

    /// The same project, seen through another server.
    pub fn through(&self, url: &str) -> Self {
        Self { url: url.to_owned(), ..self.clone() }
    }

    /// The same project, seen with another key.
    pub fn with_key(&self, api_key: impl Into<String>) -> Self {
        Self { api_key: api_key.into(), ..self.clone() }
    }

    /// A request with the key.
    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.client.request(method, format!("{}{path}", self.url)).bearer_auth(&self.api_key)
    }

    pub async fn get(&self, path: &str) -> Reply {
        Reply::of(self.request(Method::GET, path).send().await.expect("an answer")).await
    }

    pub async fn post(&self, path: &str, body: Value) -> Reply {
        let request = self.request(Method::POST, path).json(&body);
        Reply::of(request.send().await.expect("an answer")).await
    }

    pub async fn patch(&self, path: &str, body: Value) -> Reply {
        let request = self.request(Method::PATCH, path).json(&body);
        Reply::of(request.send().await.expect("an answer")).await
    }

    pub async fn put(&self, path: &str, body: Value) -> Reply {
        let request = self.request(Method::PUT, path).json(&body);
        Reply::of(request.send().await.expect("an answer")).await
    }

    pub async fn delete(&self, path: &str) -> Reply {
        Reply::of(self.request(Method::DELETE, path).send().await.expect("an answer")).await
    }

    /// Posts without a body.
    pub async fn act(&self, path: &str) -> Reply {
        Reply::of(self.request(Method::POST, path).send().await.expect("an answer")).await
    }

    /// Sends a body as it is.
    pub async fn post_text(&self, path: &str, body: impl Into<reqwest::Body>) -> Reply {
        let request = self.request(Method::POST, path).header("content-type", "application/json");
        Reply::of(request.body(body).send().await.expect("an answer")).await
    }

    /// Enqueues a job of this shape and answers with its id. `job_type` is added when missing.
    #[track_caller]
    pub fn enqueue(&self, job: Value) -> impl Future<Output = String> {
        let mut job = job;
        job.as_object_mut().expect("an object").entry("job_type").or_insert("test".into());
        async move {
            let job = self.post("/v1/jobs", job).await.is(201);
            job["id"].as_str().expect("an id").to_owned()
        }
    }

    /// Polls once, without waiting.
    pub async fn poll(&self, worker: &str, capacity: u32) -> Vec<Value> {
        let poll = json!({
            "worker_id": worker, "queues": ["default"], "capacity": capacity, "wait_seconds": 0,
        });
        self.polled(poll).await
    }

    /// Polls with all details, and answers with the jobs.
    pub async fn polled(&self, poll: Value) -> Vec<Value> {
        let reply = self.post("/v1/workers/poll", poll).await.is(200);
        reply["jobs"].as_array().expect("jobs").clone()
    }

    /// Leases the one job that is there.
    pub async fn lease(&self, worker: &str) -> Value {
        self.poll(worker, 1).await.pop().expect("a job to lease")
    }

    /// Waits until there is a job and leases it.
    pub async fn wait_and_lease(&self, worker: &str) -> Value {
        let poll = json!({"worker_id": worker, "queues": ["default"], "wait_seconds": 10});
        self.polled(poll).await.pop().expect("a job within the wait")
    }

    /// Acknowledges a leased job, showing its attempt and lease.
    pub async fn ack(&self, job: &Value, worker: &str, status: &str) -> Reply {
        self.ack_with(job, worker, status, json!({})).await
    }

    /// Acknowledges a leased job with more to say.
    pub async fn ack_with(&self, job: &Value, worker: &str, status: &str, more: Value) -> Reply {
        let mut body = Self::ack_body(job, worker, status);
        let more = more.as_object().expect("an object").clone();
        body.as_object_mut().expect("an object").extend(more);
        self.post("/v1/workers/ack", body).await
    }

    /// The body of an ack that shows attempt and lease.
    pub fn ack_body(job: &Value, worker: &str, status: &str) -> Value {
        json!({
            "job_id": job["id"], "worker_id": worker, "status": status,
            "attempt": job["attempt"], "lease_id": job["lease_id"],
        })
    }

    /// Sends a heartbeat, showing attempt and lease.
    pub async fn heartbeat(&self, job: &Value, worker: &str) -> Reply {
        let beat = json!({
            "job_id": job["id"], "worker_id": worker,
            "attempt": job["attempt"], "lease_id": job["lease_id"],
        });
        self.post("/v1/workers/heartbeat", beat).await
    }

    /// Reads a job.
    pub async fn job(&self, id: &str) -> Value {
        self.get(&format!("/v1/jobs/{id}")).await.is(200)
    }

    /// Looks at a job until it is in this state.
    pub async fn job_becomes(&self, id: &str, state: &str) -> Value {
        eventually(format!("job {id} to be {state}"), async || {
            Some(self.job(id).await).filter(|job| job["state"] == state)
        })
        .await
    }
}
