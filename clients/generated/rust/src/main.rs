//! A job from enqueue to ack, through the client that progenitor makes of the document for OpenAPI
//! 3.0.

use anyhow::{Context, ensure};
use serde_json::json;

progenitor::generate_api!(spec = "../../../openapi/openapi-3.0.json", interface = Builder);

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let (queue, worker) = ("client-progenitor", "progenitor");
    let key = std::env::var("FENCEPOST_KEY")?;
    let mut headers = reqwest::header::HeaderMap::new();
    headers.insert("authorization", format!("Bearer {key}").parse()?);
    let http = reqwest::Client::builder().default_headers(headers).build()?;
    let client = Client::new_with_client(&std::env::var("FENCEPOST_URL")?, http);

    let enqueue = json!({"job_type": "greet", "payload": {"name": "Ada"}, "queue": queue});
    let job = client.jobs_create().body(serde_json::from_value::<types::EnqueueRequest>(enqueue)?).send().await?;
    let poll = json!({"worker_id": worker, "queues": [queue], "wait_seconds": 5});
    let polled = client.workers_poll().body(serde_json::from_value::<types::PollRequest>(poll)?).send().await?;
    let leased = polled.jobs.first().context("a job")?;
    ensure!(leased.id == job.id && leased.attempt == 1);
    let fence = json!({
        "job_id": leased.id, "worker_id": worker, "attempt": leased.attempt, "lease_id": leased.lease_id,
    });
    let beat = serde_json::from_value::<types::HeartbeatRequest>(fence.clone())?;
    let beat = client.workers_heartbeat().body(beat).send().await?;
    ensure!(beat.status == Some(types::HeartbeatStatus::Ok));
    let mut ack = fence;
    ack["status"] = json!("succeeded");
    let acked = client.workers_ack().body(serde_json::from_value::<types::AckRequest>(ack)?).send().await?;
    ensure!(acked.action == types::AckAction::Done);
    let done = client.jobs_get().job_id(&job.id).send().await?;
    ensure!(done.state == types::JobState::Succeeded);
    let missing = client.jobs_get().job_id("job_01m7w3ha3aextt8pkwwdmxsmqw").send().await;
    ensure!(missing.err().and_then(|it| it.status()).is_some_and(|it| it == 404));
    println!("worked {}", job.id);
    Ok(())
}
