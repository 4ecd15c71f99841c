//! What webhooks cost: deliveries a second, what they cost the jobs, and the time from an end to
//! its request.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use axum::{Router, body::Bytes, extract::State, http::StatusCode, routing::post};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::{
    bulk,
    client::{self, Client, Target},
    report::{Measure, plain},
};

/// Jobs whose ends are reported.
const JOBS: usize = 20_000;
/// Ends in a second while the delay is measured.
const EVENTS_PER_SECOND: u32 = 200;
/// Endpoints that never answer, beside the measured one.
const HANGING: usize = 10;
/// Where they are: requests to one address share its turns.
const HANGING_HOST: &str = "127.0.0.2";
const HOST: &str = "127.0.0.1";
/// All deliveries of the measurement come within this.
const PATIENCE: Duration = Duration::from_secs(120);
const LOOK_PERIOD: Duration = Duration::from_millis(2);

/// An endpoint, and another that never answers.
#[derive(Default)]
struct Sink {
    received: AtomicUsize,
    /// When the request about each job came.
    times: Mutex<HashMap<String, Instant>>,
}

async fn receive(State(sink): State<Arc<Sink>>, body: Bytes) -> StatusCode {
    let event: Value = serde_json::from_slice(&body).unwrap_or_default();
    if let Some(job) = event["data"]["job"]["id"].as_str() {
        let mut times = sink.times.lock().unwrap_or_else(PoisonError::into_inner);
        // A second request about a job counts for nothing.
        if times.insert(job.to_owned(), Instant::now()).is_none() {
            sink.received.fetch_add(1, Ordering::Relaxed);
        }
    }
    StatusCode::NO_CONTENT
}

impl Sink {
    /// Also returns its port, on each of [`HOST`] and [`HANGING_HOST`].
    async fn start() -> anyhow::Result<(Arc<Self>, u16)> {
        let (this, listener) = (Arc::new(Self::default()), TcpListener::bind("0.0.0.0:0").await?);
        let port = listener.local_addr()?.port();
        let router = Router::new()
            .route("/hook", post(receive))
            .route("/hangs", post(async || std::future::pending::<StatusCode>().await))
            .with_state(Arc::clone(&this));
        tokio::spawn(async move { axum::serve(listener, router).await });
        Ok((this, port))
    }

    async fn has(&self, requests: usize) -> anyhow::Result<()> {
        let begun = Instant::now();
        while self.received.load(Ordering::Relaxed) < requests {
            let received = self.received.load(Ordering::Relaxed);
            ensure!(begun.elapsed() < PATIENCE, "{received} of {requests} deliveries came");
            tokio::time::sleep(LOOK_PERIOD).await;
        }
        Ok(())
    }
}

async fn endpoint(client: &mut Client, url: &str, queue: &str) -> anyhow::Result<String> {
    let body = json!({"url": url, "events": ["job.succeeded"], "queues": [queue],
                      "max_in_flight": 50, "timeout_seconds": 30});
    let made: Value =
        serde_json::from_slice(&client.post("/v1/webhooks", body.to_string()).await?)?;
    Ok(made["endpoint"]["id"].as_str().context("an id")?.to_owned())
}

/// Runs all measurements.
///
/// # Errors
/// When the server does not answer, or a delivery is missing.
pub async fn measure(
    target: &Target,
    queue: impl Fn(&str) -> String,
    time: Duration,
) -> anyhow::Result<Vec<Measure>> {
    let (sink, port) = Sink::start().await?;
    let mut client = Client::connect(target).await?;
    let (without, ledger) = bulk::at_once(target, &queue("untold"), JOBS).await?;
    ledger.check(target, &queue("untold")).await?;
    let reported = queue("reported");
    let url = format!("http://{HOST}:{port}/hook");
    endpoint(&mut client, &url, &reported).await?;
    // Each node learns of it.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let begun = Instant::now();
    let (with, ledger) = bulk::at_once(target, &reported, JOBS).await?;
    sink.has(JOBS).await?;
    let deliveries = JOBS as f64 / begun.elapsed().as_secs_f64();
    ledger.check(target, &reported).await?;
    let quiet = delay(target, &sink, &reported, time).await?;
    let hanging = queue("hanging");
    // The server has closed the one before, which was idle.
    let mut client = Client::connect(target).await?;
    for _ in 0..HANGING {
        endpoint(&mut client, &format!("http://{HANGING_HOST}:{port}/hangs"), &hanging).await?;
    }
    tokio::time::sleep(Duration::from_secs(3)).await;
    bulk::at_once(target, &hanging, 1_000).await?;
    let beside = delay(target, &sink, &reported, time).await?;
    Ok(vec![
        plain("bulk lifecycle, reported to no endpoint", without, "jobs/s"),
        plain("bulk lifecycle, reported to one", with, "jobs/s"),
        plain("reported to one, to reported to none", with / without, "times"),
        plain("deliveries, from the first enqueue to the last request", deliveries, "1/s"),
        plain("end to request at 200/s, p50", quiet.0, "ms"),
        plain("end to request at 200/s, p99", quiet.1, "ms"),
        plain("beside 10 endpoints that hang, p50", beside.0, "ms"),
        plain("beside 10 endpoints that hang, p99", beside.1, "ms"),
    ])
}

/// The time from the answer to an ack to the request about its job: p50 and p99, in milliseconds.
async fn delay(
    target: &Target,
    sink: &Sink,
    queue: &str,
    time: Duration,
) -> anyhow::Result<(f64, f64)> {
    let before = sink.received.load(Ordering::Relaxed);
    let mut client = Client::connect(target).await?;
    let mut ends = Vec::new();
    let mut ticks = tokio::time::interval(Duration::from_secs(1) / EVENTS_PER_SECOND);
    let begun = Instant::now();
    while begun.elapsed() < time {
        ticks.tick().await;
        client.post_job(queue).await?;
        for job in client.poll(queue, 0, 1, 1).await? {
            client.post("/v1/workers/ack", client::ack(&job, 0)).await?;
            ends.push((job.id, Instant::now()));
        }
    }
    sink.has(before + ends.len()).await?;
    let times = sink.times.lock().unwrap_or_else(PoisonError::into_inner);
    let waits = ends.iter().map(|(job, ended)| {
        let came = times.get(job).context("a delivery is missing")?;
        Ok(came.saturating_duration_since(*ended).as_secs_f64() * 1e3)
    });
    let mut waits = waits.collect::<anyhow::Result<Vec<_>>>()?;
    ensure!(!waits.is_empty(), "no job ended");
    waits.sort_by(f64::total_cmp);
    let at = |share: f64| waits[((waits.len() - 1) as f64 * share) as usize];
    Ok((at(0.5), at(0.99)))
}
