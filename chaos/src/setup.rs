//! What each tenant has before clients begin: an endpoint, a queue with a limit, another that is
//! pushed, and a schedule that fires often.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use reqwest::Method;
use serde_json::{Value, json};
use tokio::time::sleep;
use uuid::Uuid;

use crate::{
    check::MAX_ATTEMPTS,
    clients::{
        GROUPS_QUEUE, LIMITED_QUEUE, MAX_CONCURRENCY, MAX_OF_GROUP, MAX_SHARED, ORDERED_QUEUE,
        PAUSED_GROUP, PAUSED_QUEUE, RETRY_PAUSE, SHARED_QUEUES, STARTS_OF_GROUP, TURNS_QUEUE,
        WINDOW_SECONDS, World,
    },
    history::now,
    pushed, receiver,
};

/// The time between two ticks of a schedule, in seconds.
pub const TICK_SECONDS: i64 = 2;
/// Longest wait for a call that must be accepted.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(30);

/// Makes these for each tenant, and returns the ids of the schedules. `has_order`: further queues
/// get a strict order, limits of their groups, turns, and limits that they share.
///
/// # Errors
/// When the API refuses.
pub async fn set_up(
    world: &World,
    receiver: std::net::SocketAddr,
    has_order: bool,
) -> anyhow::Result<Vec<String>> {
    let mut schedules = Vec::new();
    for tenant in 0..world.tenants.len() {
        let endpoint = json!({
            "url": receiver::url(receiver, tenant),
            "events": ["job.succeeded", "job.dead_lettered", "job.cancelled"],
        });
        post(world, tenant, "/v1/webhooks", &endpoint).await?;
        let limit = json!({"max_concurrency": MAX_CONCURRENCY});
        let queue = format!("/v1/queues/{LIMITED_QUEUE}");
        send(world, tenant, (Method::PATCH, &queue), &limit, false).await?;
        if has_order {
            let order = json!({"groups": {"order": "strict", "on_dead": "skip"}});
            let queue = format!("/v1/queues/{ORDERED_QUEUE}");
            send(world, tenant, (Method::PATCH, &queue), &order, false).await?;
            let rate = json!({"count": STARTS_OF_GROUP, "per_seconds": WINDOW_SECONDS});
            share_limits(world, tenant, &rate).await?;
            let limits = json!({"groups": {"max_running": MAX_OF_GROUP, "rates": [rate]}});
            let queue = format!("/v1/queues/{GROUPS_QUEUE}");
            send(world, tenant, (Method::PATCH, &queue), &limits, false).await?;
            let mut turns = limits;
            turns["groups"]["fair"] = json!(true);
            let queue = format!("/v1/queues/{TURNS_QUEUE}");
            send(world, tenant, (Method::PATCH, &queue), &turns, false).await?;
        }
        let push = pushed::settings(&receiver::pushed_url(receiver, tenant));
        let queue = format!("/v1/queues/{}/push", pushed::QUEUE);
        send(world, tenant, (Method::PUT, &queue), &push, false).await?;
        let schedule = json!({
            "job_type": "chaos-tick", "cron_expression": format!("*/{TICK_SECONDS} * * * * *"),
            "queue": "q0", "max_attempts": MAX_ATTEMPTS, "payload": {"tenant": tenant},
            "retry": {"initial_seconds": 0, "jitter_seconds": 0, "max_seconds": 1},
        });
        let made = post(world, tenant, "/v1/recurring", &schedule).await?;
        let id = made["id"].as_str().context("its id")?;
        schedules.push(id.to_owned());
    }
    Ok(schedules)
}

/// Has queues share a limit of all their jobs, and one that each group has.
async fn share_limits(world: &World, tenant: usize, rate: &Value) -> anyhow::Result<()> {
    let all = json!({"by": "all", "max_running": MAX_SHARED});
    let each = json!({"by": "group", "max_running": MAX_OF_GROUP, "rates": [rate]});
    for (name, limit) in [("all", all), ("each", each)] {
        let path = format!("/v1/shared-limits/{name}");
        send(world, tenant, (Method::PUT, &path), &limit, false).await?;
    }
    for queue in SHARED_QUEUES {
        let named = json!({"groups": {"fair": true}, "shared_limits": ["all", "each"]});
        let path = format!("/v1/queues/{queue}");
        send(world, tenant, (Method::PATCH, &path), &named, false).await?;
    }
    Ok(())
}

/// Lets the schedules fire no more, and returns when it was asked for.
///
/// # Errors
/// When the API refuses.
pub async fn pause(world: &World, schedules: &[String]) -> anyhow::Result<i64> {
    let asked_at = now();
    for (tenant, schedule) in schedules.iter().enumerate() {
        post(world, tenant, &format!("/v1/recurring/{schedule}/pause"), &json!({})).await?;
    }
    Ok(asked_at)
}

/// Resumes the queue that was paused now and then, and the group: a node that was frozen may have
/// run a pause that its client had sent to another one since.
///
/// # Errors
/// When the API refuses.
pub async fn resume(world: &World, has_order: bool) -> anyhow::Result<()> {
    for tenant in 0..world.tenants.len() {
        post(world, tenant, &format!("/v1/queues/{PAUSED_QUEUE}/resume"), &json!({})).await?;
        if has_order {
            // A group that is not paused and has no jobs is not there.
            let path = format!("/v1/queues/{ORDERED_QUEUE}/groups/{PAUSED_GROUP}/resume");
            send(world, tenant, (Method::POST, &path), &json!({}), true).await?;
        }
    }
    Ok(())
}

/// Posts until it is accepted: a commit may fail, and a node may not know yet that all is healed.
async fn post(world: &World, tenant: usize, path: &str, body: &Value) -> anyhow::Result<Value> {
    send(world, tenant, (Method::POST, path), body, false).await
}

/// The same for any method. `may_be_missing`: a 404 is accepted, too.
async fn send(
    world: &World,
    tenant: usize,
    (method, path): (Method, &str),
    body: &Value,
    may_be_missing: bool,
) -> anyhow::Result<Value> {
    let (key, began) = (Uuid::new_v4().to_string(), Instant::now());
    loop {
        let url = format!("{}{path}", world.urls[0]);
        let request = world.client.request(method.clone(), url);
        let request = request.bearer_auth(&world.tenants[tenant].key).json(body);
        let answered = request.header("idempotency-key", &key).send().await;
        let refusal = match answered {
            Ok(answer) if answer.status().is_success() => return Ok(answer.json().await?),
            Ok(answer) if may_be_missing && answer.status() == 404 => return Ok(Value::Null),
            Ok(answer) => format!("{} {}", answer.status(), answer.text().await?),
            Err(error) => error.to_string(),
        };
        ensure!(began.elapsed() < ACCEPT_TIMEOUT, "{path}: {refusal}");
        sleep(RETRY_PAUSE).await;
    }
}
