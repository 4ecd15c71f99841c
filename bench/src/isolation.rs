//! What one tenant notices of another that does its worst: a table with a row for each measurement
//! of an attack.

use std::{
    io::{BufRead, BufReader, Write as _},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use clap::ValueEnum;
use serde_json::Value;
use sqlx::{ConnectOptions, postgres::PgConnectOptions};
use tokio::task::JoinSet;

use super::{
    attacks::Attack,
    client::{self, Client, SMALL_PAYLOAD_BYTES, Target},
    server::OwnServer,
};
use fencepost::dev::{self, Ready};

/// The victim's queue.
const QUEUE: &str = "work";
/// Jobs that the victim enqueues per second. Every third is due a second later.
const JOBS_PER_SECOND: u32 = 40;
const DELAY_SECONDS: f64 = 1.0;
/// The victim's workers, each with a poll that waits.
const WORKERS: usize = 8;
/// The wait of their polls, in seconds.
const WAIT_SECONDS: u64 = 2;
/// A request without an answer has failed after this time.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Time for polls to arrive before, and for jobs to be worked off after a measurement.
const MARGIN: Duration = Duration::from_secs(2);
/// How much lower the priority of the attacking process is: it must not take the CPU that the
/// server needs.
const NICENESS: &str = "10";
/// The bound: twice the time when it is quiet, or this much more, whichever is larger.
const MAX_MORE_MS: f64 = 25.0;
/// An attack is measured until this many measurements agree, so that the median of three decides:
/// single ones also show what else the machine does.
const AGREEING_MEASUREMENTS: usize = 2;

/// The kinds of requests that are timed.
const KINDS: [&str; 6] = ["pickup", "due", "ack", "enqueue", "heartbeat", "read"];

/// The place of reads among them.
const READ: usize = 5;

/// Times in milliseconds, by kind.
#[derive(Debug, Default)]
struct Times {
    of_kind: [Vec<f64>; KINDS.len()],
    failed: u64,
}

#[derive(Debug, Clone)]
struct Watch {
    times: Arc<Mutex<Times>>,
    epoch: Instant,
}

impl Watch {
    fn note(&self, kind: usize, since_ms: f64) {
        let took = self.now_ms() - since_ms;
        self.times.lock().unwrap_or_else(PoisonError::into_inner).of_kind[kind].push(took);
    }

    fn fail(&self) {
        self.times.lock().unwrap_or_else(PoisonError::into_inner).failed += 1;
    }

    fn now_ms(&self) -> f64 {
        self.epoch.elapsed().as_secs_f64() * 1e3
    }

    /// Times a request. After a failure the connection is a new one.
    async fn request(
        &self,
        client: &mut Client,
        target: &Target,
        (kind, path, body): (usize, &str, String),
    ) -> anyhow::Result<()> {
        let since = self.now_ms();
        let answer = tokio::time::timeout(REQUEST_TIMEOUT, client.post(path, body)).await;
        if matches!(answer, Ok(Ok(_))) {
            self.note(kind, since);
        } else {
            self.fail();
            *client = Client::connect(target).await?;
        }
        Ok(())
    }
}

impl Watch {
    /// Times a read of a job.
    async fn read(&self, client: &mut Client, target: &Target, path: &str) -> anyhow::Result<()> {
        let since = self.now_ms();
        let answer = tokio::time::timeout(REQUEST_TIMEOUT, client.get(path)).await;
        if matches!(answer, Ok(Ok(_))) {
            self.note(READ, since);
        } else {
            self.fail();
            *client = Client::connect(target).await?;
        }
        Ok(())
    }
}

/// 99 of 100 requests are faster, by kind; and how many failed.
#[derive(Debug, Clone, Copy)]
struct P99 {
    ms: [f64; KINDS.len()],
    failed: u64,
}

/// Works as a small tenant does for `time`: jobs at a low rate, each picked up, renewed and acked.
async fn work(target: &Target, queue: &str, time: Duration) -> anyhow::Result<P99> {
    let watch = Watch { times: Arc::default(), epoch: Instant::now() };
    let stop = Arc::new(AtomicBool::new(false));
    let mut workers = JoinSet::new();
    for number in 0..WORKERS {
        let (watch, stop) = (watch.clone(), Arc::clone(&stop));
        let (target, queue) = (target.clone(), queue.to_owned());
        workers.spawn(async move {
            let mut client = Client::connect(&target).await?;
            while !stop.load(Ordering::Relaxed) {
                let Ok(jobs) = client.poll(&queue, number, 1, WAIT_SECONDS).await else {
                    watch.fail();
                    client = Client::connect(&target).await?;
                    continue;
                };
                for job in jobs {
                    let kind = usize::from(job.job_type == "due");
                    let payload: Value = serde_json::from_str(job.payload.get())?;
                    watch.note(kind, payload["ready_ms"].as_f64().context("a time")?);
                    let ack = client::ack(&job, number);
                    let beat = ack.replace(r#","status":"succeeded""#, "");
                    let beat = (4, "/v1/workers/heartbeat", beat);
                    watch.request(&mut client, &target, beat).await?;
                    watch.request(&mut client, &target, (2, "/v1/workers/ack", ack)).await?;
                    let path = format!("/v1/jobs/{}", job.id);
                    watch.read(&mut client, &target, &path).await?;
                }
            }
            anyhow::Ok(())
        });
    }
    tokio::time::sleep(MARGIN).await;
    let mut sender = Client::connect(target).await?;
    let mut ticks = tokio::time::interval(Duration::from_secs(1) / JOBS_PER_SECOND);
    let started = Instant::now();
    for number in 0_u64.. {
        if started.elapsed() >= time {
            break;
        }
        ticks.tick().await;
        let (kind, delay) = if number % 3 == 2 { ("due", DELAY_SECONDS) } else { ("now", 0.0) };
        let ready_ms = watch.now_ms() + delay * 1e3;
        let body = format!(
            r#"{{"job_type":"{kind}","queue":"{queue}","delay_seconds":{delay},"payload":{{"ready_ms":{ready_ms}}}}}"#
        );
        watch.request(&mut sender, target, (3, "/v1/jobs", body)).await?;
    }
    tokio::time::sleep(MARGIN).await;
    stop.store(true, Ordering::Relaxed);
    while let Some(ended) = workers.join_next().await {
        ended??;
    }
    let times = std::mem::take(&mut *watch.times.lock().unwrap_or_else(PoisonError::into_inner));
    let p99 = times.of_kind.map(|mut it| {
        it.sort_by(f64::total_cmp);
        it.get(it.len() * 99 / 100).copied().unwrap_or(f64::NAN)
    });
    Ok(P99 { ms: p99, failed: times.failed })
}

/// The p99 of the time that jobs of a small tenant wait for their worker, in milliseconds.
pub async fn pickup_ms(target: &Target, time: Duration) -> anyhow::Result<f64> {
    let seen = work(target, QUEUE, time).await?;
    ensure!(seen.failed == 0, "{} requests failed", seen.failed);
    Ok(seen.ms[0])
}

/// An attack in a process of its own, which ends when this is dropped.
struct Attacking(Child);

impl Attacking {
    /// Returns when the attack has begun.
    fn begin(server: &OwnServer, attack: Attack, api_key: &str) -> anyhow::Result<Self> {
        let name = attack.to_possible_value().context("a name")?;
        let mut child = Command::new("nice")
            .args(["-n", NICENESS])
            .arg(std::env::current_exe()?)
            .args(["--attack", name.get_name(), "--data-dir"])
            .arg(&server.dir)
            .env("FENCEPOST_KEY", api_key)
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = child.stdout.take().context("its output")?;
        let this = Self(child);
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        ensure!(line.trim() == super::attacks::HAS_BEGUN, "the attack did not begin");
        Ok(this)
    }
}

impl Drop for Attacking {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The attacks to measure.
#[derive(Debug)]
pub struct Selection<'a> {
    /// Only attacks whose name contains this text.
    pub only: Option<&'a str>,
    /// True for attacks that a stranger with a free account can make, false for all others.
    pub is_abuse: bool,
    /// True to repeat each attack by the victim itself, for comparison.
    pub is_compared: bool,
}

/// Measures attacks, each on a server of its own.
///
/// # Errors
/// When a server does not start, or does not answer at all; or when an attack by another has
/// missed the bound in most of its measurements.
pub async fn run(selection: &Selection<'_>, time: Duration) -> anyhow::Result<()> {
    let Selection { only, is_abuse, is_compared } = *selection;
    let mut missed = Vec::new();
    let kinds = KINDS.join(" | ");
    let line = "---|".repeat(KINDS.len() + 6);
    print(&format!("| attack | by | {kinds} | failed | bound | load | MiB |\n|{line}\n"))?;
    for attack in Attack::value_variants() {
        let name = attack.to_possible_value().context("a name")?.get_name().to_owned();
        if only.is_some_and(|it| !name.contains(it)) || attack.is_abuse() != is_abuse {
            continue;
        }
        let (mut held, mut beyond) = (0, 0);
        while held.max(beyond) < AGREEING_MEASUREMENTS {
            match measure_and_print(*attack, &name, true, time).await? {
                true => held += 1,
                false => beyond += 1,
            }
        }
        if beyond > held {
            missed.push(name.clone());
        }
        // A free account has no comparison by the victim itself.
        if is_compared && !is_abuse {
            measure_and_print(*attack, &name, false, time).await?;
        }
    }
    ensure!(missed.is_empty(), "the bound was missed: {}", missed.join(", "));
    Ok(())
}

/// Measures an attack and prints its row. Returns whether the bound was held.
async fn measure_and_print(
    attack: Attack,
    name: &str,
    by_another: bool,
    time: Duration,
) -> anyhow::Result<bool> {
    let (quiet, beside, load, mib) = measure(attack, by_another, time).await?;
    let pairs = || quiet.ms.into_iter().zip(beside.ms);
    let times: String = pairs().map(|it| format!(" {} → {} |", shown(it.0), shown(it.1))).collect();
    let is_within = |quiet: f64, beside| beside <= (2.0 * quiet).max(quiet + MAX_MORE_MS);
    let is_held = beside.failed == 0 && pairs().all(|it| is_within(it.0, it.1));
    let by = if by_another { "another" } else { "itself" };
    let (failed, bound) = (beside.failed, if is_held { "held" } else { "missed" });
    print(&format!("| {name} | {by} |{times} {failed} | {bound} | {load} | {mib} |\n"))?;
    Ok(is_held)
}

/// Without a number: no such request was answered.
fn shown(ms: f64) -> String {
    if ms.is_nan() { "–".to_owned() } else { format!("{ms:.0}") }
}

fn print(text: &str) -> std::io::Result<()> {
    std::io::stdout().write_all(text.as_bytes())
}

async fn measure(
    attack: Attack,
    by_another: bool,
    time: Duration,
) -> anyhow::Result<(P99, P99, String, u64)> {
    // Strangers come from many addresses.
    let server = OwnServer::start(&["--trusted-proxies", "127.0.0.1"])?;
    let ready = Ready::of_running(Some(server.dir.clone()))?;
    let options: PgConnectOptions = ready.database_url.parse()?;
    let mut conn = options.connect().await?;
    let (_, another) = dev::make_project(&mut conn, "attacker", "attacker").await?;
    if attack.is_abuse() {
        let free = "update projects set plan = 'free' where slug = 'attacker'";
        sqlx::query(free).execute(&mut conn).await?;
        // The grant of the key is cached until then.
        tokio::time::sleep(MARGIN).await;
    }
    let authority = ready.url.strip_prefix("http://").context("a URL")?.to_owned();
    let api_key = ready.api_key;
    let victim = Target { authority, api_key: api_key.clone(), payload_bytes: SMALL_PAYLOAD_BYTES };
    let quiet = work(&victim, QUEUE, time).await?;
    let attacker = if by_another { &another } else { &api_key };
    let attacking = Attacking::begin(&server, attack, attacker)?;
    let beside = work(&victim, QUEUE, time).await?;
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    drop(attacking);
    let load = load.split(' ').next().unwrap_or_default().to_owned();
    Ok((quiet, beside, load, server.most_memory_mib()?))
}
