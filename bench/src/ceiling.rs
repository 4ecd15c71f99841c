//! The ceiling: the same three requests against axum routes that keep jobs in memory, without
//! keys, limits, fences and a database: what HTTP alone costs on this machine.

use std::{
    collections::{HashMap, VecDeque},
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::Context;
use axum::{Json, Router, extract::State, http::StatusCode, routing::post};
use serde::Deserialize;
use serde_json::{Value, json, value::RawValue};
use tokio::{net::TcpListener, sync::Notify, time::timeout};
use uuid::Uuid;

/// Jobs of one queue, in memory.
#[derive(Default)]
struct Memory {
    ready: Mutex<VecDeque<(Uuid, Box<RawValue>)>>,
    leased: Mutex<HashMap<Uuid, Box<RawValue>>>,
    arrived: Notify,
}

#[derive(Deserialize)]
struct Enqueue {
    payload: Box<RawValue>,
}

#[derive(Deserialize)]
struct Poll {
    wait_seconds: u64,
}

#[derive(Deserialize)]
struct Ack {
    job_id: Uuid,
}

async fn enqueue(
    State(memory): State<Arc<Memory>>,
    Json(job): Json<Enqueue>,
) -> (StatusCode, Json<Value>) {
    let id = Uuid::now_v7();
    let mut ready = memory.ready.lock().unwrap_or_else(PoisonError::into_inner);
    ready.push_back((id, job.payload));
    drop(ready);
    memory.arrived.notify_one();
    (StatusCode::CREATED, Json(json!({ "id": id, "state": "pending" })))
}

async fn poll(State(memory): State<Arc<Memory>>, Json(poll): Json<Poll>) -> Json<Value> {
    let take = || memory.ready.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    let found = async {
        loop {
            match take() {
                Some(job) => return job,
                None => memory.arrived.notified().await,
            }
        }
    };
    let Ok((id, payload)) = timeout(Duration::from_secs(poll.wait_seconds), found).await else {
        return Json(json!({ "jobs": [] }));
    };
    let reported =
        json!({ "jobs": [{ "id": id, "payload": payload, "attempt": 1, "lease_id": id }] });
    memory.leased.lock().unwrap_or_else(PoisonError::into_inner).insert(id, payload);
    Json(reported)
}

async fn ack(State(memory): State<Arc<Memory>>, Json(ack): Json<Ack>) -> Json<Value> {
    memory.leased.lock().unwrap_or_else(PoisonError::into_inner).remove(&ack.job_id);
    Json(json!({ "action": "done" }))
}

/// Serves until this process is killed; prints its address first.
pub async fn serve() -> anyhow::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let router = Router::new()
        .route("/v1/jobs", post(enqueue))
        .route("/v1/workers/poll", post(poll))
        .route("/v1/workers/ack", post(ack))
        .with_state(Arc::default());
    #[expect(clippy::print_stdout, reason = "the parent process reads it")]
    {
        println!("{}", listener.local_addr()?);
    }
    axum::serve(listener, router).await?;
    Ok(())
}

/// The same in a process of its own, whose CPU can be measured.
pub struct Ceiling {
    child: Child,
    /// `host:port`.
    pub authority: String,
}

impl Ceiling {
    /// # Errors
    /// When it does not start.
    pub fn start() -> anyhow::Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("--serve-ceiling")
            .stdout(Stdio::piped())
            .spawn()?;
        let mut authority = String::new();
        let stdout = child.stdout.take().context("it is piped")?;
        BufReader::new(stdout).read_line(&mut authority)?;
        Ok(Self { child, authority: authority.trim().to_owned() })
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Ceiling {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
