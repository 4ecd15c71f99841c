//! What a tenant may do to others, as bad as it can.

use std::{io::Write as _, sync::Arc, time::Duration};

use anyhow::Context;
use clap::ValueEnum;
use sqlx::{ConnectOptions, Executor, PgConnection, postgres::PgConnectOptions};
use tokio::task::JoinSet;
use uuid::Uuid;

use super::{
    abuse::Abuse,
    client::{self, Client, SMALL_PAYLOAD_BYTES, Target},
};
use fencepost::dev::Ready;
use fencepost_domain::ids::JobId;

/// The line that says that an attack has begun.
pub const HAS_BEGUN: &str = "has begun";

/// Clients that attack at the same time.
const CLIENTS: usize = 16;
/// Clients of enqueues of [`BATCH_BYTES`].
const LARGE_CLIENTS: usize = 4;
/// Bytes of a large batch, below the limit of a body.
const BATCH_BYTES: usize = 7_500_000;
const BATCH_JOBS: usize = 100;
/// Entries of a batch of acks, the most that is permitted.
const ACKS: usize = 500;
/// Rows that fail.
const POISON_ROWS: u32 = 50;
const DUE_JOBS: u32 = 200_000;
const QUEUE_NAMES: u32 = 100_000;
const CONCURRENCY_KEYS: u32 = 5_000;
const TURN_GROUPS: u32 = 100_000;
const LIMITED_PROJECTS: u32 = 1_000;
const EXPIRED_LEASES: u32 = 50_000;
/// Jobs per second that are stored for limited projects while a snapshot is held.
const LIMITED_RATE: u32 = 200;
/// A poll of the jobs with concurrency keys, or of groups.
const POLL: &str = r#"{"worker_id":"w","queues":["many"],"capacity":1,"wait_seconds":0}"#;
/// Pause of a client after an error, usually a refusal.
const PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Attack {
    /// Jobs that are due and whose every change fails in the database.
    Poison,
    /// Batches of acks of jobs that do not exist.
    RefusedAcks,
    /// Enqueues of 7.5 MB.
    LargeBatches,
    /// The same ack, 500 times a batch.
    OneKey,
    /// 200,000 jobs that are due in the same second.
    DueJobs,
    /// 100,000 queues, and claims of any.
    QueueNames,
    /// 5,000 concurrency keys with a job each.
    ConcurrencyKeys,
    /// 100,000 groups that take turns, none of them in line yet, with a job each.
    Groups,
    /// An ack of a job whose row is locked.
    LockedRow,
    /// A held snapshot, and 1,000 projects with a limit of jobs.
    HeldSnapshot,
    /// 50,000 leases that end in the same second.
    MassExpiry,
    /// Of a free account, as all below: cron expressions that take long to read, or never fire.
    Expressions,
    /// Pages of large jobs.
    LargePages,
    /// The same, by 500 readers that take a byte a second.
    SlowReaders,
    /// Enqueues of 7.5 MB.
    Bytes,
    /// 600 event streams.
    Streams,
    /// 480 parked polls.
    Polls,
    /// Logins with a wrong password, from 240 addresses.
    Passwords,
    /// Sign-ups, from 240 addresses.
    SignUps,
    /// Keys that do not exist, from 240 addresses.
    UnknownKeys,
    /// Exports and lists of one account.
    Exports,
    /// Paths that do not exist: what the CPU alone costs, for comparison with the others.
    Control,
    /// Batches of jobs with nested callbacks, which are cancelled.
    Callbacks,
    /// 150 polls of ever new workers and queues.
    NewQueues,
    /// Lists that search and count.
    Lists,
    /// Pages of the console.
    Pages,
    /// Endpoints that never answer, and events for them.
    HangingEndpoints,
    /// Pushed queues whose URL never answers, and jobs for them.
    HangingPushes,
    /// Questions for passkeys.
    PasskeyOptions,
    /// Enqueues, each with a new idempotency key.
    IdempotencyKeys,
    /// Jobs in batches, and operations that cancel them.
    BulkOperations,
}

impl Attack {
    /// Whether a stranger with a free account can do it, over HTTP alone.
    #[must_use]
    pub fn is_abuse(self) -> bool {
        matches!(
            self,
            Self::Expressions
                | Self::LargePages
                | Self::SlowReaders
                | Self::Bytes
                | Self::Streams
                | Self::Polls
                | Self::Passwords
                | Self::SignUps
                | Self::UnknownKeys
                | Self::Exports
                | Self::Control
                | Self::Callbacks
                | Self::NewQueues
                | Self::Lists
                | Self::Pages
                | Self::HangingEndpoints
                | Self::HangingPushes
                | Self::PasskeyOptions
                | Self::IdempotencyKeys
                | Self::BulkOperations
        )
    }
}

/// The tenant that attacks, and how it reaches the database for what it cannot do by a request in
/// time.
#[derive(Debug, Clone)]
pub struct Attacker {
    target: Target,
    database_url: String,
}

