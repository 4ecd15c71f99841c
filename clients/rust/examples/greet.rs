//! A worker that greets, and a producer: `greet`, `greet enqueue 10`.

use std::time::Duration;

use fencepost_client::{Client, Error, Failure, Job, Worker};
use serde_json::{Value, json};

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|it| it.parse().ok()).unwrap_or(otherwise)
}

async fn in_steps(job: &Job, steps: u64) -> Result<Value, Failure> {
    let (mut ran, mut sum) = (Vec::new(), 0);
    for number in 1..=steps {
        let name = format!("square {number}");
        let square = job.step(&name, async || {
            if job.payload["hangs_at"] == number && job.attempt == 1 {
                tokio::time::sleep(Duration::from_secs(60)).await;
            }
            ran.push(number);
            Ok(number * number)
        });
        sum += square.await?;
    }
    Ok(json!({"ran": ran, "sum": sum}))
}

async fn greet(job: Job) -> Result<Value, Failure> {
    if let Some(steps) = job.payload["steps"].as_u64() {
        return in_steps(&job, steps).await;
    }
    let time = Duration::from_secs(job.payload["sleep_seconds"].as_u64().unwrap_or(0));
    tokio::select! {
        () = tokio::time::sleep(time) => (),
        () = job.stopped() => job.check()?,
    }
    if let (Some(later), 1) = (job.payload["later"].as_u64(), job.attempt) {
        return Err(Failure::snooze(Duration::from_secs(later)));
    }
    for _ in 0..job.payload["children"].as_u64().unwrap_or(0) {
        Client::from_env()?.enqueue("child", json!({"of": "greet"})).await?;
    }
    if job.payload["fail"] == true || job.payload["fails_first"] == true && job.attempt == 1 {
        return Err(Failure::new("Refused", "asked to fail"));
    }
    let name = job.payload["name"].as_str().unwrap_or("world");
    Ok(json!({"greeting": format!("Hello, {name}!")}))
}

/// Enqueues this number of jobs at once, and counts all of them, page by page.
#[expect(clippy::print_stdout, reason = "the line says how many")]
async fn many(client: &Client, count: usize) -> Result<(), Error> {
    let stored = client.enqueue_many(&vec![json!({"job_type": "many"}); count]).await?;
    let (mut found, mut cursor) = (0, None);
    loop {
        let (jobs, next) = client.page("/v1/jobs?q=type:many&limit=2", cursor.as_deref()).await?;
        found += jobs.len();
        cursor = next;
        if cursor.is_none() {
            println!("{} {found}", stored.len());
            return Ok(());
        }
    }
}

#[tokio::main]
#[expect(clippy::print_stdout, reason = "the line says that it is ready")]
async fn main() -> Result<(), Error> {
    let client = Client::from_env()?;
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    if let [command, count] = &arguments[..]
        && command == "enqueue"
    {
        let mut fields = json!({});
        if let Ok(seconds) = std::env::var("RETRY_SECONDS") {
            fields["retry_seconds"] = json!(seconds.parse::<u64>().unwrap_or_default());
        }
        for number in 0..count.parse().unwrap_or(0) {
            let payload = json!({"name": format!("number {number}")});
            client.enqueue_with("greet", payload, fields.clone()).await?;
        }
        return Ok(());
    }
    if let [command, count] = &arguments[..]
        && command == "many"
    {
        return many(&client, count.parse().unwrap_or(0)).await;
    }
    let mut worker = Worker::new(client);
    worker.concurrency = usize::try_from(number("CONCURRENCY", 1)).unwrap_or(1);
    worker.lease = Duration::from_secs(number("FENCEPOST_LEASE_SECONDS", 30));
    worker.job("greet", greet);
    worker.run_with(|| println!("ready")).await
}
