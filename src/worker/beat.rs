//! The worker's heartbeat: one call for all of its jobs.

use std::time::Duration;

use serde_json::{Value, json};

use crate::client::{Client, Failure};

/// The longest interval: a worker that was silent for 30 s is lost.
pub const MAX_PERIOD: Duration = Duration::from_secs(5);

/// A job in a heartbeat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Active {
    pub job_id: String,
    pub attempt: i64,
    pub lease_id: String,
}

/// The server's answer for one job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    Ok,
    Cancel,
    Lost,
}

/// The server's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heard {
    /// `running`, `quiet` or `terminate`.
    pub state: String,
    /// Each lease of the request, with its job.
    pub jobs: Vec<(Active, Status)>,
}

/// Sends one heartbeat.
pub async fn send(
    client: &Client,
    worker_id: &str,
    state: &str,
    active: &[Active],
) -> Result<Heard, Failure> {
    let named: Vec<_> = active
        .iter()
        .map(|it| json!({"job_id": it.job_id, "attempt": it.attempt, "lease_id": it.lease_id}))
        .collect();
    let beat = json!({"worker_id": worker_id, "state": state, "active_jobs": named});
    client.post("/v1/workers/heartbeat", &beat).await.map(|it| read(&it.json(), active))
}

fn read(reply: &Value, active: &[Active]) -> Heard {
    let jobs = reply["jobs"].as_array().cloned().unwrap_or_default();
    // The answers are in the order of the request.
    let jobs = active.iter().cloned().zip(jobs);
    let status = |it: &Value| match it["status"].as_str() {
        Some("cancel") => Status::Cancel,
        Some("lost") => Status::Lost,
        _ => Status::Ok,
    };
    Heard {
        state: reply["state"].as_str().unwrap_or("running").to_owned(),
        jobs: jobs.map(|(active, it)| (active, status(&it))).collect(),
    }
}