impl Attacker {
    pub fn of(ready: &Ready, api_key: String) -> anyhow::Result<Self> {
        let authority = ready.url.strip_prefix("http://").context("a URL")?.to_owned();
        let target = Target { authority, api_key, payload_bytes: SMALL_PAYLOAD_BYTES };
        Ok(Self { target, database_url: ready.database_url.clone() })
    }

    /// Attacks until the process is killed.
    ///
    /// # Errors
    /// When it cannot begin.
    pub async fn run(&self, attack: Attack) -> anyhow::Result<()> {
        let mut conn = self.connect().await?;
        // A job over HTTP shows which project it is of.
        Client::connect(&self.target).await?.post_job("attack").await?;
        let project = "select max(project_id) from jobs where queue = 'attack'";
        let project: i32 = sqlx::query_scalar(project).fetch_one(&mut conn).await?;
        let mut clients = JoinSet::new();
        match attack {
            Attack::Poison => poison(&mut conn, project).await?,
            Attack::DueJobs => {
                let state = format!("{DUE_JOBS}, 'scheduled', now() + interval '3 s'");
                jobs(&mut conn, project, &state, "").await?;
            }
            Attack::MassExpiry => expire(&mut conn, project).await?,
            Attack::RefusedAcks => {
                let ack = || ack_of(&JobId::generate().to_string());
                let acks: Vec<_> = (0..ACKS).map(|_| ack()).collect();
                self.flood(&mut clients, CLIENTS, "/v1/workers/ack/batch", batch(&acks));
            }
            Attack::OneKey => {
                let jobs = Client::connect(&self.target).await?.poll("attack", 0, 1, 5).await?;
                let ack = client::ack(jobs.first().context("a job")?, 0);
                let acks = vec![ack; ACKS];
                self.flood(&mut clients, CLIENTS, "/v1/workers/ack/batch", batch(&acks));
            }
            Attack::LargeBatches => {
                self.flood(&mut clients, LARGE_CLIENTS, "/v1/jobs/batch", large_batch());
            }
            Attack::QueueNames => {
                queue_names(&mut conn, project).await?;
                let claim = r#"{"worker_id":"w","labels":[]}"#.to_owned();
                self.flood(&mut clients, CLIENTS, "/workflow-graph/api/jobs/claim", claim);
            }
            Attack::ConcurrencyKeys => {
                let state = format!("{CONCURRENCY_KEYS}, 'pending', now()");
                let key = "md5(n::text)::uuid, 'key ' || n, 1";
                jobs(&mut conn, project, &state, key).await?;
                self.flood(&mut clients, CLIENTS, "/v1/workers/poll", POLL.to_owned());
            }
            Attack::Groups => {
                groups(&mut conn, project).await?;
                self.flood(&mut clients, CLIENTS, "/v1/workers/poll", POLL.to_owned());
            }
            Attack::LockedRow => {
                let jobs = Client::connect(&self.target).await?.poll("attack", 0, 1, 5).await?;
                let ack = client::ack(jobs.first().context("a job")?, 0);
                let hold = format!(
                    "begin; select from jobs where project_id = {project} and queue = 'attack'
                     for update"
                );
                execute(&mut conn, hold).await?;
                self.flood(&mut clients, CLIENTS, "/v1/workers/ack", ack);
            }
            Attack::HeldSnapshot => {
                limited_projects(&mut conn).await?;
                let hold = "begin isolation level repeatable read; select from projects limit 1";
                execute(&mut conn, hold.to_owned()).await?;
                clients.spawn(limited_enqueues(self.connect().await?));
            }
            of_a_stranger => {
                Abuse::new(&self.target, &mut clients).begin(of_a_stranger).await?;
            }
        }
        std::io::stdout().write_all(format!("{HAS_BEGUN}\n").as_bytes())?;
        std::future::pending::<()>().await;
        drop((conn, clients));
        Ok(())
    }

    async fn connect(&self) -> anyhow::Result<PgConnection> {
        let options: PgConnectOptions = self.database_url.parse()?;
        Ok(options.connect().await?)
    }

    /// Sends the same request again and again, whatever is answered.
    fn flood(&self, clients: &mut JoinSet<()>, many: usize, path: &'static str, body: String) {
        let body: Arc<str> = body.into();
        for _ in 0..many {
            let (target, body) = (self.target.clone(), Arc::clone(&body));
            clients.spawn(async move {
                loop {
                    let Ok(mut client) = Client::connect(&target).await else { continue };
                    while client.post(path, body.to_string()).await.is_ok() {}
                    tokio::time::sleep(PAUSE).await;
                }
            });
        }
    }
}

async fn execute(conn: &mut PgConnection, sql: String) -> anyhow::Result<()> {
    conn.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(sql))).await?;
    Ok(())
}

