//! A Fencepost worker with reqwest and tokio: see docs/worker-guide.md.
#![allow(clippy::print_stdout)]

use std::{env, time::Duration};

use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
    time::{MissedTickBehavior, interval, sleep, timeout},
};

const GRACE: Duration = Duration::from_secs(25);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(40);

#[derive(Debug, Deserialize)]
struct Job {
    id: String,
    payload: Value,
    attempt: i64,
    lease_id: String,
    heartbeat_interval_seconds: u64,
}

/// How a job ended, but for success.
enum Stopped {
    Failed(String),
    Released,
    Lost,
}

struct Worker {
    http: reqwest::Client,
    url: String,
    key: String,
    name: String,
    lease_seconds: u32,
}

impl Worker {
    /// Repeats temporary errors (network, 408, 429, 5xx) after a pause; fails with others (4xx).
    async fn call(&self, path: &str, body: &Value) -> Result<Value, String> {
        let mut pause = Duration::from_millis(500);
        loop {
            let request = self.http.post(format!("{}/v1/workers/{path}", self.url));
            if let Ok(reply) = request.bearer_auth(&self.key).json(body).send().await {
                let status = reply.status().as_u16();
                let text = reply.text().await;
                match (status, text) {
                    (200..=299, Ok(text)) => {
                        return serde_json::from_str(&text).map_err(|error| error.to_string());
                    }
                    (400..=499, Ok(text)) if ![408, 429].contains(&status) => return Err(text),
                    _ => (),
                }
            }
            sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(10));
        }
    }

    /// What a poll asks for.
    fn wanted(&self) -> Value {
        json!({
            "queues": ["default"], "job_types": ["greet"], "lease_seconds": self.lease_seconds,
            // Short, so that SIGTERM is obeyed soon. Repeated with the same id, a lost answer loses
            // nothing.
            "wait_seconds": 2, "poll_id": uuid::Uuid::new_v4(),
        })
    }

    /// Works on a job. Returns the jobs that come with the answer to its ack.
    async fn work(
        &self,
        job: Job,
        stopping: &watch::Receiver<bool>,
        grace_over: watch::Receiver<bool>,
    ) -> Vec<Job> {
        let mut ack = json!({
            "job_id": job.id, "worker_id": self.name, "attempt": job.attempt,
            "lease_id": job.lease_id,
        });
        let stopped = tokio::select! {
            done = handle(&job.payload) => done.map_err(Stopped::Failed),
            stopped = self.beat(&job, &ack) => Err(stopped),
            () = ended(grace_over) => Err(Stopped::Released),
        };
        match stopped {
            Ok(result) => {
                ack["status"] = json!("succeeded");
                ack["result"] = result;
            }
            Err(Stopped::Failed(message)) => {
                ack["status"] = json!("failed");
                ack["error"] = json!({"type": "error", "message": message});
            }
            Err(Stopped::Released) => ack["status"] = json!("released"),
            Err(Stopped::Lost) => return Vec::new(),
        }
        if !*stopping.borrow() {
            ack["then_poll"] = self.wanted();
        }
        match self.call("ack", &ack).await {
            Ok(mut reply) => {
                serde_json::from_value(reply["poll"]["jobs"].take()).unwrap_or_default()
            }
            Err(refused) => {
                println!("{} {refused}", job.id); // 409: another attempt decides
                Vec::new()
            }
        }
    }

    /// Heartbeats until the job must not go on.
    async fn beat(&self, job: &Job, fence: &Value) -> Stopped {
        let mut beats = interval(Duration::from_secs(job.heartbeat_interval_seconds));
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        beats.tick().await;
        loop {
            beats.tick().await;
            match self.call("heartbeat", fence).await {
                Ok(reply) if reply["status"] == "cancel" => {
                    return Stopped::Failed("the job was cancelled".to_owned());
                }
                Ok(_) => (),
                Err(_) => return Stopped::Lost, // 409: the job is not ours any more
            }
        }
    }
}

/// Your work. It is dropped when the job must not go on.
async fn handle(payload: &Value) -> Result<Value, String> {
    sleep(Duration::from_secs_f64(payload["sleep_seconds"].as_f64().unwrap_or(0.0))).await;
    if payload["fail"] == true {
        return Err("asked to fail".to_owned());
    }
    let name = payload["name"].as_str().unwrap_or("world");
    Ok(json!({"greeting": format!("Hello, {name}!")}))
}

async fn ended(mut what: watch::Receiver<bool>) {
    // An error means that the sender is gone: stop.
    let _ = what.wait_for(|it| *it).await;
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Delete this line if your reqwest has its default features.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let name = format!("rust-{}-{:08x}", std::process::id(), rand::random::<u32>());
    let lease_seconds: u32 = env::var("FENCEPOST_LEASE_SECONDS").map_or(Ok(30), |it| it.parse())?;
    let worker = Worker {
        http: reqwest::Client::builder().timeout(REQUEST_TIMEOUT).build()?,
        url: env::var("FENCEPOST_URL").unwrap_or_else(|_| "http://127.0.0.1:7070".to_owned()),
        key: env::var("FENCEPOST_KEY")?,
        name: name.clone(),
        lease_seconds,
    };
    let (stop, stopping) = watch::channel(false);
    let (end_grace, grace_over) = watch::channel(false);
    let (mut terminated, mut interrupted) =
        (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    tokio::spawn(async move {
        tokio::select! {
            _ = terminated.recv() => (),
            _ = interrupted.recv() => (),
        }
        stop.send_replace(true);
        sleep(GRACE).await;
        end_grace.send_replace(true);
    });
    // After three times `beat_seconds` without a call its job returns, without a failure.
    let wanted = json!({
        "worker_id": name, "queues": ["default"], "job_types": ["greet"],
        "beat_seconds": (worker.lease_seconds / 3).max(5),
    });
    worker.call("register", &wanted).await?;
    println!("ready");
    let mut jobs: Vec<Job> = Vec::new();
    while !jobs.is_empty() || !*stopping.borrow() {
        if let Some(job) = jobs.pop() {
            jobs.extend(worker.work(job, &stopping, grace_over.clone()).await);
        } else {
            let mut poll = worker.wanted();
            poll["worker_id"] = json!(name);
            let mut reply = worker.call("poll", &poll).await?;
            jobs = serde_json::from_value(reply["jobs"].take())?;
        }
    }
    let request = json!({"worker_id": name});
    let _ = timeout(Duration::from_secs(5), worker.call("deregister", &request)).await;
    Ok(())
}