fn ack_of(job_id: &str) -> String {
    let lease_id = Uuid::new_v4();
    format!(
        r#"{{"job_id":"{job_id}","worker_id":"w","attempt":1,"lease_id":"{lease_id}","status":"succeeded"}}"#
    )
}

/// An enqueue of 7.5 MB.
pub fn large_batch() -> String {
    let job = client::job("large", BATCH_BYTES / BATCH_JOBS);
    format!(r#"{{"jobs":[{}]}}"#, vec![job; BATCH_JOBS].join(","))
}

fn batch(acks: &[String]) -> String {
    format!(r#"{{"acks":[{}]}}"#, acks.join(","))
}

/// Stores jobs in the queue `many`. `state`: their number, state and `run_at`; `key`: constraint
/// key, concurrency key and limit, if they have any.
async fn jobs(conn: &mut PgConnection, project: i32, state: &str, key: &str) -> anyhow::Result<()> {
    let (number, state) = state.split_once(", ").context("a number and a state")?;
    let key = if key.is_empty() { "null::uuid, null, null::int" } else { key };
    let sql = format!(
        "with new as (
             insert into jobs (
                 project_id, id, queue, job_type, max_attempts, timeout_seconds, rank, state,
                 run_at, constraint_key, concurrency_key, concurrency_limit
             )
             select {project}, gen_random_uuid(), 'many', 'many', 3, 600, 0, {state}, {key}
             from generate_series(1, {number}) n
             returning project_id, id
         )
         insert into job_bodies (project_id, job_id, payload) select project_id, id, '1' from new"
    );
    execute(conn, sql).await
}

async fn queue_names(conn: &mut PgConnection, project: i32) -> anyhow::Result<()> {
    let names = format!(
        "insert into queue_counts (project_id, queue)
         select {project}, 'name-' || n from generate_series(1, {QUEUE_NAMES}) n
         on conflict do nothing"
    );
    execute(conn, names).await
}

/// Groups of the queue `many`, which take turns, each with a job and a note.
async fn groups(conn: &mut PgConnection, project: i32) -> anyhow::Result<()> {
    let rules = format!(
        "insert into queues (project_id, name, group_fair, has_gate)
         values ({project}, 'many', true, true)"
    );
    execute(conn, rules).await?;
    jobs(conn, project, &format!("{TURN_GROUPS}, 'pending', now()"), "").await?;
    let named = format!(
        "update jobs
         set group_key = 'group ' || id, group_place = nextval('job_places'),
             takes_turns = true
         where project_id = {project} and queue = 'many';
         insert into group_notes (project_id, queue, group_key)
         select project_id, queue, group_key
         from jobs where project_id = {project} and queue = 'many'"
    );
    execute(conn, named).await
}

/// Due jobs that cannot be promoted.
async fn poison(conn: &mut PgConnection, project: i32) -> anyhow::Result<()> {
    let trigger = format!(
        "create function poison() returns trigger language plpgsql as $$
         begin raise 'poison' using errcode = '23514'; end $$;
         create trigger poison before update on jobs for each row
         when (new.project_id = {project} and new.queue = 'many') execute function poison()"
    );
    execute(conn, trigger).await?;
    jobs(conn, project, &format!("{POISON_ROWS}, 'scheduled', now()"), "").await
}

/// Leases that end in a few seconds.
async fn expire(conn: &mut PgConnection, project: i32) -> anyhow::Result<()> {
    jobs(conn, project, &format!("{EXPIRED_LEASES}, 'pending', now() + interval '1 h'"), "")
        .await?;
    let lease = format!(
        "update jobs
         set state = 'processing', attempt = 1, lease_id = gen_random_uuid(), worker_id = 'w',
             claimed_at = now(), lease_seconds = 3, lease_expires_at = now() + interval '3 s'
         where project_id = {project} and queue = 'many'"
    );
    execute(conn, lease).await
}

/// Projects whose number of jobs is limited, each with a queue.
async fn limited_projects(conn: &mut PgConnection) -> anyhow::Result<()> {
    let sql = format!(
        "insert into projects (public_id, slug, name, plan, mode)
         select gen_random_uuid(), 'limited-' || n, 'limited', 'free', 'live'
         from generate_series(1, {LIMITED_PROJECTS}) n"
    );
    execute(conn, sql).await
}

/// Changes of counts as enqueues of all these projects make them.
async fn limited_enqueues(mut conn: PgConnection) {
    let mut ticks = tokio::time::interval(Duration::from_secs(1) / LIMITED_RATE);
    loop {
        ticks.tick().await;
        let sql = "insert into queue_deltas (project_id, queue, active, enqueued)
                   select id, 'q', 1, 1 from projects
                   where slug = 'limited-' || (1 + random() * 999)::int";
        if let Err(error) = conn.execute(sql).await {
            eprintln!("a change of counts failed: {error}");
            return;
        }
    }
}
